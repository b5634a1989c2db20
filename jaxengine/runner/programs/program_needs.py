"""Device memory of programs: workspace while they run, and what they hold while loaded. Stored with their files."""

from __future__ import annotations

import functools
from typing import NamedTuple

from jaxengine.runner.base.memory import held_bytes, workspace_bytes
from jaxengine.runner.base.program import Program
from jaxengine.runner.executables.cache import ExecutableCache
from jaxengine.runner.executables.layer_chain import Executable, serialized_bytes


class MemoryEstimate(NamedTuple):
    """Memory estimate of a program, in bytes of one device."""

    held: int  # bytes that it will hold as long as it is loaded
    held_as_whole: int  # the same if it were not cut into parts (jaxengine.runner.executables.layer_chain)
    workspace: int  # bytes that it needs besides its arguments while it runs


def estimate_memory(program: Program, executables: ExecutableCache, description: str, backend: str) -> MemoryEstimate:
    """Estimate the bytes on one device that a program will take. It is compiled for this, and discarded, unless the
    numbers are stored; new numbers are stored.

    executables: the cache that stores them. description: as in ExecutableCache.get; backend: as `jax.default_backend`
    names it. Raises the errors of `compile_program`; AssertionError if the platform reports no sizes.
    """

    @functools.cache
    def stand_in() -> Executable:
        return executables.compile(program.function, program.arguments, donate=program.donate)

    def workspace() -> int:
        analysis = stand_in().memory_analysis()
        assert analysis is not None, "this platform reports no memory of programs"
        return workspace_bytes(analysis)

    key = program.arguments, description
    held = executables.get_number("held", *key, lambda: _held_bytes(stand_in(), backend)[0])
    whole = executables.get_number("held as a whole", *key, lambda: _held_bytes(stand_in(), backend)[1])
    return MemoryEstimate(held, whole, executables.get_number("workspace", *key, workspace))


def held_by(
    program: Program, compiled: Executable, executables: ExecutableCache, description: str, backend: str
) -> int:
    """Return the bytes on one device that a compiled program holds as long as it is loaded; measured once, and stored
    in the cache.

    compiled: the executable of `program`. The other arguments are those of `estimate_memory`.
    """

    def measure() -> int:
        # A loaded program cannot be serialised again, and a compiled one may not have been stored.
        stored = executables.stored_bytes(
            program.name, program.arguments, program.results, donate=program.donate, description=description
        )
        return _held_bytes(compiled, backend, stored)[0]

    return executables.get_number(f"held by {program.name}", program.arguments, description, measure)


def _held_bytes(compiled: Executable, backend: str, stored: int = 0) -> tuple[int, int]:
    """Return (bytes that an executable holds, bytes that it would hold without being cut into parts). stored: size of
    its file, 0 if it has none.
    """
    analysis = compiled.memory_analysis()
    code = 0 if analysis is None else analysis.generated_code_size_in_bytes
    own, whole = (stored, stored) if stored or code else serialized_bytes(compiled)
    return held_bytes(code, own, backend), held_bytes(code, whole, backend)
