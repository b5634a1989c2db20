"""Safetensors checkpoints: what a good file yields, and that no bad one is believed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.files import read_object
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint

A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}
DATA = np.arange(6, dtype=np.float32).tobytes() + np.arange(4).astype(ml_dtypes.bfloat16).tobytes()


def file_bytes(header: object, data: bytes = DATA) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def test_reads_tensors_of_a_file(tmp_path):
    path = tmp_path / "any.safetensors"
    path.write_bytes(file_bytes({"__metadata__": {"format": "pt"}, "b": B, "a": A}))
    checkpoint = SafetensorsCheckpoint(path)
    assert set(checkpoint.names()) == {"a", "b"} and checkpoint.shape("a") == (2, 3)
    a, b = checkpoint.read("a"), checkpoint.read("b")
    np.testing.assert_array_equal(a, [[0, 1, 2], [3, 4, 5]])
    assert b.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(b.astype(np.float32), [0, 1, 2, 3])
    with pytest.raises(ModelFileError, match="no such tensor.*at c"):
        checkpoint.read("c")
    checkpoint.close()
    assert a.sum() == 15  # the array does not depend on the open file


def test_a_disk_that_fails_is_an_error_of_the_file(tmp_path, monkeypatch):
    path = tmp_path / "any.safetensors"
    path.write_bytes(file_bytes({"b": B, "a": A}))
    checkpoint = SafetensorsCheckpoint(path)

    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(ModelFileError, match="any.safetensors.*Input/output error"):
        checkpoint.read("a")
    checkpoint.close()
    open_files = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    with pytest.raises(ModelFileError, match="Input/output error"):
        SafetensorsCheckpoint(path)
    assert not open_files or len(os.listdir("/proc/self/fd")) == open_files


def test_a_file_in_the_place_of_a_folder_holds_nothing(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert read_object(tmp_path / "config.json", "x.json") is None


def test_scalar_and_empty_tensors(tmp_path):
    path = tmp_path / "model.safetensors"
    header = {
        "scalar": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
        "empty": {"dtype": "F16", "shape": [0, 5], "data_offsets": [4, 4]},
    }
    path.write_bytes(file_bytes(header, np.float32(2.5).tobytes()))
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert checkpoint.read("scalar") == 2.5 and checkpoint.read("scalar").shape == ()
    assert checkpoint.read("empty").shape == (0, 5)


def test_reads_no_more_than_the_rows_and_columns_asked_for(tmp_path):
    values = np.arange(60, dtype=np.float32).reshape(6, 5, 2)
    header = {
        "cube": {"dtype": "F32", "shape": [6, 5, 2], "data_offsets": [0, 240]},
        "line": {"dtype": "F32", "shape": [60], "data_offsets": [240, 480]},
    }
    (tmp_path / "model.safetensors").write_bytes(file_bytes(header, values.tobytes() * 2))
    checkpoint = SafetensorsCheckpoint(tmp_path)
    rows, columns = slice(1, 4), slice(2, 4)
    for name, part, expected in (
        ("cube", (rows,), values[rows]),
        ("cube", (slice(None), columns), values[:, columns]),
        ("cube", (rows, columns), values[rows, columns]),
        ("cube", (rows, slice(4, 4)), values[rows, 4:4]),
        ("line", (slice(7, 9),), values.ravel()[7:9]),
    ):
        before = checkpoint.bytes_read
        read = checkpoint.read(name, *part)
        np.testing.assert_array_equal(read, expected, strict=True)
        assert checkpoint.bytes_read - before == expected.nbytes
    checkpoint.close()
    assert checkpoint.bytes_read > 240  # counted still


def with_entry(**changes) -> bytes:
    return file_bytes({"a": A, "b": {**B, **changes}})


BAD_FILES = {
    "empty file": (b"", "at least 8 bytes"),
    "seven bytes": (b"\0" * 7, "at least 8 bytes"),
    "header longer than the file": ((10_000).to_bytes(8, "little") + b"{}", "does not fit"),
    "header of exabytes": ((2**63).to_bytes(8, "little") + b"{}", "at most"),
    "header not JSON": (file_bytes(b"{not json}"), "not JSON"),
    "header not UTF-8": (file_bytes(b'{"\xff\xfe": 1}'), "not UTF-8"),
    "header nested too deep": (file_bytes(b"[" * 200_000), "not JSON"),
    "header a list": (file_bytes([A]), "JSON object"),
    "header empty": (file_bytes(b""), "not JSON"),
    "key twice": (file_bytes(b'{"a": %b, "a": %b}' % ((json.dumps(A).encode(),) * 2)), "appears twice"),
    "sizes of thousands of digits": (with_entry(shape=[10**4000] * 2), "integers from 0 to"),
    "empty but endless": (with_entry(shape=[0, 2**62], data_offsets=[24, 24]), "product of at most"),
    "entry not an object": (file_bytes({"a": 5}), "exactly dtype"),
    "entry without shape": (file_bytes({"a": {"dtype": "F32", "data_offsets": [0, 32]}}), "exactly dtype"),
    "entry with more": (with_entry(extra=1), "exactly dtype"),
    "unknown dtype": (with_entry(dtype="F31"), "dtype must be one of.*'F31'"),
    "dtype a list": (with_entry(dtype=["F32"]), "dtype must be one of"),
    "negative shape": (with_entry(shape=[-4]), "shape must be"),
    "bool in shape": (with_entry(shape=[True, 4]), "shape must be"),
    "float in shape": (with_entry(shape=[4.0]), "shape must be"),
    "rank 17": (with_entry(shape=[4] + [1] * 16), "shape must be"),
    "shape overflows 64 bits": (with_entry(shape=[2**40, 2**40]), "product of at most"),
    "offsets reversed": (with_entry(data_offsets=[32, 24]), "data_offsets must be"),
    "offsets negative": (with_entry(data_offsets=[-8, 0]), "data_offsets must be"),
    "one offset": (with_entry(data_offsets=[24]), "data_offsets must be"),
    "size disagrees": (with_entry(shape=[3]), "takes 6 bytes"),
    "overlap": (with_entry(data_offsets=[20, 28]), "overlaps"),
    "hole": (with_entry(data_offsets=[28, 36]), "leaves a gap"),
    "out of range": (with_entry(shape=[400], data_offsets=[24, 824]), "describes .* bytes"),
    "cut short": (file_bytes({"a": A, "b": B}, DATA[:-1]), "describes .* bytes"),
    "bytes left over": (file_bytes({"a": A, "b": B}, DATA + b"\0"), "describes .* bytes"),
}


@pytest.mark.parametrize("content, message", BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_file(tmp_path, content, message):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelFileError, match=message) as raised:
        SafetensorsCheckpoint(tmp_path)
    assert str(tmp_path) in str(raised.value)


@pytest.mark.timeout(60)
def test_a_name_twice_among_many_is_found_at_once(tmp_path):
    """Counting each name in turn takes minutes for a header of 2 MB."""
    names = [f'"n{number}":{{}}' for number in range(160_000)]
    (tmp_path / "model.safetensors").write_bytes(file_bytes(("{" + ",".join([*names, names[-1]]) + "}").encode()))
    with pytest.raises(ModelFileError, match="appears twice.*n159999"):
        SafetensorsCheckpoint(tmp_path)


def test_what_an_error_quotes_is_short_and_printable(tmp_path):
    for name in ("\ud800", "x" * 100_000, "a\nb\x1b[2J"):
        (tmp_path / "model.safetensors").write_bytes(file_bytes(json.dumps({name: 5}).encode()))
        with pytest.raises(ModelFileError) as error:
            SafetensorsCheckpoint(tmp_path)
        assert str(error.value).isprintable() and len(str(error.value)) < 500


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, 150), value=st.integers(0, 255), length=st.integers(0, 250))
def test_damaged_files_raise_only_model_file_errors(tmp_path_factory, position, value, length):
    content = bytearray(file_bytes({"a": A, "b": B}))
    content[position % len(content)] = value
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(content[:length])
    try:
        checkpoint = SafetensorsCheckpoint(path)
    except ModelFileError:
        return
    for name in checkpoint.names():
        assert checkpoint.read(name).shape == checkpoint.shape(name)
    checkpoint.close()


def test_pickle_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(ModelFileError, match="pickle.*safetensors"):
            SafetensorsCheckpoint(path)


def test_places_that_hold_no_checkpoint(tmp_path):
    with pytest.raises(ModelFileError, match="neither model.safetensors nor model.safetensors.index.json"):
        SafetensorsCheckpoint(tmp_path)
    with pytest.raises(ModelFileError, match="cannot be read: No such file"):
        SafetensorsCheckpoint(tmp_path / "absent.safetensors")
    os.mkfifo(tmp_path / "model.safetensors")  # opening it would wait for ever
    with pytest.raises(ModelFileError, match="regular file"):
        SafetensorsCheckpoint(tmp_path)


@pytest.fixture
def sharded(tmp_path, checkpoints):
    folder = tmp_path / "models--org--name" / "snapshots" / "0123"
    shutil.copytree(checkpoints / "llama3_sharded", folder)
    return folder


def rewrite_index(folder, change) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_sharded_checkpoint(sharded):
    checkpoint = SafetensorsCheckpoint(sharded)
    assert len(list(checkpoint.names())) == 21
    assert checkpoint.read("lm_head.weight").shape == checkpoint.shape("lm_head.weight") == (128, 64)
    checkpoint.close()


@pytest.mark.parametrize("name", ["/etc/passwd", "../evil.safetensors", "sub/../../evil.safetensors", "", "a\0b"])
def test_index_paths_stay_in_the_folder(sharded, name):
    rewrite_index(sharded, lambda weight_map: weight_map.update({"lm_head.weight": name}))
    with pytest.raises(ModelFileError, match="stay inside the folder"):
        SafetensorsCheckpoint(sharded)


HEAD, NORM = "lm_head.weight", "model.norm.weight"


def test_index_that_is_slightly_off(sharded, caplog):
    path = sharded / "model.safetensors.index.json"
    whole = path.read_text()
    files = json.loads(whole)["weight_map"]
    of_head = files[HEAD]
    other = next(name for name in files.values() if name != of_head)
    expected = {name: SafetensorsCheckpoint(sharded).read(name) for name in files}
    assert not caplog.text

    def off(change) -> str:
        """Change the index, check that all tensors are read, and return what is logged."""
        caplog.clear()
        path.write_text(whole)
        rewrite_index(sharded, change)
        checkpoint = SafetensorsCheckpoint(sharded)
        assert checkpoint.names() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(checkpoint.read(name), array)
        return caplog.text

    assert f"{HEAD} of {of_head} is left out" in off(lambda listed: listed.pop(HEAD))
    assert f"{HEAD} is in {of_head}, not in {other}" in off(lambda listed: listed.update({HEAD: other}))
    assert f"more.weight is not in {other}" in off(lambda listed: listed.update({"more.weight": other}))
    many = off(lambda listed: listed.update({f"more.{number}": other for number in range(20)}))
    assert f"more.7 is not in {other}, and 12 more" in many and "more.8" not in many
    path.write_text(json.dumps(json.loads(whole) | {"metadata": {"total_size": 7}}))
    caplog.clear()
    SafetensorsCheckpoint(sharded).close()
    assert not caplog.text  # nobody needs the size


def test_tensor_in_several_files(sharded):
    path = sharded / "model.safetensors.index.json"
    whole = path.read_text()
    files = json.loads(whole)["weight_map"]
    other = next(name for name in files.values() if name != files[HEAD])
    tensors = load_file(sharded / other)
    third = np.full((128, 64), 3, np.float32)
    save_file({**tensors, HEAD: third}, sharded / other)
    assert (SafetensorsCheckpoint(sharded).read(HEAD) != third).any()  # as the index says
    rewrite_index(sharded, lambda listed: listed.update({HEAD: other}))
    assert (SafetensorsCheckpoint(sharded).read(HEAD) == third).all()
    rewrite_index(sharded, lambda listed: listed.pop(HEAD))
    with pytest.raises(ModelFileError, match="the tensor is in .* and .*, and the index names none for it.*lm_head"):
        SafetensorsCheckpoint(sharded)


def test_needed_tensor_that_is_in_no_file(sharded, caplog):
    name = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"][NORM]
    tensors = load_file(sharded / name)
    save_file({each: array for each, array in tensors.items() if each != NORM}, sharded / name)
    checkpoint = SafetensorsCheckpoint(sharded)
    assert f"{NORM} is not in {name}" in caplog.text and NORM not in checkpoint.names()
    with pytest.raises(ModelFileError, match="there is no such tensor.*model.norm.weight"):
        checkpoint.read(NORM)


def test_index_that_lists_an_absent_file(sharded):
    rewrite_index(sharded, lambda weight_map: weight_map.update({"more.weight": "absent.safetensors"}))
    with pytest.raises(ModelFileError, match="absent.safetensors: cannot be read"):
        SafetensorsCheckpoint(sharded)


@pytest.mark.parametrize("content", ["[]", "{", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "{}"])
def test_bad_index(sharded, content):
    (sharded / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelFileError, match="index.json"):
        SafetensorsCheckpoint(sharded)


def test_links_in_a_circle(sharded):
    shard = next(sharded.glob("*-00001-*"))
    shard.unlink()
    shard.symlink_to(shard.name)
    with pytest.raises(ModelFileError):
        SafetensorsCheckpoint(sharded)


def test_links(sharded, tmp_path):
    shard = next(sharded.glob("*-00001-*"))
    outside = tmp_path / "outside.safetensors"
    shard.rename(outside)
    shard.symlink_to(outside)
    with pytest.raises(ModelFileError, match="links must not lead out"):
        SafetensorsCheckpoint(sharded)
    # The layout of the Hugging Face cache: snapshots/<revision>/<file> -> ../../blobs/<hash>.
    blob = sharded.parent.parent / "blobs" / "abcd"
    blob.parent.mkdir()
    outside.rename(blob)
    shard.unlink()
    shard.symlink_to("../../blobs/abcd")
    checkpoint = SafetensorsCheckpoint(sharded)
    assert len(list(checkpoint.names())) == 21
    checkpoint.close()
