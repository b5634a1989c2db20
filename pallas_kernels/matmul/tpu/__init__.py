"""Matrix products on TPUs as Mosaic kernels."""
