"""Ragged paged attention in plain XLA."""
