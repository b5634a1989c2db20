"""Layers and heads that draft from a model's hidden states."""
