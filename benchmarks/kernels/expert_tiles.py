"""Rows that expert kernels multiply, for each row that tokens bring: tiles are shared between experts, or not full.

Every token goes to as many experts as in the model, each equally likely; the tiles that the kernels themselves list are
counted, for the gate and up products, on a device that has all experts. `jaxengine check` reports the same of its
steps. Needs no device. With few rows an expert's matrix takes longer to read than to multiply with.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness import Option
from benchmarks.recorder import Recorder
from jaxengine.check.model.shapes import SHAPES
from jaxengine.models.layers.experts.expert_counts import routed
from jaxengine.pallas_kernels.registry import group_kernel

# Dtype of codes, inputs that share a scale (0 for all), and dtype of rows: as published, for Qwen3 as
# `--quantization int8` quantises it.
MODELS = {
    "qwen3-moe-30b-a3b": ("int8", 0, "bfloat16"),
    "gpt-oss-120b": ("int8", 32, "bfloat16"),
    "deepseek-v3": ("float8_e4m3fn", 128, "float8_e4m3fn"),
}
KERNELS = {"TPU": "tpu", "Hopper": "gpu"}
OPTIONS = {"tokens": Option((8, 128, 1024, 8192), "of a step")}


def measure(model: str, num_tokens: int) -> dict[str, Any]:
    """Return the row of one layer of a model's experts, all on one device: how many experts get rows, and for each
    kernel the rows that the gated product multiplies, and their ratio to the tokens' rows.

    num_tokens: tokens of the step, each of which goes to the model's number of experts.
    """
    experts = SHAPES[model].experts
    assert experts is not None
    count, k = experts.num_experts, experts.num_per_token
    sizes, num_rows = routed(num_tokens, count, k), num_tokens * k
    row: dict[str, Any] = {"model": model, "tokens": num_tokens, "rows": num_rows, "experts": int((sizes > 0).sum())}
    size, (codes, group, rows) = SHAPES[model].hidden_size, MODELS[model]
    num_scales = size // (group or size)
    matrices = (count, size, 2 * experts.intermediate_size), (count, num_scales, 2 * experts.intermediate_size)
    for name, platform in KERNELS.items():
        kernel = group_kernel(platform)
        step = kernel.group_step(num_rows, count)  # as jaxengine.models.layers.experts.expert_rows fills groups up
        most = num_rows + count * (step - 1)
        x, scaled = jax.ShapeDtypeStruct((most, size), rows), rows == codes
        of_rows = x, jax.ShapeDtypeStruct((most, num_scales), jnp.float32) if scaled else None
        of_codes = map(jax.ShapeDtypeStruct, matrices, (jnp.dtype(codes), jnp.dtype(jnp.float32)))
        multiplied = kernel.multiplied_rows(sizes + -sizes % step, *of_rows, *of_codes, gated=True)
        row |= {f"{name} rows": multiplied, f"{name} ratio": multiplied / num_rows}
    return row


def run(args: Namespace, recorder: Recorder) -> None:
    for model in MODELS:
        for tokens in args.tokens:
            recorder.add(measure(model, tokens))
