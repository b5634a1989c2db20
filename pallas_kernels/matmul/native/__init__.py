"""Products of few rows on CPUs as machine code that llvmlite makes at start, called through XLA's FFI."""
