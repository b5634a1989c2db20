"""Embeddings in the place of pictures: which files are read; none costs more than its bytes, none is unpickled."""

from __future__ import annotations

import base64
import io
import json
import pickle
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save

from jaxengine.config.inputs.multimodal import MediaOptions
from jaxengine.media.base.errors import MediaError
from jaxengine.media.embeds import GivenEmbeds, given_embeds, read_embeds
from jaxengine.media.parts import collect_media
from jaxengine.requests.media.inputs import digest_of
from jaxengine.requests.media.prompt_embeds import _read as read_prompt_embeds
from jaxengine.scheduler.base.errors import RequestError
from tests.jaxengine.media.test_parts import Both
from tests.tables import each_row

OPTIONS = MediaOptions(enable_mm_embeds=True)
ROWS = np.linspace(-3, 3, 20, dtype=np.float32).reshape(5, 4)


def npy(array: np.ndarray, **options) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def read(data, grid=None, options=OPTIONS):
    data = base64.b64encode(data).decode() if isinstance(data, bytes) else data
    return read_embeds(GivenEmbeds(data, grid), options)


def bf16(array: np.ndarray) -> bytes:
    """A safetensors file, whose numbers numpy does not know."""
    data = array.astype(ml_dtypes.bfloat16).tobytes()
    header = json.dumps({"a": {"dtype": "BF16", "shape": array.shape, "data_offsets": [0, len(data)]}}).encode()
    return struct.pack("<Q", len(header)) + header + data


class Tensor:
    """The part of torch's Tensor that is used: numpy reads one only without gradients, and not in bfloat16."""

    def __init__(self, values, dtype, needs_grad):
        self.values, self.dtype, self.needs_grad = values, f"torch.{dtype}", needs_grad

    def detach(self):
        return Tensor(self.values, self.dtype[6:], False)

    def cpu(self):
        return self

    def float(self):
        return Tensor(self.values, "float32", self.needs_grad)

    def __array__(self, dtype=None, copy=None):
        if self.needs_grad or self.dtype == "torch.bfloat16":
            raise TypeError(f"cannot read {self.dtype}, gradients: {self.needs_grad}")
        return self.values


Tensor.__module__ = "torch"


@each_row("dtype,needs_grad", [("float32", True), ("bfloat16", False), ("bfloat16", True)])
def test_tensors_of_torch_are_arrays(dtype, needs_grad):
    tensor = Tensor(ROWS, dtype, needs_grad)
    for given in (tensor, {"image_embeds": tensor}):
        np.testing.assert_array_equal(read_embeds(given_embeds(given), OPTIONS).values, ROWS)
    np.testing.assert_array_equal(read_prompt_embeds(tensor, OPTIONS), ROWS)


@pytest.mark.parametrize(
    ("data", "exact"),
    [
        (npy(ROWS), True),
        (npy(np.asfortranarray(ROWS)), True),
        (npy(ROWS.astype(np.float16)), False),
        (save({"image": ROWS}), True),
        (save({"x": ROWS.astype(np.float16)}), False),
        (bf16(ROWS), False),
        (ROWS, True),
        (ROWS.astype(ml_dtypes.bfloat16), False),
    ],
)
def test_what_is_read(data, exact):
    found = read(data, [1, 2, 10])
    assert found.grid == (1, 2, 10) and found.values.dtype == np.float32
    np.testing.assert_allclose(found.values, ROWS, atol=0 if exact else 0.02)
    assert read(data, np.array([[1, 2, 10]])).grid == (1, 2, 10) and read(data).grid is None
    # What was read may come once more, and a file as it is.
    again = given_embeds(found)
    assert again is not None and read_embeds(again, OPTIONS).grid == found.grid
    if isinstance(data, bytes):
        np.testing.assert_array_equal(read_embeds(GivenEmbeds(data), OPTIONS).values, found.values)


def header_file(header: str, version: tuple[int, int] = (1, 0), body: bytes = bytes(16)) -> bytes:
    """A .npy whose header is any text."""
    size = struct.pack("<H" if version == (1, 0) else "<I", len(header))
    return b"\x93NUMPY" + bytes(version) + size + header.encode("latin1") + body


def shape_file(shape: object, kind: str = "F32", body: bytes = b"") -> bytes:
    """A safetensors file that claims this shape."""
    header = json.dumps({"a": {"dtype": kind, "shape": shape, "data_offsets": [0, len(body)]}}).encode()
    return struct.pack("<Q", len(header)) + header + body


def shaped(shape: object, kind: str = "<f4", order: object = False) -> str:
    return repr({"descr": kind, "fortran_order": order, "shape": shape})


DAMAGED = "is a .npy that is damaged or cut short"
MALFORMED = [
    # Parsers of Python raise more than SyntaxError.
    *[(header_file(text), DAMAGED) for text in ("-" * 9000 + "1", "(" * 9000, "[" * 9000 + "]" * 9000, "\t\n  {", "'")],
    *[
        (header_file(text), DAMAGED)
        for text in ("9" * 9000, "{[]: 1}", "...", "{'a': '\\ud800'}", " " * 9999, "\0", "1j")
    ],
    (header_file("{}", (2, 0)), DAMAGED),
    (header_file(" " * (1 << 20), (2, 0)), DAMAGED),
    (header_file(shaped((2, 2)), (9, 0)), r"is a .npy of version \(9, 0\); allowed: 1.0, 2.0 and 3.0"),
    *[
        (header_file(shaped((2, 2), kind)), DAMAGED)
        for kind in ("<U0", "|V0", "f4," * 900, "x", "|S99999999999999999999")
    ],
    *[(header_file(shaped(shape)), DAMAGED) for shape in ((-1, 2), (True, 4), (10**30, 2), (1 << 40, 1 << 40), (2, 3))],
    *[(header_file(shaped(shape)), DAMAGED) for shape in ([2, 2], (2.0, 2), ("a", 2), None)],
    *[
        (header_file(shaped(shape)), r"is an array float32\[.*; allowed: \[rows, size\]")
        for shape in ((), (4,), (0, 9))
    ],
    *[(shape_file([0, size]), "is an array float32") for size in (1 << 62, 1 << 63, (1 << 64) - 1)],
    (shape_file([0, 1 << 63], "BF16"), "is an array float32"),
    (shape_file([1] * 100, body=bytes(4)), r"is an array float32\[1, 1, 1, 1, 1, 1, ...\]; allowed: \[rows, size\]"),
    (shape_file([0] * 100), "is an array float32"),
    (shape_file([], body=bytes(4)), r"is an array float32\[\]"),
    (shape_file([1 << 62, 4]), "is a file of an unknown type"),
    (struct.pack("<Q", 200_000) + b"[" * 200_000, "is a file of an unknown type"),
    (struct.pack("<Q", 1 << 63) + b"{}", "is a file of an unknown type"),
]


@each_row(("data", "message"), MALFORMED)
def test_a_malformed_file_is_one_error(data, message):
    with pytest.raises(MediaError, match=message):
        read(data)


def test_a_length_of_header_may_look_like_a_pickle():
    for size in range(1, 300):
        assert read(save({"a" * size: ROWS})).values.shape == (5, 4)


class Evil:
    def __reduce__(self):
        return pytest.fail, ("unpickled",)


LONG = npy(ROWS).replace(b"(5, 4), ", b"(5 << 30, 4)")
HUGE = npy(ROWS).replace(b"(5, 4), }  ", b"(500000000, 4), }")[: len(npy(ROWS))]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pickle.dumps(Evil()), "is a file of torch.save or pickle, which may contain code"),
        (b"PK\x03\x04archive/data.pkl", "is a file of torch.save or pickle"),
        (npy(np.array([Evil()], object), allow_pickle=True), "is a file of torch.save or pickle"),
        (b"hello", "is a file of an unknown type; allowed: safetensors with one tensor, or .npy"),
        (b"", "is a file of an unknown type"),
        (npy(ROWS)[:-3], "is a .npy that is damaged"),
        (npy(ROWS)[:20], "is a .npy that is damaged"),
        (HUGE, "is a .npy that is damaged"),
        (LONG, "is a .npy that is damaged"),
        (save({"a": ROWS, "b": ROWS}), "has 2 tensors; allowed: one"),
        (save({"a": ROWS.astype(np.int8)}), "a tensor of I8; allowed: F32, F16, BF16"),
        (npy(ROWS.astype(np.float64)), r"an array float64\[5, 4\]; allowed: \[rows, size\]"),
        (npy(ROWS[None]), r"an array float32\[1, 5, 4\]"),
        (npy(ROWS[:0]), r"an array float32\[0, 4\]"),
        (npy(np.where(ROWS > 2, np.inf, ROWS).astype(np.float32)), "not finite"),
        ("@@@@", "is not valid base64"),
        ("ä", "is not valid base64"),
        (3, "is a int; allowed: base64"),
    ],
)
def test_what_is_refused(data, message):
    with pytest.raises(MediaError, match=message):
        read(data)


def test_what_is_said_of_them():
    for grid in ([1, 2], [1, 2, 0], [1, 2, 3.0], "abc", {"a": 1}, [[1], 2, 3], [1, 2, 1 << 20]):
        with pytest.raises(MediaError, match="has image_grid_thw .*; allowed: three whole numbers"):
            read(ROWS, grid)
    with pytest.raises(MediaError, match=r"has 500 bytes or more; allowed: 99 \(max_media_bytes\)"):
        read_embeds(GivenEmbeds(bytes(500)), MediaOptions(max_media_bytes=99))
    with pytest.raises(MediaError, match=r"bytes or more; allowed: 99 \(max_media_bytes\)"):
        read(npy(ROWS), options=MediaOptions(max_media_bytes=99))
    assert given_embeds(np.zeros((4, 4), np.uint8)) is None and given_embeds(b"x") is None and given_embeds({}) is None


def test_parts_of_messages():
    text = base64.b64encode(npy(ROWS)).decode()

    def collect(embeds, options=OPTIONS):
        messages = [{"role": "user", "content": [{"type": "image_embeds", "image_embeds": embeds}]}]
        return collect_media(messages, Both(), options)

    for given, grid in ((text, None), ({"image_embeds": text, "image_grid_thw": [1, 2, 10]}, (1, 2, 10))):
        written, (part,) = collect(given)
        assert written[0]["content"] == [{"type": "image"}] and part.modality == "image"
        found = read_embeds(part.source, OPTIONS)
        assert np.array_equal(found.values, ROWS) and found.grid == grid
    with pytest.raises(
        RequestError, match=r"image_embeds is given as embeddings, .* only allowed with enable_mm_embeds"
    ):
        collect(text, MediaOptions())
    with pytest.raises(RequestError, match="must have image_embeds"):
        collect(None)


def test_they_are_known_by_what_they_hold():
    def digest(values, grid=None):
        return digest_of("image", read_embeds(GivenEmbeds(values, grid), OPTIONS), {}, "")

    other = ROWS.copy()
    other[4, 3] += 1
    assert digest(ROWS) == digest(ROWS.copy()) == digest(ROWS.astype(np.float32))
    assert len({digest(ROWS), digest(other), digest(ROWS.reshape(4, 5)), digest(ROWS, [1, 2, 10])}) == 4
