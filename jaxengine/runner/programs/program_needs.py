"""What programs take of a device's memory: while they run, and as long as they are loaded. Remembered beside their
files."""

from __future__ import annotations

import functools
from typing import NamedTuple

from jaxengine.runner.executables.cache import ExecutableCache
from jaxengine.runner.executables.layer_chain import Executable, serialized_bytes
from jaxengine.runner.memory import held_bytes, workspace_bytes
from jaxengine.runner.program import Program


class Foreseen(NamedTuple):
    """Bytes of a program of this size: what it will hold, what another one would that is not in parts
    (jaxengine.runner.executables.layer_chain), and what it will need while it runs."""

    held: int
    held_as_whole: int
    workspace: int


def foresee(program: Program, executables: ExecutableCache, description: str, backend: str) -> Foreseen:
    """Bytes of one device that a program will take. It is compiled to find out, and not kept, unless that is
    remembered.

    executables: where it is remembered. description: as ExecutableCache.get has it; backend as `jax.default_backend`
    names it. Raises as `compile_program`; AssertionError where the platform does not tell.
    """

    @functools.cache
    def stand_in() -> Executable:
        return executables.compile(program.function, program.arguments, donate=program.donate)

    def workspace() -> int:
        analysis = stand_in().memory_analysis()
        assert analysis is not None, "this platform does not tell what a program needs"
        return workspace_bytes(analysis)

    key = program.arguments, description
    held = executables.get_number("held", *key, lambda: _held_bytes(stand_in(), backend)[0])
    whole = executables.get_number("held as a whole", *key, lambda: _held_bytes(stand_in(), backend)[1])
    return Foreseen(held, whole, executables.get_number("workspace", *key, workspace))


def held_by(
    program: Program, compiled: Executable, executables: ExecutableCache, description: str, backend: str
) -> int:
    """Bytes of one device that a compiled program holds as long as it is loaded. compiled: that of `program`; all else
    as in `foresee`."""

    def measure() -> int:
        # One that was loaded cannot be made into a file again, and one that was just compiled may not be kept.
        stored = executables.stored_bytes(
            program.name, program.arguments, program.results, donate=program.donate, description=description
        )
        return _held_bytes(compiled, backend, stored)[0]

    return executables.get_number(f"held by {program.name}", program.arguments, description, measure)


def _held_bytes(compiled: Executable, backend: str, stored: int = 0) -> tuple[int, int]:
    """Bytes that it holds, and that it would as a whole. stored: bytes of the program's file, 0 where there is none."""
    analysis = compiled.memory_analysis()
    code = 0 if analysis is None else analysis.generated_code_size_in_bytes
    own, whole = (stored, stored) if stored or code else serialized_bytes(compiled)
    return held_bytes(code, own, backend), held_bytes(code, whole, backend)
