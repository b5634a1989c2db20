"""What programs take of a device's memory: while they run, and as long as they are loaded. Remembered beside their
files."""

from __future__ import annotations

import functools

import jax
from jax.experimental import serialize_executable

from jaxengine.runner.executables import ExecutableCache, compile_program
from jaxengine.runner.memory import held_bytes, workspace_bytes
from jaxengine.runner.program import Program


def foresee(program: Program, executables: ExecutableCache, description: str, backend: str) -> tuple[int, int]:
    """Bytes that a program of this size will hold, and will need while it runs: it is compiled to tell.

    description: as ExecutableCache.get has it; backend as `jax.default_backend` names it.
    """

    @functools.cache
    def stand_in() -> jax.stages.Compiled:
        lowered = jax.jit(program.function, donate_argnums=program.donate).lower(*program.arguments)
        return compile_program(lowered, backend)

    def workspace() -> int:
        analysis = stand_in().memory_analysis()
        assert analysis is not None, "this platform does not tell what a program needs"
        return workspace_bytes(analysis)

    key = program.arguments, description
    held = executables.get_number("held", *key, lambda: _held_bytes(stand_in(), backend))
    return held, executables.get_number("workspace", *key, workspace)


def held_by(
    program: Program, compiled: jax.stages.Compiled, executables: ExecutableCache, description: str, backend: str
) -> int:
    """Bytes that a compiled program holds. Arguments as `foresee`'s."""

    def measure() -> int:
        # One that was loaded cannot be made into a file again, and one that was just compiled may not be kept.
        stored = executables.stored_bytes(
            program.name, program.arguments, program.results, donate=program.donate, description=description
        )
        return _held_bytes(compiled, backend, stored)

    return executables.get_number(f"held by {program.name}", program.arguments, description, measure)


def _held_bytes(compiled: jax.stages.Compiled, backend: str, stored: int = 0) -> int:
    """stored: bytes of the program's file, 0 where there is none."""
    analysis = compiled.memory_analysis()
    code = 0 if analysis is None else analysis.generated_code_size_in_bytes
    try:
        stored = stored or (0 if code else len(serialize_executable.serialize(compiled)[0]))
    except (ValueError, jax.errors.JaxRuntimeError):  # a platform whose executables cannot be stored
        stored = 0
    return held_bytes(code, stored, backend)
