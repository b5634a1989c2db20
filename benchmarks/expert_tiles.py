"""Rows that the kernels of experts multiply, for each row that a token has there: tiles are shared, or not full.

    python -m benchmarks.expert_tiles [--tokens 8 128 1024 8192] [--json FILE]

Every token goes to as many experts as the model has it go to, each as likely as another; the kernels' own lists of
tiles are counted, of gate and up. Needs no device. Of few rows an expert's matrix takes longer to read than to multiply
with.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.bench.report import table, write_json
from jaxengine.check.shapes import SHAPES
from pallas_kernels.matmul.hopper import grouped as hopper
from pallas_kernels.matmul.hopper import shape as hopper_shape
from pallas_kernels.matmul.tpu import grouped as tpu
from pallas_kernels.tuning import HopperProducts, TpuProducts

# Codes, inputs of a scale (0 for all) and what rows are given as: as published, of Qwen3 as `--quantization int8` makes
# them.
MODELS = {
    "qwen3-moe-30b-a3b": ("int8", 0, "bfloat16"),
    "gpt-oss-120b": ("int8", 32, "bfloat16"),
    "deepseek-v3": ("float8_e4m3fn", 128, "float8_e4m3fn"),
}


def measure(model: str, num_tokens: int) -> dict[str, Any]:
    """The row of a model's layer of experts, all of which one device has."""
    experts = SHAPES[model].experts
    assert experts is not None
    count, k = experts.num_experts, experts.num_per_token
    scores = np.random.default_rng(0).random((num_tokens, count))
    picked = np.argpartition(scores, k, axis=1)[:, :k]
    sizes = jnp.asarray(np.bincount(picked.ravel(), minlength=count), jnp.int32)
    num_rows = num_tokens * k
    row: dict[str, Any] = {"model": model, "tokens": num_tokens, "rows": num_rows, "experts": int((sizes > 0).sum())}
    width, out, (codes, group, rows) = SHAPES[model].hidden_size, experts.intermediate_size, MODELS[model]
    num_scales, dtypes = width // (group or width), (jnp.dtype(rows), jnp.dtype(codes))
    gated = not tpu.why_apart(out)
    of_both = out if gated else 2 * out
    shape = tpu.shape_of(num_rows, width, of_both, num_scales, count, *dtypes, TpuProducts(), gated=gated)
    visits = jax.device_get(jax.jit(tpu.visits_of, static_argnums=(1, 2))(sizes, num_rows, shape.rows))
    blocks = "|".join(map(str, shape.blocks))
    row |= {"TPU tile": shape.rows, "TPU blocks": blocks, "TPU visits": int(visits.products[0])}
    row["TPU ratio"] = multiplied_rows(visits, shape) / num_rows
    most = hopper_shape.most_rows(width, num_scales, dtypes[1], HopperProducts().rows)
    tile = hopper.tile_rows_of(num_rows, count, most)
    step = hopper_shape.step_of(tile, tensor_memory=False)
    listed = jax.jit(hopper.tiles_of, static_argnums=(1, 2, 3))(sizes, num_rows, tile, step)
    tiles = np.asarray(listed.tiles).reshape(-1, 3)
    rows = int(tiles[tiles[:, 0] >= 0, 2].sum()) * step
    return row | {"Hopper tile": tile, "Hopper ratio": rows / num_rows}


def multiplied_rows(visits: tpu.Visits, shape: tpu.Shape) -> int:
    """What the TPU kernel multiplies: of each visit blocks from the group's first row in the tile on."""
    total, most = 0, shape.blocks[-1]
    for visit in range(int(visits.products[0])):
        group, before = visits.group[visit], int(visits.tile[visit]) * shape.rows
        first, last = int(visits.starts[group]) - before, int(visits.ends[group]) - before
        whole, rest = divmod(min(last, shape.rows) - max(first, 0) // tpu.STEP * tpu.STEP, most)
        total += whole * most + min((block for block in shape.blocks if block >= rest), default=0) * (rest > 0)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 128, 1024, 8192])
    parser.add_argument("--json")
    options = parser.parse_args()
    rows = [measure(model, tokens) for model in MODELS for tokens in options.tokens]
    print(table(rows))
    write_json(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
