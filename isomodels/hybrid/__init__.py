"""Linear-attention hybrids: one package an architecture. None yet."""
