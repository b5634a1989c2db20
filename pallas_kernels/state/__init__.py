"""Layers whose memory of a sequence is one row of a fixed size: convolutions and recurrences over ragged batches."""
