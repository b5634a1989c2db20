"""Quantised arrays, the rules that find them in a model, and how they are stored."""
