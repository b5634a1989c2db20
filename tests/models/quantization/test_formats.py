"""Every quantised format: weights bit for bit as an independent reading has them, and what a model makes of them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jaxengine.models.build import Build
from jaxengine.models.params.declare import declared_params
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.quantization.base.plain import PlainWeight
from jaxengine.models.quantization.base.quantized import QuantizedWeight
from jaxengine.models.quantization.base.table import weight_rows, weight_table
from jaxengine.models.quantization.registry import read_quantization, rounded
from jaxengine.models.registry import build_model, read_folder
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from jaxengine.models.weights.views.quantized import QuantizedSource
from jaxengine.sharding.layout import MeshLayout
from tests.fixtures.drawn_weights import FOLDER
from tests.fixtures.quantized_models import FORMATS, shapes_of, write
from tests.models.quantization import readings
from tests.models.quantization.emulation import FLIPPED, MIDDLE, decoder_of

# What float32 sums in another order are off by, of the largest logit; zero points lose most.
SUMS = 1e-5
PROMPTS = np.random.default_rng(0).integers(0, 48, (4, 13))
WITH_EXPERTS = (
    "ct float tensor static",
    "ct int channel token",
    "ct packed 4 asymmetric",
    "fp8 block",
    "gptq 4",
    "bnb nf4 nested",
    "modelopt nvfp4",
    "gptq 4 v2 act-order",
)
CASES = [(name, False) for name in FORMATS] + [(name, True) for name in WITH_EXPERTS]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(format, experts) -> the folder."""

    @cache
    def folder(name: str, experts: bool) -> Path:
        return write(tmp_path_factory.mktemp("quantized"), name, experts=experts)

    return folder


def loaded(folder: Path):
    model = build_model(read_folder(folder), Build("float32"))
    source = SafetensorsCheckpoint(folder)
    nnx.update(model, load_params(model, source))
    source.close()
    return model


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    source = SafetensorsCheckpoint(folder)
    return {name: source.read(name) for name in source.names()}


@cache
def read_matrices(folder: Path) -> dict[str, np.ndarray]:
    """Every quantised matrix [out, in] by its module, as `readings` has it."""
    config, tensors = json.loads((folder / "config.json").read_text()), tensors_of(folder)
    settings = config["quantization_config"]
    return {module: readings.matrix(tensors, module, settings, shape) for module, shape in shapes_of(config).items()}


def weights_of(model) -> dict[str, QuantizedWeight | PlainWeight]:
    """Those of layers, but of norms and routers."""
    return {
        name: weight
        for path, weight in nnx.iter_graph(model)
        if isinstance(weight, QuantizedWeight | PlainWeight)
        and (name := ".".join(map(str, path))).startswith("layers")
        and "router" not in name
    }


def dequantized(weight: QuantizedWeight | PlainWeight) -> np.ndarray:
    """f32 [..., in, out], inputs in the order of the layer."""
    if isinstance(weight, PlainWeight):
        return np.asarray(weight.values[...])
    codes, scales = np.asarray(weight.codes[...]), np.asarray(weight.scales[...])
    if codes.dtype == np.uint8:  # two inputs a byte, the first in the low bits; four bits and a sign
        pairs = np.stack([codes & 15, codes >> 4], axis=-2).reshape(*codes.shape[:-2], -1, codes.shape[-1])
        codes = np.where(pairs < 8, pairs.astype(np.int8), pairs.astype(np.int8) - 16)
    codes = codes.astype(np.float32)
    group = codes.shape[-2] // scales.shape[-2]
    values = codes * np.repeat(scales, group, axis=-2)
    if weight.zeros is not None:
        values -= np.repeat(np.asarray(weight.zeros[...]), group, axis=-2)
    if weight.order is not None:
        places = np.argsort(np.asarray(weight.order[...]), axis=-1)
        values = np.take_along_axis(values, places[..., None], axis=-2)
    return values


@pytest.mark.parametrize(("name", "experts"), CASES)
def test_weights_are_those_of_an_independent_reading(written, name, experts):
    model, matrices = loaded(written(name, experts)), read_matrices(written(name, experts))
    weights = weights_of(model)
    assert len(weights) == 4
    kept = PlainWeight if name.startswith("bnb") else QuantizedWeight
    assert {type(weight) for weight in weights.values()} == {kept}
    for param in declared_params(model):
        held, _, kind = param.name.rpartition(".")
        if held not in weights or kind not in ("codes", "values"):
            continue
        modules = [source.name.rpartition(".")[0] for source in param.decl.sources]
        numbers = range(param.decl.num_experts or 1)
        stack = [np.concatenate([matrices[m.replace("{expert}", str(e))] for m in modules]).T for e in numbers]
        expected = np.stack(stack) if param.decl.num_experts else stack[0]
        np.testing.assert_array_equal(dequantized(weights[held]), expected)


def test_experts_that_bitsandbytes_has_left_as_they_are(written, tmp_path):
    """transformers 5 has them as parameters, which bitsandbytes does not quantise and no field lists."""
    folder, values = written("bnb nf4 nested", True), np.random.default_rng(3).standard_normal((64, 64), np.float32)
    tensors = {name: value for name, value in tensors_of(folder).items() if ".experts.2.down_proj." not in name}
    plain = "model.layers.0.mlp.experts.2.down_proj.weight"
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors | {plain: values}, tmp_path / "model.safetensors")
    before, found = (weights_of(loaded(each))["layers.0.mlp.down"] for each in (folder, tmp_path))
    np.testing.assert_array_equal(dequantized(found)[2], values.T)
    np.testing.assert_array_equal(dequantized(found)[[0, 1, 3]], dequantized(before)[[0, 1, 3]])
    save_file(tensors | {plain: values.astype(np.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=f"must hold floating-point numbers, got int32 .at {plain}"):
        loaded(tmp_path)


@pytest.mark.parametrize("name", ["bnb nf4 nested", "ct int channel token", "fp8 block"])
def test_routers_that_tools_have_quantised_are_dequantised(written, tmp_path, name):
    """Older transformers had them as linear layers, which not every configuration lists as plain."""
    folder = written(name, True)
    config, tensors, module = (
        json.loads((folder / "config.json").read_text()),
        tensors_of(folder),
        "model.layers.0.mlp.gate",
    )
    plain, shape = tensors.pop(f"{module}.weight"), (config["num_experts"], config["hidden_size"])
    drawn = FORMATS[name][1](np.random.default_rng(5), *shape)
    tensors |= {f"{module}.{kind}": np.asarray(values, order="C") for kind, values in drawn.items()}
    config["quantization_config"] |= {"ignore": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    before, found = (np.asarray(loaded(each).layers[0].mlp.router.values[...]) for each in (folder, tmp_path))
    np.testing.assert_array_equal(before, plain.T)
    np.testing.assert_array_equal(found, readings.matrix(tensors, module, config["quantization_config"], shape).T)


@pytest.mark.parametrize(("name", "kept"), [("bnb fp4", "bitsandbytes fp4, dequantised"), ("awq", "awq")])
def test_what_people_are_told_of_it(written, name, kept):
    folder = written(name, False)
    source = SafetensorsCheckpoint(folder)
    model = build_model(read_folder(folder), Build("float32"))
    rows = weight_rows([model], "cpu")
    formats = {row["modules"]: row["format"] for row in rows}
    assert {module for module, told in formats.items() if told == "as it is"} == {"embed", "lm_head"}
    assert {*formats.values()} == {"as it is", kept}
    held = nnx.to_flat_state(load_params(model, source))
    source.close()
    sizes = [param.get_value().nbytes for path, param in held if "norm" not in str(path)]
    assert sum(row["bytes"] for row in rows) == sum(sizes)


def test_what_people_are_told_of_tables_and_of_matrices_of_heads():
    """Of a token table that nothing is multiplied with, and of kv_b_proj, which devices hold dequantised."""
    config = read_folder(FOLDER / "deepseek_v3")
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    told = []
    for quantization in (rounded("int8"), read_quantization(settings)):
        rows = weight_rows([build_model(replace(config, quantization=quantization), Build("float32"))], "cpu")
        told.append({row["modules"]: (row["format"], row["product"]) for row in rows})
    assert [each["layers.*.attention.w_uk"] for each in told] == [
        ("as it is", "matmul.batched"),
        ("fp8, dequantised", "matmul.batched"),
    ]
    assert told[0]["embed"] == ("as it is", "none: rows are looked up")
    assert told[0]["lm_head"] == ("as it is", "matmul.cpu.dense")
    tied = weight_rows([build_model(read_folder(FOLDER / "llama"), Build("float32"))], "cpu")
    assert tied[0]["modules"] == "embed" and tied[0]["product"] == "matmul.cpu.dense"
    assert weight_table(tied) == ""
    own = weight_rows(
        [build_model(replace(config, quantization=rounded("int8")), Build("float32"))], "cpu", prefix="x: "
    )
    table, sums = weight_table([*tied, *own]).rsplit("\n", 1)
    assert "  x: layers.*.mlp.gate_up " in table
    assert (
        sums.split(", ")[0]
        == f"  float32 {sum(row['bytes'] for row in [*tied, *own] if row['dtype'] == 'float32') / 2**20:,.1f} MiB"
    )


def read_part(held: QuantizedSource, module: str, rows: slice, half: bool) -> np.ndarray:
    """f32 [rows, in] of some outputs of a module, or of the second half of the inputs, by what a device reads of it."""

    def read(kind: str) -> np.ndarray:
        count = held.shape(name := f"{module}.weight:{kind}")[1]
        return held.read(name, rows, slice(count // 2 if half else 0, count))

    kinds = {name.rpartition(":")[2] for name in held.names() if name.startswith(f"{module}.weight:")}
    if "pairs" in kinds:
        pairs = read("pairs")
        codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), -1).astype(np.int8)
        codes = np.where(codes < 8, codes, codes - 16)
    else:
        codes = read("codes")
    each = codes.shape[1] // read("scales").shape[1]
    values = codes.astype(np.float32) * np.repeat(read("scales"), each, axis=1)
    return values - np.repeat(read("zeros"), each, axis=1) if "zeros" in kinds else values


@pytest.mark.parametrize("name", ["ct float tensor static", "ct packed 4 asymmetric", "ct mxfp4", "awq", "gptq 3"])
def test_parts_that_two_devices_read_are_those_of_the_whole(written, name):
    """Split by outputs or by inputs; three groups of 32 inputs are six of 16 then, of which each device has three."""
    folder = written(name, False)
    source = SafetensorsCheckpoint(folder)
    model = build_model(read_folder(folder), Build("float32", MeshLayout(model=2)))
    held = QuantizedSource(source, declared_params(model), model.build.scheme)
    for module, matrix in read_matrices(folder).items():
        out, size = matrix.shape
        np.testing.assert_array_equal(read_part(held, module, slice(out // 2, out), False), matrix[out // 2 :], module)
        np.testing.assert_array_equal(read_part(held, module, slice(0, out), True), matrix[:, size // 2 :], module)
    source.close()
    scales = held.shape("model.layers.0.mlp.down_proj.weight:scales")[1]
    assert scales == (1 if name == "ct float tensor static" else 6)


# A program of each kind always.
KINDS = (
    "ct float tensor static",
    "ct float block group",
    "ct int channel token",
    "awq",
    "gptq 4 v2 act-order",
)
COMPUTED_EXPERTS = ("ct packed 4 asymmetric", "gptq 4 v2 act-order")
COMPUTED = [
    pytest.param(name, False, marks=[] if name in KINDS else pytest.mark.thorough("as another format"))
    for name in FORMATS
] + [
    pytest.param(name, True, marks=[] if name in COMPUTED_EXPERTS else pytest.mark.thorough("as the dense one"))
    for name in (*WITH_EXPERTS[:3], *WITH_EXPERTS[-2:])
]


@pytest.mark.parametrize(("name", "experts"), COMPUTED)
def test_a_model_computes_what_the_checkpoint_says(written, name, experts, paged_run):
    """As NumPy does (emulation.py), which rounds inputs where the format says so.

    What a float32 sum in another order moves across the middle between two codes changes the code, and with it all that
    follows: such tokens may differ, others not.
    """
    folder = written(name, experts)
    model, reference, num_clear = loaded(folder), decoder_of(folder), 0
    for prompt in PROMPTS:
        got = paged_run(model).step({"a": prompt}, num_tokens=16)["a"]
        exact = reference.logits(prompt.tolist())
        assert np.ptp(exact) > 1
        errors = np.abs(got - exact).max(axis=1) / np.abs(exact).max()
        assert errors[reference.near > MIDDLE].max(initial=0) < SUMS, errors
        assert errors.max() < FLIPPED, errors
        clear = errors < SUMS
        num_clear += clear.sum()
        np.testing.assert_array_equal(got.argmax(1)[clear], exact.argmax(1)[clear])
    assert num_clear > 0.9 * np.size(PROMPTS)
