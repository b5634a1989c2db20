"""Pooled results of a step: vectors of sequences, of tokens, of vocabularies."""
