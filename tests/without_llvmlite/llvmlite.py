"""In place of llvmlite for processes that tests start, whose recorded tokens and kept programs are plain XLA's."""

raise ImportError("tests run without llvmlite, but for those of machine code")
