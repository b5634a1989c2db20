"""Rows that the kernels of experts multiply, for each row that a token has there: tiles are shared, or not full.

    python -m benchmarks.expert_tiles [--tokens 8 128 1024 8192] [--json FILE]

Every token goes to as many experts as the model has it go to, each as likely as another; the kernels' own lists of
tiles are counted. Needs no device. Of few rows an expert's matrix takes longer to read than to multiply with.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxengine.bench.report import table, write_json
from jaxengine.check.shapes import SHAPES
from pallas_kernels.matmul.grouped_tiles import tile_rows_of
from pallas_kernels.matmul.hopper import grouped as hopper
from pallas_kernels.matmul.tpu import grouped as tpu
from pallas_kernels.tuning import HopperProducts, TpuProducts

MODELS = ("qwen3-moe-30b-a3b", "gpt-oss-120b", "deepseek-v3")


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
    tile = min(num_rows, tile_rows_of(num_rows, count), TpuProducts().group_rows)
    visits = tpu.visits_of(sizes, num_rows, tile)
    row |= {"TPU tile": tile, "TPU ratio": int(visits.products[0]) * tile / num_rows}
    tile = hopper.tile_rows_of(num_rows, count, HopperProducts().rows)
    tiles = hopper.tiles_of(sizes, num_rows, tile)
    return row | {"Hopper tile": tile, "Hopper ratio": int((tiles.groups >= 0).sum()) * tile / num_rows}


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
