"""Estimate of the device memory that programs need, without compiling them.

The figures are fitted to what libtpu, XLA:GPU and XLA:CPU report for published models (`jaxengine check`; records in
benchmarks/results). A test compares the estimate with these memory plans.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxengine.check.model.code import layers_with_code
from jaxengine.check.model.roofline import product_work
from jaxengine.models.kernel_rows import backend_of
from jaxengine.models.params.declare import declared_params
from jaxengine.runner.base.memory import StageNeeds, kept_bytes
from jaxengine.runner.executables.layer_chain import num_compiled_layers
from jaxengine.runner.extensions.pictures.section import PicturesExtension
from jaxengine.runner.programs.epilogues import SAMPLE
from jaxengine.runner.start.stage_arrays import StageArrays
from jaxengine.sampling.logprobs import PROMPT_BLOCK_ROWS
from jaxengine.sharding.rules import part_bytes

MIB = 1 << 20


class _Compiler(NamedTuple):
    """Sizes of the programs that one compiler produces.

    Attributes:
      layer, expert_layer: bytes of code of a forward pass for each layer, without and with experts.
      of_calls: bytes of code that a forward pass has besides, if its layers share their code.
      sampler, score: bytes of code of a sampler, and of another epilogue.
      rows: share of the inputs and outputs of a layer's products that a forward pass holds at once.
      logits: number of copies of its logits that a sampler needs.
      least_rows: smallest number of rows of logits for which these copies are counted.
      large: size in bytes of a layer's weights from which on its code has the size `layer`; smaller layers have less
        code. 0 if all layers have code of that size.
    """

    layer: float
    expert_layer: float
    of_calls: float
    sampler: float
    score: float
    rows: float
    logits: float
    least_rows: int
    large: int = 0


_COMPILERS = {
    "tpu": _Compiler(6.5 * MIB, 9.5 * MIB, 5 * MIB, 12 * MIB, 14 * MIB, 1.0, 5.8, 64, 200 * MIB),
    "cuda": _Compiler(0.35 * MIB, 0.65 * MIB, 0, 0.3 * MIB, 0.1 * MIB, 0.8, 2.2, 1),
    "cpu": _Compiler(8 * MIB, 14 * MIB, 0, 8 * MIB, 6 * MIB, 1.0, 3.0, 8),
}


def estimated_needs(stage: StageArrays) -> StageNeeds:
    """Return an estimate of the memory that the programs of a stage need on one device.

    What they hold is code: for each bucket by its layers, for each epilogue, for the draft model and for encoders. The
    workspace is the sum of the largest forward pass, the slot state (which is exact), the largest epilogue with its
    inputs, and the largest encoder.
    """
    programs = stage.programs
    backend = backend_of(programs.platform)
    how = _COMPILERS[backend]
    model, buckets = programs.model, programs.packer.buckets
    of_layer = how.layer if model.config.experts is None else how.expert_layer
    of_layer *= _share_of_code(stage, how)
    held = 0.0
    for bucket in buckets:
        layers = _layers_with_code(stage, backend, bucket.num_tokens)
        held += layers * of_layer + (how.of_calls if layers < len(model.stage.layers) else 0)
    epilogue = encoder = 0.0
    for name, size in programs.epilogue_sizes():
        held += how.sampler if name == SAMPLE else how.score
        epilogue = max(epilogue, programs.forwarded_bytes(name, size) + _epilogue_workspace(stage, name, size, how))
    forward = _forward_workspace(stage, model, how)
    if stage.draft_params:
        draft = stage.draft_model
        held += len(list(buckets)) * layers_with_code(backend, len(draft.stage.layers)) * how.layer
        forward = max(forward, _forward_workspace(stage, draft, how))
    for each in programs.extensions:
        if isinstance(each, PicturesExtension):
            for layout in (tower.layout for tower in each.encoders if tower.layout.sizes):
                patch_bytes, depth = _tower_rows(stage, layout.part)
                held += len(layout.sizes) * layers_with_code(backend, depth, of_tower=True) * how.layer
                encoder = max(encoder, how.rows * layout.sizes[-1] * patch_bytes)
    workspace = int(forward + programs.slot_bytes + epilogue + encoder)
    kept = kept_bytes(int(forward)) + kept_bytes(int(epilogue))
    return StageNeeds(int(held), workspace, stage.memory(), kept)


def _layers_with_code(stage: StageArrays, backend: str, num_tokens: int) -> int:
    """Return the number of the stage's layers whose code a forward pass of `num_tokens` tokens holds; the others share
    it. backend: as `jax.default_backend` names it.
    """
    layers = stage.programs.model.stage.layers
    if backend != "cpu" or stage.num_devices > 1:
        return layers_with_code(backend, len(layers))
    attention = stage.programs.model.config.attention
    return num_compiled_layers([attention[layer] for layer in layers], num_tokens)


def _share_of_code(stage: StageArrays, how: _Compiler) -> float:
    """Return the size of a layer's code relative to that of a large layer, at most 1: on TPUs small layers are unrolled
    less. how: the compiler.
    """
    size = stage.sizes(0).weights / max(1, len(stage.programs.model.stage.layers))
    return min(1.0, math.sqrt(size / how.large)) if how.large else 1.0


def _forward_workspace(stage: StageArrays, model: Any, how: _Compiler) -> float:
    """Return the bytes that the largest forward pass needs while it runs: inputs and outputs of one layer's products,
    and its results for epilogues. model: the stage's model or its draft model. how: the compiler.
    """
    programs = stage.programs
    bucket = max(programs.packer.buckets)
    work = product_work(model, bucket, programs.shape.config.dtype, programs.kv_shapes(programs.num_columns))
    results = sum(map(part_bytes, jax.tree.leaves(programs.forwarded(bucket))))
    layers = max(1, len(model.stage.layers))
    return (how.rows * work.row_bytes + work.gathered_bytes) / layers + results


def _epilogue_workspace(stage: StageArrays, name: str, size: int, how: _Compiler) -> float:
    """Return the bytes that the epilogue `name` of this size needs while it runs: float32 copies of its logits, or of
    those of one block of prompt rows. how: the compiler.
    """
    epilogue = stage.programs.epilogues[name]
    if "logits" in epilogue.arguments:
        rows = max(how.least_rows, size * epilogue.width) * how.logits
    else:
        rows = min(PROMPT_BLOCK_ROWS, size)
    return 4 * rows * stage.programs.own_vocab_size


def _tower_rows(stage: StageArrays, part: str) -> tuple[float, int]:
    """Return (bytes, layers): how many bytes per image patch the products of a layer of an encoder tower need, and how
    many layers it has, at least 1. The bytes are 4 times those of an input and an output of the widest product, in the
    config's dtype.

    part: name of the model's attribute that is the tower.
    """
    model, widest, layers = stage.programs.model, 0, set()
    for param in declared_params(model):
        # Not a table of positions that is stored as one row.
        if param.path[0] == part and len(param.shape) > 1 and min(param.shape[-2:]) > 1:
            layers |= {param.path[param.path.index("layers") + 1]} if "layers" in param.path else set()
            widest = max(widest, sum(param.shape[-2:]))
    return 4.0 * widest * jnp.dtype(stage.programs.shape.config.dtype).itemsize, max(1, len(layers))
