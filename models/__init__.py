"""Model families in flax.nnx, their configurations and their checkpoint loaders.

Knows nothing of requests, scheduling policies or text. Importing this package imports nothing else.
"""
