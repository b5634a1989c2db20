"""Layers with several hidden states of a token."""
