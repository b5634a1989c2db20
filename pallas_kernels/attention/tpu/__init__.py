"""Mosaic kernels of ragged paged attention for TPUs."""
