"""Attention to keys that stand for blocks of tokens, and to blocks of keys that are selected."""
