"""Tables of kernel implementations: a row for each operation and kind of implementation, and one for each platform.

This module also maps devices and option values to platforms. A new kernel is a module and a row here. Rows are names of
modules, which are imported at first use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxengine.pallas_kernels.cards import card_of_trace, has_mosaic, has_tcgen05, has_triton

NATIVE = "native"  # machine code from llvmlite, which is only used after `native_code` has built it
NATIVE_LIBRARY = "jaxengine.pallas_kernels.native.library"
# Packages whose modules `code` have the handlers of NATIVE kernels.
NATIVE_ROOMS = tuple(
    f"jaxengine.pallas_kernels.{room}" for room in ("matmul.native", "matmul.native_rows", "attention.native")
)
# Layouts in which kernels store keys and values. jaxengine.pallas_kernels.kv.pages describes and implements them.
HEAD_TILES, HEAD_TILES_AS_BITS, TOKEN_ROWS, SEQUENCES = "head_tiles", "head_tiles_as_bits", "token_rows", "sequences"


@dataclass(frozen=True)
class KernelPlatform:
    """Kernels that one kind of device runs.

    Attributes:
      kinds: kinds of implementations, the best first. An operation uses the first kind that has a row for it.
      backend: jax's lowering platform, "cpu", "cuda" or "tpu".
      layout: layout in which its kernels store keys and values.
      option: value of `check --kernels` and of the options of `replay` that chooses its kernels.
      reads_token_scales: whether its attention supports 8-bit pools with a scale per token and KV head.
    """

    kinds: tuple[str, ...]
    backend: str
    layout: str
    option: str
    reads_token_scales: bool = False


PLATFORMS = {
    "cpu": KernelPlatform((NATIVE, "cpu", "xla"), "cpu", HEAD_TILES_AS_BITS, "cpu", reads_token_scales=True),
    "gpu": KernelPlatform(("hopper", "cuda", "xla"), "cuda", HEAD_TILES, "hopper"),
    "gpu_blackwell": KernelPlatform(
        ("blackwell", "cuda", "xla"), "cuda", HEAD_TILES, "blackwell", reads_token_scales=True
    ),
    "gpu_triton": KernelPlatform(("triton", "cuda", "xla"), "cuda", HEAD_TILES, "triton", reads_token_scales=True),
    "gpu_xla": KernelPlatform(("cuda", "xla"), "cuda", HEAD_TILES, "xla", reads_token_scales=True),
    "tpu": KernelPlatform(("tpu", "xla"), "tpu", TOKEN_ROWS, "tpu"),
}
# Platform by KernelPlatform.option.
PLATFORM_OF_OPTION = {row.option: name for name, row in PLATFORMS.items()}
# Platform of whole sequences without pages, which no device has. It is plain XLA, and its operations have gradients.
UNPAGED = "unpaged"
# Platform of CPUs on which not a single bit of a token's result may depend on the rest of its step: operations compute
# every token by itself. It has the CPU's pages.
EXACT = "exact"
_KINDS = {
    **{name: row.kinds for name, row in PLATFORMS.items()},
    UNPAGED: (UNPAGED,),
    EXACT: (EXACT, "cpu", "xla"),
}
# Kinds in plain XLA, and machine code, which is tested when it is built. Implementations of other kinds are kernels,
# which have to be tested on the device (pallas_kernels.proof).
PLAIN_KINDS = frozenset((NATIVE, "cpu", "cuda", "xla", UNPAGED, EXACT))
_ROWS: dict[tuple[str, str], str] = {
    ("attention_schedule", "blackwell"): "attention.triton.blackwell",
    ("attention_schedule", "hopper"): "attention.triton.hopper",
    ("attention_schedule", NATIVE): "attention.native.attend",
    ("attention_schedule", "tpu"): "attention.tpu.attend",
    ("attention_schedule", "triton"): "attention.triton.attend",
    ("attention_schedule", "xla"): "attention.xla.schedule",
    ("attention_schedule", UNPAGED): "attention.unpaged",
    ("ragged_paged_attention", "blackwell"): "attention.triton.blackwell",
    ("ragged_paged_attention", "hopper"): "attention.triton.hopper",
    ("ragged_paged_attention", NATIVE): "attention.native.attend",
    ("ragged_paged_attention", "tpu"): "attention.tpu.attend",
    ("ragged_paged_attention", "triton"): "attention.triton.attend",
    ("ragged_paged_attention", "xla"): "attention.xla.attend",
    ("ragged_paged_attention", UNPAGED): "attention.unpaged",
    ("selection_schedule", "xla"): "attention.xla.selected",
    ("select_keys", "blackwell"): "attention.triton.index",
    ("select_keys", "hopper"): "attention.triton.index",
    ("select_keys", "tpu"): "attention.tpu.index",
    ("select_keys", "triton"): "attention.triton.index",
    ("select_keys", "xla"): "attention.xla.selected",
    ("selected_attention", "blackwell"): "attention.triton.selected",
    ("selected_attention", "hopper"): "attention.triton.selected",
    ("selected_attention", "tpu"): "attention.tpu.selected",
    ("selected_attention", "triton"): "attention.triton.selected",
    ("selected_attention", "xla"): "attention.xla.selected",
    ("select_blocks", "blackwell"): "attention.triton.index",
    ("select_blocks", "hopper"): "attention.triton.index",
    ("select_blocks", "tpu"): "attention.tpu.index",
    ("select_blocks", "triton"): "attention.triton.index",
    ("select_blocks", "xla"): "attention.xla.selected_blocks",
    ("block_attention", "blackwell"): "attention.triton.selected",
    ("block_attention", "hopper"): "attention.triton.selected",
    ("block_attention", "tpu"): "attention.tpu.selected",
    ("block_attention", "triton"): "attention.triton.selected",
    ("block_attention", "xla"): "attention.xla.selected_blocks",
    ("selection_schedule", UNPAGED): "attention.selected_unpaged",
    ("select_keys", UNPAGED): "attention.selected_unpaged",
    ("selected_attention", UNPAGED): "attention.selected_unpaged",
    ("select_blocks", UNPAGED): "attention.selected_unpaged",
    ("block_attention", UNPAGED): "attention.selected_unpaged",
    ("whole_prompt_schedule", "cpu"): "attention.xla.whole_prompts",
    ("whole_prompt_attention", "cpu"): "attention.xla.whole_prompts",
    ("kv_update_schedule", "tpu"): "kv.update_tpu",
    ("kv_update_schedule", "xla"): "kv.update_xla",
    ("kv_update_schedule", UNPAGED): "kv.update_xla",
    ("kv_cache_update", "tpu"): "kv.update_tpu",
    ("kv_cache_update", "xla"): "kv.update_xla",
    ("kv_cache_update", UNPAGED): "kv.update_unpaged",
    ("matmul", NATIVE): "matmul.native.dense",
    ("matmul", "cpu"): "matmul.cpu.dense",
    ("matmul", "cuda"): "matmul.xla.dense_gpu",
    ("matmul", "xla"): "matmul.xla.dense",
    ("matmul", UNPAGED): "matmul.xla.dense",
    ("grouped_matmul", "cpu"): "matmul.cpu.grouped",
    ("grouped_matmul", "hopper"): "matmul.hopper.grouped",
    ("grouped_matmul", "tpu"): "matmul.tpu.grouped_plain",
    ("grouped_matmul", "xla"): "matmul.xla.grouped",
    ("grouped_matmul", UNPAGED): "matmul.xla.ragged",
    ("gated_matmul", "hopper"): "matmul.hopper.grouped",
    ("gated_matmul", "tpu"): "matmul.tpu.grouped_plain",
    ("microscaled_rows", "tpu"): "matmul.tpu.microscaled",
    ("microscaled_rows", "xla"): "matmul.xla.microscaled",
    ("quantized_matmul", NATIVE): "matmul.native.quantized",
    ("quantized_matmul", "cpu"): "matmul.cpu.quantized",
    ("quantized_matmul", "hopper"): "matmul.hopper.quantized",
    ("quantized_matmul", "tpu"): "matmul.tpu.quantized",
    ("quantized_matmul", "triton"): "matmul.triton.quantized",
    ("quantized_matmul", "xla"): "matmul.xla.quantized",
    ("quantized_table_matmul", NATIVE): "matmul.native.quantized_table",
    ("quantized_table_matmul", "cpu"): "matmul.cpu.quantized_table",
    ("quantized_table_matmul", "xla"): "matmul.xla.quantized_table",
    ("quantized_grouped_matmul", "cpu"): "matmul.cpu.quantized_groups",
    ("quantized_grouped_matmul", "hopper"): "matmul.hopper.grouped",
    ("quantized_grouped_matmul", "tpu"): "matmul.tpu.grouped",
    ("quantized_grouped_matmul", "xla"): "matmul.xla.quantized_groups",
    ("quantized_gated_matmul", "hopper"): "matmul.hopper.grouped",
    ("quantized_gated_matmul", "tpu"): "matmul.tpu.grouped",
    ("lora_product", "cpu"): "matmul.xla.lora",
    ("lora_product", "hopper"): "matmul.hopper.lora",
    ("lora_product", "tpu"): "matmul.tpu.lora",
    ("causal_conv", "xla"): "state.conv_xla",
    ("causal_conv", UNPAGED): "state.unpaged",
    ("causal_conv", EXACT): "state.one_by_one",
    ("gated_delta_rule", "xla"): "state.delta_xla",
    ("gated_delta_rule", UNPAGED): "state.unpaged",
    ("gated_delta_rule", EXACT): "state.one_by_one",
    ("selective_scan", "xla"): "state.scan_xla",
    ("selective_scan", UNPAGED): "state.unpaged",
    ("selective_scan", EXACT): "state.one_by_one",
    ("state_space", "xla"): "state.space_xla",
    ("state_space", UNPAGED): "state.unpaged",
    ("state_space", EXACT): "state.one_by_one",
}
# (operation, platform) for the operations of each platform of devices.
KERNELS = tuple(
    (op, platform)
    for op in dict.fromkeys(op for op, _ in _ROWS)
    for platform, row in PLATFORMS.items()
    if any((op, kind) in _ROWS for kind in row.kinds)
)
# Modules that replace kernels that are not used, for operations without a row in plain XLA for their platforms.
_STAND_INS = {"lora_product": "matmul.xla.lora"}
# Operations that an engine's option attention_backend chooses.
_ATTENTION = ("ragged_paged_attention", "selected_attention", "block_attention", "whole_prompt_attention")
# Pairs of a schedule and the operation that uses it. Both must run as the same kind.
_TOGETHER = (("attention_schedule", "ragged_paged_attention"), ("kv_update_schedule", "kv_cache_update"))
# Modules that can compile a block of attention by itself for a profile.
_PROFILES = {"tpu": "attention.tpu.profile"}
# Modules that list candidate sizes for products with quantised matrices, for `jaxengine tune`.
_CANDIDATES = {"tpu": "matmul.tpu.candidates", "gpu": "matmul.hopper.candidates"}
# Grouped products whose kernels add the bias of a row's group to the row's sums. Otherwise it is added afterwards.
_ADDS_BIAS = frozenset((("grouped_matmul", "tpu"), ("quantized_grouped_matmul", "tpu")))
# Modules with `group_step` and `multiplied_rows`, which describe how a platform's grouped kernels lay out rows.
_GROUPS = {"tpu": "matmul.tpu.group_rows", "gpu": "matmul.hopper.group_rows"}

# Platforms of devices -> the platform whose rows their matrix products use, if it is another one.
PRODUCT_PLATFORMS = {"gpu_blackwell": "gpu"}
# For each jax platform, the platform whose rows are used by operations that are chosen at compilation. All CUDA cards
# share one, except those with Triton kernels.
PLATFORM_ROWS = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}

_ONLY: ContextVar[str | None] = ContextVar("only platform", default=None)
_BUILT: set[str] = set()  # kinds whose machine code this process has built
_UNUSED: ContextVar[frozenset[tuple[str, str]]] = ContextVar("unused rows", default=frozenset())
_OBSERVER: ContextVar[Callable[..., Any] | None] = ContextVar("observer of calls", default=None)


@contextmanager
def rows_of(platform: str) -> Iterator[None]:
    """Return a context manager in which operations that are chosen at compilation use the rows of `platform`, whatever
    the device.
    """
    token = _ONLY.set(platform)
    try:
        yield
    finally:
        _ONLY.reset(token)


def platform_rows() -> dict[str, str]:
    """Return the platforms whose rows operations that are chosen at compilation use, by the keyword of
    `jax.lax.platform_dependent`: {"default": platform} within `rows_of`, otherwise one entry for each jax platform, in
    which "cuda" uses "gpu_triton" if the trace is for a card with Triton kernels (Ampere, Ada, RTX Blackwell).
    """
    if (only := _ONLY.get()) is not None:
        return {"default": only}
    card = card_of_trace()
    return PLATFORM_ROWS | {"cuda": "gpu_triton"} if card is not None and card.triton else PLATFORM_ROWS


@contextmanager
def without_rows(rows: Iterable[tuple[str, str]]) -> Iterator[None]:
    """Return a context manager in which these rows, (operation, kind), are not used: the operation uses the next kind
    of its platform that has a row. An operation and its schedule are excluded together.

    Within another such context, its rows are excluded as well.
    """
    left_out = {*_UNUSED.get(), *rows}
    for op, kind in tuple(left_out):
        left_out |= {(other, kind) for ops in _TOGETHER if op in ops for other in ops}
    token = _UNUSED.set(frozenset(left_out))
    try:
        yield
    finally:
        _UNUSED.reset(token)


@contextmanager
def observed(observer: Callable[..., Any]) -> Iterator[None]:
    """Return a context manager in which `kernel` returns functions that call observer(op, platform, function,
    *arguments, **options) instead of `function`, the implementation.

    The observer must return the operation's result, usually by calling `function`. It is for code that lists the calls
    in a trace.
    """
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


def layout_of(platform: str) -> str:
    """Return the layout in which `platform`, one of PLATFORMS or UNPAGED, stores keys and values. Raises ValueError for
    any other platform.
    """
    if platform == UNPAGED:
        return SEQUENCES
    if platform not in PLATFORMS:
        raise ValueError(f"platform {platform!r} has no KV pages, allowed: {', '.join(PLATFORMS)}")
    return PLATFORMS[platform].layout


def backend_of(platform: str) -> str:
    """Return jax's lowering platform of the devices of `platform`; "" for a name outside PLATFORMS, such as UNPAGED and
    EXACT.
    """
    return PLATFORMS[platform].backend if platform in PLATFORMS else ""


def kernel_kind(op: str, platform: str) -> str | None:
    """Return the kind of implementation that `op` uses on `platform`: the first of the platform's kinds that has a row
    for it and is not excluded by `without_rows`; None if there is none. NATIVE is excluded before `native_code`, and
    in `rows_of(EXACT)`.
    """
    unused, has_native = _UNUSED.get(), NATIVE in _BUILT and _ONLY.get() != EXACT
    kinds = (kind for kind in _KINDS.get(platform, ()) if kind != NATIVE or has_native)
    return next((kind for kind in kinds if (op, kind) in _ROWS and (op, kind) not in unused), None)


def native_code(store: Any = None) -> str:
    """Build the machine code of NATIVE kernels, once per process, and return a description of it, which is part of the
    key of programs that use it. Programs with such kernels can only be loaded afterwards. If it cannot be built, return
    "", and the operations run as plain XLA.

    store: library.CodeStore of the code that earlier processes have built; None to build it here.
    """
    if about := importlib.import_module(NATIVE_LIBRARY).load(NATIVE_ROOMS, store):
        _BUILT.add(NATIVE)
    return about


def has_machine_code(op: str, platform: str) -> bool:
    """Return whether `op` runs as machine code on `platform` after `native_code`, if that could be built. Raises
    KeyError for an unknown platform.
    """
    return NATIVE in _KINDS[platform] and (op, NATIVE) in _ROWS


def is_kernel(op: str, platform: str) -> bool:
    """Return whether `op` runs as a kernel on `platform`, not in plain XLA."""
    kind = kernel_kind(op, platform)
    return kind is not None and kind not in PLAIN_KINDS


def attention_rows(platform: str) -> frozenset[tuple[str, str]]:
    """Return the rows (operation, kind) of attention on `platform` that are not plain XLA: kernels and machine code,
    whether or not they are excluded or built. Raises KeyError for an unknown platform.
    """
    kinds = [kind for kind in _KINDS[platform] if kind == NATIVE or kind not in PLAIN_KINDS]
    return frozenset((op, kind) for op in _ATTENTION for kind in kinds if (op, kind) in _ROWS)


def has_kernels(platform: str) -> bool:
    """Return whether any operation runs as a kernel on `platform`."""
    return any(is_kernel(op, own) for op, own in KERNELS if own == platform)


def adds_bias(op: str, platform: str) -> bool:
    """Return whether the implementation of grouped product `op` on `platform` adds the bias of a row's group to its
    sums.
    """
    return (op, platform) in _ADDS_BIAS and is_kernel(op, platform)


def kernel_module(op: str, platform: str) -> str:
    """Return the name, within pallas_kernels, of the module that implements `op` on `platform`. If all rows of the
    operation are excluded, it is the module in _STAND_INS, if there is one.

    Raises ValueError, which names the platforms that have the operation, if there is none.
    """
    if (kind := kernel_kind(op, platform)) is not None:
        return _ROWS[op, kind]
    if (op, platform) in KERNELS and op in _STAND_INS:
        return _STAND_INS[op]
    platforms = sorted(allowed for row_op, allowed in KERNELS if row_op == op)
    raise ValueError(f"{op} is not implemented for platform {platform!r}, allowed: {', '.join(platforms) or 'none'}")


def kernel(op: str, platform: str) -> Callable:
    """Return the function that implements `op` on `platform`; within `observed` it is wrapped. Raises ValueError if the
    platform does not have the operation.
    """
    function = getattr(importlib.import_module(f"jaxengine.pallas_kernels.{kernel_module(op, platform)}"), op)
    observer = _OBSERVER.get()
    return function if observer is None else partial(observer, op, platform, function)


def kernel_rows(platform: str) -> dict[str, str]:
    """Return the operations that `platform` implements, with the names of their modules within pallas_kernels; {} for
    a name outside PLATFORMS.
    """
    return {op: kernel_module(op, own) for op, own in KERNELS if own == platform}


def block_profile(platform: str) -> Callable | None:
    """Return the function that builds a single block of `platform`'s attention for compilation
    (`attention.tpu.profile`); None for platforms whose compiler reports no cost.
    """
    module = _PROFILES.get(platform)
    return None if module is None else importlib.import_module(f"jaxengine.pallas_kernels.{module}").block_profile


def product_candidates(platform: str) -> Callable | None:
    """Return the function that yields the `Candidate`s for a `matmul.candidates.Problem` on `platform`; None if there
    is nothing to choose.
    """
    module = _CANDIDATES.get(platform)
    return None if module is None else importlib.import_module(f"jaxengine.pallas_kernels.{module}").candidates


def group_kernel(platform: str) -> Any:
    """Return the module with `group_step` and `multiplied_rows` for `platform`'s grouped kernels; None if XLA computes
    grouped products.
    """
    module = _GROUPS.get(platform)
    return None if module is None else importlib.import_module(f"jaxengine.pallas_kernels.{module}")


def kernel_modules(platform: str) -> tuple[str, ...]:
    """Return the sorted full names of the modules whose code may be part of a program that is compiled for `platform`,
    including those that replace kernels that fail their tests on the device.

    Platforms with the same backend are treated alike, since operations that are chosen at compilation share a row on
    all CUDA cards. "cpu" includes the rows of EXACT. Raises KeyError for a name that is not in PLATFORMS.
    """
    backend = PLATFORMS[platform].backend
    rows = [(op, row) for op, row in KERNELS if PLATFORMS[row].backend == backend]
    modules = {kernel_module(op, row) for op, row in rows}
    for op, row in rows:  # what replaces kernels that fail their tests
        if is_kernel(op, row):
            plain = {_ROWS[op, kind] for kind in _KINDS[row] if (op, kind) in _ROWS}
            modules |= plain | ({_STAND_INS[op]} if op in _STAND_INS else set())
    if backend == "cpu":
        modules |= {module for (_, kind), module in _ROWS.items() if kind == EXACT}
    return tuple(sorted(f"jaxengine.pallas_kernels.{module}" for module in modules))


def platform_of(device: Any) -> str:
    """Return the platform of a jax device: "cpu", "tpu", "gpu" (Hopper), "gpu_blackwell", "gpu_triton" (Ampere, Ada
    and RTX Blackwell) or "gpu_xla" (any other CUDA card, one for which the installed jax lowers no Triton, and within
    `plain_cards` every card).

    Raises ValueError for another kind of device.
    """
    if device.platform in ("cpu", "tpu"):
        return device.platform
    if device.platform in ("gpu", "cuda"):
        if has_mosaic(device.compute_capability):
            return "gpu"
        if has_tcgen05(device.compute_capability):
            return "gpu_blackwell"
        return "gpu_triton" if has_triton(device.compute_capability) else "gpu_xla"
    raise ValueError(f"platform {device.platform!r} has no kernels, allowed: cpu, tpu, gpu (CUDA)")


def product_platform_of(device: Any) -> str:
    """Return the platform whose matrix products a jax device runs: `platform_of` the device, or the one in
    PRODUCT_PLATFORMS. Raises ValueError for a kind of device that has no platform.
    """
    platform = platform_of(device)
    return PRODUCT_PLATFORMS.get(platform, platform)
