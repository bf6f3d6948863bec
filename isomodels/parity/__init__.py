"""The comparison that the package exists for: real engine against real trainer, bit by bit."""
