"""Delta nets of checkpoints that quantise q, k, v and z, and leave beta and the decay as they are."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.lora import LoraSpec
from jaxengine.models.layers.states.delta_net import GatedDeltaNet
from jaxengine.models.quantization.base.plain import PlainWeight
from jaxengine.models.quantization.base.table import weight_rows
from jaxengine.models.registry import build_model, read_folder
from jaxengine.models.weights.adapters.folder import read_adapter
from jaxengine.models.weights.adapters.pools import targets_of
from tests.fixtures.adapters import write_adapter
from tests.fixtures.drawn_weights import checkpoint
from tests.fixtures.quantized_models import FORMATS, Tensors
from tests.models.conftest import forward
from tests.models.families.test_adapters import loaded, with_slot
from tests.models.quantization import readings
from tests.models.quantization.emulation import FLIPPED
from tests.models.quantization.test_formats import SUMS, dequantized

NAMES = ("qwen3_next", "qwen3_5")
GATES = ("in_proj_ba", "in_proj_b", "in_proj_a")
PROMPT = np.random.default_rng(0).integers(0, 128, 30)


class RowsRounded(nnx.Module):
    """A plain matrix [in, out] of which the first `count` columns meet rows rounded to e4m3 by 48 inputs."""

    def __init__(self, plain: PlainWeight, count: int):
        self.plain, self.count = plain, count

    def matmul(self, x, *, contract=0, out_dtype=jnp.float32):
        groups = jnp.pad(x, ((0, 0), (0, -x.shape[1] % 48))).reshape(len(x), -1, 48)
        scales = jnp.maximum(jnp.abs(groups).max(axis=2, keepdims=True), 1e-30) / 448
        rounded = (groups / scales).astype(jnp.float8_e4m3fn).astype(jnp.float32) * scales
        rounded = rounded.reshape(len(x), -1)[:, : x.shape[1]]
        parts = (self.plain.matmul(rows, out_dtype=out_dtype) for rows in (rounded, x))
        return jnp.where(jnp.arange(self.plain.values.shape[1]) < self.count, *parts)


def write(folder: Path, name: str, form: str, *, kept: tuple[str, ...] = GATES) -> tuple[Path, Tensors]:
    """A recorded checkpoint with the matrices that attention and delta nets begin with quantised, but for `kept`; and
    the tensors of one with those matrices dequantised."""
    settings, writer = FORMATS[form]
    config = json.loads((checkpoint(name) / "config.json").read_text())
    settings = settings | {"modules_to_not_convert": [*kept, "out_proj", "o_proj", "mlp", "lm_head"]}
    plain, stored, rng = load_file(checkpoint(name) / "model.safetensors"), {}, np.random.default_rng(1)
    for tensor, values in plain.items():
        module, _, _ = tensor.rpartition(".")
        last = module.rpartition(".")[2]
        if last in kept or not (last.startswith("in_proj_") or last in ("q_proj", "k_proj", "v_proj")):
            stored[tensor] = values
            continue
        own = {f"{module}.{kind}": each for kind, each in writer(rng, *values.shape).items()}
        plain[tensor] = readings.matrix(own, module, settings, values.shape)
        stored |= {key: np.asarray(each, order="C") for key, each in own.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    save_file(stored, folder / "model.safetensors")
    return folder, plain


def plain_model(folder: Path, name: str, tensors: Tensors):
    save_file(tensors, folder / "plain.safetensors")
    return loaded(build_model(read_folder(checkpoint(name)), Build("float32")), folder / "plain.safetensors")


@pytest.fixture(autouse=True)
def forget_programs():
    yield
    forward.clear_cache()


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("qwen3_next", "fp8 block"),
        pytest.param("qwen3_5", "fp8 block", marks=pytest.mark.thorough("as the other family")),
        pytest.param("qwen3_5", "awq", marks=pytest.mark.thorough("as the other format")),
        pytest.param("qwen3_next", "awq", marks=pytest.mark.thorough("as the other family")),
    ],
)
def test_a_model_computes_what_the_checkpoint_says(tmp_path, name, form, paged_run):
    folder, tensors = write(tmp_path / name, name, form)
    model = loaded(build_model(read_folder(folder), Build("float32")), folder)
    plain = plain_model(tmp_path, name, tensors)
    first, reference = model.layers[0].attention, plain.layers[0].attention
    together = np.asarray(reference.inputs.weight.values[...])
    split = together.shape[1] - first.gates.weight.values[...].shape[1]
    np.testing.assert_array_equal(dequantized(first.inputs.weight), together[:, :split])
    np.testing.assert_array_equal(first.gates.weight.values[...], together[:, split:])

    if form == "fp8 block":
        for layer in plain.layers:
            is_delta = isinstance(layer.attention, GatedDeltaNet)
            linear = layer.attention.inputs if is_delta else layer.attention.qkv
            linear.weight = RowsRounded(linear.weight, split if is_delta else linear.weight.values.shape[1])
    logits, exact = (paged_run(each).step({"a": PROMPT}, num_tokens=40)["a"] for each in (model, plain))
    errors = np.abs(logits - exact).max(axis=1) / np.abs(exact).max()
    clear = errors < SUMS  # a code that a sum in another order has changed is in the state of later tokens too
    assert clear.all() if form == "awq" else errors.max() < FLIPPED and clear.mean() > 0.5
    np.testing.assert_array_equal(logits.argmax(1)[clear], exact.argmax(1)[clear])
    told = {row["modules"]: row["format"] for row in weight_rows([model], "cpu")}
    assert told["layers.*.attention.gates"] == "as it is" != told["layers.*.attention.inputs"]


@pytest.mark.parametrize("name", NAMES)
def test_one_product_where_all_are_stored_alike(tmp_path, name):
    folder, _ = write(tmp_path / name, name, "fp8 block", kept=())
    for each in (folder, checkpoint(name)):
        layers = build_model(read_folder(each), Build("float32")).layers
        nets = [layer.attention for layer in layers if isinstance(layer.attention, GatedDeltaNet)]
        assert nets and all(net.gates is None for net in nets)


def test_beta_and_the_decay_are_stored_alike(tmp_path):
    folder, _ = write(tmp_path / "qwen3_5", "qwen3_5", "fp8 block", kept=GATES[:2])
    with pytest.raises(ModelConfigError, match=r"one way, got \S*in_proj_b as it is, \S*in_proj_a as EightBits"):
        build_model(read_folder(folder), Build("float32"))


@pytest.mark.thorough("adapters beside quantised weights are in tests/jaxengine/engine/test_lora_beside.py")
@pytest.mark.parametrize(
    "name", ["qwen3_5", pytest.param("qwen3_next", marks=pytest.mark.thorough("as the other family"))]
)
def test_adapters_of_both_products(tmp_path, name, paged_run):
    folder, tensors = write(tmp_path / name, name, "awq")
    model = build_model(read_folder(folder), Build("float32", lora=LoraSpec(3, 4)))
    targets = targets_of([model])
    shapes = {module: shape[::-1] for module, shape in targets.shapes.items() if ".linear_attn.in_proj_" in module}
    assert {module.rpartition(".")[2] for module in shapes} & {*GATES}
    adapter = write_adapter(tmp_path / "adapter", shapes, seed=5, r=3, lora_alpha=3, target_modules="all-linear")
    run = paged_run(with_slot(loaded(model, folder), read_adapter(adapter, targets, 4, "float32"), 1))
    found = run.step({"a": PROMPT, "b": PROMPT}, num_tokens=80, adapters={"a": 1})
    without = paged_run(plain_model(tmp_path, name, tensors)).step({"b": PROMPT}, num_tokens=80)["b"]
    matrices = load_file(adapter / "adapter_model.safetensors")
    for module in shapes:
        prefix = f"base_model.model.{module}"
        tensors[f"{module}.weight"] += matrices[f"{prefix}.lora_B.weight"] @ matrices[f"{prefix}.lora_A.weight"]
    merged = paged_run(plain_model(tmp_path, name, tensors)).step({"a": PROMPT}, num_tokens=80)["a"]
    assert np.abs(found["a"] - merged).max() < SUMS * np.abs(merged).max()
    assert np.abs(found["b"] - without).max() < SUMS * np.abs(without).max()
    assert np.abs(merged - without).max() > 1e-2 * np.abs(without).max()
