"""Block formats against values recorded from the `gguf` package, and against blocks written out by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxengine.models.weights.gguf.dequant import FORMATS, dequantize

BLOCKS = Path(__file__).parents[3] / "fixtures" / "gguf_blocks.npz"
# I32, of tables of experts by token, is no format of the `gguf` package's.
BY_NAME = {block_format.name: block_format for block_format in FORMATS.values() if block_format.name != "I32"}
ONE, HALF, MINUS_TWO = b"\x00\x3c", b"\x00\x38", b"\x00\xc0"  # float16, little-endian


@pytest.mark.parametrize("name", BY_NAME)
def test_values_are_bit_equal_to_the_recorded_ones(name):
    with np.load(BLOCKS) as recorded:
        blocks, expected = recorded[f"{name}_blocks"], recorded[f"{name}_values"]
    values = dequantize(BY_NAME[name], blocks.tobytes())
    assert values.dtype == BY_NAME[name].dtype
    np.testing.assert_array_equal(values.astype(np.float32).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", BY_NAME)
def test_every_block_is_independent_of_its_neighbours(name):
    with np.load(BLOCKS) as recorded:
        blocks = recorded[f"{name}_blocks"]
    one_by_one = [dequantize(BY_NAME[name], block.tobytes()) for block in blocks]
    np.testing.assert_array_equal(np.concatenate(one_by_one), dequantize(BY_NAME[name], blocks.tobytes()))


def values_of(name: str, block: bytes) -> dict[int, float]:
    """Position -> value, for the values of one block that are not 0."""
    values = dequantize(BY_NAME[name], block)
    assert values.shape == (BY_NAME[name].values,)
    return {int(at): float(values[at]) for at in np.flatnonzero(values)}


def test_i32_by_hand():
    values = dequantize(FORMATS[26], b"\x02\x01\x00\x00\xff\xff\xff\xff")
    assert values.dtype == np.int32 and values.tolist() == [258, -1]


def test_q4_0_by_hand():
    # All nibbles 8 mean 0; byte 3 holds value 3 (low nibble 15) and value 19 (high nibble 0).
    assert values_of("Q4_0", HALF + b"\x88" * 3 + b"\x0f" + b"\x88" * 12) == {3: 3.5, 19: -4.0}


def test_q5_1_by_hand():
    # Bit 17 of the word is the fifth bit of value 17; the minimum -2 is added everywhere, so 4 * 0.5 is 0.
    block = HALF + MINUS_TWO + (1 << 17).to_bytes(4, "little") + b"\x44\x14" + b"\x44" * 14
    assert values_of("Q5_1", block) == {17: (16 + 1) * 0.5 - 2}


def test_q8_0_is_signed():
    assert values_of("Q8_0", HALF + bytes(30) + b"\x80\x7f") == {30: -64.0, 31: 63.5}


def test_q4_k_by_hand():
    # Group 5: scale 0b110011 (low nibble of byte 9, top bits in byte 1), minimum 0b010110 (high nibble, byte 5).
    scales = bytearray(12)
    scales[1], scales[5], scales[9] = 0b11_000000, 0b01_000000, 0b0110_0011
    quants = bytearray(128)
    quants[2 * 32 + 7] = 0xF0  # third run of 32 bytes: groups 4 (low) and 5 (high)
    expected = dict.fromkeys(range(160, 192), -0.5 * 0b010110)
    expected[167] += 15 * 0b110011
    assert values_of("Q4_K", ONE + HALF + bytes(scales) + bytes(quants)) == expected


def test_q5_k_fifth_bits_by_hand():
    # Group 6 (low nibbles of the last run) has scale 1; bit 6 of byte 4 of the word field adds 16 to its value 4.
    scales, high, quants = bytearray(12), bytearray(32), bytearray(128)
    scales[10], high[4], quants[96 + 4] = 0x01, 1 << 6, 0x03
    assert values_of("Q5_K", ONE + HALF + bytes(scales) + bytes(high) + bytes(quants)) == {6 * 32 + 4: 19.0}


def test_q6_k_by_hand():
    # Second half, third group of 32: high nibbles of bytes 64-95, bits 4-5 of the high bytes 32-63; 32 means 0.
    low, high, scales = bytearray(128), bytearray(b"\xaa" * 64), bytearray(16)
    low[64 + 20], high[32 + 20], scales[8 + 5] = 0xD0, 0b11_11_11_11, 0xFD  # scale -3 of values 16-31 of that group
    expected = {128 + 64 + 20: -0.5 * 3 * (0b11_1101 - 32)}
    assert values_of("Q6_K", bytes(low) + bytes(high) + bytes(scales) + HALF) == expected


def test_infinite_scales_stay_infinite_without_a_warning():
    values = dequantize(BY_NAME["Q8_0"], b"\x00\x7c" + bytes([1, 0xFF]) + bytes(30))
    assert values[0] == np.inf and values[1] == -np.inf and np.isnan(values[2:]).all()
