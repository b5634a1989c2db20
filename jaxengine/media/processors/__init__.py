"""Processors of the model families, which preprocess decoded pictures and videos for the tower."""
