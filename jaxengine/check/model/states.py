"""Programs that write the states after accepted tokens, for a check."""

from __future__ import annotations

from collections.abc import Iterator

import jax

from jaxengine.check.compiled.hlo import MustNotCopy
from jaxengine.check.model.programs import CheckedProgram, StagePrograms, checked_step, large_types
from jaxengine.check.model.roofline import Work
from jaxengine.runner.extensions.states.section import StatesExtension


def accepted_states(stage: StagePrograms, *, short: bool) -> Iterator[CheckedProgram]:
    """Yield the program of each bucket with drafts, with `short` only of the largest; nothing without states or drafts.
    The programs have no roofline; they must not copy the states.
    """
    for extension in stage.steps.extensions:
        if not isinstance(extension, StatesExtension) or not (programs := extension.programs(stage.params)):
            continue
        kept = large_types(("states", leaf) for leaf in jax.tree.leaves(programs[0].results))
        for program in programs[-1:] if short else programs:
            others = {"must_not_copy": MustNotCopy(states=kept), "expected": None}
            yield checked_step(program, stage.mesh, work=Work(0, 0), **others)
