"""Checkpoints whose tensors have other names than the model's, hold other parts, or hold numbers that are code here."""

from __future__ import annotations

import json
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from jaxengine.checkpoint.token_tasks import with_token_labels
from jaxengine.models.build import Build
from jaxengine.models.config.altup import SharedBlocks
from jaxengine.models.config.pooler import LAST, Classifier, Pooler
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import CheckpointNames, StackedExperts
from jaxengine.models.params.stored_names import StoredNames
from jaxengine.models.registry import build_model, read_hf
from jaxengine.models.weights.load import check_source
from jaxengine.models.weights.pooled import naming
from jaxengine.models.weights.views.adapted import AdaptedSource
from jaxengine.models.weights.views.joined import JoinedSource
from jaxengine.models.weights.views.joined_rows import AlternatingRowsSource, JoinedRowsSource
from jaxengine.models.weights.views.renamed import RenamedSource, SharedBlocksSource, with_prefix
from jaxengine.models.weights.views.split_latent import SplitLatentSource
from jaxengine.models.weights.views.stacked import StackedSource
from tests.fixtures.drawn_weights import FOLDER
from tests.fixtures.drawn_weights import TENSORS as SHAPES
from tests.models.weights.test_load import ArraySource
from tests.tables import each_row

NAMES = CheckpointNames(
    prefixes=(("language_model.model.", "model."), ("model.language_model.", "model.")),
    unused=("vision.",),
    constants={".act_fn.beta": 0.3},
)
TENSORS = {name: np.full((2, 3), number, np.float32) for number, name in enumerate(("lm_head.weight", "vision.a"))}


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model."])
def test_names_and_parts(prefix):
    source = RenamedSource(ArraySource({**TENSORS, f"{prefix}norm.weight": np.arange(3.0)}), NAMES)
    assert list(source.names()) == ["lm_head.weight", "model.norm.weight"] and source.path == "memory"
    assert source.shape("lm_head.weight") == (2, 3) and source.shape("model.norm.weight") == (3,)
    np.testing.assert_array_equal(source.read("model.norm.weight", slice(1, 3)), [1, 2])
    np.testing.assert_array_equal(source.read("lm_head.weight", slice(0, 1), slice(0, 2)), [[0, 0]])


def test_ends_of_names():
    stored = {"model.moe.input.weight": np.ones((2, 3)), "moe.input.weight.scale": np.ones(2)}
    names = CheckpointNames(prefixes=(("model.", "m."),), suffixes=(("input.weight", "experts.gate_up_proj"),))
    source = RenamedSource(ArraySource(stored), names)
    assert list(source.names()) == ["m.moe.experts.gate_up_proj", "moe.input.weight.scale"]
    assert source.stored_name("m.moe.experts.gate_up_proj") == "model.moe.input.weight"


def test_an_axis_of_one_is_left_out():
    stored = {"conv1d.weight": np.arange(12.0).reshape(4, 1, 3), "conv2d.weight": np.ones((4, 1, 3))}
    source = RenamedSource(ArraySource(stored), CheckpointNames(squeezed=("conv1d.weight",)))
    assert source.shape("conv1d.weight") == (4, 3) and source.shape("conv2d.weight") == (4, 1, 3)
    np.testing.assert_array_equal(source.read("conv1d.weight", slice(1, 3), slice(0, 2)), [[3, 4], [6, 7]])


def test_axes_behind_the_first_are_joined():
    stored = {"patch_embed.weight": np.arange(24.0).reshape(4, 1, 3, 2), "patch_embed.bias": np.ones(4)}
    source = RenamedSource(ArraySource(stored), CheckpointNames(flattened=("patch_embed.weight", "patch_embed.bias")))
    assert source.shape("patch_embed.weight") == (4, 6) and source.shape("patch_embed.bias") == (4,)
    np.testing.assert_array_equal(source.read("patch_embed.weight", slice(1, 3), slice(4, 6)), [[10, 11], [16, 17]])
    assert source.read("patch_embed.weight", slice(0, 0)).shape == (0, 6)  # as headers are checked


def test_bytes_of_a_matrix_are_not_transposed():
    """GPT-2's matrices are [in, out]; bitsandbytes transposes them before it packs them to a column."""
    stored = {"c_fc.weight": np.arange(6.0)[:, None], "c_proj.weight": np.ones((2, 3))}
    source = RenamedSource(ArraySource(stored), CheckpointNames(transposed=("c_fc.weight", "c_proj.weight")))
    assert source.shape("c_fc.weight") == (6, 1) and source.shape("c_proj.weight") == (3, 2)
    np.testing.assert_array_equal(source.read("c_fc.weight", slice(2, 4)), [[2], [3]])


def test_two_tensors_of_one_name_are_refused():
    twice = {"model.norm.weight": np.ones(3), "language_model.model.norm.weight": np.ones(3)}
    with pytest.raises(ModelFileError, match=r"stands for model\.norm\.weight, as does model\.norm"):
        RenamedSource(ArraySource(twice), NAMES)


def test_constants_are_compared():
    for held in (np.full(1, 0.3, np.float32), np.full((), 0.3, np.float32), np.full((), 0.3, ml_dtypes.bfloat16)):
        assert list(RenamedSource(Scalars({"mlp.act_fn.beta": held}), NAMES).names()) == []
    for held in (np.full(1, 0.31), np.full(2, 0.3, np.float32)):
        with pytest.raises(ModelFileError, match=r"must hold 0\.3 and nothing else, got .*act_fn\.beta"):
            RenamedSource(Scalars({"mlp.act_fn.beta": held}), NAMES)
    filled = NAMES._replace(filled={".lambda1": 1.0})
    assert list(RenamedSource(Scalars({"a.lambda1": np.ones((2, 3), np.float32)}), filled).names()) == []
    for held in (np.asarray([1.0, 1.0, 0.5]), np.ones(0)):
        with pytest.raises(ModelFileError, match=r"must hold 1\.0 and nothing else, got .*lambda1"):
            RenamedSource(Scalars({"a.lambda1": held}), filled)


class Scalars(ArraySource):
    """Tensors without axes too."""

    def read(self, name, rows=slice(None), columns=slice(None)):
        return np.asarray(self.tensors[name])


@each_row(
    ("name", "family", "base"),
    [
        ("bloom", "Bloom", "transformer."),
        ("gpt2", "GPT2", "transformer."),
        ("dbrx", "Dbrx", "transformer."),
        ("gpt_neox", "GPTNeoX", "gpt_neox."),
        ("biogpt", "BioGpt", "biogpt."),
        ("mamba", "Mamba", "backbone."),
        ("opt", "OPT", "model."),
        ("phi", "Phi", "model."),
    ],
)
def test_pooling_checkpoints_of_every_base(name, family, base):
    """As transformers saves *Model, without the base's name, and *For..Classification, with it."""
    folder, pooler = FOLDER / name, Pooler(LAST)
    raw, shapes = json.loads((folder / "config.json").read_text()), json.loads((folder / SHAPES).read_text())["shapes"]
    body = {name: np.zeros(shape, np.float32) for name, shape in shapes.items() if name.startswith(base)}
    size = read_hf(raw).hidden_size
    score, bias = np.zeros((3, size), np.float32), np.zeros(3, np.float32)
    for suffix, pooled, tensors in (
        ("Model", pooler, {name.removeprefix(base): array for name, array in body.items()}),
        ("ForSequenceClassification", Pooler(LAST, Classifier(3)), body | {"score.weight": score}),
        (
            "ForTokenClassification",
            with_token_labels(pooler, 3),
            body | {"classifier.weight": score, "classifier.bias": bias},
        ),
    ):
        model = build_model(read_hf(raw | {"architectures": [family + suffix]}, pooled), Build("float32"))
        source = with_prefix(ArraySource(tensors), model.checkpoint_names)
        check_source(model, source)
        named = naming([model])
        assert {model.checkpoint_names.renamed(named(each)) for each in tensors} == {
            model.checkpoint_names.renamed(each) for each in source.names()
        }


def test_blocks_that_layers_of_zamba_share():
    """Layers 1, 2 and 4 have two blocks in turn; each of their low-rank products is in the list of a stored block. What
    layer 4 reads, where it is the first of a stage, has no name among the others.
    """
    blocks, stem = SharedBlocks((1, 2, 4), 2, 3, True, "gelu", True), "model.layers.{}.shared_transformer.{}".format
    stored = {"model.norm.weight": 0, stem(1, "o.weight"): 1, stem(2, "o.weight"): 2}
    stored |= {stem(1 + number % 2, f"q_list.{number}.0.weight"): 3 + number for number in range(3)}
    expected = {"model.norm.weight": 0, stem(1, "o.weight"): 1, stem(2, "o.weight"): 2}
    expected |= {stem(layer, "q.0.weight"): 3 + number for number, layer in enumerate(blocks.layers)}
    again = {stem(4, "o.weight"): 1, stem(4, "q_list.2.0.weight"): 5}  # the first block once more under the last layer
    tensors = {name: np.full(1, number, np.float32) for name, number in stored.items()}
    copies = {name: np.full(1, number, np.float32) for name, number in again.items()}
    for given in (tensors, tensors | copies):
        source = SharedBlocksSource(ArraySource(given), blocks)
        assert {name: int(source.read(name)[0]) for name in source.names()} == expected
        assert int(source.read(stem(4, "o.weight"))[0]) == 1
    other = ArraySource(tensors | {stem(4, "o.weight"): np.full(1, 6, np.float32)})
    with pytest.raises(ModelFileError, match="differs from .*layers.1.*, but these layers share one block"):
        SharedBlocksSource(other, blocks).read(stem(1, "o.weight"))
    for given, of_last in ((ArraySource(tensors), 1), (other, 6)):  # without ties each layer has its own
        source = SharedBlocksSource(given, replace(blocks, tied=False))
        found = {name: int(source.read(name)[0]) for name in source.names()}
        assert found == expected | {stem(4, "o.weight"): of_last}


ROWS, STACK = np.ones((6, 3), np.float32), np.ones((2, 4, 3), np.float32)
ALL_ROWS = CheckpointNames(joined={".qk.weight": (".q.weight", ".k.weight")})
OWN_HEAD = CheckpointNames(prefixes=(("t.out.", "lm_head."), ("t.", "model."), ("model.words.", "model.tokens.")))
IN_LAYERS = CheckpointNames(prefixes=(("model.layers.layers.", "model.layers."),))
ORIGINAL, DOWN = "a.parametrizations.weight.original", "m.layers.{}.experts.down_proj"
KEYS, VALUES, LATENT = (f"m.{name}_b_proj.weight" for name in ("k", "v", "kv"))


def test_a_tensor_has_the_names_of_those_that_are_stored():
    """Also one that is missing, by what other layers, or others with its beginning, have in its place."""
    inner = RenamedSource(ArraySource({"model.language_model.a": ROWS, "c.a": ROWS}), NAMES)
    experts = StackedSource(ArraySource({DOWN.format(3): STACK}), StackedExperts(), 2)
    parts, whole = {"a.q.weight": (4, 3), "a.k.weight": (2, 3)}, {"a.qk.weight": (6, 3)}
    joined = {"a.q.weight": ROWS[:4], "a.k.weight": ROWS[4:]}
    for source, name, stored in (
        (inner, "model.a", ["model.language_model.a"]),
        (inner, "model.missing", ["model.language_model.missing"]),
        (inner, "c.missing", ["c.missing"]),
        (inner, "d.missing", ["d.missing"]),
        (RenamedSource(ArraySource({"t.embed": ROWS}), OWN_HEAD), "lm_head.weight", ["t.out.weight"]),
        (RenamedSource(ArraySource({"s.embed": ROWS}), OWN_HEAD), "lm_head.weight", ["t.out.weight"]),
        (RenamedSource(ArraySource({"model.words.b": ROWS}), OWN_HEAD), "model.tokens.a", ["model.words.a"]),
        (RenamedSource(ArraySource({"model.a": ROWS}), OWN_HEAD), "model.tokens.a", ["model.tokens.a"]),
        (RenamedSource(ArraySource({"model.layers.layers.0.a": ROWS}), IN_LAYERS), "model.a", ["model.a"]),
        (
            RenamedSource(ArraySource({"model.b": ROWS, "t.out.a": ROWS}), OWN_HEAD),
            "model.tokens.a",
            ["model.tokens.a"],
        ),
        (RenamedSource(ArraySource({"model.a": ROWS}), OWN_HEAD), "lm_head.weight", ["lm_head.weight"]),
        *((experts, f"m.layers.{layer}.experts.1.down_proj.weight", [DOWN.format(layer)]) for layer in (3, 7)),
        (SplitLatentSource(ArraySource({KEYS: STACK, VALUES: STACK.swapaxes(1, 2)})), LATENT, [KEYS, VALUES]),
        (JoinedRowsSource(ArraySource({"a.qk.weight": ROWS}), ALL_ROWS, parts), "a.k.weight", ["a.qk.weight"]),
        (JoinedRowsSource(ArraySource(joined), ALL_ROWS, whole), "a.qk.weight", [*joined]),
        (AlternatingRowsSource(ArraySource({"a.w": ROWS}), {"w": ("gate", "up")}), "a.up", ["a.w"]),
        (AdaptedSource(ArraySource({ORIGINAL: ROWS}), None), "a.weight", [ORIGINAL]),
        (JoinedSource(ArraySource({}), {"x.": inner}), "x.model.a", ["model.language_model.a"]),
    ):
        assert [*StoredNames(source).of(name)] == stored, name
    found = [(f"m.layers.3.experts.{expert}.down_proj.weight", f"fault {expert}") for expert in range(2)]
    assert StoredNames(experts).faults(found) == [(DOWN.format(3), f"fault 0, as {found[0][0]}")]
