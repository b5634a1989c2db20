"""Ragged paged attention for TPUs, in Mosaic."""
