"""Checkpoint tensors to parameters: layout, dtype, what is refused, and how little memory it takes on the way."""

from __future__ import annotations

import tracemalloc
import weakref
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxengine.models.build import Build
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.rope import Rope, RopeScaling
from jaxengine.models.params.declare import ParamDecl, Source, declare, declared_params, parts_of
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.quantization.registry import rounded
from jaxengine.models.registry import build_model, read_folder
from jaxengine.models.weights import dummy
from jaxengine.models.weights.compress import compress
from jaxengine.models.weights.dummy import dummy_params
from jaxengine.models.weights.load import load_params
from jaxengine.sharding.layout import MeshLayout
from jaxengine.sharding.stages import Stage
from tests.fixtures.drawn_weights import checkpoint
from tests.models.tiny import with_attention

CONFIG = ModelConfig(
    architecture="Qwen2ForCausalLM",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    rms_norm_eps=1e-6,
    max_position_embeddings=64,
    attention=(LayerAttention(num_heads=4, num_kv_heads=2, head_dim=8, rope=Rope(8), bias=True),) * 2,
)


class ArraySource:
    """A WeightSource over arrays in memory."""

    path = "memory"

    def __init__(self, tensors: dict[str, np.ndarray]):
        self.tensors = tensors

    def names(self):
        return self.tensors.keys()

    def shape(self, name):
        return self.tensors[name].shape

    def read(self, name, rows=slice(None), columns=slice(None)):
        array = self.tensors[name]
        return array[(rows, columns)[: array.ndim]].copy()

    def close(self):
        pass


def random_tensors(config: ModelConfig) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    model = build_model(config, Build(jnp.float32))
    return {
        source.name: rng.standard_normal(param.source_shape(source), np.float32)
        for param in declared_params(model)
        for source in param.decl.sources
    }


def load(tensors: dict[str, np.ndarray], config: ModelConfig = CONFIG, dtype=jnp.float32, **options) -> nnx.State:
    return load_params(build_model(config, Build(dtype)), ArraySource(tensors), **options)


@pytest.mark.versions
def test_layout():
    tensors = random_tensors(CONFIG)
    state = load(tensors)
    attention, prefix = state["layers"][1]["attention"], "model.layers.1.self_attn"
    qkv = np.concatenate([tensors[f"{prefix}.{part}_proj.weight"] for part in "qkv"]).T
    np.testing.assert_array_equal(attention["qkv"]["weight"]["values"][...], qkv)
    bias = np.concatenate([tensors[f"{prefix}.{part}_proj.bias"] for part in "qkv"])
    np.testing.assert_array_equal(attention["qkv"]["bias"][...], bias)
    np.testing.assert_array_equal(attention["out"]["weight"]["values"][...], tensors[f"{prefix}.o_proj.weight"].T)
    gate_up = np.concatenate([tensors[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")]).T
    np.testing.assert_array_equal(state["layers"][0]["mlp"]["gate_up"]["weight"]["values"][...], gate_up)
    np.testing.assert_array_equal(state["embed"]["weight"]["values"][...], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(state["lm_head"]["weight"]["values"][...], tensors["lm_head.weight"].T)


def test_state_fits_the_model_it_was_loaded_for():
    model = build_model(CONFIG, Build(jnp.float32))
    expected = jax.tree.structure(nnx.state(model))
    assert jax.tree.structure(load(random_tensors(CONFIG))) == expected
    assert jax.tree.structure(dummy_params(model)) == expected


@pytest.mark.versions
@pytest.mark.parametrize("stored, wanted", [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float32")])
def test_dtype_conversion(stored, wanted):
    stored, wanted = (np.dtype(getattr(ml_dtypes, d, d)) for d in (stored, wanted))
    tensors = {name: array.astype(stored) for name, array in random_tensors(CONFIG).items()}
    state = load(tensors, dtype=wanted)
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {wanted}
    loaded = np.asarray(state["layers"][0]["mlp"]["down"]["weight"]["values"][...])
    np.testing.assert_array_equal(loaded, tensors["model.layers.0.mlp.down_proj.weight"].T.astype(wanted))


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.k_proj.bias", "lm_head.weight"])
def test_missing_tensor(name):
    tensors = random_tensors(CONFIG)
    del tensors[name]
    with pytest.raises(ModelFileError, match=f"missing.*{name}"):
        load(tensors)


def test_unexpected_shape():
    tensors = random_tensors(CONFIG)
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((32, 16), np.float32)
    with pytest.raises(ModelFileError, match=r"shape must be \(16, 32\), got \(32, 16\).*layers.0.self_attn.k_proj"):
        load(tensors)


def test_layers_that_predict_further_tokens_are_not_read():
    """As many as the configuration says."""
    tensors, config = random_tensors(CONFIG), replace(CONFIG, num_nextn_predict_layers=1)
    load(tensors | {"model.layers.2.eh_proj.weight": np.zeros((2, 2), np.float32)}, config)
    with pytest.raises(ModelFileError, match="no use for this tensor.*layers.3.eh_proj"):
        load(tensors | {"model.layers.3.eh_proj.weight": np.zeros((2, 2), np.float32)}, config)


def test_unused_tensor():
    tensors = random_tensors(CONFIG)
    for name in (
        *("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "k_scale", "v_scale"),
        *("q_scale", "attn.q_scale", "prob_scale", "attn.prob_scale", "q_proj.output_scale", "prob_output_scale"),
    ):
        load(tensors | {f"model.layers.0.self_attn.{name}": np.zeros(4, np.float32)})
    load(tensors | {"model.rotary_emb.inv_freq": np.zeros(4, np.float32)})
    with pytest.raises(ModelFileError, match="no use for this tensor.*layers.2.mlp"):
        load(tensors | {"model.layers.2.mlp.up_proj.weight": np.zeros((48, 32), np.float32)})


def test_integers_are_not_weights():
    tensors = random_tensors(CONFIG)
    tensors["model.norm.weight"] = np.ones(32, np.int8)
    with pytest.raises(ModelFileError, match="floating-point numbers, got int8.*model.norm.weight"):
        load(tensors)


def test_source_that_breaks_its_word():
    class Liar(ArraySource):
        def read(self, name, rows=slice(None), columns=slice(None)):
            return self.tensors[name][:1]

    with pytest.raises(ModelFileError, match="announced with shape"):
        load_params(build_model(CONFIG, Build(jnp.float32)), Liar(random_tensors(CONFIG)))


def test_tied_checkpoint_may_repeat_the_embedding():
    tied = replace(CONFIG, tie_word_embeddings=True)
    tensors = random_tensors(tied)
    load(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, tied)
    with pytest.raises(ModelFileError, match="differs from model.embed_tokens.weight.*lm_head.weight"):
        load(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, tied)


def test_rope_factors_of_the_file_must_be_in_the_config():
    factors = (1.0, 1.0, 2.0, 8.0)
    tensors = random_tensors(CONFIG) | {"rope_freqs.weight": np.array(factors, np.float32)}
    load(tensors, with_attention(CONFIG, rope=Rope(8, scaling=RopeScaling("factors", factors=factors))))
    for scaling in (None, RopeScaling("linear", 8.0), RopeScaling("factors", factors=(1.0, 1.0, 2.0, 4.0))):
        with pytest.raises(ModelFileError, match="rope_scaling differs"):
            load(tensors, with_attention(CONFIG, rope=Rope(8, scaling=scaling)))


JOINED = with_attention(replace(CONFIG, architecture="Phi3ForCausalLM"), bias=False)


def test_joined_tensors():
    tensors = random_tensors(JOINED)
    state = load(tensors, JOINED)
    prefix = "model.layers.1"
    assert tensors[f"{prefix}.self_attn.qkv_proj.weight"].shape == (64, 32)
    for name, module in (("self_attn.qkv_proj", "attention.qkv"), ("mlp.gate_up_proj", "mlp.gate_up")):
        part, product = module.split(".")
        loaded = state["layers"][1][part][product]["weight"]["values"][...]
        np.testing.assert_array_equal(loaded, tensors[f"{prefix}.{name}.weight"].T)
    short = tensors | {f"{prefix}.self_attn.qkv_proj.weight": np.zeros((63, 32), np.float32)}
    with pytest.raises(ModelFileError, match=r"shape must be \(64, 32\), got \(63, 32\).*qkv_proj"):
        load(short, JOINED)


def test_joined_rows_are_rounded_as_their_parts_are(tmp_path):
    """transformers joins gates and ups when it saves MiniMax M3; its published files have both apart."""
    folder = checkpoint("minimax_m3")
    joined = load_file(folder / "model.safetensors")
    apart = {name: each for name, each in joined.items() if not name.endswith(".gate_up_proj.weight")}
    for name in joined.keys() - apart.keys():
        for part, rows in zip(("gate_proj", "up_proj"), np.split(joined[name], 2), strict=True):
            apart[name.replace("gate_up_proj", part)] = rows
    model = build_model(read_folder(folder), Build("float32", scheme=rounded("int8")))
    found, wanted = (load_params(model, ArraySource(each)) for each in (joined, apart))
    assert found["layers"][0]["mlp"]["gate_up"]["weight"]["codes"].dtype == jnp.int8
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    model = build_model(read_folder(folder), Build("float32", scheme=rounded("fp8")))
    experts = ".mlp.experts."
    with pytest.raises(ModelFileError, match=r"joins matrices of modules.*\(at model.*gate_up_proj.weight\)"):
        compress(ArraySource({name: each for name, each in joined.items() if experts not in name}), model, tmp_path)


class Other(nnx.Module):
    """As much of a model as the loader asks for: weights of any dtype, over any rows of a tensor "t" [6, 4]."""

    def __init__(self, dtype: str, *sources: Source):
        self.config, self.build, self.stage = CONFIG, Build("float32"), Stage(0, CONFIG.num_layers)
        self.checkpoint_names = CheckpointNames()
        rows = sum(source.rows for source in sources)
        self.weight = declare((rows, 4), jnp.dtype(dtype), ParamDecl(("embed", None), sources, init_std=1.0))


@pytest.mark.parametrize(
    ("sources", "read"),
    [
        ((Source("t", 3, tensor_rows=6), Source("t", 2, first=3, tensor_rows=6)), r"\[0, 3\), \[3, 5\)"),
        ((Source("t", 3, first=3, tensor_rows=6),), r"\[3, 6\)"),
        ((Source("t", 4, tensor_rows=6), Source("t", 3, first=3, tensor_rows=6)), r"\[0, 4\), \[3, 6\)"),
        ((Source("t", 3, tensor_rows=6), Source("t", 4, first=3, tensor_rows=7)), r"\[0, 3\), \[3, 7\)"),
    ],
)
def test_every_row_of_a_tensor_is_read_once(sources, read):
    with pytest.raises(ValueError, match=f"must be read once each.*the model reads {read}"):
        load_params(Other("float32", *sources), ArraySource({"t": np.zeros((6, 4), np.float32)}))


def test_parts_of_a_tensor_in_another_order():
    tensor = np.arange(24, dtype=np.float32).reshape(6, 4)
    first, second = parts_of("t", 2, 4)
    (leaf,) = jax.tree.leaves(load_params(Other("float32", second, first), ArraySource({"t": tensor})))
    np.testing.assert_array_equal(leaf, tensor[[2, 3, 4, 5, 0, 1]])


def test_rows_that_take_turns():
    tensor = np.arange(48, dtype=np.float32).reshape(12, 4)
    turns = {"tensor_rows": 12, "stride": 6}
    one, two = Source("t", 4, group=2, **turns), Source("t", 8, group=4, first=2, **turns)
    (leaf,) = jax.tree.leaves(load_params(Other("float32", one, two), ArraySource({"t": tensor})))
    np.testing.assert_array_equal(leaf, tensor[[0, 1, 6, 7, 2, 3, 4, 5, 8, 9, 10, 11]])
    with pytest.raises(ValueError, match=r"the model reads \[0, 2\), \[6, 8\)$"):
        load_params(Other("float32", one), ArraySource({"t": tensor}))


def test_every_weight_has_a_dtype_of_its_own():
    tensor = np.arange(24).reshape(6, 4)
    for stored, wanted in (("float32", "bfloat16"), ("float16", "float32"), ("int8", "int8"), ("int64", "int32")):
        source = ArraySource({"t": tensor.astype(stored)})
        (leaf,) = jax.tree.leaves(load_params(Other(wanted, Source("t", 6)), source))
        assert leaf.dtype == wanted
        np.testing.assert_array_equal(np.asarray(leaf, np.int32), tensor)
    for stored, wanted in (("int16", "int8"), ("float32", "int8"), ("int8", "float32")):
        with pytest.raises(ModelFileError, match=f"a weight must hold (int8|floating-point numbers), got {stored}"):
            load_params(Other(wanted, Source("t", 6)), ArraySource({"t": tensor.astype(stored)}))
    with pytest.raises(ModelFileError, match="integers of 32 bits"):
        load_params(Other("int32", Source("t", 6)), ArraySource({"t": tensor + 2**32}))


@pytest.mark.parametrize("tied", [False, True])
def test_stages_share_one_checkpoint(tied):
    config = replace(CONFIG, tie_word_embeddings=tied)
    tensors, model = random_tensors(config), lambda stage=None: build_model(config, Build(jnp.float32, stage=stage))
    whole = load(tensors, config)
    for stage in (Stage(0, 1, is_last=False), Stage(1, 2, is_first=False)):
        part = load_params(model(stage), ArraySource(tensors))
        jax.tree.map(np.testing.assert_array_equal, part["layers"][0], whole["layers"][stage.first_layer])
        jax.tree.map(
            np.testing.assert_array_equal,
            dummy_params(model(stage))["layers"][0],
            dummy_params(model())["layers"][stage.first_layer],
        )
        with pytest.raises(ModelFileError, match="no use for this tensor.*other"):
            load_params(model(stage), ArraySource(tensors | {"other": tensors["model.norm.weight"]}))


def test_repeated_heads_and_padding():
    model = build_model(CONFIG, Build(jnp.float32, MeshLayout(model=4)))  # 2 kv heads for 4 devices
    tensors = random_tensors(CONFIG)
    state = load_params(model, ArraySource(tensors))
    table = np.asarray(state["embed"]["weight"]["values"][...])
    np.testing.assert_array_equal(table[:64], tensors["model.embed_tokens.weight"])
    assert table.shape == (512, 32) and not table[64:].any()
    k = tensors["model.layers.0.self_attn.k_proj.bias"]
    bias = np.asarray(state["layers"][0]["attention"]["qkv"]["bias"][...])
    np.testing.assert_array_equal(bias[32:64], np.concatenate([k[:8], k[:8], k[8:], k[8:]]))


def test_progress_counts_every_byte():
    calls = []
    state = load(random_tensors(CONFIG), progress=lambda *call: calls.append(call))
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert calls[-1][0] == total and {call[1] for call in calls} == {total}
    assert (np.diff([call[0] for call in calls]) > 0).all()
    assert "layers.1.attention.qkv.bias" in [call[2] for call in calls]


def test_host_memory_stays_near_one_weight():
    config = with_attention(replace(CONFIG, hidden_size=256, intermediate_size=512), num_layers=12)
    alive: list[weakref.ref] = []

    class FreshArrays(ArraySource):
        def shape(self, name):
            return shapes[name]

        def read(self, name, rows=slice(None), columns=slice(None)):
            assert sum(ref() is not None for ref in alive) <= 1, "a tensor outlived the reading of the next"
            array = np.ones(shapes[name], np.float32)
            if name.endswith("_proj.weight"):  # those that are joined or turned; others may become the device's memory
                alive.append(weakref.ref(array))
            return array

    model = build_model(config, Build(jnp.float32))
    shapes = {source.name: p.source_shape(source) for p in declared_params(model) for source in p.decl.sources}
    sizes = [param.num_bytes for param in declared_params(model)]
    tracemalloc.start()
    state = load_params(model, FreshArrays(dict.fromkeys(shapes)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(jax.tree.leaves(state)) == len(sizes)
    assert peak < 3 * max(sizes) + (256 << 10) < sum(sizes) / 3


@pytest.mark.versions
def test_dummy_weights_are_deterministic_and_sane(monkeypatch):
    """Small ones, which NumPy computes, as those that the device computes."""
    model = build_model(replace(CONFIG, vocab_size=512, hidden_size=128), Build(jnp.float32))
    first, other = (dummy_params(model, seed=seed) for seed in (3, 4))
    monkeypatch.setattr(dummy, "_MOST_BY_NUMPY", 0)
    again = dummy_params(model, seed=3)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(first["embed"]["weight"]["values"][...], other["embed"]["weight"]["values"][...])
    down = [np.asarray(layer["mlp"]["down"]["weight"]["values"][...]) for _, layer in first["layers"].items()]
    assert not np.array_equal(*down)
    assert np.std(down[0]) == pytest.approx(48**-0.5, rel=0.05)
    table = np.asarray(first["embed"]["weight"]["values"][...])
    for vectors in (table[:64], table.T[:64]):
        assert np.abs(np.corrcoef(vectors) - np.eye(64)).max() < 6 / vectors.shape[1] ** 0.5
    assert set(np.asarray(first["norm"]["weight"][...])) == {1.0}
    nnx.update(model, first)
    hidden = np.random.default_rng(0).standard_normal((8, 128)).astype(np.float32)
    assert 0.5 < np.std(model.logits(jnp.asarray(hidden))) < 2
