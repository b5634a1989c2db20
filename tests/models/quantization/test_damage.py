"""Quantised checkpoints that cannot be trusted are refused by name, before anything is loaded."""

from __future__ import annotations

import json
from functools import partial

import ml_dtypes
import numpy as np
import pytest

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.readers.name_patterns import Effort
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.quantization.base import rules
from jaxengine.models.registry import build_model, read_hf
from jaxengine.models.weights import load
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from tests.fixtures.quantized_models import CONFIG, FORMATS, write
from tests.models.weights.test_load import ArraySource
from tests.tables import each_row

Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"


def opened(tmp_path, name):
    """(model, tensors by name) of a format."""
    folder = write(tmp_path, name)
    source = SafetensorsCheckpoint(folder)
    model = build_model(read_hf(json.loads((folder / "config.json").read_text())), Build("float32"))
    return model, {tensor: source.read(tensor) for tensor in source.names()}


def with_nan(array):
    array = array.copy()
    array.ravel()[:3] = np.nan
    return array


STATE, NESTED = (f"weight.quant_state.bitsandbytes__{kind}" for kind in ("fp4", "nf4"))


def replaced(old: bytes, new: bytes):
    """What it makes of a text."""

    def change(array):
        assert old in array.tobytes()
        return np.frombuffer(array.tobytes().replace(old, new), np.uint8)

    return change


# format, tensor, what becomes of it (None: nothing is left), what is said
DAMAGE = [
    ("ct int channel", f"{Q}.weight_scale", None, f"a tensor of .* is missing .at {Q}.weight_scale"),
    ("ct int channel", f"{Q}.weight_scale", lambda a: a[:-1], r"shape must be \(64, 1\) or \(64,\) for"),
    ("ct int channel", f"{Q}.weight_scale", with_nan, f"3 of 64 scales are not finite numbers .at {Q}"),
    ("ct int channel", f"{Q}.weight", lambda a: a.astype(np.int16), "must hold int8, got int16"),
    ("ct int channel", f"{Q}.weight", lambda a: a[:, :-1], r"shape must be \(64, 64\) for"),
    (
        "ct int channel",
        f"{Q}.weight_scale",
        lambda a: a.astype(np.int32),
        "must hold floating-point numbers, got int32",
    ),
    ("fp8 block", f"{DOWN}.weight_scale_inv", lambda a: a[:, :1], r"shape must be \(2, 2\) for fp8, got \(2, 1\)"),
    (
        "fp8 block",
        f"{DOWN}.weight",
        lambda a: a.astype(ml_dtypes.float8_e5m2),
        "must hold float8_e4m3fn, got float8_e5m2",
    ),
    ("fp8 tensor static", f"{Q}.activation_scale", lambda a: a * 2, "must have the same static scale of inputs"),
    ("fp8 tensor static", f"{DOWN}.activation_scale", lambda a: a * 0, "scale of inputs must be finite and > 0"),
    ("fp8 tensor static", f"{DOWN}.activation_scale", lambda a: a * 0 + 1e-40, "no subnormal number, got .1.*e-40"),
    ("ct packed 4", f"{Q}.weight_scale", lambda a: a[:, :1], r"shape must be \(64, 2\) for .*, got \(64, 1\)"),
    ("ct packed 4", f"{Q}.weight_shape", lambda a: a + 1, r"must be \(64, 64\), got \(65, 65\)"),
    ("ct packed 4", f"{Q}.weight_packed", lambda a: a.astype(np.int64), "must hold int32, got int64"),
    ("ct nvfp4", f"{Q}.weight_packed", lambda a: a.view(np.int8), "must hold uint8, got int8"),
    ("ct nvfp4", f"{Q}.weight_scale", lambda a: a.astype(np.float32), "must hold float8_e4m3fn, got float32"),
    ("ct nvfp4", f"{Q}.weight_global_scale", lambda a: a * 0, "must be finite and > 0, .* got 0.0"),
    ("ct mxfp4", f"{Q}.weight_packed", lambda a: a.view(np.int8), "must hold uint8, got int8"),
    ("ct mxfp4", f"{Q}.weight_scale", lambda a: a[:, :1], r"shape must be \(64, 2\) for .*, got \(64, 1\)"),
    ("ct mxfp4", f"{Q}.weight_scale", lambda a: a * 0 + 255, "255 stands for no number .at"),
    ("ct nvfp4", f"{Q}.weight_global_scale", lambda a: a * 0 + 1e-40, "must be finite and > 0, no subnormal number"),
    ("ct nvfp4 rows", f"{Q}.input_global_scale", lambda a: a * 0 + 1e-40, "> 0, no subnormal number, got .*e-4. .at"),
    ("ct nvfp4 rows", f"{Q}.input_global_scale", None, "is missing .at .*input_global_scale"),
    ("ct nvfp4 rows", f"{Q}.input_global_scale", lambda a: a * np.inf, "must be finite and > 0, .* got inf .at"),
    ("ct nvfp4 rows", f"{Q}.input_global_scale", lambda a: a * 2, "must have the same static scale of inputs"),
    ("ct mxfp8 rows", f"{Q}.weight_scale", lambda a: a * 0 + 255, "255 stands for no number .at"),
    ("ct mxfp8 rows", f"{Q}.weight", lambda a: a.view(np.int8), "must hold float8_e4m3fn, got int8"),
    ("modelopt fp8", f"{Q}.input_scale", None, "is missing .at .*input_scale"),
    ("modelopt fp8 block", f"{Q}.weight_scale", lambda a: a[:, 0], r"must be \(1, 1\) or \(1, 1, 1, 1\) for"),
    ("modelopt nvfp4", f"{DOWN}.input_scale", lambda a: a * 0, "must be finite and > 0, .* got 0.0 .at .*input_scale"),
    ("modelopt nvfp4", f"{Q}.weight_scale_2", None, "is missing .at .*weight_scale_2"),
    ("awq", f"{Q}.qzeros", None, "is missing"),
    ("awq", f"{Q}.scales", with_nan, "3 of 128 scales are not finite"),
    ("gptq 4", f"{Q}.qzeros", lambda a: a + 1, "zero points must all be 8, for the configuration says sym"),
    ("gptq 4", f"{Q}.g_idx", lambda a: a[::-1].copy(), "must name groups of 32 inputs each, in order: no desc_act"),
    ("gptq 3", f"{Q}.qweight", lambda a: a[:-1], r"shape must be \(6, 64\) for"),
    ("gptq 3", f"{Q}.qzeros", lambda a: a[:, :-1], r"shape must be \(2, 6\) for"),
    (
        "gptq 3",
        f"{Q}.qzeros",
        lambda a: a ^ 1 << 30,
        "zero points must all be 4, for the configuration says",
    ),
    ("gptq 4 v2 act-order", f"{Q}.g_idx", lambda a: a * 0, "must name groups of 32 inputs each"),
    ("bnb fp4", f"{Q}.weight", lambda a: a[:-1], r"shape must be \(2048, 1\) for bitsandbytes fp4, got \(2047, 1\)"),
    ("bnb fp4", f"{Q}.weight", lambda a: a.view(np.int8), "must hold uint8, got int8"),
    ("bnb fp4", f"{Q}.weight.absmax", with_nan, "must hold finite numbers .at .*absmax"),
    ("bnb fp4", f"{Q}.weight.absmax", None, "is missing"),
    ("bnb fp4", f"{Q}.weight.quant_map", lambda a: a[:8], r"shape must be \(16,\)"),
    ("bnb fp4", f"{Q}.weight.quant_map", with_nan, "must hold finite numbers .at .*quant_map"),
    ("bnb fp4", f"{Q}.{STATE}", None, "is missing"),
    ("bnb fp4", f"{Q}.{STATE}", lambda a: a[:-1], "must be JSON"),
    ("bnb fp4", f"{Q}.{STATE}", lambda a: np.repeat(a, 100), "must be a text of at most 4096 bytes"),
    ("bnb fp4", f"{Q}.{STATE}", replaced(b"fp4", b"nf4"), "must be an object with .*'quant_type': 'fp4'"),
    ("bnb fp4", f"{Q}.{STATE}", replaced(b"[64, 64]", b"[32, 64]"), r"must be an object with .*'shape': \[64, 64\]"),
    (
        "bnb fp4",
        f"{Q}.{STATE}",
        replaced(b': 64, "d', b': -1, "d'),
        "blocksize must be a whole number of 1 to .*, got -1",
    ),
    ("bnb fp4", f"{Q}.{STATE}", lambda a: np.uint8([91] * 4000), "must be JSON"),
    ("bnb nf4 nested", f"{Q}.weight.nested_absmax", lambda a: a * np.nan, "must hold finite numbers"),
    ("bnb nf4 nested", f"{Q}.weight.absmax", lambda a: a.astype(np.float32), "must hold uint8, got float32"),
    ("bnb nf4 nested", f"{Q}.{NESTED}", replaced(b"0.1875", b'"abc"'), "nested_offset must be a finite number"),
    ("bnb nf4 nested", f"{Q}.{NESTED}", replaced(b"0.1875", b"1" * 400), "nested_offset must be a finite number"),
    ("gptq 4 v2 act-order", f"{Q}.g_idx", lambda a: a[::-1].copy(), "must have the same order of inputs"),
]


@pytest.mark.parametrize(("name", "tensor", "change", "message"), DAMAGE)
def test_damaged(tmp_path, monkeypatch, name, tensor, change, message):
    model, tensors = opened(tmp_path, name)
    if change is None:
        del tensors[tensor]
    else:
        tensors[tensor] = change(tensors[tensor])
    monkeypatch.setattr(load._Loader, "load", lambda *_: pytest.fail("something was loaded"))
    with pytest.raises(ModelFileError, match=message):
        load_params(model, ArraySource(tensors))


def test_zero_points_of_three_bits_as_two_writers_have_them(tmp_path):
    """GPTQModel before version 7 took the words of ones in the wrong order; symmetric points say nothing anyway."""
    model, tensors = opened(tmp_path, "gptq 3")
    for name in [each for each in tensors if each.endswith("qzeros")]:
        words = tensors[name].view(np.uint32).reshape(-1, 3)
        assert (words == (0xDB6DB6DB, 0xB6DB6DB6, 0x6DB6DB6D)).all()
        fours = np.array([0x24924924, 0x49249249, 0x92492492], np.uint32)
        ones = np.array([0x24924924, 0x92492492, 0x49249249], np.uint32)
        other = np.broadcast_to(fours - ones, words.shape).reshape(tensors[name].shape)
        tensors[name] = np.ascontiguousarray(other).view(np.int32)
    load_params(model, ArraySource(tensors))


def test_zero_points_of_awq_where_there_are_to_be_none(tmp_path):
    """Words that hold the middle of the range say nothing; others were the weights of another model."""
    _, tensors = opened(tmp_path, "awq")
    model = build_model(read_hf(settings(**FORMATS["awq"][0] | {"zero_point": False})), Build("float32"))
    with pytest.raises(ModelFileError, match="zero points must all be 8, for the configuration has none .at .*qzeros"):
        load_params(model, ArraySource(tensors))
    words = np.array([0x88888888], np.uint32).view(np.int32)[0]
    halves = {name: np.full_like(tensors[name], words) for name in tensors if name.endswith("qzeros")}
    load_params(model, ArraySource(tensors | halves))


@pytest.mark.parametrize("name", ["gptq 4", "awq"])
def test_biases_of_zeros(tmp_path, name):
    """AutoGPTQ writes one of each module, whether the model has it or not."""
    model, tensors = opened(tmp_path, name)
    scales = {name: array for name, array in tensors.items() if name.endswith("scales")}
    biases = {name.replace("scales", "bias"): np.zeros(array.shape[1], np.float16) for name, array in scales.items()}
    load_params(model, ArraySource(tensors | biases))
    for bias in (np.eye(64, dtype=np.float16)[3], np.zeros(3, np.float16)):
        with pytest.raises(ModelFileError, match=f"the model has no use for this tensor .at {Q}.bias"):
            load_params(model, ArraySource(tensors | biases | {f"{Q}.bias": bias}))
    with pytest.raises(ModelFileError, match=r"the model has no use for this tensor .at model.norm.bias"):
        load_params(model, ArraySource(tensors | {"model.norm.bias": np.zeros(64, np.float16)}))
    load_params(model, ArraySource(tensors | {"model.norm.bias": np.zeros(0, np.float16)}))


@pytest.mark.parametrize("name", ["ct nvfp4 rows", "ct mxfp8 rows"])
def test_inputs_that_leave_a_group_of_rounded_ones_cut(name):
    config = CONFIG | {"intermediate_size": 104, "quantization_config": FORMATS[name][0]}
    with pytest.raises(
        ModelConfigError, match=r"model.layers.\*.mlp.down_proj: .*104 inputs are not a multiple of the"
    ):
        build_model(read_hf(config), Build("float32"))


def test_a_tensor_of_a_module_that_is_not_quantised(tmp_path):
    model, tensors = opened(tmp_path, "fp8 block")
    with pytest.raises(ModelFileError, match="the model has no use for this tensor .at lm_head.weight_scale_inv"):
        load_params(model, ArraySource(tensors | {"lm_head.weight_scale_inv": np.ones((2, 2), np.float32)}))


COMPRESSED = FORMATS["ct packed 4"][0]
BNB = FORMATS["bnb fp4"][0]
AUTO_ROUND = FORMATS["auto-round gptq"][0]
CHANGED = {
    "kv_cache_scheme": {"num_bits": 8, "type": "int"},
    "format": "marlin-24",
    "ignore": "lm_head",
    "config_groups": {},
    "quantization_status": "initialized",
    "sparsity_config": {"format": "sparse-24-bitmask"},
    "moe_sparsity_config": {"num_active_experts": 2},
}


def settings(**changes):
    return {**CONFIG, "quantization_config": changes}


@pytest.mark.parametrize("field", CHANGED)
def test_what_compressed_tensors_asks_for_is_refused_by_its_field(field):
    with pytest.raises(ModelConfigError, match=f"quantization_config: {field} must be"):
        read_hf(settings(**COMPRESSED | {field: CHANGED[field]}))


@each_row(
    ("changes", "message"),
    [
        ({"quant_method": "quark"}, "quant_method must be .*, got 'quark'"),
        ({"quant_method": ["fp8"]}, r"quant_method must be .*, got \['fp8'\]"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit must be True, got None"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_8bit must be false: .*, got True"),
        ({**BNB, "bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage must be 'uint8', got 'bfloat16'"),
        ({**BNB, "bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type must be 'nf4' or 'fp4', got 'int4'"),
        ({**BNB, "llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules must be a list of at most"),
        ({**BNB, "llm_int8_skip_modules": 0}, "llm_int8_skip_modules must be a list of at most .*, got 0"),
        ({"quant_method": "fp8", "ignored_layers": False}, "ignored_layers must be a list of at most .*, got False"),
        ({"quant_method": "fp8", "modules_to_not_convert": ""}, "modules_to_not_convert must be a list .*, got ''"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": 0}, "dynamic must be a mapping of regular expressions"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": 0}, "checkpoint_format must be 'gptq'"),
        (
            {"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": {}},
            "modules_in_block_to_quantize must be a list of lists",
        ),
        ({**COMPRESSED, "sparsity_config": False}, "sparsity_config must be absent or dense: .*, got False"),
        ({**COMPRESSED, "format": ""}, "format must be .*, got ''"),
        ({**AUTO_ROUND, "extra_config": ""}, "extra_config must be a mapping of modules to mappings, got ''"),
        ({**AUTO_ROUND, "block_name_to_quantize": 0}, "block_name_to_quantize must be a list of at most .*, got 0"),
        ({"quant_method": "mxfp8", "weight_block_size": [1, 16]}, r"weight_block_size must be .*32\], got .*16\]"),
        ({"quant_method": "awq", "bits": 3}, "bits must be 4, got 3"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version must be 'gemm' or 'GEMM'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 0}, "group_size must be -1 or"),
        ({"quant_method": "gptq", "bits": 3, "sym": False}, "checkpoint_format is 'gptq', of 3 bits with sym false"),
        ({"quant_method": "gptq", "bits": 5}, "bits must be 2 or 3 or 4 or 8, got 5"),
        ({"quant_method": "awq", "bits": 4, "format": "gemv"}, "format must be 'gemm' or 'GEMM', got 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "backend": "llm-awq"}, "backend must be another one, .*got 'llm-awq'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": ["x"]}, "dynamic must be a mapping of regular expressions"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {r"+:(a)\1": {}}}, "dynamic must be a regular expression"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"a": {"bits": 5}}}, "bits must be 2 or 3 or 4 or 8, got 5"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format must be absent"),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int64"}, "pack_dtype must be 'int32', got 'int64'"),
        (
            {"quant_method": "gptq", "bits": 4, "format": "gptq", "checkpoint_format": "gptq_v2"},
            "format must be 'gptq_v2', which checkpoint_format is, got 'gptq'",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": ["a"]},
            "modules_in_block_to_quantize must be a list of lists",
        ),
        (
            {**AUTO_ROUND, "packing_format": "auto_round:llm_compressor"},
            "packing_format must be 'auto_round:auto_gptq'",
        ),
        ({**AUTO_ROUND, "data_type": "mx_fp"}, "data_type must be 'int', got 'mx_fp'"),
        ({**AUTO_ROUND, "act_bits": 8}, "act_bits must be 16 or more"),
        ({**AUTO_ROUND, "bits": 3}, "sym must be true where bits is 3"),
        ({**AUTO_ROUND, "extra_config": {"lm_head": 16}}, "extra_config must be a mapping of modules to mappings"),
        ({**AUTO_ROUND, "extra_config": {r".*(a)\1": {"bits": 8}}}, "extra_config must be a regular expression"),
        ({**AUTO_ROUND, "extra_config": {"a": {"bits": 5}}}, "bits must be 2 or 3 or 4 or 8, got 5"),
        ({"quant_method": "modelopt"}, "quant_algo must be 'FP8' or .*'MIXED_PRECISION', got None"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo must be .*, got 'NVFP4_AWQ'"),
        ({"quant_method": "modelopt", "quant_algo": ["FP8"]}, "quant_algo must be .*, got .'FP8'"),
        ({"quant_method": "modelopt", "quantization": []}, "quantization must be a mapping, got"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size must be 16, got 32"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": "lm_head"}, "ignore must be a list"),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 4, "type": "float"}},
            "kv_cache_scheme must be absent, or",
        ),
        (
            {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}},
            "kv_cache_quant_algo must be 'FP8' or absent, got 'NVFP4'",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": ["a"]},
            "quantized_layers must be a mapping of modules",
        ),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "W4"}},
            },
            "quant_algo must be .*'UNQUANTIZED', got 'W4'",
        ),
        ({"quant_method": "fp8", "scale_fmt": "e8"}, "scale_fmt must be 'float' or 'ue8m0', got 'e8'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt must be"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two whole numbers"),
        ({"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "static"}, "activation_scheme must"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": -1}, "activation_scale_ub must be a finite number"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 10**400}, "activation_scale_ub must be a finite number"),
    ],
)
def test_what_is_not_read_is_refused_by_its_field(changes, message):
    with pytest.raises(ModelConfigError, match=f"quantization_config: {message}"):
        read_hf(settings(**changes))


NVFP4_ROWS, MXFP4_ROWS = (
    FORMATS[f"ct {name} rows"][0]["config_groups"]["group_0"]["input_activations"] for name in ("nvfp4", "mxfp4")
)


@each_row(
    ("name", "weights", "rows", "message"),
    [
        ("nvfp4", {}, NVFP4_ROWS | {"num_bits": 8}, "input_activations must be .*, or absent, for nvfp4"),
        ("nvfp4", {}, NVFP4_ROWS | {"dynamic": True}, "input_activations must be .* dynamic 'local'"),
        ("nvfp4", {}, NVFP4_ROWS | {"group_size": 32}, "input_activations must be .*'group_size': 16"),
        ("nvfp4", {}, "all", "input_activations must be a mapping"),
        ("nvfp4", {"group_size": 32}, None, "group_size must be 16, got 32"),
        ("nvfp4", {"type": "int"}, None, "type must be 'float', got 'int'"),
        ("nvfp4", {"symmetric": False}, None, "symmetric must be True, got False"),
        ("nvfp4", {"strategy": "group"}, None, "strategy must be 'tensor_group', got 'group'"),
        ("mxfp4", {}, MXFP4_ROWS | {"dynamic": False}, "input_activations must be .* dynamic True"),
        ("mxfp4", {}, MXFP4_ROWS | {"type": "int"}, "input_activations must be .*'type': 'float'"),
        ("mxfp8 rows", {"num_bits": 4}, None, "num_bits must be 8, got 4"),
        ("mxfp8 rows", {}, MXFP4_ROWS, "input_activations must be .*'num_bits': 8"),
        ("mxfp4", {"group_size": 16}, None, "group_size must be 32, got 16"),
        ("mxfp4", {"strategy": "tensor_group"}, None, "strategy must be 'group', got 'tensor_group'"),
    ],
)
def test_other_kinds_of_four_bit_floats_are_refused_by_their_field(name, weights, rows, message):
    whole, _ = FORMATS[f"ct {name}"]
    group = whole["config_groups"]["group_0"]
    group = {**group, "weights": {**group["weights"], **weights}, "input_activations": rows}
    with pytest.raises(ModelConfigError, match=f"quantization_config: {message}"):
        read_hf(settings(**whole | {"config_groups": {"group_0": group}}))


@each_row("pattern", [r"re:(a)\1", "re:[", "re:(?>a)", "re:a++", "re:" + "a+" * 2500, "re:" + "(" * 60 + ")" * 60])
def test_regular_expressions_that_cannot_be_matched_are_refused(pattern):
    for settings_of in EXPRESSIONS.values():
        with pytest.raises(ModelConfigError, match="must be a regular expression"):
            read_hf(settings(**settings_of([pattern.removeprefix("re:")])))


def _with_targets(patterns):
    group = COMPRESSED["config_groups"]["group_0"]
    return COMPRESSED | {"config_groups": {"g": {**group, "targets": [f"re:{each}" for each in patterns]}}}


# Every field of a format whose names may be regular expressions.
EXPRESSIONS = {
    "ignore": lambda patterns: COMPRESSED | {"ignore": [f"re:{each}" for each in patterns]},
    "targets": _with_targets,
    "dynamic": lambda patterns: {
        "quant_method": "gptq",
        "bits": 4,
        "dynamic": {f"-:{each}": {} for each in patterns},
    },
    "extra_config": lambda patterns: (
        FORMATS["auto-round gptq"][0] | {"extra_config": {each: {"bits": 16} for each in patterns}}
    ),
}


@each_row("field", EXPRESSIONS)
def test_expressions_with_lookarounds_and_groups_choose_modules(field):
    chosen = read_hf(settings(**EXPRESSIONS[field]([r"^(?!.*mlp).*(?:q|k)_proj(?<!_k_proj)$"]))).quantization
    found = [type(chosen(f"model.layers.3.{name}")).__name__ for name in ("self_attn.q_proj", "self_attn.o_proj")]
    assert found == (["Quantized", "Plain"] if field == "targets" else ["Plain", "Quantized"])


@each_row("field", EXPRESSIONS)
def test_expressions_that_would_take_forever_end(field, monkeypatch):
    """Those that backtrack are matched; one that takes too many steps even so is one error."""
    chosen = read_hf(settings(**EXPRESSIONS[field](["(l+a*)+$", "((m|o|d|e|l|[.])*)*!"]))).quantization
    chosen("model.layers.3." + "l" * 60)
    chosen = read_hf(settings(**EXPRESSIONS[field](["(?:(?:(?:x|.?){200}){200}){200}!"]))).quantization
    monkeypatch.setattr(rules, "Effort", partial(Effort, 50_000))
    with pytest.raises(ModelConfigError, match="match this model's names in 50,000 steps"):
        for layer in range(1000):
            chosen(f"model.layers.{layer}.mlp.up_proj")


@each_row("entry", [r"model\.layers\.3\.self_attn", r".*(?:self_attn|x)$", "re:.*self_attn", "model.*.self_attn"])
def test_listed_modules_may_be_expressions(entry):
    """As in transformers' should_convert_module."""
    for own in ({"quant_method": "awq", "bits": 4}, {"quant_method": "fp8", "weight_block_size": [8, 8]}):
        chosen = read_hf(settings(**own, modules_to_not_convert=[entry])).quantization
        names = ("model.layers.3.self_attn", "model.layers.3.self_attn_other", "model.layers.3.mlp.up_proj")
        found = [type(chosen(name)).__name__ for name in names]
        assert found[0] == "Plain" and found[2] == "Quantized", found
