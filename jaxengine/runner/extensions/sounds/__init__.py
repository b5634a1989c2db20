"""Sounds: keys and values of encoded sounds, one row for each slot, and the rules of timestamps in transcripts."""
