"""Attention layers over pages: full, windowed, latent, sparse, compressed, cross."""
