"""Mosaic GPU kernels of ragged paged attention for Hopper."""
