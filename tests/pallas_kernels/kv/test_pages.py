"""Storage of pages: writes touch the named slots only, bit for bit, in place, and pages can be exchanged."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.pallas_kernels.kv.pages import (
    LAYOUTS,
    KVSpec,
    alloc,
    export_pages,
    import_pages,
    largest,
    page_bytes,
    partition_spec,
    pool_shape,
)
from jaxengine.pallas_kernels.kv.update import kv_cache_update
from jaxengine.pallas_kernels.registry import HEAD_TILES, PLATFORMS, TOKEN_ROWS
from tests.pallas_kernels.checks import CHECKS, SLOTS
from tests.pallas_kernels.implementations import CPU, GPU_XLA, IN_PROCESS, Implementation
from tests.tables import each_row

# What other releases of jax run: a few writes, and an export.
VERSIONS = pytest.mark.versions

ONE_OF_EACH_LAYOUT = list({row.layout: name for name, row in PLATFORMS.items()}.values())
DTYPES = ["float32", "bfloat16", "float16"]
QUANTIZED = ["float8_e4m3fn", "float8_e5m2", "int8"]
PER_TOKEN = [
    "int8_per_token_head",
    pytest.param("fp8_per_token_head", marks=pytest.mark.thorough("as int8_per_token_head")),
]
update = jax.jit(kv_cache_update, donate_argnums=0)


def spec(dtype: str, **changes: int) -> KVSpec:
    fields = {"num_pages": 6, "page_size": 16, "num_kv_heads": 2, "head_dim": 8, "v_head_dim": 8}
    return KVSpec(**{**fields, **changes}, dtype=dtype)


AS_ON_A_CPU = pytest.mark.thorough("XLA for GPUs is the CPU's code on another layout")
OTHER_BYTES = pytest.mark.thorough("as another dtype of as many bytes")


@pytest.mark.parametrize(
    "implementation",
    [pytest.param(each, id=each.name, marks=AS_ON_A_CPU if each is GPU_XLA else ()) for each in IN_PROCESS],
)
@pytest.mark.parametrize("pattern", SLOTS)
@pytest.mark.parametrize(
    "dtype",
    ["float32", "bfloat16", "float8_e4m3fn", "int8"]
    + [pytest.param(name, marks=OTHER_BYTES) for name in ("float16", "float8_e5m2")],
)
def test_update_writes_named_slots_only(dtype, pattern, implementation):
    CHECKS["update"](dtype, pattern, implementation)


@pytest.mark.parametrize("implementation", IN_PROCESS, ids=lambda implementation: implementation.name)
@pytest.mark.parametrize("sizes", [(64, 1, 80, 80, False), (16, 2, 192, 128, False), (8, 5, 16, 64, True)])
def test_update_of_other_shapes(sizes, implementation):
    CHECKS["update_sizes"]("bfloat16", *sizes, implementation)


@pytest.mark.parametrize("implementation", IN_PROCESS, ids=lambda implementation: implementation.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("pattern", ["one token", "runs"])
def test_update_of_keys_that_hold_their_values(pattern, dtype, implementation):
    CHECKS["update_keys"](dtype, pattern, 2, 24, 16, implementation)


@pytest.mark.parametrize("implementation", [CPU, GPU_XLA], ids=lambda implementation: implementation.name)
@pytest.mark.parametrize("pattern", ["one token", "runs"])
@pytest.mark.parametrize("dtype", PER_TOKEN)
def test_update_writes_a_scale_for_each_token(dtype, pattern, implementation):
    CHECKS["update"](dtype, pattern, implementation)


@pytest.mark.parametrize("dtype", PER_TOKEN)
def test_update_of_a_scale_for_each_latent(dtype):
    CHECKS["update_keys"](dtype, "runs", 2, 24, 16, CPU)


@pytest.mark.parametrize("dtype", PER_TOKEN)
@pytest.mark.parametrize("platform", [name for name, row in PLATFORMS.items() if row.reads_token_scales])
def test_tokens_of_any_range_are_as_exact_as_codes_are(platform, dtype):
    """By what rounding to a code can be off at most; with one scale of 1 the same tokens saturate, or are all 0."""
    rng = np.random.default_rng(0)
    ranges = np.float32([1e-6, 1e6, 1.0, 1e-3]).reshape(4, 1, 1)  # of a token
    k, v = (rng.uniform(0.01, 1, (4, 2, 8)).astype(np.float32) * rng.choice([-1, 1], (4, 2, 8)) for _ in "kv")
    k, v, slots = k * ranges, v / ranges, jnp.asarray([3, 17, 18, 95], jnp.int32)
    kv = update(alloc(spec(dtype), platform=platform), k, v, slots)
    other = import_pages(alloc(spec(dtype), platform=platform), jnp.arange(6), export_pages(kv, jnp.arange(6)))
    np.testing.assert_array_equal(*(np.asarray(pool.data).view(np.uint8) for pool in (kv, other)))
    rows = np.asarray(export_pages(kv, jnp.arange(6))).reshape(96, 2, 2, 12)[np.asarray(slots)].view(np.uint8)
    scales = np.ascontiguousarray(rows[..., 8:]).view(np.float32)
    values = np.ascontiguousarray(rows[..., :8]).view(kv.dtype).astype(np.float32) * scales
    unit = alloc(spec(dtype=kv.dtype.name), platform=platform)
    unit = np.asarray(export_pages(update(unit, k, v, slots), jnp.arange(6)), np.float32)
    unit = unit.reshape(96, 2, 2, 8)[np.asarray(slots)]
    for part, x in enumerate((k, v)):
        largest = np.abs(x).max(-1, keepdims=True)
        # Half a step of int8 codes; of fp8's, whose least is 2**-9, half of 2**-3 of a number.
        most = largest / 254 if dtype.startswith("int8") else np.maximum(np.abs(x) / 16, largest / 448 * 2**-10)
        assert (np.abs(values[:, part] - x) <= most * 1.0001).all()
        beyond = (largest < 2**-10) | (largest > 4480)
        assert beyond.any() and (np.abs(unit[:, part] - x).max(-1, keepdims=True) > largest * 0.9)[beyond].all()


@pytest.mark.parametrize(("dtype", "in_keys"), [("bfloat16", False), ("int8", False), ("bfloat16", True)])
@pytest.mark.parametrize("source", ONE_OF_EACH_LAYOUT)
@pytest.mark.parametrize("target", ONE_OF_EACH_LAYOUT)
def test_pages_move_between_layouts_bit_for_bit(source, target, dtype, in_keys):
    CHECKS["exchange"](source, dtype, in_keys, Implementation(target, target))


@pytest.mark.parametrize("platform", ONE_OF_EACH_LAYOUT)
@pytest.mark.parametrize(("dtype", "in_keys"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_the_largest_of_some_pages(platform, dtype, in_keys):
    shape = replace(spec(dtype, num_pages=6), values_in_keys=in_keys, aligned_values=not in_keys)
    values = np.random.default_rng(0).normal(size=(6, 16, 1 if in_keys else 2, 2, 8)).astype(dtype)
    kv = import_pages(alloc(shape, platform=platform), jnp.arange(6), jnp.asarray(values))
    assert np.asarray(export_pages(kv, jnp.arange(6))).tobytes() == values.tobytes()
    found = largest(kv, jnp.int32(2), 3)
    expected = np.abs(values[2:5].astype(np.float32)).max(axis=(0, 1, 4))
    np.testing.assert_array_equal(found[0], expected[0])
    assert found[1] is None if in_keys else (np.asarray(found[1]) == expected[1]).all()
    with pytest.raises(ValueError, match="a pool of int8"):
        largest(alloc(spec("int8"), platform=platform), jnp.int32(0), 1)


def test_update_of_one_padding_token_changes_nothing():
    kv = import_pages(alloc(spec("float32")), jnp.arange(6), jnp.ones((6, 16, 2, 2, 8)))
    new = jnp.zeros((1, 2, 8))
    after = kv_cache_update(kv, new, new, jnp.full((1,), -1, jnp.int32))
    np.testing.assert_array_equal(after.data, kv.data)


@pytest.mark.parametrize("dtype", DTYPES + QUANTIZED)
def test_export_import_round_trip(dtype):
    rng = np.random.default_rng(0)
    values = jnp.asarray(rng.standard_normal((6, 16, 2, 2, 8)) * 30, jnp.float32).astype(dtype)
    full = import_pages(alloc(spec(dtype)), jnp.arange(6), values)
    ids = jnp.asarray([4, 1, 5])
    exported = export_pages(full, ids)
    assert exported.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(np.asarray(exported), np.asarray(values)[np.asarray(ids)])
    other = import_pages(alloc(spec(dtype)), jnp.asarray([0, -1, 2]), exported)
    np.testing.assert_array_equal(np.asarray(export_pages(other, jnp.asarray([0, 2]))), np.asarray(exported)[[0, 2]])
    assert not np.asarray(other.data)[[1, 3, 4, 5]].any(), "a page id of -1 must be dropped"


def test_export_of_written_tokens_is_canonical():
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((3, 2, 8)).astype(np.float32) for _ in range(2))
    slots = np.asarray([5 * 16 + 3, 2, 16 * 6 - 1], np.int32)
    kv = kv_cache_update(alloc(spec("float32")), jnp.asarray(k), jnp.asarray(v), jnp.asarray(slots))
    pages = np.asarray(export_pages(kv, jnp.arange(6)))
    np.testing.assert_array_equal(pages[slots // 16, slots % 16, 0], k)
    np.testing.assert_array_equal(pages[slots // 16, slots % 16, 1], v)
    assert np.count_nonzero(pages) == k.size + v.size


@VERSIONS
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_quantized_codes_are_scaled_and_saturate(dtype):
    kv = alloc(spec(dtype))
    kv = type(kv)(kv.data, jnp.asarray([0.5, 2.0]), jnp.asarray([1e-4, 1e3]), kv.spec, kv.platform)
    k = jnp.full((1, 2, 8), 3.0).at[0, 0, 0].set(1e9).at[0, 0, 1].set(-1e9)
    v = jnp.stack([jnp.full((8,), 2e-4), jnp.full((8,), 5e3)])[None]
    kv = kv_cache_update(kv, k, v, jnp.zeros((1,), jnp.int32))
    codes = np.asarray(export_pages(kv, jnp.asarray([0])), np.float32)[0, 0]
    limit = {"float8_e4m3fn": 448, "float8_e5m2": 57344, "int8": 127}[dtype]
    np.testing.assert_array_equal(codes[0, 0, :3], [limit, -limit, 6])
    np.testing.assert_array_equal(codes[0, 1], 2 if dtype == "int8" else 1.5)
    np.testing.assert_array_equal(codes[1], [[2] * 8, [5] * 8])


@VERSIONS
@pytest.mark.parametrize(
    "dtype",
    ["float32", "bfloat16", "int8", *PER_TOKEN[:1]]
    + [pytest.param(name, marks=OTHER_BYTES) for name in ("float16", "float8_e4m3fn", "float8_e5m2")],
)
@pytest.mark.parametrize("num_tokens", [1, 32])
def test_update_is_in_place(dtype, num_tokens):
    kv = jax.eval_shape(lambda: alloc(spec(dtype, num_pages=4096)))
    new = jax.ShapeDtypeStruct((num_tokens, 2, 8), jnp.float32)
    memory = update.lower(kv, new, new, jax.ShapeDtypeStruct((num_tokens,), jnp.int32)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < kv.data.size * kv.data.dtype.itemsize // 10
    assert memory.alias_size_in_bytes >= kv.data.size * kv.data.dtype.itemsize


@pytest.mark.parametrize("dtype", DTYPES + QUANTIZED + PER_TOKEN)
def test_page_bytes_is_what_alloc_takes(dtype):
    shape = spec(dtype, v_head_dim=12)
    assert alloc(shape).data.nbytes == page_bytes(shape) * shape.num_pages


def test_a_latent_takes_its_own_bytes_only():
    latent = KVSpec(1, 64, 1, 576, 512, "bfloat16", values_in_keys=True)
    assert page_bytes(latent, HEAD_TILES) == 64 * 576 * 2
    assert page_bytes(latent, TOKEN_ROWS) == 64 * 640 * 2  # whole lane tiles
    assert alloc(latent).data.nbytes == page_bytes(latent)
    scaled = alloc(replace(latent, dtype="int8"))
    assert scaled.v_scale is None and scaled.value_scale is scaled.k_scale


@pytest.mark.parametrize("layout", LAYOUTS)
def test_partition_spec_splits_pages_and_heads(layout):
    shape = pool_shape(spec("bfloat16", num_kv_heads=16), layout)
    half = pool_shape(spec("bfloat16", num_kv_heads=16, num_pages=12), layout)
    more = pool_shape(spec("bfloat16", num_kv_heads=32), layout)
    got = partition_spec(layout, head_axis="model", data_axis="data")
    for axis, name in enumerate(got):
        assert (name == "data") == (half[axis] != shape[axis])
        assert (name == "model") == (more[axis] != shape[axis])


@each_row(
    ("call", "message"),
    [
        (lambda: KVSpec(4, 0, 1, 8, 8, "float32"), "KVSpec.page_size must be at least 1, got 0"),
        (lambda: KVSpec(2**28, 16, 1, 8, 8, "float32"), "do not fit int32"),
        (lambda: alloc(spec("float64")), "KVSpec.dtype 'float64' is not supported, allowed: float32"),
        (
            lambda: alloc(spec("int8_per_token_head"), platform="tpu"),
            "'tpu' read no scales of tokens, allowed: cpu, gpu_blackwell, gpu_triton, gpu_xla",
        ),
        (lambda: spec("bfloat16", token_scales=True), "token_scales are those of codes of one byte, got bfloat16"),
        (lambda: alloc(spec("float32"), platform="abacus"), "platform 'abacus' has no KV pages, allowed: cpu"),
        (
            lambda: KVSpec(4, 16, 1, 8, 12, "float32", values_in_keys=True),
            r"KVSpec.v_head_dim must be at most head_dim \(8\) where values lie in keys, got 12",
        ),
        (
            lambda: kv_cache_update(
                alloc(replace(spec("float32"), values_in_keys=True)),
                *[jnp.zeros((1, 2, 8))] * 2,
                jnp.zeros((1,), jnp.int32),
            ),
            r"v must have shape None, got \(1, 2, 8\)",
        ),
        (
            lambda: kv_cache_update(alloc(spec("float32")), jnp.zeros((1, 2, 8)), None, jnp.zeros((1,), jnp.int32)),
            r"v must have shape \(1, 2, 8\), got None",
        ),
        (lambda: export_pages(alloc(spec("float32", v_head_dim=4)), jnp.arange(2)), "no canonical form"),
        (
            lambda: import_pages(alloc(spec("float32")), jnp.arange(2), jnp.zeros((2, 16, 2, 2, 4))),
            "import_pages needs",
        ),
        (
            lambda: kv_cache_update(alloc(spec("float32")), *[jnp.zeros((3, 2, 7))] * 2, jnp.zeros(3, jnp.int32)),
            "k must",
        ),
        (lambda: kv_cache_update(alloc(spec("float32")), *[jnp.zeros((3, 2, 8))] * 2, jnp.zeros(3)), "must be int32"),
    ],
)
def test_errors_name_field_and_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()
