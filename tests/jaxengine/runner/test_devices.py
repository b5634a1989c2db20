"""Which devices an engine takes, and what it says when it cannot have them. One device is here."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxengine import LLM
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.rope import Rope
from jaxengine.models.params.declare import declared_params
from jaxengine.models.quantization.base.rules import LINEAR, Quantization
from jaxengine.models.quantization.base.stored import Activation
from jaxengine.models.quantization.schemes.eight_bits import BLOCK, EightBits
from jaxengine.models.registry import read_folder, read_hf
from jaxengine.models.vision.base.vit import VitConfig
from jaxengine.models.vision.llava import LlavaTowerConfig
from jaxengine.runner.start.devices import build_split, choose_devices, choose_stages
from jaxengine.sharding.layout import MESH_AXES, RAGGED, MeshLayout
from jaxengine.sharding.mesh import make_mesh
from jaxengine.sharding.stages import Stage
from tests.fixtures.drawn_weights import FOLDER
from tests.models.config.test_as_transformers import recorded

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    attention=(LayerAttention(num_heads=8, num_kv_heads=4, head_dim=8, rope=Rope(8)),) * 4,
)
VIT = VitConfig(
    hidden_size=80,
    intermediate_size=80,
    num_layers=1,
    num_heads=4,
    image_size=16,
    patch_size=4,
    activation="gelu",
    norm_eps=1e-5,
)
TOWER = LlavaTowerConfig(
    num_features=48, columns=(), merge=1, unit=16, vit=VIT, layers=(1,), projector_activation="gelu"
)
SEES = replace(MODEL, tower=TOWER)
DEVICES = [f"device {index}" for index in range(8)]


def config(**options):
    return EngineConfig.from_options(**options).resolved(MODEL, PLATFORMS["cpu"])


def test_the_first_devices_are_taken():
    options = EngineConfig.from_options(tensor_parallel_size=2, data_parallel_size=3)
    assert choose_devices(options, DEVICES, None) == (options, DEVICES[:6])


def test_too_few_devices():
    options = EngineConfig.from_options(tensor_parallel_size=2, pipeline_parallel_size=8)
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 8; allowed: .* at most 8, .* it is 16") as error:
        choose_devices(options, DEVICES, None)
    assert error.value.param == "pipeline_parallel_size"


def test_a_mesh_says_the_sizes():
    mesh = make_mesh(MeshLayout(), jax.devices()[:1])
    options = EngineConfig()
    assert choose_devices(options, None, mesh) == (options, [jax.devices()[0]])
    with pytest.raises(ConfigError, match="no mesh beside devices or parallel sizes"):
        choose_devices(options, jax.devices(), mesh)
    with pytest.raises(ConfigError, match="no mesh beside devices or parallel sizes"):
        choose_devices(EngineConfig.from_options(tensor_parallel_size=2), None, mesh)


def test_an_engine_on_a_mesh_or_a_device_of_the_caller(tiny_options):
    mesh = make_mesh(MeshLayout(), jax.devices()[:1])
    assert tuple(mesh.axis_names) == MESH_AXES
    own = {"mesh": Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp")), "mesh_axes": {"tp": "tensor"}}
    for where in ({"mesh": mesh}, own, {"devices": jax.devices()[:1]}):
        llm = LLM(**tiny_options, **where)
        assert llm.core.runner.num_ranks == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 5}, r"tensor_parallel_size is 5; allowed: 1, 2, 3, 4, 6, 8, 12, 16 for this model"),
        ({"tensor_parallel_size": 3, "replicate_kv_heads": True}, r"allowed: 1, 2, 4, 8 for this model"),
    ],
)
def test_sizes_that_do_not_divide_the_model(options, message):
    resolved = config(**options)
    with pytest.raises(ConfigError, match=message):
        build_split(MODEL, resolved, resolved.mesh_layout(MODEL), Stage(0, 4))


def test_sizes_that_cut_what_is_rounded_together():
    """96 inputs in groups of 16 are split over 1, 2, 3 and 6 devices, without groups over 4 as well."""
    rounded = Activation("float8_e4m3fn", 16)
    stored = EightBits("fp8", "float8_e4m3fn", BLOCK, rounded, (16, 16))
    model = replace(MODEL, quantization=Quantization("fp8", (((LINEAR,), stored),)))
    resolved = EngineConfig.from_options(tensor_parallel_size=4).resolved(model, PLATFORMS["cpu"])
    said = r"size is 4; allowed: 1, 2, 3, 6 for this model .model.layers.\*.mlp.down_proj: fp8: 96 inputs"
    with pytest.raises(ConfigError, match=said):
        build_split(model, resolved, resolved.mesh_layout(model), Stage(0, 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 5}, "pipeline_parallel_size is 5; allowed: at most 4"),
        ({"pipeline_parallel_size": 2, "pipeline_layers": (1, 2)}, "pipeline_layers is .*add up to 4"),
        ({"pipeline_parallel_size": 2, "pipeline_layers": (4,)}, "2 integers of at least 1"),
        ({"pipeline_layers": (4.0,)}, "1 integers of at least 1"),
        ({"enable_expert_parallel": True}, "enable_expert_parallel is True; allowed: False: .* has no experts"),
        ({"all2all_backend": "pplx"}, "all2all_backend is 'pplx'; allowed: allgather_reducescatter, ragged_all_to_all"),
        ({"all2all_backend": RAGGED}, f"'{RAGGED}'; allowed: allgather_reducescatter without enable_expert_parallel"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0; allowed: 1 to"),
        ({"data_parallel_size": True}, "data_parallel_size is True; allowed: a whole number"),
    ],
)
def test_options_that_the_model_cannot_do(options, message):
    with pytest.raises(ConfigError, match=message):
        config(**options)


def test_layers_are_split_by_bytes_unless_said_otherwise():
    resolved = config(pipeline_parallel_size=2)
    # The embedding is on both stages; equal layers are split in halves.
    assert [len(stage.layers) for stage in choose_stages(MODEL, resolved, MeshLayout())] == [2, 2]
    for num_layers in (1, 2, 3):  # the tower is in the first stage alone
        stages = Stage(0, num_layers, is_last=False), Stage(num_layers, 4, is_first=False)
        models = [build_split(SEES, resolved, MeshLayout(), stage) for stage in stages]
        first, last = (sum(param.num_bytes for param in declared_params(model)) for model in models)
        assert (first < last) == (num_layers == 1)
    assert [len(stage.layers) for stage in choose_stages(SEES, resolved, MeshLayout())] == [1, 3]
    resolved = config(pipeline_parallel_size=3, pipeline_layers=[1, 1, 2])
    assert [len(stage.layers) for stage in choose_stages(MODEL, resolved, MeshLayout())] == [1, 1, 2]


def test_runs_of_a_layer_count_as_layers_when_stages_are_chosen():
    """A stage with later runs alone has the weights of the layer, too."""
    looped, resolved = read_folder(FOLDER / "dory"), config(pipeline_parallel_size=3)
    assert looped.loops is not None and looped.loops.stored == (0, 1, 2, 1, 2, 3)
    assert [len(stage.layers) for stage in choose_stages(looped, resolved, MeshLayout())] == [2, 2, 2]


def test_blocks_that_layers_share_count_for_each_stage_that_has_one():
    block = {"num_hidden_layers": 6, "layers_block_type": ["mamba", "hybrid", "mamba", "mamba", "mamba", "hybrid"]}
    for raw in (recorded("zamba", **block), recorded("zamba2_shared")):
        shared, resolved = read_hf(raw), config(pipeline_parallel_size=2)
        half = shared.num_layers // 2
        assert [len(stage.layers) for stage in choose_stages(shared, resolved, MeshLayout())] == [half, half]


def test_a_stage_has_what_its_layers_share():
    parts = replace(SEES, tower=replace(TOWER, num_parts=2, part_layers=(3,)))
    reads = replace(MODEL.attention[0], kv_source=1)
    shared = replace(MODEL, attention=(*MODEL.attention[:2], reads, MODEL.attention[3]))
    resolved, said = config(pipeline_parallel_size=2), "^the first 3 layers add parts of images, but the first .* has 2"
    for model, first, message in ((parts, 3, said), (shared, 3, "layer 2 attends to keys and values of layer 1")):
        assert [len(stage.layers) for stage in choose_stages(model, resolved, MeshLayout())] == [first, 4 - first]
        with pytest.raises(ConfigError, match=message) as error:
            build_split(model, resolved, MeshLayout(), Stage(2, 4, is_first=False))
        assert error.value.param == "pipeline_parallel_size"
    # Nothing fits three stages of `parts`: an even split is made, and refused.
    stages = choose_stages(parts, config(pipeline_parallel_size=3), MeshLayout())
    assert len(stages) == 3 and stages[1].layers[0] < 3


def test_a_stage_without_pages_has_none_to_keep_elsewhere():
    state = replace(MODEL.attention[0], state=object())  # pyright: ignore[reportArgumentType]
    hybrid = replace(MODEL, attention=(state, state, *MODEL.attention[2:]))
    for stage in (Stage(0, 2), Stage(0, 1, is_last=False)):
        with pytest.raises(ConfigError, match="^kv_offloading_size is given, but none of the layers 0 to . of"):
            build_split(hybrid, config(pipeline_parallel_size=2, kv_offloading_size=1.0), MeshLayout(), stage)


def test_ranks_that_split_a_batch_share_its_limits():
    """Four kv heads over eight devices: two ranks of four."""
    sizes = {"cudagraph_capture_sizes": [4, 16], "prefill_sizes": [64]}
    resolved = config(tensor_parallel_size=8, max_num_seqs=16, max_num_batched_tokens=128, compilation_config=sizes)
    assert resolved.mesh_layout(MODEL) == MeshLayout(attn=2, model=4)
    assert (resolved.max_num_seqs, resolved.max_num_batched_tokens) == (8, 64)
    buckets = resolved.buckets(PLATFORMS["cpu"])
    assert [bucket.num_seqs for bucket in buckets.decode] == [2, 8]
    replicas = config(data_parallel_size=2, max_num_seqs=16, max_num_batched_tokens=128)
    assert (replicas.max_num_seqs, replicas.max_num_batched_tokens) == (16, 128)


MIXTURE = replace(MODEL, architecture="Qwen3MoeForCausalLM", experts=ExpertsConfig(6, 2, 32))


def test_devices_that_do_not_divide_the_experts_have_room_for_more():
    def experts_on(**options: int) -> list[tuple[int, int | None, int]]:
        """Matrices, experts and bytes of each stack of the first layer."""
        resolved = EngineConfig.from_options(**options).resolved(MIXTURE, PLATFORMS["cpu"])
        params = declared_params(build_split(MIXTURE, resolved, resolved.mesh_layout(MIXTURE), Stage(0, 4)))
        stacks = [each for each in params if each.layer == 0 and each.decl.num_experts is not None]
        return [(each.shape[0], each.decl.num_experts, each.num_bytes) for each in stacks]

    alone = experts_on()
    assert [each[:2] for each in alone] == [(6, 6)] * 2
    for stored, sizes in (
        (8, {"tensor_parallel_size": 4}),
        (6, {"data_parallel_size": 2}),
        (10, {"data_parallel_size": 5}),
    ):
        wanted = [(stored, 6, num_bytes // 6 * stored) for _, _, num_bytes in alone]
        assert experts_on(**sizes, enable_expert_parallel=True) == wanted, sizes


def test_how_tokens_reach_whole_experts():
    options = {"data_parallel_size": 2, "enable_expert_parallel": True}
    for platform in PLATFORMS.values():
        default = EngineConfig.from_options(**options).resolved(MIXTURE, platform)
        assert not default.mesh_layout(MIXTURE).sends_rows
    ragged = EngineConfig.from_options(**options, all2all_backend=RAGGED)
    for name in ("cpu", "tpu"):
        assert ragged.resolved(MIXTURE, PLATFORMS[name]).mesh_layout(MIXTURE).sends_rows
    for name in ("gpu", "gpu_xla"):
        with pytest.raises(ConfigError, match="allowed: allgather_reducescatter on CUDA devices") as error:
            ragged.resolved(MIXTURE, PLATFORMS[name])
        assert error.value.param == "all2all_backend"
    alone = replace(ragged, data_parallel_size=1).resolved(MIXTURE, PLATFORMS["cpu"])
    assert not alone.mesh_layout(MIXTURE).sends_rows
