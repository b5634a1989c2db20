"""Paged attention for CPUs as machine code of llvmlite."""
