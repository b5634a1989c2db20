"""Files of torch.save: tensors are read, and nothing else; no instruction of a pickle is run."""

from __future__ import annotations

import io
import random
import zipfile

import numpy as np
import pytest

from jaxengine.models.weights.formats.torch_zip import _CODES, TorchCheckpoint, TorchFileError, read_torch
from tests.fixtures.drawn_weights import draw
from tests.fixtures.token_models import GOLDENS

REBUILD = b"torch._utils\n_rebuild_tensor_v2"
HUGE = b"\x8a\x06" + (1 << 46).to_bytes(6, "little")


def archive(program: bytes, storage: bytes = bytes(24), *, compressed: bool = False, order: bytes = b"little"):
    file = io.BytesIO()
    kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(file, "w", kind) as made:
        made.writestr("a/data.pkl", program)
        made.writestr("a/byteorder", order)
        made.writestr("a/data/0", storage)
    return file


def tensor(
    offset: int = 0,
    shape: bytes = b"K\x02K\x03\x86",
    strides: bytes = b"K\x03K\x01\x86",
    name=REBUILD,
    size: bytes = b"K\x06",
) -> bytes:
    """A program that makes one tensor of a storage of six floats, or of `size`."""
    begin = (
        b"\x80\x02c" + name + b"\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu" + size + b"tQ"
    )
    return begin + b"K" + bytes([offset]) + shape + strides + b"\x89ccollections\nOrderedDict\n)RtR."


def misnamed() -> io.BytesIO:
    """An archive with a file whose name is said to be UTF-8, and is not."""
    file = archive(tensor())
    with zipfile.ZipFile(file, "a") as made:
        made.writestr("\u00e9", b"")
    return io.BytesIO(file.getvalue().replace("\u00e9".encode(), b"\xff\xff"))


def test_what_torch_wrote_is_read():
    with np.load(GOLDENS) as goldens:
        found = read_torch(io.BytesIO(goldens["colbert_linear.pt"].tobytes()), 1 << 20)
    assert {name: each.dtype for name, each in found.items()} == {"weight": np.float32, "bias": np.float32}
    for name, each in found.items():
        assert np.array_equal(each, draw(f"colbert_linear.{name}", each.shape))


def test_views_of_a_storage():
    values = np.arange(6, dtype="<f4")
    whole = read_torch(archive(tensor(), values.tobytes()), 24)[""]
    assert np.array_equal(whole, values.reshape(2, 3))
    turned = tensor(shape=b"K\x03K\x02\x86", strides=b"K\x01K\x03\x86")
    assert np.array_equal(read_torch(archive(turned, values.tobytes()), 24)[""], values.reshape(2, 3).T)
    part = tensor(offset=2, shape=b"K\x02\x85", strides=b"K\x02\x85")
    assert read_torch(archive(part, values.tobytes()), 24)[""].tolist() == [2, 4]


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (archive(b"\x80\x02cos\nsystem\nX\x02\0\0\0id\x85R."), "names 'os system'"),
        (archive(b"\x80\x02ctorch\nload\n)R."), "names 'torch load'"),
        (archive(b"\x80\x04\x8c\x02os\x8c\x06system\x93."), "has an instruction that no tensor needs"),
        (archive(b"\x80\x02i0\n."), "has an instruction that no tensor needs"),
        (archive(b"\x80\x02ccollections\nOrderedDict\n(K\x01tR."), "makes a tensor in an unknown way|damaged"),
        (archive(tensor(name=b"collections\nOrderedDict")), "makes a tensor in an unknown way"),
        (archive(b"\x80\x02K\x01."), "must hold a tensor or a dict of tensors"),
        (archive(b"\x80\x02"), "ends early"),
        (archive(b"\x80\x02RR."), "damaged"),
        (archive(b"K\x01(K\x02K\x03u."), "sets items of what is no dict of names"),
        (archive(b"NK\x02K\x03s."), "sets items of what is no dict of names"),
        (archive(b"X\x01\0\0\0aK\x02K\x03s."), "sets items of what is no dict of names"),
        (archive(b"}K\x02K\x03s."), "sets items of what is no dict of names"),
        (archive(b"}Nq\0" + b"h\0h\0\x86q\0" * 64 + b"Ns."), "sets items of what is no dict of names"),  # 2^64 hashes
        (archive(b"}N" + b"\x85" * 60_000 + b"Ns."), "sets items of what is no dict of names"),
        (archive(b"N\x87."), "takes more values than it makes"),
        (archive(b"NN(RNNt."), "calls something that makes no tensor"),
        (archive(b"NN(bbt."), "takes more values than it makes"),
        (archive(b"\x80\x02" + b"K\x01" * 70_000 + b"."), "has an instruction that no tensor needs|damaged"),
        (archive(tensor(offset=1)), "reads past the end of storage 0"),
        (archive(tensor(strides=b"K\x04K\x01\x86")), "reads past the end of storage 0"),
        (archive(tensor(), bytes(20)), "storage 0 has 20 bytes; the file says 24"),
        (archive(tensor(shape=b"M\xff\xffM\xff\xff\x86", strides=b"K\0K\0\x86")), "bytes; allowed: 1000"),
        (archive(tensor(), compressed=True), "must be stored as they are"),
        (archive(tensor(), order=b"big"), "must be little-endian"),
        (archive(tensor(shape=b"K\0" + HUGE + HUGE + b"\x87", strides=b"K\0K\0K\0\x87")), r"torch.save \(ValueError\)"),
        (misnamed(), r"torch.save \(UnicodeDecodeError\)"),
        (
            archive(tensor(shape=b"K\x01\x85", strides=b"K\x01\x85", size=b"M\xff\x7f"), bytes(4 * 0x7FFF)),
            "allowed: 1000",
        ),
        (io.BytesIO(b"\x80\x02}q\0."), "cannot be read as a file of torch.save"),
    ],
)
def test_what_is_no_tensor_is_refused(file, said):
    with pytest.raises(TorchFileError, match=said):
        read_torch(file, 1000)


def test_any_program_gives_tensors_or_one_kind_of_error():
    """Random programs of the instructions that are read, and the one of a tensor with a few of them changed: many of
    either are refused, and some of the second are still read.
    """
    drawn, codes = random.Random(0), [*_CODES]
    operands = {b"c": [REBUILD + b"\n", b"collections\nOrderedDict\n"], b"X": [b"\1\0\0\0a", b"\1\0\0\x000"]}
    operands |= {b"M": [b"\2\0"], b"J": [b"\2\0\0\0"], b"\x8a": [b"\1\2"], b"r": [bytes(4)], b"j": [bytes(4)]}
    operands |= dict.fromkeys((b"\x80", b"K", b"q", b"h"), [b"\0", b"\1"])

    def instruction() -> bytes:
        code = drawn.choice(codes)
        return code + drawn.choice(operands.get(code, [b""]))

    whole, outcomes = tensor(), {"made": [0, 0], "changed": [0, 0]}
    for _ in range(2000):
        at = drawn.randrange(len(whole))
        made = b"".join(instruction() for _ in range(drawn.randrange(1, 24))) + b"."
        changed = whole[:at] + instruction() + whole[at + drawn.randrange(2) :]
        for kind, program in (("made", made), ("changed", changed)):
            try:
                read_torch(archive(program), 1000)
                outcomes[kind][0] += 1
            except TorchFileError:
                outcomes[kind][1] += 1
    assert outcomes["made"][1] > 1000 and min(outcomes["changed"]) > 20, outcomes


def test_a_file_of_one_number_is_a_source(tmp_path):
    (tmp_path / "a.pt").write_bytes(archive(tensor(shape=b")", strides=b")", offset=2)).getvalue())
    assert TorchCheckpoint(tmp_path / "a.pt").read("").shape == ()
