"""Checkpoints that stack the experts of a layer in e4m3, beside an independent reading in NumPy."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxengine.checkpoint.stored_head import with_stored_head
from jaxengine.models.build import Build
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import StackedExperts
from jaxengine.models.registry import build_model, read_hf
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from jaxengine.models.weights.views.stacked import StackedSource
from tests.fixtures.drawn_weights import FOLDER, checkpoint
from tests.models.weights.test_load import ArraySource

# Recorded checkpoints, whether their matrices are [out, in], and what they call the two stacks.
FAMILIES = {
    "qwen3_vl_moe_vision": (True, ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")),
    "llama4": (False, ("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj")),
    "granite_hybrid": (True, ("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight")),
}


def drawn(name: str) -> dict[str, np.ndarray]:
    source = SafetensorsCheckpoint(checkpoint(name))
    tensors = {each: source.read(each) for each in source.names()}
    source.close()
    return tensors


def in_fp8(name: str, block: tuple[int, int] | None, *, static: bool = False) -> dict[str, np.ndarray]:
    """The checkpoint with e4m3 in its stacks, whose blocks [rows, columns] of outputs and inputs have any scales."""
    out_first, ends = FAMILIES[name]
    tensors, rng = drawn(name), np.random.default_rng(0)
    for stack in [each for each in tensors if each.endswith(ends)]:
        tensors[stack] = (64 * tensors[stack]).astype(ml_dtypes.float8_e4m3fn)
        experts, *matrix = tensors[stack].shape
        sizes = (
            [1, 1]
            if block is None
            else [-(-size // each) for size, each in zip(matrix, block if out_first else block[::-1], strict=True)]
        )
        tensors[f"{stack}_scale_inv"] = rng.uniform(0.001, 0.1, (experts, *sizes)).astype(np.float32)
        if static:
            tensors[f"{stack}_activation_scale"] = rng.uniform(0.01, 0.1, experts).astype(np.float32)
    return tensors


def raw_config(name: str, tensors: dict[str, np.ndarray], block: tuple[int, int] | None, *, static: bool = False):
    """The checkpoint's configuration, which says that of its matrices only experts are quantised."""
    plain = [each.removesuffix(".weight") for each in tensors if each.endswith(".weight") and tensors[each].ndim == 2]
    plain = [each for each in plain if tensors[f"{each}.weight"].dtype != ml_dtypes.float8_e4m3fn]
    stored = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "static" if static else "dynamic"}
    stored |= {} if block is None else {"weight_block_size": [*block]}
    return {**read_config_json(FOLDER / name), "quantization_config": {**stored, "modules_to_not_convert": plain}}


def loaded(raw, tensors: dict[str, np.ndarray]):
    source = ArraySource(tensors)
    return load_params(build_model(with_stored_head(read_hf(raw), raw, source), Build("float32")), source)


def stacks_of(name: str, tensors: dict[str, np.ndarray], number: int) -> list[str]:
    return sorted(each for each in tensors if each.endswith(FAMILIES[name][1][number]))


def experts_of(state) -> list:
    return [
        layer["mlp"] for layer in state["layers"].values() if "gate_up" in layer["mlp"] and "router" in layer["mlp"]
    ]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("block", [(8, 8), (8, 24), None], ids=["blocks", "cut off blocks", "tensors"])
def test_weights_are_those_of_an_independent_reading(name, block):
    """Bit for bit, and the codes as they are stored."""
    tensors, out_first = in_fp8(name, block), FAMILIES[name][0]
    layers = experts_of(loaded(raw_config(name, tensors, block), tensors))
    assert len(layers) == len(stacks_of(name, tensors, 0)) > 0
    for number, kind in enumerate(("gate_up", "down")):
        for layer, stack in zip(layers, stacks_of(name, tensors, number), strict=True):
            codes, scales = tensors[stack], tensors[f"{stack}_scale_inv"]
            for axis, size in enumerate(codes.shape[1:], 1):
                # Of outputs or of inputs, whichever this axis of the stack is.
                length = size if block is None else block[axis - 1 if out_first else 2 - axis]
                scales = scales.repeat(length, axis)[(slice(None),) * axis + (slice(0, size),)]
            values = codes.astype(np.float32) * scales
            if out_first:
                codes, values = codes.swapaxes(1, 2), values.swapaxes(1, 2)
            held = layer[kind]["codes"][...]
            np.testing.assert_array_equal(np.asarray(held).view(np.uint8), codes.view(np.uint8))
            held_scales = np.asarray(layer[kind]["scales"][...])
            held_scales = held_scales.repeat(held.shape[1] // held_scales.shape[1], axis=1)
            np.testing.assert_array_equal(np.asarray(held, np.float32) * held_scales, values)


def one_by_one(name: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same with tensors of each expert, as most checkpoints of e4m3 have them."""
    out_first, ends = FAMILIES[name]
    made = {each: values for each, values in tensors.items() if not any(end in each for end in ends)}
    kinds = {"": "weight", "_scale_inv": "weight_scale_inv", "_activation_scale": "activation_scale"}
    for stack in stacks_of(name, tensors, 0) + stacks_of(name, tensors, 1):
        prefix, _, stem = stack.rpartition(".")
        modules = ("gate_proj", "up_proj") if stem == "gate_up_proj" else ("down_proj",)
        for end, kind in kinds.items():
            for expert, values in enumerate(tensors.get(stack + end, ())):
                turned = np.atleast_1d(values) if out_first else np.atleast_1d(values).T
                parts = [turned] * len(modules) if len(turned) == 1 else np.split(turned, len(modules))
                made |= {
                    f"{prefix}.{expert}.{module}.{kind}": part for module, part in zip(modules, parts, strict=True)
                }
    return made


@pytest.mark.parametrize("name", ["qwen3_vl_moe_vision", "llama4"])
@pytest.mark.parametrize(("block", "static"), [((8, 8), False), (None, False), (None, True)])
def test_a_stack_is_its_experts(name, block, static):
    """The whole state, scales of inputs too."""
    tensors = in_fp8(name, block, static=static)
    raw = raw_config(name, tensors, block, static=static)
    stacked, apart = loaded(raw, tensors), loaded(raw, one_by_one(name, tensors))
    assert ("input_scale" in experts_of(stacked)[0]["gate_up"]) == static
    jax.tree.map(np.testing.assert_array_equal, stacked, apart)


def test_the_same_whichever_way_round_it_lies():
    """Qwen3-VL's are published [in, out], and recorded as transformers 5 writes them."""
    name = "qwen3_vl_moe_vision"
    tensors = in_fp8(name, (8, 8))
    turned = {each: np.ascontiguousarray(v.swapaxes(1, 2)) if v.ndim == 3 else v for each, v in tensors.items()}
    raw = raw_config(name, tensors, (8, 8))
    jax.tree.map(np.testing.assert_array_equal, loaded(raw, tensors), loaded(raw, turned))


@pytest.mark.parametrize("out_first", [False, True])
def test_parts_of_a_stack(out_first):
    """As devices that share a matrix ask for them, of weights and of their scales."""
    rng, prefix = np.random.default_rng(0), "model.layers.0.mlp.experts"
    codes, scales = rng.integers(0, 100, (3, 48, 64)), rng.random((3, 6, 8), np.float32)
    held = {"gate_up_proj": codes.astype(ml_dtypes.float8_e4m3fn), "gate_up_proj_scale_inv": scales}
    turned = {f"{prefix}.{each}": v if out_first else v.swapaxes(1, 2) for each, v in held.items()}
    source = StackedSource(ArraySource(turned), StackedExperts(out_first=out_first), 3)
    for kind, stack, sizes in (("weight", held["gate_up_proj"], (24, 64)), ("weight_scale_inv", scales, (3, 8))):
        for expert in range(3):
            for first, module in ((0, "gate_proj"), (sizes[0], "up_proj")):
                name = f"{prefix}.{expert}.{module}.{kind}"
                assert source.shape(name) == sizes
                for rows, columns in ((slice(None), slice(None)), (slice(1, 3), slice(2, 7))):
                    expected = stack[expert, first : first + sizes[0]][rows, columns]
                    np.testing.assert_array_equal(source.read(name, rows, columns), expected)


def test_blocks_of_rows_of_gate_and_of_up():
    """24 rows each: of 16 in a block the second has eight of both, or is cut off in gate; the numbers may not tell."""
    name = "qwen3_vl_moe_vision"
    tensors = in_fp8(name, (16, 16))
    raw = raw_config(name, tensors, (16, 16))
    with pytest.raises(ModelFileError, match="gate and up must be equally many rows, got 3 .* .at .*_proj_scale_inv"):
        loaded(raw, tensors)
    tensors = in_fp8(name, (40, 40))
    raw = raw_config(name, tensors, (40, 40))
    with pytest.raises(ModelFileError, match="blocks of 40 of the 48 rows of gate and up have rows of both, which is"):
        loaded(raw, tensors)
    # Of gate and up each, and no other way to read them.
    tensors = in_fp8(name, (16, 16))
    for stack in stacks_of(name, tensors, 0):
        scales = tensors[f"{stack}_scale_inv"]
        tensors[f"{stack}_scale_inv"] = np.concatenate([scales[:, :2], scales[:, :2] / 2], axis=1)
    raw = raw_config(name, tensors, (16, 16))
    jax.tree.map(np.testing.assert_array_equal, loaded(raw, tensors), loaded(raw, one_by_one(name, tensors)))
    # One block of all of them.
    tensors = in_fp8(name, (64, 64))
    raw = raw_config(name, tensors, (64, 64))
    jax.tree.map(np.testing.assert_array_equal, loaded(raw, tensors), loaded(raw, one_by_one(name, tensors)))


def test_rows_that_take_turns_share_every_block():
    source = {
        "m.experts.gate_up_proj": np.zeros((2, 64, 32), ml_dtypes.float8_e4m3fn),
        "m.experts.gate_up_proj_scale_inv": np.ones((2, 8, 4), np.float32),
    }
    name = "qwen3_vl_moe_vision"
    scheme = read_hf(raw_config(name, drawn(name), (8, 8))).quantization
    with pytest.raises(ModelFileError, match="have rows of both, which is not read .at m.experts.gate_up_proj_scale_"):
        StackedSource(ArraySource(source), StackedExperts(interleaved=True), 2, scheme=scheme)


DOWN = "model.language_model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({f"{DOWN}_scale_inv": None}, r"a tensor of fp8 is missing \(at .*down_proj.weight_scale\)"),
        ({DOWN: None}, rf"is missing \(at {DOWN}\)"),
        ({f"{DOWN}_scale_inv": np.ones((6, 7, 3), np.float32)}, r"shape must be \(8, 3\) for fp8, got \(7, 3\)"),
        ({f"{DOWN}_scale_inv": np.ones((5, 8, 3), np.float32)}, "must be a stack of the scales of 6 experts"),
        ({f"{DOWN}_scale_inv": np.ones(6, np.float32)}, "must be a stack of the scales of 6 experts"),
        ({f"{DOWN}_scale_inv": np.full((6, 8, 3), np.inf, np.float32)}, "192 of 192 scales are not finite numbers"),
        ({f"{DOWN}_activation_scale": np.ones((6, 1), np.float32)}, "must be a stack of the scales of 6 experts"),
        ({f"{DOWN}_activation_scale": np.ones(6, np.float32)}, rf"no use .*\(at {DOWN}_activation_scale"),
        ({DOWN: np.ones((6, 64, 24), np.float32)}, rf"must hold float8_e4m3fn, got float32, as .* \(at {DOWN}\)"),
        # ModelOpt's, which are not read of stacks.
        (
            {f"{DOWN}_weight_scale": np.ones(6, np.float32)},
            "is not a tensor of stacked experts that can be read; allowed: ",
        ),
    ],
)
def test_refused(changes, said):
    name = "qwen3_vl_moe_vision"
    tensors = in_fp8(name, (8, 8))
    raw = raw_config(name, tensors, (8, 8))
    tensors = {each: values for each, values in (tensors | changes).items() if values is not None}
    with pytest.raises(ModelFileError, match=said):
        loaded(raw, tensors)


def test_codes_are_no_weights_where_nothing_says_what_they_are():
    name = "qwen3_vl_moe_vision"
    tensors = in_fp8(name, (8, 8))
    raw = raw_config(name, tensors, (8, 8))
    raw.pop("quantization_config")
    with pytest.raises(
        ModelFileError, match="no use for this tensor, as .* .at model.language_model.layers.0.*_scale_inv"
    ):
        loaded(raw, tensors)
