"""Processors of the model families, which preprocess decoded images and videos for the tower."""
