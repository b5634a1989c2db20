"""Configurations of heads that draft from a model's hidden states."""
