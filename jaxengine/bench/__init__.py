"""Benchmarks of the engine (`jaxengine bench ...`). Each module adds its own arguments; importing one does not import
jax, so that the command line starts quickly.
"""
