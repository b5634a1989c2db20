"""Mosaic GPU attention for Blackwell: prefill and split-KV decode, with their sums in tensor memory."""
