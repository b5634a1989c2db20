"""Decoders of image, video and sound files, with the bounds that hostile files meet."""
