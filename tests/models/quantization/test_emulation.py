"""The decoder in NumPy that formats are compared with: transformers' logits, and rounding by numbers written down."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.pallas_kernels.matmul.microscaled import microscaled_rows
from jaxengine.pallas_kernels.matmul.rounding import (
    E4M3,
    E8M0,
    FLOAT32,
    UE8M0,
    dynamic_scales,
    largest_values,
    rounded_rows,
)
from tests.fixtures.drawn_weights import FOLDER, checkpoint
from tests.fixtures.recorders.blocks import GLOBAL_SCALE, given
from tests.fixtures.recorders.blocks import MICROSCALED_ROWS as RECORDED
from tests.models.quantization.emulation import Decoder, Rounding, distances, to_float, to_int8

F32 = np.float32


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_transformers_logits_and_tokens(name):
    source = SafetensorsCheckpoint(checkpoint(name))
    tensors = {each: np.asarray(source.read(each), F32) for each in source.names()}
    source.close()
    decoder = Decoder(json.loads((FOLDER / name / "config.json").read_text()), tensors, {}, None)
    with np.load(FOLDER / name / "golden.npz", allow_pickle=False) as golden:
        for index in range(2):
            tokens, expected = golden[f"token_ids_{index}"].tolist(), golden[f"logits_{index}"]
            assert np.abs(decoder.logits(tokens) - expected).max() < 5e-6 * np.abs(expected).max()
            assert decoder.greedy(tokens, 24) == golden[f"greedy_{index}"].tolist()


def test_codes_of_published_formats():
    # OFP8's table: steps of an eighth from 1 on, 2^-9 is the least, 448 the largest; ties go to the even code.
    given = [1.1875, 1.0625, -1.0625, 2**-9, 2**-10, 1.5 * 2**-9, 1.01 * 2**-10, 432, 460, -1e30, 17, 19, 0]
    expected = [1.25, 1, -1, 2**-9, 0, 2 * 2**-9, 2**-9, 448, 448, -448, 16, 20, 0]
    np.testing.assert_array_equal(to_float(np.array(given)), expected)
    # Microscaling's table 5: ties to the code whose mantissa is 0.
    given = [0.25, 0.75, -1.25, 1.75, 2.5, -3.5, 5, 5.01, 7, -1e30, 0.26, 0]
    np.testing.assert_array_equal(to_float(np.array(given), "float4"), [0, 1, -1, 2, 2, -4, 4, 6, 6, -6, 0.5, 0])
    given, expected = [0.5, 1.5, -2.5, 126.5, 300, -128.4, -300], [0, 2, -2, 126, 127, -128, -128]
    np.testing.assert_array_equal(to_int8(np.array(given)), expected)
    np.testing.assert_allclose(distances(np.array([17.0, 16.5, 447]), "float"), [0, 0.5 / 448, 15 / 448])
    np.testing.assert_allclose(distances(np.array([2.5, -7.0, 1.25]), "int"), [0, 0.5 / 127, 0.25 / 127])


def rows() -> np.ndarray:
    """Of zeros, with one value larger than all others, with subnormal ones, with ties, and usual ones."""
    drawn = np.random.default_rng(0).standard_normal((9, 112)).astype(F32)
    drawn[0] = 0
    drawn[1, 5], drawn[2, 70] = 3e4, -1e30
    drawn[3] *= F32(1e-30)
    drawn[4] = np.arange(-56, 56) / F32(2)
    drawn[4, 7] = 127
    drawn[5, 48:96] = 0
    drawn[6] *= F32(700)
    drawn[7, 0] = 448
    return drawn


# What is rounded how, and inputs that the kernels' rows have a scale for: the last group is cut off there.
ROUNDINGS = {
    "token, int8": (Rounding("int"), 112),
    "token": (Rounding("float"), 112),
    "token, bound": (Rounding("float", bound=1.5), 112),
    "groups": (Rounding("float", 16), 16),
    "groups, powers of two": (Rounding("float", 16, scales="up"), 16),
    "groups of int8": (Rounding("int", 56), 56),
    "static": (Rounding("float", static=F32(0.011)), 112),
    "static int8": (Rounding("int", static=F32(0.011)), 112),
}


DTYPES = {"int": "int8", "float": "float8_e4m3fn", "float4": "float4_e2m1fn"}
KINDS = {"": FLOAT32, "up": UE8M0, "near": E8M0, "e4m3": E4M3}


@pytest.mark.parametrize("name", ROUNDINGS)
def test_rows_are_rounded_as_published(name):
    """What saturates too: int8 at -128 below, as vLLM's kernels and compressed-tensors have it, e4m3 at 448."""
    rounding, group = ROUNDINGS[name]
    x, dtype = rows(), DTYPES[rounding.kind]
    if rounding.static is not None:
        scales = jnp.full((1, 1), rounding.static)
    else:
        largest = largest_values(jnp.asarray(x), group)
        largest = largest if rounding.bound is None else jnp.minimum(largest, rounding.bound)
        scales = dynamic_scales(largest, dtype, kind=KINDS[rounding.scales])
    found = rounded_rows(jnp.asarray(x), scales, dtype)
    codes, expected = rounding.codes(x)
    np.testing.assert_array_equal(np.asarray(found.codes, np.float64), codes)
    # XLA multiplies by 1 / 448 in place of dividing, which may be another number in the last bit.
    np.testing.assert_allclose(np.repeat(found.scales, group, axis=1), expected, rtol=2e-7)
    if rounding.kind == "int" and rounding.static is not None:
        assert codes.min() == -128


MICROSCALED = {
    "mxfp8": Rounding("float", 32, scales="near"),
    "mxfp8, up": Rounding("float", 32, scales="up"),
    "mxfp4": Rounding("float4", 32, scales="near"),
    "nvfp4": Rounding("float4", 16, scales="e4m3", whole=GLOBAL_SCALE),
    "nvfp4, saturated": Rounding("float4", 16, scales="e4m3", whole=F32(1e4)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MICROSCALED)
def test_rows_with_scales_of_a_few_inputs_are_exact(name, dtype):
    """As written down here, in bfloat16 too, and as compressed-tensors' own code has them, which was recorded."""
    rounding = MICROSCALED[name]
    whole = F32(1) if rounding.whole is None else rounding.whole
    x = jnp.concatenate([jnp.asarray(rows()[:, :96]), jnp.pad(given(), ((0, 0), (0, 32)))]).astype(dtype)
    found = microscaled_rows(
        x, rounding.group, DTYPES[rounding.kind], kind=KINDS[rounding.scales], global_scale=whole.reshape(1, 1)
    )
    assert found.dtype == x.dtype
    codes, scales = rounding.codes(np.asarray(x, F32))
    np.testing.assert_allclose(np.asarray(found, F32), codes * scales * np.float64(whole), rtol=3e-7)
    with np.load(RECORDED, allow_pickle=False) as recorded:
        if name in recorded and dtype == "float32":
            np.testing.assert_allclose(found[9:, :64], recorded[name] * whole, rtol=3e-7)
