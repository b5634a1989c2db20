"""Matrix products that XLA does not do well by itself."""
