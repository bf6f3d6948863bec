"""Dense decoders: one package an architecture."""
