"""Ragged paged attention for Hopper GPUs, in Mosaic GPU."""
