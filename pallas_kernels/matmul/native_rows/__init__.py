"""Dense products of many rows on CPUs as machine code of llvmlite."""
