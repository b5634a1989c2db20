"""Mosaic kernels of matrix products for TPUs."""
