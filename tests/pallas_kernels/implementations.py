"""Everything the conformance suite runs over: one row per implementation and way of running it.

A row says where its kernels are (a registry platform), how they are run, with which sizes, and what they refuse. What
a row refuses must raise ValueError; nothing is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxengine.pallas_kernels.attention.native import attend as native
from jaxengine.pallas_kernels.kv.pages import KVPages
from jaxengine.pallas_kernels.mosaic_gpu import WARPGROUP_ROWS
from jaxengine.pallas_kernels.registry import kernel, platform_of
from jaxengine.pallas_kernels.tuning import (
    HopperAttention,
    TpuAttention,
    TpuUpdate,
    TritonAttention,
    Tuning,
    tuning_of,
)
from tests.pallas_kernels.pools import PER_TOKEN, QUANTIZED
from tests.pallas_kernels.problems import Case


@dataclass(frozen=True)
class Implementation:
    """Kernels of one platform.

    interpreter: module with `install`, `reset` and `problems`, None to run compiled.
    interpret: the kernels' `interpret` argument, made when first needed.
    refuses: why a case of a query dtype is not supported, None if it is.
    elsewhere: why its own kernels leave a case to the XLA work list, None if they take it.
    tuning: how much is worked on at a time, None for what the table has.
    options: of products.
    """

    name: str
    platform: str
    interpreter: Callable[[], ModuleType] | None = None
    interpret: Callable[[], Any] | None = None
    refuses: Callable[[Case, str], str | None] = lambda case, dtype: None
    elsewhere: Callable[[Case, str], str | None] | None = None
    default_dims: tuple[int, int] = (16, 16)
    latent_dims: tuple[int, int] = (40, 24)  # of values in keys
    tuning: Tuning | None = None
    overrides: dict[str, Callable] = field(default_factory=dict, hash=False, compare=False)
    options: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)

    def _kernel(self, op: str) -> Callable:
        return self.overrides.get(op) or kernel(op, self.platform)

    def _tuning(self) -> Tuning:
        return self.tuning or tuning_of(self.platform)

    def _options(self) -> dict[str, Any]:
        return self.options if self.interpret is None else {"interpret": self.interpret(), **self.options}

    def schedule(self, batch, spec, **options: Any) -> Any:
        return self._kernel("attention_schedule")(batch, spec, **options, tuning=self._tuning())

    def attend(self, q, kv, batch, schedule, *, spec, **options) -> tuple[jax.Array, jax.Array]:
        if spec.values_in_keys:
            q, options["q_rest"] = jnp.split(q, (spec.v_head_dim,), axis=-1)
        options |= {"spec": spec, **self._options()}
        return self._kernel("ragged_paged_attention")(q, kv, batch, schedule, **options)

    def update(self, kv: KVPages, k, v, slot_mapping) -> KVPages:
        schedule = self._kernel("kv_update_schedule")(slot_mapping, page_size=kv.page_size, tuning=self._tuning())
        options = self._options() if self.platform == "tpu" else {}
        return self._kernel("kv_cache_update")(kv, k, v, slot_mapping, schedule=schedule, **options)

    def dtypes(self, case: Case) -> tuple[str, ...]:
        """Query dtypes to run a case in: kernels of an accelerator are for bfloat16, whatever else is compared."""
        return case.dtypes if self.elsewhere is None else tuple(dict.fromkeys(("bfloat16", *case.dtypes)))

    def kernels(self, case: Case, dtype: str) -> set[str]:
        """Names of the kernels of its own that attend a case; none where plain XLA does."""
        if self.elsewhere is None:
            return set()
        on_mosaic = self.platform in ("gpu", "gpu_blackwell")
        if (reason := self.elsewhere(case, dtype)) is not None or self.platform == "gpu_triton":
            in_triton = (reason is None or on_mosaic) and _not_triton(case, dtype) is None
            return {"paged_attention_rows", "paged_attention_cuts"} if in_triton else set()
        always, with_runs = _KERNELS[self.platform]
        if on_mosaic and case.values_in_keys:
            return {"paged_attention_latent", "paged_attention_merge"}
        has_runs = case.num_tokens > case.max_seqs
        if on_mosaic:  # rows of few tokens are no runs
            most = HopperAttention().decode_tokens, WARPGROUP_ROWS // (case.heads[0] // case.heads[1])
            row = min(case.num_tokens // case.max_seqs, *most)
            has_runs &= case.num_tokens > row
        return always | with_runs if has_runs else always

    def adapted(self, case: Case) -> Case:
        """The case with this implementation's sizes where it does not ask for its own."""
        return case.with_defaults(self.default_dims, self.latent_dims)

    def start(self) -> None:
        """Once per process, before the first kernel."""
        if self.interpreter is not None:
            self.interpreter().install()

    def forget(self) -> None:
        if self.interpreter is not None:
            self.interpreter().reset()

    def problems(self) -> list[str]:
        return [] if self.interpreter is None else self.interpreter().problems()


# By platform: those of every program, and those of one with more tokens than sequences.
_KERNELS = {
    **dict.fromkeys(
        ("gpu", "gpu_blackwell"), ({"paged_attention_decode", "paged_attention_merge"}, {"paged_attention_prefill"})
    ),
    "tpu": ({"paged_attention_single"}, {"paged_attention_runs"}),
}


def _tpu_interpreter() -> ModuleType:
    from tests.pallas_kernels import tpu_interpret

    return tpu_interpret


def _mosaic_gpu_interpreter() -> ModuleType:
    from tests.pallas_kernels import mosaic_gpu_interpret

    return mosaic_gpu_interpret


def _machine_code() -> ModuleType:
    from tests.pallas_kernels import machine_code

    return machine_code


def _tpu_refuses(case: Case, dtype: str) -> str | None:
    if "float16" in (dtype, case.kv_dtype):
        return "float16"
    if case.pictures:
        return "tokens that see some that follow"
    if case.window is not None and not case.causal:
        return "a window on both sides"
    if case.kv_dtype in PER_TOKEN:
        return "scales of tokens"
    return f"page size {case.page_size}" if case.page_size % 8 else None


def _mosaic_gpu_refuses(case: Case, dtype: str) -> str | None:
    return "scales of tokens" if case.kv_dtype in PER_TOKEN else None


def _not_tpu(case: Case, dtype: str) -> str | None:
    added = "slopes by distance" if case.slopes else "biases by distance" if case.biases else None
    return added or ("chunks before a token's own" if case.lookback else None)


def _not_mosaic_gpu(case: Case, dtype: str) -> str | None:
    """Written down again from what the kernels are said to take, not asked of them."""
    pool_dtype = case.pool_dtype(dtype)
    quantized = pool_dtype in QUANTIZED
    reasons = {
        "codes of values in keys": case.values_in_keys and quantized,
        "latent dims": case.values_in_keys and case.dims not in ((192, 128), (96, 64), (576, 512)),
        "head dims differ": not case.values_in_keys and case.dims[0] != case.dims[1],
        "head dim": not case.values_in_keys
        and (case.dims[0] % (32 if quantized else 16) or case.dims[0] > (192 if quantized else 256)),
        "group": not case.values_in_keys and case.heads[0] // case.heads[1] > 64,
        "page size": case.page_size % 64 and case.page_size not in (8, 16, 32),
        "tree mask": case.tree is not None,
        "slopes": case.slopes,
        "biases": case.biases,
        "lookback": case.lookback,
        "chunks": case.chunk is not None,
        "limits of keys": case.pictures,
        "a window on both sides": case.window is not None and not case.causal,
        "queries": dtype == "float32",
        "pool": not quantized and pool_dtype != dtype,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _not_blackwell(case: Case, dtype: str) -> str | None:
    if case.values_in_keys or case.kv_dtype in PER_TOKEN:
        return "latents" if case.values_in_keys else "scales of tokens"
    return _not_mosaic_gpu(case, dtype)


def _not_triton(case: Case, dtype: str) -> str | None:
    pool_dtype = case.pool_dtype(dtype)
    reasons = {
        "tree mask": case.tree is not None,
        "slopes": case.slopes,
        "biases": case.biases,
        "lookback": case.lookback,
        "limits of keys": case.pictures,
        "queries": dtype == "float32",
        "pool": pool_dtype in PER_TOKEN or (pool_dtype not in QUANTIZED and pool_dtype != dtype),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


# Blocks of 128 keys in three buffers, writes of four groups, so that small problems meet every border there is.
_SMALL_TPU = Tuning(
    tpu_attention=TpuAttention(
        single_keys=128, run_keys=128, part_rows=64, single_tiles=3, max_heads=1, max_buffers=3, selected_tokens=7
    ),
    tpu_update=TpuUpdate(groups_in_flight=4, reads_ahead=2, window_bytes=1),
)
# As on a chip of two cores with wide matrix units whose scalar memory does not hold the page table.
_FAR_TPU = replace(
    _SMALL_TPU, tpu_attention=replace(_SMALL_TPU.tpu_attention, smem_table_bytes=1, cores=2, mxu_columns=256)
)

CPU = Implementation("cpu", "cpu")
GPU_XLA = Implementation("gpu_xla", "gpu_xla")
TPU_LAZY, TPU_EAGER, TPU_FAR_LAZY, TPU_FAR_EAGER, TPU_PRODUCTION_LAZY, TPU_PRODUCTION_EAGER = (
    Implementation(
        name,
        "tpu",
        _tpu_interpreter,
        lambda dma=dma: _tpu_interpreter().interpret_params(dma),
        _tpu_refuses,
        _not_tpu,
        default_dims=(64, 64),
        tuning=tuning,
    )
    for name, dma, tuning in (
        ("tpu-lazy", "on_wait", _SMALL_TPU),
        ("tpu-eager", "eager", _SMALL_TPU),
        ("tpu-far-lazy", "on_wait", _FAR_TPU),
        ("tpu-far-eager", "eager", _FAR_TPU),
        ("tpu-production-lazy", "on_wait", Tuning()),
        ("tpu-production-eager", "eager", Tuning()),
    )
)
MOSAIC_GPU = Implementation(
    "mgpu",
    "gpu",
    _mosaic_gpu_interpreter,
    lambda: _mosaic_gpu_interpreter().interpret_params(),
    _mosaic_gpu_refuses,
    elsewhere=_not_mosaic_gpu,
    default_dims=(64, 64),
    latent_dims=(192, 128),
    tuning=Tuning(hopper_attention=HopperAttention(num_ctas=3)),
)
# Of products only: it has no other kernels.
BLACKWELL = replace(MOSAIC_GPU, name="mgpu-blackwell", options={"tensor_memory": True})
# Of attention only.
BLACKWELL_ATTENTION = replace(
    MOSAIC_GPU,
    name="mgpu-blackwell-attention",
    platform="gpu_blackwell",
    refuses=lambda case, dtype: None,
    elsewhere=_not_blackwell,
    latent_dims=(40, 24),
)
TRITON = Implementation(
    "triton",
    "gpu_triton",
    interpret=lambda: True,
    elsewhere=_not_triton,
    tuning=Tuning(
        triton_attention=TritonAttention(
            num_ctas=3,
            merged_parts=2,
            selected_rows=16,
            selected_keys=32,
            least_part=64,
            most_part=64,
            partial_bytes=40_000,
        )
    ),
)
NATIVE = Implementation(
    "native",
    "cpu",
    interpreter=_machine_code,
    overrides={name: getattr(native, name) for name in ("attention_schedule", "ragged_paged_attention")},
)
ACCELERATOR = None if jax.default_backend() == "cpu" else platform_of(jax.devices()[0])
DEVICE = (
    []
    if ACCELERATOR is None
    else [
        Implementation(
            "device",
            ACCELERATOR,
            refuses={"gpu": _mosaic_gpu_refuses, "tpu": _tpu_refuses}.get(ACCELERATOR, lambda case, dtype: None),
            elsewhere={
                "gpu": _not_mosaic_gpu,
                "gpu_blackwell": _not_blackwell,
                "gpu_triton": _not_triton,
                "tpu": _not_tpu,
            }.get(ACCELERATOR),
            default_dims=(64, 64),
            latent_dims=(192, 128) if ACCELERATOR == "gpu" else (40, 24),
        )
    ]
)

IN_PROCESS = [CPU, GPU_XLA, *DEVICE]
TPU = [TPU_LAZY, TPU_EAGER, TPU_FAR_LAZY, TPU_FAR_EAGER, TPU_PRODUCTION_LAZY, TPU_PRODUCTION_EAGER]
INTERPRETED = [*TPU, MOSAIC_GPU, TRITON]
IMPLEMENTATIONS = {
    implementation.name: implementation
    for implementation in (*IN_PROCESS, *INTERPRETED, NATIVE, BLACKWELL, BLACKWELL_ATTENTION)
}


def each_on_card(cases: Iterable[str], is_here: bool) -> pytest.MarkDecorator:
    """Run a test for each case, its argument `name`, on the card here. Without one a skipped test stands for all."""
    skipped = pytest.param("all", marks=pytest.mark.skip(reason="there is no card here that the kernels are for"))
    return pytest.mark.parametrize("name", list(cases) if is_here else [skipped])
