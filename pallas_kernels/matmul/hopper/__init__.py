"""Mosaic GPU kernels of matrix products for Hopper."""
