"""Device memory that programs need: workspace while they run, and what they hold as long as they are loaded.

The numbers are stored in the cache of executables, with the programs' files.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from jaxengine.runner.base.memory import held_bytes, workspace_bytes
from jaxengine.runner.base.program import Program
from jaxengine.runner.executables.cache import ExecutableCache
from jaxengine.runner.executables.layer_chain import Executable, num_blocks, serialized_bytes


class ProgramNeeds(NamedTuple):
    """Estimate of the memory that a program needs, in bytes on one device.

    Attributes:
      held: bytes that it will hold as long as it is loaded.
      held_of_few: the same for a step of fewer than FEW_TOKENS tokens (jaxengine.runner.executables.layer_chain).
      workspace: bytes that it needs while it runs, without its arguments.
      num_blocks: number of blocks of its temporaries at once, see `kept_bytes`.
    """

    held: int
    held_of_few: int
    workspace: int
    num_blocks: int


def estimate_needs(
    program: Program,
    executables: ExecutableCache,
    description: str,
    backend: str,
    on_made: Callable[[Executable], None] = lambda compiled: None,
) -> ProgramNeeds:
    """Return the estimated memory needs of a program. Unless the numbers are stored in the cache, the program is
    compiled, and they are stored, but not the program.

    executables: the cache. description: as in ExecutableCache.get. backend: as `jax.default_backend` names it. on_made:
    called with the executable if it was compiled. Raises the errors of `compile_program`, and AssertionError if the
    platform reports no sizes.
    """

    @functools.cache
    def compiled() -> Executable:
        made = executables.compile(program.function, program.arguments, donate=program.donate)
        on_made(made)
        return made

    def workspace() -> int:
        analysis = compiled().memory_analysis()
        assert analysis is not None, "this platform reports no memory of programs"
        return workspace_bytes(analysis)

    key = program.arguments, description
    held = executables.get_number("held", *key, lambda: _held_bytes(compiled(), backend)[0])
    of_few = executables.get_number("held of few", *key, lambda: _held_bytes(compiled(), backend)[1])
    blocks = executables.get_number("blocks", *key, lambda: num_blocks(compiled()))
    return ProgramNeeds(held, of_few, executables.get_number("workspace", *key, workspace), blocks)


def held_by(
    program: Program, compiled: Executable, executables: ExecutableCache, description: str, backend: str
) -> int:
    """Return the bytes on one device that a compiled program holds as long as it is loaded. The number is measured
    once and stored in the cache.

    compiled: the executable of `program`. The other arguments are those of `estimate_needs`.
    """

    def measure() -> int:
        # A loaded program cannot be serialised again, and a compiled one may not have been stored.
        stored = executables.stored_bytes(
            program.name, program.arguments, program.results, donate=program.donate, description=description
        )
        return _held_bytes(compiled, backend, stored)[0]

    return executables.get_number(f"held by {program.name}", program.arguments, description, measure)


def _held_bytes(compiled: Executable, backend: str, stored: int = 0) -> tuple[int, int]:
    """Return (bytes that an executable holds, bytes that it would hold for a step of few tokens). stored: size of its
    file, 0 if it has none.
    """
    analysis = compiled.memory_analysis()
    code = 0 if analysis is None else analysis.generated_code_size_in_bytes
    size, of_few = (stored, stored) if stored or code else serialized_bytes(compiled)
    return held_bytes(code, size, backend), held_bytes(code, of_few, backend)
