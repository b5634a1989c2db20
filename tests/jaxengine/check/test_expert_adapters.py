"""What adapters of experts need of a step: memory for every slot and expert, work for the pairs that rows meet."""

from __future__ import annotations

import dataclasses

import pytest

from jaxengine.check.model.roofline import product_work
from jaxengine.check.model.shapes import SHAPES
from jaxengine.models.build import Build
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.lora import LoraSpec
from jaxengine.models.lora import declared_pools
from jaxengine.models.registry import build_model
from jaxengine.scheduler.batches.buckets import Bucket
from jaxengine.sharding.layout import MeshLayout
from tests.models.tiny import with_attention

EXPERTS = ExpertsConfig(num_experts=8, num_per_token=2, intermediate_size=32)
PAIRS = 8 * (2 * 1024 + 2 * 32) + 8 * (32 + 1024)  # of one expert and slot: gate and up, down


@pytest.mark.parametrize(("slots", "layout", "rows"), [(4, MeshLayout(), 12), (64, MeshLayout(), 12), (4, None, 6)])
def test_a_row_meets_one_pair(slots, layout, rows):
    """Six tokens have twelve rows; of two devices with half of the experts each has six of these."""
    layout, shares = layout or MeshLayout(model=2, expert_parallel=True), 2 if layout is None else 1
    config = with_attention(SHAPES["qwen3-0.6b"], num_layers=1)
    config = dataclasses.replace(config, architecture="Qwen3MoeForCausalLM", vocab_size=1024, experts=EXPERTS)
    model = build_model(config, Build("bfloat16", layout, lora=LoraSpec(slots, 8)))
    dense = [pool for pool in declared_pools(model) if pool.decl.num_experts is None]
    bucket, plain = Bucket(6, 6), build_model(config, Build("bfloat16", layout))
    own, others = (product_work(each, bucket, "bfloat16") for each in (model, plain))
    of_dense = 0
    for pool in dense:
        split = [layout.num_shards(axis) if axis else 1 for axis in pool.decl.axes]
        of_dense += pool.shape[0] // split[0] * (pool.shape[1] // split[1])
    assert own.flops - others.flops == 2 * (6 * of_dense + rows * PAIRS)
    assert own.weight_bytes - others.weight_bytes == 2 * (of_dense + slots * 8 // shares * PAIRS)
    assert own.reached_bytes - others.reached_bytes == 2 * (of_dense + min(slots * 8 // shares, rows) * PAIRS)
