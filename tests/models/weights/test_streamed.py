"""Tensors that come one after the other: each weight is loaded as soon as it is whole, and its tensors are let go."""

from __future__ import annotations

import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.params.declare import declared_params
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.quantization.registry import rounded
from jaxengine.models.registry import build_model, read_folder
from jaxengine.models.weights import load
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from jaxengine.models.weights.streamed import load_streamed
from jaxengine.sharding.stages import Stage
from tests.fixtures.drawn_weights import checkpoint
from tests.models.weights.test_load import CONFIG, ArraySource, random_tensors
from tests.tables import each_row

NORM, HEAD, EMBED = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"
TENSORS = random_tensors(CONFIG)


def stored(folder: Path) -> dict[str, np.ndarray]:
    source = SafetensorsCheckpoint(folder)
    tensors = {name: source.read(name) for name in source.names()}
    source.close()
    return tensors


def assert_equal(found: nnx.State, expected: nnx.State) -> None:
    ours, theirs = dict(nnx.to_flat_state(found)), dict(nnx.to_flat_state(expected))
    assert [*ours] == [*theirs]
    for path, variable in ours.items():
        np.testing.assert_array_equal(np.asarray(variable[...]), np.asarray(theirs[path][...]), str(path))


class Given:
    """Tensors that nobody but their taker holds.

    most: bytes of them that were alive at once.
    """

    def __init__(self, tensors: dict[str, np.ndarray], order: list[str]):
        self._tensors, self._order, self.most = tensors, order, 0

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        alive: list[Any] = []
        for name in self._order:
            array = self._tensors[name].copy()
            alive.append(weakref.ref(array))
            held = [each() for each in alive]
            self.most = max(self.most, sum(each.nbytes for each in held if each is not None))
            del held
            yield name, array
            del array


FEW = [
    ("llama", "int8"),
    ("phi3", "int4"),
    ("qwen3_5_moe_vision", None),
    ("mixtral_tied", None),
    ("deepseek_v3", None),
    ("kimi_linear", None),
    ("step3p5", None),
]
MORE = [
    *((name, None) for name in ("llama", "qwen3", "llama4", "gemma2", "qwen3_moe", "gpt_oss")),
    ("qwen3_moe", "int8"),
]


STACKED = {
    "mixtral_tied": (".mlp.", ".block_sparse_moe.", ("w1", "w3", "w2")),
    "deepseek_v3": (".mlp.", ".mlp.", ("gate_proj", "up_proj", "down_proj")),
    "kimi_linear": (".mlp.", ".block_sparse_moe.", ("w1", "w3", "w2")),
}


@each_row(("model", "scheme"), FEW)
def test_it_loads_what_a_checkpoint_loads(model, scheme):
    assert_loaded(model, scheme)


@pytest.mark.thorough("further families of these layouts")
@each_row(("model", "scheme"), MORE)
def test_it_loads_what_further_checkpoints_load(model, scheme):
    assert_loaded(model, scheme)


def assert_loaded(model: str, scheme: str | None) -> None:
    folder = checkpoint(model)
    tensors = stored(folder)
    build = Build("float32") if scheme is None else Build("float32", scheme=rounded(scheme))
    built = build_model(read_folder(folder), build)
    expected = load_params(built, ArraySource(tensors))
    for seed, chunk_bytes in ((0, None), (1, 4096)):
        order = sorted(tensors)
        np.random.default_rng(seed).shuffle(order)
        (found,) = load_streamed([(built, None)], Given(tensors, order), chunk_bytes=chunk_bytes)
        assert_equal(found, expected)
    assert_equal(load_params(built, ArraySource(tensors), chunk_bytes=1), expected)
    if model in STACKED:
        stacked = in_memory(tensors, *STACKED[model])
        assert_equal(load_params(built, ArraySource(stacked)), expected)
        for chunk_bytes in (None, 4096):
            (found,) = load_streamed([(built, None)], Given(stacked, sorted(stacked)), chunk_bytes=chunk_bytes)
            assert_equal(found, expected)


def in_memory(tensors: dict[str, np.ndarray], layer: str, own: str, modules: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Return tensors per expert as transformers 5 has them in memory: a stack of gate and up, one of down. Convolutions
    of queries, keys and values are one.

    layer, own: its name of the part of a layer with the experts, and the checkpoint's. modules: gate, up and down.
    """
    made = {name.replace(own, layer): array for name, array in tensors.items() if ".experts." not in name}
    for experts in {name.partition(".experts.")[0] + ".experts" for name in tensors if ".experts." in name}:
        count = sum(name.startswith(f"{experts}.") and name.endswith(f".{modules[0]}.weight") for name in tensors)
        parts = [np.stack([tensors[f"{experts}.{each}.{part}.weight"] for each in range(count)]) for part in modules]
        made[f"{experts}.gate_up_proj".replace(own, layer)] = np.concatenate(parts[:2], axis=1)
        made[f"{experts}.down_proj".replace(own, layer)] = parts[2]
    for name in [name for name in made if ".q_conv1d." in name]:
        made[name.replace(".q_", ".")] = np.concatenate([made.pop(name.replace(".q_", f".{part}_")) for part in "qkv"])
    return made


def test_the_model_is_not_searched_for_every_tensor(monkeypatch):
    """Otherwise the time of an update would grow with the square of the number of layers."""
    folder = checkpoint("kimi_linear")  # joins convolutions of queries, keys and values
    model, tensors, calls = build_model(read_folder(folder), Build("float32")), stored(folder), []
    monkeypatch.setattr(load, "declared_params", lambda each: calls.append(each) or declared_params(each))
    for chunk_bytes in (None, 4096):
        calls.clear()
        load_streamed([(model, None)], tensors.items(), chunk_bytes=chunk_bytes)
        assert 0 < len(calls) < 8 < len(tensors)


def test_stages_share_one_stream():
    models = [
        build_model(CONFIG, Build(jnp.float32, stage=stage))
        for stage in (Stage(0, 1, is_last=False), Stage(1, 2, is_first=False))
    ]
    given = Given(TENSORS, sorted(TENSORS))
    for model, found in zip(models, load_streamed([(each, None) for each in models], given), strict=True):
        assert_equal(found, load_params(model, ArraySource(TENSORS)))


def test_no_more_is_held_than_an_unfinished_weight_needs():
    """In the order of names, the tensors of a layer's two joined weights are apart by no more than the layer."""
    given = Given(TENSORS, sorted(TENSORS))
    load_streamed([(build_model(CONFIG, Build(jnp.float32)), None)], given)
    joined = [each.nbytes for name, each in TENSORS.items() if ".0.self_attn." in name or ".0.mlp." in name]
    assert given.most <= sum(joined) < sum(each.nbytes for each in TENSORS.values()) // 2


def test_in_chunks_no_tensor_waits_for_another():
    """In the order that holds most: all tensors of a kind after each other, joined ones far apart, the head last."""
    order = sorted(TENSORS, key=lambda name: name.rpartition(".layers.")[2].partition(".")[2])
    given = Given(TENSORS, order)
    load_streamed([(build_model(CONFIG, Build(jnp.float32)), None)], given, chunk_bytes=4096)
    assert given.most == max(each.nbytes for each in TENSORS.values())


def test_copies_in_host_memory_are_chunks():
    """Of an embedding, a joined and turned matrix and a head, as NumPy's allocations tell; of all at once without."""
    sizes = {"vocab_size": 16384, "intermediate_size": 16384, "attention": CONFIG.attention[:1]}
    config = replace(CONFIG, **sizes)
    model, tensors = build_model(config, Build(jnp.float32)), random_tensors(config)
    expected, large = load_params(model, ArraySource(tensors)), tensors[EMBED].nbytes
    assert large == tensors[HEAD].nbytes == 2 << 20

    def peak(load: Callable[[], nnx.State]) -> int:
        tracemalloc.start()
        try:
            found = load()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            assert_equal(found, expected)

    chunk, slack = 1 << 18, 1 << 18  # of what is no array, such as declarations
    assert peak(lambda: load_params(model, ArraySource(tensors))) > large
    assert peak(lambda: load_params(model, ArraySource(tensors), chunk_bytes=chunk)) < chunk + slack
    assert peak(lambda: load_streamed([(model, None)], tensors.items(), chunk_bytes=chunk)[0]) < chunk + slack


def test_in_chunks_a_tied_head_is_compared():
    config = replace(CONFIG, tie_word_embeddings=True)
    model, tensors = build_model(config, Build(jnp.float32)), random_tensors(config)
    for order in ([EMBED, HEAD], [HEAD, EMBED]):
        given = tensors | {HEAD: tensors[EMBED].astype(np.float16).astype(np.float32)}
        pairs = [*((name, given[name]) for name in order), *((n, each) for n, each in given.items() if n not in order)]
        with pytest.raises(ModelFileError, match="the head differs"):
            load_streamed([(model, None)], pairs, chunk_bytes=4096)
        pairs = [(name, tensors[EMBED] if name == HEAD else each) for name, each in pairs]
        (found,) = load_streamed([(model, None)], pairs, chunk_bytes=4096)
        assert_equal(found, load_params(model, ArraySource(tensors)))


def test_in_chunks_some_experts_are_none():
    """All of one matrix of a layer's experts may come without the other matrices; not a part of them."""
    folder = checkpoint("qwen3_moe")
    model, tensors = build_model(read_folder(folder), Build("float32")), stored(folder)
    some = {name: each for name, each in tensors.items() if ".layers.0." in name and name.endswith(".down_proj.weight")}
    for chunk_bytes in (None, 4096):
        (found,) = load_streamed([(model, None)], some.items(), partial=True, chunk_bytes=chunk_bytes)
        assert len(nnx.to_flat_state(found)) == 1
        with pytest.raises(ModelFileError, match="missing"):
            load_streamed([(model, None)], [*some.items()][1:], partial=True, chunk_bytes=chunk_bytes)


def faults(pairs: Any, **options: Any) -> dict[str, str]:
    with pytest.raises(ModelFileError) as error:
        load_streamed([(build_model(CONFIG, Build(jnp.float32)), None)], pairs, **options)
    return {str(error.value.where): error.value.what, **dict(error.value.others)}


def test_every_fault_is_listed():
    """However they come: also where a weight could have been loaded before the first fault, and after it."""
    bad = TENSORS | {
        "model.layers.0.self_attn.q_proj.weight": TENSORS["model.layers.0.self_attn.q_proj.weight"][:-1],
        "model.layers.1.mlp.up_proj.weight": np.full_like(TENSORS["model.layers.1.mlp.up_proj.weight"], np.nan),
        "other": np.zeros(2),
        "text": "no array",
    }
    del bad[NORM]
    first = {
        "model.layers.0.self_attn.q_proj.weight": "shape",
        "other": "no use",
        "text": "array",
        NORM: "missing",
        EMBED: "twice",
    }
    found = faults([*bad.items(), (EMBED, TENSORS[EMBED])])
    assert found.keys() == first.keys() and all(first[name] in text for name, text in found.items()), found
    fine = bad | {name: TENSORS[name] for name in first if name in TENSORS}
    del fine["other"], fine["text"]
    (text,) = faults(fine.items()).items()
    assert text[0] == "model.layers.1.mlp.up_proj.weight" and "finite" in text[1]


# Checkpoint, the tensor's end, and whether the tensors are those that transformers has in memory.
SPLIT = [
    *(("mixtral_tied", f".experts.{name}_proj", True) for name in ("gate_up", "down")),
    ("kimi_linear", ".conv1d.weight", True),
    *(("phi3", f".{name}_proj.weight", False) for name in ("qkv", "gate_up")),
    *(("dbrx", f".{name}", False) for name in ("Wqkv.weight", "experts.mlp.w1")),
    ("gpt_oss", ".experts.gate_up_proj_bias", False),
    # A part of the token table, and a head under a name of its own.
    *(("molmo_vision", f".transformer.{name}", False) for name in ("wte.embedding", "ff_out.weight")),
]


@each_row(("model", "end", "is_held"), SPLIT)
def test_faults_of_what_is_split_name_what_was_given(model, end, is_held):
    """Each fault once, whatever the model has in place of the tensor: many experts' matrices, or parts of rows."""
    folder = checkpoint(model)
    tensors = stored(folder)
    tensors = in_memory(tensors, *STACKED[model]) if is_held else tensors
    name = max(each for each in tensors if each.endswith(end))
    own = tensors[name]
    changes = {
        "missing": None,
        "finite": np.where(np.arange(own.size).reshape(own.shape) == own.size - 1, np.nan, own),
        "got": np.ascontiguousarray(own.swapaxes(-1, -2)),
        "floating": own.astype(np.int32),
        "twice": own,
    }
    build = Build("float32", scheme=rounded("int8")) if model == "mixtral_tied" else Build("float32")
    built = build_model(read_folder(folder), build)
    for (fault, array), chunk_bytes in product(changes.items(), (None, 4096)):
        pairs = [(key, array if key == name else each) for key, each in tensors.items()]
        pairs = [(key, each) for key, each in pairs if each is not None] + [(name, own)] * (fault == "twice")
        with pytest.raises(ModelFileError) as error:
            load_streamed([(built, None)], pairs, chunk_bytes=chunk_bytes)
        found = [(error.value.where, error.value.what), *error.value.others]
        assert [each for each, _ in found] == [name] and fault in found[0][1], (fault, chunk_bytes, found)


def test_arrays_that_are_given_up_are_deleted_when_they_have_been_loaded():
    alive: list[int] = []

    def pairs() -> Iterator[tuple[str, Any]]:
        given = {name: jnp.asarray(each) for name, each in TENSORS.items()}
        for name, array in given.items():
            yield name, array
            alive.append(sum(not each.is_deleted() for each in given.values()))

    model = build_model(CONFIG, Build(jnp.float32))
    (found,) = load_streamed([(model, None)], pairs(), donate=True)
    assert_equal(found, load_params(model, ArraySource(TENSORS)))
    assert alive[-1] == 0 and len({*alive}) > 5
    array = jnp.ones(3)
    array.delete()
    assert "deleted" in faults([(NORM, array)])[NORM]
