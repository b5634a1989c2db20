"""Layers with experts, their counts, and adapters on them."""
