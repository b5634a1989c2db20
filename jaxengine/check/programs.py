"""What is compiled for one target: the engine's steps over their bucket grid, and one layer's kernels by themselves.

Everything is abstract: shapes with the shardings of a mesh of devices that need not exist. The steps are those of
jaxengine.step_programs, the memory plan that of jaxengine.memory, so a check sees what the engine would run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxengine.check.hlo import Precious
from jaxengine.check.roofline import DECODE_CONTEXT, Work, attention_work, step_work, update_work
from jaxengine.config import EngineConfig, Platform
from jaxengine.step_programs import StepPrograms
from models.attention import RaggedBatch, attention_spec, kv_cache_update, ragged_paged_attention
from models.config import ModelConfig
from models.declare import declared_params
from models.llama import attention_schedule, kv_update_schedule
from models.registry import build_model
from scheduler.buckets import Bucket
from sharding.rules import named_sharding

# A state array below this size costs nothing to copy.
_SMALL = 1 << 20


@dataclass(frozen=True)
class Program:
    """One thing to compile.

    Attributes:
      name: of the row in the report.
      bucket: the shape it is for.
      is_step: a whole step, not a kernel alone.
      arguments: as shapes with shardings.
      donate: indices of donated arguments.
      work: what a roofline counts.
      precious: the arrays it must not copy.
    """

    name: str
    bucket: Bucket
    is_step: bool
    function: Callable
    arguments: tuple[Any, ...]
    donate: tuple[int, ...]
    work: Work
    precious: Precious


class TargetPrograms:
    """The programs of one model under one config on one mesh.

    Attributes:
      config: resolved for the platform.
      weight_bytes, page_bytes: of one device.
    """

    def __init__(self, model_config: ModelConfig, config: EngineConfig, platform: Platform, mesh: Mesh):
        self.config = config.resolved(model_config, platform)
        self.model = build_model(model_config, dtype=self.config.dtype)
        self.mesh = mesh
        self._steps = StepPrograms(self.model, self.config, platform)
        self._layout = platform.name
        self._params = [
            jax.ShapeDtypeStruct(param.shape, param.dtype, sharding=named_sharding(mesh, param.decl.axes))
            for param in declared_params(self.model)
        ]
        self.weight_bytes = sum(_device_elements(leaf) * leaf.dtype.itemsize for leaf in self._params)
        self.page_bytes = self._steps.page_bytes // mesh.shape["model"]

    @property
    def state_bytes(self) -> int:
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self._steps.state_shapes))

    @property
    def num_columns(self) -> int:
        """Pages of the longest sequence."""
        return self._steps.num_columns

    @property
    def largest(self) -> Bucket:
        """The bucket whose step decides the workspace."""
        return max(self._steps.packer.buckets)

    def buckets(self, short: bool) -> list[Bucket]:
        """The whole grid, or its four corners."""
        grid = self._steps.packer.buckets
        if not short:
            return list(grid)
        return list(dict.fromkeys((grid.decode[0], grid.decode[-1], grid.mixed[0], grid.mixed[-1])))

    def step(self, bucket: Bucket, num_pages: int) -> Program:
        """The bucket's step with a pool of `num_pages` pages a layer."""
        params, kv, state, message = self._steps.arguments(bucket, self._params, self._steps.kv_shapes(num_pages))
        arguments = (params, self._place_kv(kv), self._replicate(state), self._replicate(message))
        return Program(
            str(bucket),
            bucket,
            True,
            self._steps.step(bucket),
            arguments,
            (1, 2),
            step_work(self.model, bucket, self.config.kv_cache_dtype, self.config.dtype, self._context),
            self._precious(bucket, arguments[1].data),
        )

    def kernels(self, bucket: Bucket, num_pages: int) -> Iterator[Program]:
        """One layer's attention, for each kind of window, and its KV write, their schedules being arguments.

        For one device: of a group, each runs the same kernels on its share of the heads.
        """
        config = self.model.config
        dtype, kv_dtype = self.config.dtype, self.config.kv_cache_dtype
        kv = self._place_kv(self._steps.kv_shapes(num_pages))
        batch = self._replicate(self._abstract_batch(bucket))
        precious = Precious({_device_elements(kv.data): "pool"})
        paging = {"page_size": self.config.block_size, "platform": self._layout}

        def heads(count: int) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(self.mesh, PartitionSpec(None, "model", None))
            return jax.ShapeDtypeStruct(
                (bucket.num_tokens, count, config.head_dim), jnp.dtype(dtype), sharding=sharding
            )

        for window in dict.fromkeys(config.sliding_window):
            spec = attention_spec(config, window)

            def attend(q, kv, batch, schedule, spec=spec):
                return ragged_paged_attention(q, kv, batch, spec=spec, schedule=schedule)

            plan = partial(attention_schedule, spec=spec, num_tokens=bucket.num_tokens, **paging)
            schedule = self._replicate(jax.eval_shape(plan, batch))
            name = f"attention{'' if window is None else f' window {window}'}, {bucket}"
            work = attention_work(config, bucket, kv_dtype, dtype, window, self._context)
            arguments = (heads(config.num_heads), kv, batch, schedule)
            yield Program(name, bucket, False, attend, arguments, (), work, precious)

        def write(kv, k, v, slot_mapping, schedule):
            return kv_cache_update(kv, k, v, slot_mapping, schedule=schedule)

        schedule = self._replicate(jax.eval_shape(partial(kv_update_schedule, **paging), batch.slot_mapping))
        rows = heads(config.num_kv_heads)
        work = update_work(config, bucket, kv_dtype, dtype)
        arguments = (kv, rows, rows, batch.slot_mapping, schedule)
        yield Program(f"kv write, {bucket}", bucket, False, write, arguments, (0,), work, precious)

    @property
    def _context(self) -> int:
        return min(DECODE_CONTEXT, self.config.max_model_len)

    def _precious(self, bucket: Bucket, pool: jax.ShapeDtypeStruct) -> Precious:
        named = zip(declared_params(self.model), self._params, strict=True)
        weights = {_device_elements(leaf): param.name for param, leaf in named if len(param.shape) == 2}
        # The logits of a step over all slots look like a state array.
        logits = f"f32[{bucket.num_seqs},{self.model.config.vocab_size}]"
        states = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(self._steps.state_shapes):
            text = f"{_hlo_type(leaf.dtype)}[{','.join(map(str, leaf.shape))}]"
            if math.prod(leaf.shape) * leaf.dtype.itemsize >= _SMALL and text != logits:
                states[text] = f"slot state{jax.tree_util.keystr(path)}"
        return Precious({_device_elements(pool): "pool"}, weights, states)

    def _abstract_batch(self, bucket: Bucket) -> RaggedBatch:
        def int32(*shape: int) -> Any:  # a shape stands for an array
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        return RaggedBatch(
            cu_q_lens=int32(bucket.num_seqs + 1),
            kv_lens=int32(bucket.num_seqs),
            page_table=int32(bucket.num_seqs, self.num_columns),
            slot_mapping=int32(bucket.num_tokens),
            num_seqs=int32(),
            num_decode=int32(),
        )

    def _place_kv(self, kv: Any) -> Any:
        """The pool with its heads over the mesh's model axis."""
        axis = 2 if self._layout == "tpu" else 1
        spec = PartitionSpec(*(("model" if index == axis else None) for index in range(3)))
        placed = jax.ShapeDtypeStruct(kv.data.shape, kv.data.dtype, sharding=NamedSharding(self.mesh, spec))
        return replace(self._replicate(kv), data=placed)

    def _replicate(self, tree: Any) -> Any:
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), tree)


def _device_elements(leaf: jax.ShapeDtypeStruct) -> int:
    """What one device holds of an array."""
    assert leaf.sharding is not None
    return math.prod(leaf.sharding.shard_shape(leaf.shape))


def _hlo_type(dtype: Any) -> str:
    name = jnp.dtype(dtype).name
    return {"int32": "s32", "float32": "f32", "uint32": "u32", "bfloat16": "bf16", "bool": "pred"}.get(name, name)
