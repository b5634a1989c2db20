"""Programs that encode images, for a check, with their roofline and their expected exchanges."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
from flax import nnx

from jaxengine.check.compiled.exchanges import Expected
from jaxengine.check.compiled.hlo import MustNotCopy
from jaxengine.check.model.programs import CheckedProgram, StagePrograms, checked_step
from jaxengine.check.model.roofline import Work
from jaxengine.models.causal_lm import CausalLM
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.params.declare import declared_params
from jaxengine.runner.extensions.pictures.layout import EncoderLayout
from jaxengine.runner.extensions.pictures.section import PicturesExtension
from jaxengine.sharding.layout import MeshLayout

# Parts of towers after the merge of patches into rows.
_BEHIND_MERGE = ("merger", "mergers", "projector")


def encoders(stage: StagePrograms, *, short: bool) -> Iterator[CheckedProgram]:
    """Yield a program for each call size of the stage's towers, with `short` only for the largest; nothing without a
    tower.
    """
    found = (each.encoders for each in stage.steps.extensions if isinstance(each, PicturesExtension))
    for own in (encoder for encoders in found for encoder in encoders):
        layout = own.layout
        for size in layout.sizes[-1:] if short else layout.sizes:
            program = own.encode(size, stage.params)
            yield checked_step(
                program,
                stage.mesh,
                work=tower_work(stage.model, layout, size),
                must_not_copy=MustNotCopy(),
                expected=_expected(stage, layout, size),
            )


def tower_work(model: CausalLM, layout: EncoderLayout, size: int) -> Work:
    """Return a device's share of the work of an encoder call: every weight and patch read once, and all products but
    attention's.

    Biases and norms do no operations. layout: layout of the tower that is called. size: patches of a device in the
    call.
    """
    num_bytes, flops = 4 * size * layout.tower.num_features, 0
    for param in declared_params(model):
        if param.path[0] != layout.part:
            continue
        own = math.prod(model.mesh.part_of(param.shape, param.decl.axes))
        num_bytes += own * jnp.dtype(param.dtype).itemsize
        rows = size // layout.tower.merge if param.path[1] in _BEHIND_MERGE else size
        flops += 2 * own * rows if len(param.shape) > 1 else 0
    return Work(num_bytes, flops)


def _expected(stage: StagePrograms, layout: EncoderLayout, size: int) -> Expected | None:
    """Return the expected exchanges of an encoder call; None with several data-parallel replicas, where they are not
    checked.

    size: patches of a device in the call, one of `layout.sizes`.
    """
    model, itemsize = stage.model, jnp.dtype(stage.config.dtype).itemsize
    if model.mesh.num_ranks > 1:
        return None
    widest = max(param.shape[-1] for param in declared_params(model) if param.path[0] == layout.part)
    most = layout.parts * size * widest
    return Expected(
        (), most, most * itemsize, encoding=tower_exchanges(getattr(model, layout.part), model.mesh, layout)
    )


def tower_exchanges(tower: nnx.Module, mesh: MeshLayout, layout: EncoderLayout) -> dict[str, Mapping[str, int]]:
    """Return the expected number of exchanges of a vision tower, by scope and kind; {} if there are none.

    If devices encode different images (layout.parts above 1), the tower has none inside and one all-gather after it.
    Otherwise each product whose inputs are split is followed by an all-reduce.
    """
    if layout.parts > 1:
        return {"gather": {"all-gather": 1}}
    products = [node for _, node in nnx.iter_graph(tower) if isinstance(node, Linear)]
    shared = sum(mesh.num_shards(product.axes[0]) > 1 for product in products)
    return {"tower": {"all-reduce": shared}} if shared else {}
