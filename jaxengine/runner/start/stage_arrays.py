"""Arrays that an engine allocates for a stage, as shapes: known before its weights are read, and without its devices.

StageRunner allocates these shapes; `jaxengine plan` adds them up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from jaxengine.models.weights.adapters.pools import POOLS, abstract_leaves
from jaxengine.runner.base.memory import StageSizes
from jaxengine.runner.start.devices import SplitStage
from jaxengine.sharding.layout import MESH_AXES, MeshLayout
from jaxengine.sharding.rules import part_bytes

WEIGHTS, ADAPTERS, DRAFT, PAGES, DRAFT_PAGES = "weights", "adapters", "draft", "pages", "draft pages"
SLOTS, SAMPLING = "slots", "sampling"
SLOTS_AND_SAMPLING = SLOTS, SAMPLING


def abstract_mesh(layout: MeshLayout) -> Any:
    """Return a mesh without devices, with the sizes of `layout`, over which abstract arrays can be split."""
    sizes = tuple(getattr(layout, name) for name in MESH_AXES)
    return AbstractMesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


class StageArrays:
    """Abstract arrays of one stage.

    Attributes:
      programs: the stage's StepPrograms.
      params: the model's leaves: weights and adapter pools.
      draft_params: the leaves of the stage's draft model or head; empty without one.
    """

    def __init__(self, stage: SplitStage):
        """Collect the leaves of the stage's model, separated into weights and adapter pools, and those of its draft
        model.
        """
        self.programs, self._draft = stage.programs, None if stage.draft is None else stage.draft.programs
        named = abstract_leaves(self.programs.model, self.programs.mesh)
        self.params = [leaf for _, leaf in named]
        self._pools = [leaf for name, leaf in named if name.startswith(POOLS)]
        self._weights = [leaf for name, leaf in named if not name.startswith(POOLS)]
        own = [] if self._draft is None else abstract_leaves(self._draft.model, self.programs.mesh)
        self.draft_params = [leaf for _, leaf in own]

    @property
    def num_devices(self) -> int:
        """Number of devices of the stage."""
        return self.programs.model.mesh.size

    @property
    def draft_model(self) -> Any:
        """Abstract model of the stage's draft model or head; None without one."""
        return None if self._draft is None else self._draft.model

    def memory(self) -> dict[str, int]:
        """Return the bytes on one device that extensions and drafts hold besides weights and workspace, by purpose."""
        return self.programs.memory(() if self._draft is None else (self._draft,))

    def sizes(self, total: int, limit: int | None = None) -> StageSizes:
        """Return the stage's weight and page bytes, a draft model's included, in the form that `plan_stages` takes.

        total: bytes of one device. limit: limit in bytes that `plan_memory` takes; None without one.
        """
        weights, page = sum(map(part_bytes, self.params)), self.programs.page_bytes
        if self._draft is not None:
            weights, page = weights + sum(map(part_bytes, self.draft_params)), page + self._draft.page_bytes
        return StageSizes(total, weights, page, limit)

    def arrays(self, num_pages: int) -> dict[str, list[Any]]:
        """Return the abstract arrays by purpose, with pools of `num_pages` pages for each replica; 0 leaves out the
        pools. Purposes without arrays are left out.
        """
        programs, state = self.programs, self.programs.state_shapes
        counted = {each.name for each in programs.extensions if each.counts_slots}
        slots = {name: own for name, own in state.slots.sections.items() if name not in counted}
        found: dict[str, Any] = {
            WEIGHTS: self._weights,
            ADAPTERS: self._pools,
            DRAFT: self.draft_params,
            PAGES: programs.kv_shapes(num_pages) if num_pages else None,
            DRAFT_PAGES: self._draft.kept_shapes(num_pages) if self._draft is not None and num_pages else None,
            SLOTS: state.slots._replace(sections=slots),
            SAMPLING: (state.tokens, state.sampling),
        }
        for each in programs.extensions:
            found |= each.allocated()
            if each.counts_slots:
                found[each.name] = state.slots.sections.get(each.name)
        return {purpose: leaves for purpose, own in found.items() if (leaves := jax.tree.leaves(own))}

    def bytes_of(self, num_pages: int) -> dict[str, int]:
        """Return the bytes that `arrays(num_pages)` take on one device, by purpose, without purposes of 0 bytes."""
        return total_bytes(self.arrays(num_pages))


def total_bytes(arrays: Mapping[str, Sequence[Any]]) -> dict[str, int]:
    """Return the bytes that arrays, abstract or real, take on one device, by purpose, without purposes of 0 bytes."""
    return {purpose: size for purpose, leaves in arrays.items() if (size := sum(map(part_bytes, leaves)))}
