"""Measurements of the engine (`jaxengine bench ...`). Each module adds its own arguments and runs on its own; importing
one imports no jax, so that the command line stays quick."""
