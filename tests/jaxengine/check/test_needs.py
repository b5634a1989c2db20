"""What products of a step need, by the model's own count, against counts by hand."""

from __future__ import annotations

import dataclasses

import jax

from jaxengine.check.model.roofline import _num_matrices, product_work
from jaxengine.check.model.shapes import SHAPES, model_config
from jaxengine.models.build import Build
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.lora import LoraSpec
from jaxengine.models.params.declare import declared_params
from jaxengine.models.registry import build_model, read_folder
from jaxengine.pallas_kernels.kv.pages import KVPages, KVSpec, alloc
from jaxengine.scheduler.batches.buckets import Bucket
from jaxengine.sharding.layout import GATHER, RAGGED, MeshLayout
from tests.models.conftest import CHECKPOINTS
from tests.models.tiny import with_attention

# One layer of eight experts of 32, two of each token.
EXPERTS = dataclasses.replace(
    with_attention(SHAPES["qwen3-0.6b"], num_layers=1),
    architecture="Qwen3MoeForCausalLM",
    vocab_size=1024,
    experts=ExpertsConfig(num_experts=8, num_per_token=2, intermediate_size=32),
)


def pool_of(spec: KVSpec, platform: str) -> KVPages:
    return jax.eval_shape(lambda: alloc(spec, platform=platform))


def test_few_rows_of_an_expert_are_a_tile():
    """Three tokens to two experts of eight each: six experts with a row each, which a tensor core multiplies as 16."""
    model, of_an_expert = build_model(EXPERTS, Build("bfloat16")), 2 * 3 * 1024 * 32
    pools = [pool_of(KVSpec(8, 16, 8, 128, 128, "bfloat16"), platform) for platform in ("cpu", "gpu")]
    plain, tiled = (product_work(model, Bucket(3, 3), "bfloat16", pool).flops for pool in pools)
    assert tiled - plain == 6 * (16 - 1) * of_an_expert
    plain, tiled = (product_work(model, Bucket(64, 3), "bfloat16", pool).flops for pool in pools)
    assert tiled == plain


def test_a_block_that_layers_share_is_held_once_and_multiplied_by_each():
    tied = read_folder(CHECKPOINTS / "zamba2_shared")
    assert tied.shared_blocks is not None
    own = dataclasses.replace(tied, shared_blocks=dataclasses.replace(tied.shared_blocks, tied=False))
    for build in (Build("float32"), Build("float32", lora=LoraSpec(2, 4))):
        models = [build_model(config, build) for config in (tied, own)]
        shared, apart = (product_work(model, Bucket(32, 8), "float32") for model in models)
        assert dataclasses.replace(shared, weight_bytes=apart.weight_bytes) == apart
        of_block = 64 * (3 * 64) + 64 * 32 + 32 * 80 + 40 * 32 + 64 + 32  # attention, MLP, two norms
        assert apart.weight_bytes - shared.weight_bytes == 4 * of_block  # each layer has pools for adapters of its own


def test_a_layer_that_runs_several_times_is_held_once_and_multiplied_by_each_run():
    twice = read_folder(CHECKPOINTS / "dory")
    assert twice.loops is not None
    once = dataclasses.replace(
        twice, loops=dataclasses.replace(twice.loops, num_loops=1), attention=twice.attention[:3] + twice.attention[-1:]
    )
    of_layer = 64 * (64 + 32 + 32 + 64) + 64 * 64 + 3 * 64 * 80  # attention with its gate, MLP
    more = []
    for build in (Build("float32"), Build("float32", lora=LoraSpec(2, 4))):
        many, few = (product_work(build_model(config, build), Bucket(32, 8), "float32") for config in (twice, once))
        assert many.weight_bytes == few.weight_bytes
        more.append(many.flops - few.flops)
    assert more[0] == 2 * 2 * 32 * of_layer < more[1]  # pools for adapters are multiplied by each run, too


def test_experts_without_weights_cost_nothing():
    """Of as many as the others: half of the rows, and a router twice as wide."""
    assert EXPERTS.experts is not None
    zeros = dataclasses.replace(EXPERTS, experts=dataclasses.replace(EXPERTS.experts, num_zero_experts=8))
    plain, half = (
        product_work(build_model(each, Build("bfloat16")), Bucket(64, 64), "bfloat16").flops
        for each in (EXPERTS, zeros)
    )
    assert plain - half == 2 * 64 * (3 * 1024 * 32 - 8 * 1024)


def test_rows_that_experts_are_filled_up_with_are_counted():
    """Of 2,048 tokens on four devices 1,024 rows are a device's, 512 of each expert, which may have seven more each."""
    model = build_model(EXPERTS, Build("bfloat16", MeshLayout(2, 1, 2, True, GATHER)))
    pools = [pool_of(KVSpec(8, 16, 8, 128, 128, "bfloat16"), platform) for platform in ("cpu", "tpu")]
    on_cpus, on_tpus = (product_work(model, Bucket(1024, 3), "bfloat16", pool).row_bytes for pool in pools)
    matrices = (1024 + 2 * 32) + (32 + 1024)
    assert on_tpus - on_cpus == 2 * 7 * (2 * matrices + 1024 * 8)


def test_keys_made_of_latents_are_counted():
    """Of 128 heads on eight devices, eight at a time: latents go in twice, keys and values of 16 heads come out."""
    model = build_model(model_config("deepseek-v3:1"), Build("bfloat16", MeshLayout(model=8)))
    pools = [
        pool_of(KVSpec(8, 128, 1, 576, 512, "bfloat16", values_in_keys=True), platform) for platform in ("cpu", "tpu")
    ]
    for num_tokens, made in ((512, 0), (1024, 1024 * (2 * 576 + 16 * (128 + 64 + 128)))):
        plain, more = (product_work(model, Bucket(num_tokens, 8), "bfloat16", pool).row_bytes for pool in pools)
        assert more - plain == 2 * made


def test_a_block_of_rows_and_all_tokens_are_counted_where_devices_have_experts():
    """Of 6 tokens on four devices 3 rows are a device's, and 12 at most: one block. Others are sent rows."""
    gathers, sends = (
        product_work(
            build_model(EXPERTS, Build("bfloat16", MeshLayout(2, 1, 2, True, backend))), Bucket(3, 3), "bfloat16"
        ).row_bytes
        for backend in (GATHER, RAGGED)
    )
    matrices = (1024 + 2 * 32) + (32 + 1024)
    assert gathers - sends == 2 * (12 - 3) * matrices + 1024 * (6 * (2 + 4) + 12 * 8)


def test_a_projection_to_a_latent_is_no_stack_of_matrices():
    """Mamba's x_proj has the axes of MLA's matrices of heads, and is a single one."""
    for config, stacked in (
        (read_folder(CHECKPOINTS / "mamba"), set()),
        (model_config("deepseek-v3:1"), {"w_uk", "w_uv"}),
    ):
        params = list(declared_params(build_model(config, Build("bfloat16"))))
        assert {path for param in params if _num_matrices(param.decl) for path in param.path} >= stacked
        assert {_num_matrices(param.decl) for param in params} == ({0, 128} if stacked else {0})


def test_states_are_read_and_written_once():
    """Of Qwen3-Next: 32 matrices of 128 x 128 in float32 and three tokens of 8,192 channels, over two devices."""
    model = build_model(model_config("qwen3-next-80b-a3b:4"), Build("bfloat16", MeshLayout(attn=4, model=2)))
    of_one = 4 * 32 * 128 * 128 + 2 * 3 * 8192
    for bucket in (Bucket(5, 5), Bucket(64, 5)):
        assert product_work(model, bucket, "bfloat16").state_bytes == 3 * 2 * 5 * of_one // 2
