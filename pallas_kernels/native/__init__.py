"""Machine code for CPUs by llvmlite: LLVM IR, XLA FFI handlers, and their compilation."""
