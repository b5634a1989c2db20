"""Checkpoints that stack the experts of a layer, as they are and in MXFP4."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.state import GatedDelta
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import CheckpointNames, StackedExperts
from jaxengine.models.registry import build_model, read_folder, read_hf
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import check_source, load_params
from jaxengine.models.weights.views.further_experts import FurtherExpertsSource
from jaxengine.models.weights.views.joined_rows import JoinedRowsSource
from jaxengine.models.weights.views.stacked import FP4, StackedSource, mxfp4_values, of_shapes
from tests.fixtures.drawn_weights import checkpoint
from tests.models.weights.test_load import ArraySource
from tests.tables import each_row

FIXTURES = Path(__file__).parents[3] / "fixtures"
EXPERTS, SIZE, FFN = 3, 64, 32
PREFIX = "model.layers.0.mlp.experts"


def test_mxfp4_is_read_as_transformers_does():
    with np.load(FIXTURES / "mxfp4.npz") as recorded:
        values = mxfp4_values(recorded["blocks"], recorded["scales"])
        np.testing.assert_array_equal(values.swapaxes(1, 2).view(np.int16), recorded["bits"])


def stacks(rng: np.random.Generator, *, mxfp4: bool) -> dict[str, np.ndarray]:
    biases = {
        f"{PREFIX}.gate_up_proj_bias": rng.standard_normal((EXPERTS, 2 * FFN)),
        f"{PREFIX}.down_proj_bias": rng.standard_normal((EXPERTS, SIZE)),
    }
    biases = {name: values.astype(np.float32) for name, values in biases.items()}
    if mxfp4:
        made = {}
        for name, rows, columns in (("gate_up_proj", 2 * FFN, SIZE), ("down_proj", SIZE, FFN)):
            made[f"{PREFIX}.{name}_blocks"] = rng.integers(0, 256, (EXPERTS, rows, columns // 32, 16), np.uint8)
            made[f"{PREFIX}.{name}_scales"] = rng.integers(118, 126, (EXPERTS, rows, columns // 32), np.uint8)
        return made | biases
    return biases | {
        f"{PREFIX}.gate_up_proj": rng.standard_normal((EXPERTS, SIZE, 2 * FFN)).astype(np.float32),
        f"{PREFIX}.down_proj": rng.standard_normal((EXPERTS, FFN, SIZE)).astype(np.float32),
    }


def plain(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Stacks in MXFP4 as stacks of numbers, by the format's definition."""
    made = {name: values for name, values in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    for name in tensors:
        if name.endswith("_blocks"):
            stem, blocks = name.removesuffix("_blocks"), tensors[name]
            halves = np.stack([FP4[blocks & 15], FP4[blocks >> 4]], axis=-1).reshape(*blocks.shape[:3], 32)
            scaled = halves * 2.0 ** (tensors[f"{stem}_scales"].astype(np.float64)[..., None] - 127)
            matrix = scaled.reshape(*blocks.shape[:2], -1).swapaxes(1, 2)
            made[stem] = np.ascontiguousarray(matrix, np.float32)
    return made


@pytest.mark.parametrize("mxfp4", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_parts_of_a_stack(tmp_path, mxfp4, interleaved):
    """Rows and columns of every expert's matrices, as devices that share them ask for."""
    tensors = stacks(np.random.default_rng(0), mxfp4=mxfp4)
    save_file(tensors | {"lm_head.weight": np.ones((2, 2), np.float32)}, tmp_path / "model.safetensors")
    stacked = plain(tensors)
    source = StackedSource(SafetensorsCheckpoint(tmp_path), StackedExperts(interleaved, out_first=False), EXPERTS)
    assert len(list(source.names())) == 6 * EXPERTS + 1
    assert source.shape("lm_head.weight") == source.read("lm_head.weight").shape == (2, 2)
    for expert in range(EXPERTS):
        gate_up, bias = (stacked[f"{PREFIX}.gate_up_proj{end}"][expert] for end in ("", "_bias"))
        halves = [slice(0, None, 2), slice(1, None, 2)] if interleaved else [slice(0, FFN), slice(FFN, None)]
        for module, own in zip(("gate_proj", "up_proj"), halves, strict=True):
            name = f"{PREFIX}.{expert}.{module}"
            assert source.shape(f"{name}.weight") == (FFN, SIZE) and source.shape(f"{name}.bias") == (FFN,)
            some, none = (slice(5, 13), slice(None)), (slice(0, 0), slice(None))
            for rows, columns in ((slice(None), slice(None)), some, none, (slice(None), slice(7, 40))):
                part = source.read(f"{name}.weight", rows, columns)
                np.testing.assert_array_equal(part.astype(np.float32), gate_up[:, own].T[rows, columns])
                np.testing.assert_array_equal(source.read(f"{name}.bias", rows), bias[own][rows])
        name = f"{PREFIX}.{expert}.down_proj"
        down = source.read(f"{name}.weight", slice(3, 60), slice(1, 32)).astype(np.float32)
        np.testing.assert_array_equal(down, stacked[f"{PREFIX}.down_proj"][expert].T[3:60, 1:32])
        np.testing.assert_array_equal(source.read(f"{name}.bias"), stacked[f"{PREFIX}.down_proj_bias"][expert])


def test_stacks_of_matrices_as_linear_layers_have_them(tmp_path):
    """The same parts of the same matrices, whichever way round they lie, also where gate and up are apart."""
    tensors = stacks(np.random.default_rng(0), mxfp4=False)
    turned = {
        name: np.ascontiguousarray(values.swapaxes(1, 2)) if values.ndim == 3 else values
        for name, values in tensors.items()
    }
    apart = {name: values for name, values in turned.items() if "gate_up" not in name}
    for part, own in (("gate_proj", slice(FFN)), ("up_proj", slice(FFN, None))):
        for end in ("", "_bias"):
            apart[f"{PREFIX}.{part}{end}"] = np.ascontiguousarray(turned[f"{PREFIX}.gate_up_proj{end}"][:, own])
    sources = []
    for name, held, stacked in (
        ("in", tensors, StackedExperts(out_first=False)),
        ("out", turned, StackedExperts()),
        ("apart", apart, StackedExperts()),
    ):
        (tmp_path / name).mkdir()
        save_file(held, tmp_path / name / "model.safetensors")
        checkpoint = SafetensorsCheckpoint(tmp_path / name)
        assert of_shapes(StackedExperts(out_first=None), checkpoint, SIZE) == stacked
        sources.append(StackedSource(checkpoint, stacked, EXPERTS))
    one = sources[0]
    for name, other in product(one.names(), sources[1:]):
        assert set(one.names()) == set(other.names())
        assert one.shape(name) == other.shape(name)
        parts = [(slice(None), slice(None)), (slice(3, 20), slice(1, 9))]
        for rows, columns in parts if len(one.shape(name)) == 2 else [(slice(2, 5), slice(None))]:
            np.testing.assert_array_equal(one.read(name, rows, columns), other.read(name, rows, columns), err_msg=name)


# Checkpoint with tensors per expert -> how transformers 5 calls some of its modules in memory.
IN_MEMORY = {
    "axk1": {"layers.1.mlp.post_mlp_layernorm": "layers.1.post_mlp_layernorm"},
    "bailing_hybrid": {
        ".self_attn.o_proj": ".attention.dense",
        **{f".self_attn.forget_gate.{each}": f".attention.{each}" for each in ("f_proj", "dt_bias", "A_log")},
        ".self_attn.": ".attention.",
        ".mlp.gate.e_score_correction_bias": ".mlp.gate.expert_bias",
    },
    "deepseek_v3": {},
    "deepseek_v4": {
        ".compressor.indexer.": ".indexer.compressor.",
        ".compressor.indexer.scorer.weights_proj": ".indexer.weights_proj",
        ".compressor.indexer.q_b_proj": ".indexer.wq_b",
        **{f".{name}_proj.": f".w{name}." for name in ("q_a", "q_b", "kv", "o_a", "o_b")},
        ".gate_proj.": ".wgate.",
        **{f".shared_experts.{theirs}_proj": f".shared_experts.w{n}" for n, theirs in ((1, "gate"), (2, "down"))},
        ".shared_experts.up_proj": ".shared_experts.w3",
        ".q_a_norm.": ".q_norm.",
        ".attn.kv_norm.": ".attn.norm.",
        "r.kv_norm.w": "r.norm.w",
        ".position_bias": ".ape",
        ".sinks": ".attn_sink",
        ".input_layernorm.": ".attn_norm.",
        ".post_attention_layernorm.": ".ffn_norm.",
        ".attn_hc.": ".hc_attn_",
        ".ffn_hc.": ".hc_ffn_",
        ".e_score_correction_bias": ".bias",
        ".self_attn.": ".attn.",
        ".mlp.": ".ffn.",
        "lm_head.weight": "head.weight",
    },
    "ernie4_5_moe": {".mlp.gate.moe_statics.": ".mlp.moe_statics."},
    "exaone_moe": {".mlp.gate.e_score": ".mlp.e_score"},
    "hy_v3": {".mlp.gate.w": ".mlp.router.gate.w", ".mlp.e_score_correction_": ".mlp.expert_", "_experts": "_mlp"},
    "jamba": {},
    "kolibri1": {"post_self_attn_layernorm": "post_attn_norm", "post_mlp_layernorm": "post_ffn_norm"},
    "kimi_linear": {
        **{f".self_attn.forget_gate.{each}": f".self_attn.{each}" for each in ("f_a", "f_b", "dt_bias", "A_log")},
        ".mlp.": ".block_sparse_moe.",
    },
    "lara_mini": {".linear_attn.norm.": ".linear_attn.out_norm."},
    "laguna": {".mlp.gate.e_score": ".mlp.experts.e_score", "shared_experts": "shared_expert"},
    "lfm2_moe": {},
    "longcat_flash": {},
    "minimax": {".mlp.": ".block_sparse_moe."},
    "minimax_m2": {".mlp.": ".block_sparse_moe."},
    "mixtral_tied": {".mlp.": ".block_sparse_moe."},
    "nemotron_h_latent": {},
    "olmo_hybrid": {
        ".input_layernorm.": ".attention_layer_norm.",
        ".post_attention_layernorm.": ".feedforward_layer_norm.",
    },
    "phimoe": {".mlp.router.": ".block_sparse_moe.gate.", ".mlp.": ".block_sparse_moe."},
    "qwen3_moe_bias": {},
    "qwen3_next": {},
}


@each_row(("name", "renamed"), IN_MEMORY.items())
def test_tensors_are_loaded_as_transformers_holds_them_in_memory(name, renamed):
    """As trainers send them: a stack of experts for each layer, which no published checkpoint of these families has,
    one convolution of queries, keys and values, and the inputs of Lara's delta nets apart.
    """
    folder = FIXTURES / "models" / name
    config = read_hf(json.loads((folder / "config.json").read_text()))
    shapes, stacked = json.loads((folder / "tensors.json").read_text())["shapes"], {}
    matrices = re.compile(r"(.*\.experts)\.0\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.weight")
    for tensor, shape in shapes.items():
        if (found := matrices.fullmatch(tensor)) is not None:
            joins = any(f"{found[1]}.0.{gate}.weight" in shapes for gate in ("w1", "gate_proj"))
            assert config.experts is not None
            is_down = found[2] in ("w2", "down_proj")
            count = config.experts.num_experts if is_down else config.experts.num_routed
            part, rows = ("down_proj", 1) if is_down else ("gate_up_proj", 2) if joins else ("up_proj", 1)
            stacked[f"{found[1]}.{part}"] = count, rows * shape[0], shape[1]
        elif ".q_conv1d." in tensor:
            rows = sum(shapes[tensor.replace(".q_", f".{part}_")][0] for part in "qkv")
            stacked[tensor.replace(".q_", ".")] = rows, *shape[1:]
        elif tensor.endswith(".linear_attn.in_proj.weight"):
            state = next(each.state for each in config.attention if isinstance(each.state, GatedDelta))
            rows = {"qkv": 2 * state.key_size + state.value_size, "z": state.value_size}
            for part, size in (rows | dict.fromkeys("ba", state.num_v_heads)).items():
                stacked[tensor.replace("in_proj", f"in_proj_{part}")] = size, shape[1]
        elif "_conv1d." not in tensor and (".experts." not in tensor or re.search("e_score|_proj$", tensor)):
            stacked[tensor] = shape
    for theirs, ours in renamed.items():
        assert any(ours in tensor for tensor in stacked)
        stacked = {tensor.replace(ours, theirs): shape for tensor, shape in stacked.items()}
    held = {tensor: np.broadcast_to(np.float32(0), shape) for tensor, shape in stacked.items()}
    check_source(build_model(config, Build("float32")), ArraySource(held))


_BIAS = "moe_statics.e_score_correction_bias"
# Checkpoint -> what transformers 5 calls modules in memory, and the ends of joined tensors with those of their parts
# and the parts' shares of rows.
APART: dict[str, tuple[dict[str, str], dict[str, dict[str, int]]]] = {
    "ernie4_5_vl_vision": (
        {"vision_model": "vision_tower", "linear.0": "linear.fc1", "linear.2": "linear.fc2", "linear.3": "linear.ln"},
        {f".mlp.{_BIAS}": {f".mlp.{kind}_moe.gate.{_BIAS}": 1 for kind in ("text", "vision")}},
    ),
    "molmo2_vision": (
        {".attn_out": ".o_proj", ".ff_out": ".down_proj"},
        {
            ".att_proj.weight": {f".{part}_proj.weight": 2 if part == "q" else 1 for part in "qkv"},
            ".ff_proj.weight": {".up_proj.weight": 1, ".gate_proj.weight": 1},
        },
    ),
    "qianfan_ocr_vision": (
        {"vision_model.encoder.layers.": "model.vision_tower.layers."},
        {f".attn.qkv.{end}": {f".attention.{part}_proj.{end}": 1 for part in "qkv"} for end in ("weight", "bias")},
    ),
    "qwen4_exp": ({}, {}),
}


@each_row(("name", "renamed", "joined"), [(name, *each) for name, each in APART.items()])
def test_weights_of_what_transformers_holds_apart_in_memory(name, renamed, joined):
    folder = checkpoint(name)
    tensors, found = load_file(folder / "model.safetensors"), dict[str, np.ndarray]()
    tables = sorted((each for each in tensors if ".shard_" in each), key=lambda each: int(each.split(".")[-2][6:]))
    for layer in {each.partition("shard_")[0] for each in tables}:
        found[f"{layer}weight"] = np.concatenate([tensors[each] for each in tables if each.startswith(layer)])
    for tensor in tensors.keys() - {*tables}:
        end = next((end for end in joined if tensor.endswith(end)), "")
        shares = joined.get(end, {"": 1})
        rows = np.cumsum([*shares.values()]) * len(tensors[tensor]) // sum(shares.values())
        for part, array in zip(shares, np.split(tensors[tensor], rows[:-1]), strict=True):
            found[tensor.removesuffix(end) + part] = array
    for ours, theirs in renamed.items():
        assert any(ours in tensor for tensor in found)
        found = {tensor.replace(ours, theirs): array for tensor, array in found.items()}
    if name.startswith("ernie"):
        for old, kind in ((".gate.weight", "text"), (".gate.weight_1", "vision")):
            for gate in [tensor for tensor in found if tensor.endswith(f".mlp{old}")]:
                found[gate.replace(old, f".{kind}_moe.gate.weight")] = found.pop(gate).T
        for layer in {each.partition("experts.")[0] for each in found if ".mlp.experts." in each}:
            for kind, numbers in (("text", range(8)), ("vision", range(8, 16))):
                of = (
                    [found.pop(f"{layer}experts.{number}.{part}_proj.weight") for part in ("gate", "up", "down")]
                    for number in numbers
                )
                gates, ups, downs = map(np.stack, zip(*of, strict=True))
                found[f"{layer}{kind}_moe.experts.gate_up_proj"] = np.concatenate([gates, ups], axis=1)
                found[f"{layer}{kind}_moe.experts.down_proj"] = downs
    model = build_model(read_folder(folder), Build("float32"))
    jax.tree.map(np.testing.assert_array_equal, *(load_params(model, ArraySource(each)) for each in (tensors, found)))


def test_a_whole_checkpoint_in_mxfp4(tmp_path):
    """Its weights, kept quantised, are those of the same numbers stored as they are."""
    folder, rng = checkpoint("gpt_oss"), np.random.default_rng(0)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if re.search(r"experts\.\w+_proj$", name)]:
        experts, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = rng.integers(0, 256, (experts, rows, columns // 32, 16), np.uint8)
        tensors[f"{name}_scales"] = rng.integers(118, 126, (experts, rows, columns // 32), np.uint8)
    raw = json.loads((folder / "config.json").read_text())
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    loaded = []
    for name, held, config in (
        ("quantized", tensors, raw | {"quantization_config": quantized}),
        ("plain", plain(tensors), raw),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        save_file(held, tmp_path / name / "model.safetensors")
        model = build_model(read_folder(tmp_path / name), Build(jnp.float32))
        loaded.append(load_params(model, SafetensorsCheckpoint(tmp_path / name)))
    for quantized, plain_weights in zip(*(state["layers"].values() for state in loaded), strict=True):
        for name in ("gate_up", "down"):
            held, values = quantized["mlp"].pop(name), plain_weights["mlp"].pop(name)["values"][...]
            assert (held["codes"][...].dtype, held["scales"][...].shape[1]) == (jnp.int8, values.shape[1] // 32)
            scales = np.repeat(held["scales"][...], 32, axis=1)
            np.testing.assert_array_equal(held["codes"][...].astype(jnp.float32) * scales, values)
    jax.tree.map(np.testing.assert_array_equal, *loaded)
    tensors["model.layers.0.mlp.experts.down_proj_scales"][1, 2] = 255
    save_file(tensors, tmp_path / "quantized" / "model.safetensors")
    model = build_model(read_folder(tmp_path / "quantized"), Build(jnp.float32))
    with pytest.raises(
        ModelFileError,
        match="255 stands for no number, as .*experts.1.down_proj.scales .at model.*experts.down_proj_scales",
    ):
        load_params(model, SafetensorsCheckpoint(tmp_path / "quantized"))
    with pytest.raises(ModelConfigError, match="quant_method must be .* 'mxfp4' .*, got 'mxfp6'"):
        read_hf(raw | {"quantization_config": {"quant_method": "mxfp6"}})


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("gate_up_proj", np.zeros((4, SIZE, FFN)), "a stack of the matrices or biases of 3 experts"),
        ("gate_up_proj", np.zeros((3, SIZE)), "a stack of the matrices"),
        ("gate_up_proj", np.zeros((3, SIZE, 9)), "gate and up must be equally many rows, got 9"),
        (
            "gate_up_proj_what",
            np.zeros((3, SIZE, 8)),
            "is not a tensor of stacked experts that can be read; allowed: gate_up",
        ),
        ("down_proj_blocks", np.zeros((3, SIZE, 1, 16), np.uint8), "MXFP4 must have blocks"),
        ("down_proj_blocks", np.zeros((3, SIZE, 1, 8), np.uint8), "MXFP4 must have blocks"),
        ("down_proj_bias", np.zeros((3, SIZE, 1)), "a stack of the matrices"),
    ],
)
def test_stacks_of_other_shapes(tmp_path, name, values, message):
    save_file({f"{PREFIX}.{name}": values}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=message):
        StackedSource(SafetensorsCheckpoint(tmp_path), StackedExperts(out_first=False), EXPERTS)


def test_an_expert_that_is_there_twice():
    """Alone and in a stack, in either order, in two stacks, or under two numbers."""
    both, gate = np.zeros((EXPERTS, 2 * FFN, SIZE), np.float32), np.zeros((EXPERTS, FFN, SIZE), np.float32)
    tensors = {f"{PREFIX}.gate_up_proj": both, f"{PREFIX}.1.gate_proj.weight": gate[0], f"{PREFIX}.gate_proj": gate}
    for names in ((0, 1), (1, 0), (0, 2), (2, 1)):
        held = {name: tensors[name] for name in (list(tensors)[each] for each in names)}
        with pytest.raises(ModelFileError, match=rf"stands for .*\.gate_proj.weight, as does {PREFIX}\..*{PREFIX}"):
            StackedSource(ArraySource(held), StackedExperts(), EXPERTS)
    further = {
        f"{PREFIX}.{EXPERTS}.up_proj.weight": gate[0],
        PREFIX.replace("experts", "image.0.up_proj.weight"): gate[0],
    }
    with pytest.raises(ModelFileError, match=r"stands for .*\.image.0.up_proj.weight, as does"):
        FurtherExpertsSource(ArraySource(further), "image", EXPERTS)


def test_joined_rows_that_do_not_fit():
    names = CheckpointNames(joined={".conv.weight": (".q_conv.weight", ".k_conv.weight")})
    shapes = {"a.q_conv.weight": (4, 3), "a.k_conv.weight": (2, 3)}
    rows = np.arange(18, dtype=np.float32).reshape(6, 3)
    fits = JoinedRowsSource(ArraySource({"a.conv.weight": rows, "b.conv.weight": rows}), names, shapes)
    assert {name: fits.shape(name) for name in fits.names()} == shapes | {"b.conv.weight": (6, 3)}
    np.testing.assert_array_equal(fits.read("a.k_conv.weight", slice(1, 2), slice(0, 2)), rows[5:, :2])
    for held, message in (
        ({"a.conv.weight": rows[:5]}, "must have the 6 rows of a.q_conv.weight, a.k_conv.weight, got shape"),
        (
            {"a.k_conv.weight": rows[:2], "a.conv.weight": rows},
            "stands for a.k_conv.weight, as does a.k_conv.* .at a.c",
        ),
    ):
        with pytest.raises(ModelFileError, match=message):
            JoinedRowsSource(ArraySource(held), names, shapes)
    whole = {"a.conv.weight": (6, 3)}
    held = {"a.q_conv.weight": rows[:4], "a.k_conv.weight": rows[4:]}
    np.testing.assert_array_equal(JoinedRowsSource(ArraySource(held), names, whole).read("a.conv.weight"), rows)
    for part in (rows[4:, :2], np.float32(1)):
        with pytest.raises(ModelFileError, match=r"must be rows of a.conv.weight \(6, 3\), got .* a.k_conv"):
            JoinedRowsSource(ArraySource(held | {"a.k_conv.weight": np.asarray(part)}), names, whole)


def test_joined_rows_that_were_cut_elsewhere():
    """As transformers saves OLMo Hybrid, whose values have more rows than its keys: in parts of equal length."""
    names = CheckpointNames(joined={".conv.weight": (".q_conv.weight", ".k_conv.weight", ".v_conv.weight")})
    rows, parts = np.arange(36, dtype=np.float32).reshape(12, 3), [f"a.{part}_conv.weight" for part in "qkv"]
    shapes = dict(zip(parts, [(2, 3), (3, 3), (7, 3)], strict=True))
    held = dict(zip(parts, np.split(rows, 3), strict=True))
    cut = JoinedRowsSource(ArraySource(held), names, shapes)
    assert {name: cut.shape(name) for name in cut.names()} == shapes
    np.testing.assert_array_equal(np.concatenate([cut.read(part) for part in parts]), rows)
    np.testing.assert_array_equal(cut.read(parts[2], slice(1, 5), slice(1, 3)), rows[6:10, 1:])
    assert cut.read(parts[1], slice(2, 2)).shape == (0, 3)
    other = JoinedRowsSource(ArraySource(held | {parts[0]: rows[:3]}), names, shapes)
    assert other.shape(parts[0]) == (3, 3)  # not the model's number of rows: left as they are


def test_an_expert_of_more_digits_than_numbers_have():
    name = f"{PREFIX}.{'9' * 5000}.up_proj.weight"
    held = {name: np.zeros((FFN, SIZE), np.float32)}
    assert list(FurtherExpertsSource(ArraySource(held), "image", EXPERTS).names()) == [name]


def test_mxfp4_of_another_kind(tmp_path):
    tensors = stacks(np.random.default_rng(0), mxfp4=True)
    tensors[f"{PREFIX}.down_proj_scales"] = tensors[f"{PREFIX}.down_proj_scales"].astype(ml_dtypes.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    source = StackedSource(SafetensorsCheckpoint(tmp_path), StackedExperts(out_first=False), EXPERTS)
    with pytest.raises(ModelFileError, match="MXFP4 must be stored as U8, got uint8 and bfloat16"):
        source.read(f"{PREFIX}.0.down_proj.weight")
