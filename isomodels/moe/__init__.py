"""Mixture-of-experts decoders: one package an architecture."""
