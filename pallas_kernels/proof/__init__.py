"""Proof of kernels on a device: each is run on inputs of a program's shapes and compared with plain XLA."""
