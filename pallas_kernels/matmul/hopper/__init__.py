"""Matrix products on Hopper GPUs, in Mosaic GPU."""
