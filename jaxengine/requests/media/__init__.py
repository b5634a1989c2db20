"""Images and video of a request: inputs of the encoder, and the cache of processed items."""
