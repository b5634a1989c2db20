"""One pool for layers whose pages differ in size: no two pages share bytes, and no byte is allocated for a layer that
reads another one's keys."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.models.build import Build
from jaxengine.models.cache import (
    KVSpec,
    Paged,
    as_stored,
    as_viewed,
    first_page,
    group_layers,
    largest_of_layer,
    layer_locations,
    of_layer,
    page_bytes_of_group,
    paged_groups,
    pool_spec,
    row_step,
    rows_per_page,
)
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.attention import mla, sparse_mla
from jaxengine.models.registry import build_model, read_folder, read_hf
from jaxengine.models.weights.load import is_unread
from jaxengine.pallas_kernels.attention.op import RaggedBatch
from jaxengine.pallas_kernels.kv.pages import alloc
from jaxengine.pallas_kernels.kv.update import kv_cache_update
from jaxengine.runner.start.devices import build_split
from jaxengine.sharding.layout import MeshLayout
from jaxengine.sharding.stages import Stage
from tests.fast_compile import own_traces
from tests.models.config.published import GEMMA3N_E2B, GEMMA4_26B, GEMMA4_31B, GEMMA4_E2B, GEMMA4_E4B
from tests.models.conftest import CHECKPOINTS, PAGE_SIZE, PAGES_PER_LAYER, PagedRun, load_recorded
from tests.tables import each_row

NUM_PAGES = 3


def page(heads: int, head_dim: int) -> KVSpec:
    return KVSpec(1, 8, heads, head_dim, head_dim, "float32")


NARROW, WIDE, OTHER = page(2, 64), page(1, 384), page(3, 64)
GROUPS: dict[str, list[Paged]] = {
    "a multiple": [Paged((0, 1, 3, 4, 6), 9, (NARROW,) * 5), Paged((2, 5), None, (page(1, 256),) * 2)],
    "none of the other": [Paged((0, 2), 9, (OTHER,) * 2), Paged((1, 3), None, (page(2, 128),) * 2)],
    "several in one group": [Paged((0, 1, 2, 3, 4), None, (NARROW, WIDE, NARROW, NARROW, WIDE))],
    "no layer of a group here": [Paged((), 9, ()), Paged((1,), None, (WIDE,))],
}


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("name", GROUPS)
def test_pages_share_no_bytes(name, platform):
    groups, locations = GROUPS[name], layer_locations(GROUPS[name])
    kv = alloc(pool_spec(groups, NUM_PAGES), platform=platform)
    assert kv.data.nbytes == NUM_PAGES * page_bytes_of_group(groups, platform=platform)
    owners = np.full((kv.data.size, len(groups)), -1)
    numbers = np.arange(kv.data.size).reshape(kv.data.shape)
    for number, group in enumerate(groups):
        for layer, index in product(group.layers, range(NUM_PAGES)):
            own = as_viewed(replace(of_layer(kv, locations[layer], 0), data=jnp.asarray(numbers)))
            row = first_page(kv, locations[layer], NUM_PAGES) + index * row_step(kv, locations[layer])
            taken = np.asarray(own.data[row][..., slice(*own.lanes_of_page)] if platform == "tpu" else own.data[row])
            assert taken.size == math.prod((8, locations[layer].spec.num_kv_heads, locations[layer].spec.token_width))
            assert (owners[taken.ravel(), number] == -1).all()  # nor do layers of one group
            owners[taken.ravel(), number] = index
    held = np.where(owners < 0, owners.max(axis=1, keepdims=True), owners)
    assert (held == held[:, :1]).all()


def test_the_largest_magnitudes_are_those_of_a_layer_alone():
    name = "several in one group"
    groups, locations = GROUPS[name], layer_locations(GROUPS[name])
    for platform in ("cpu", "tpu"):
        kv = alloc(pool_spec(groups, NUM_PAGES), platform=platform)
        kv = replace(kv, data=jnp.zeros(kv.data.shape, jnp.float32).view(kv.data.dtype))
        own = as_viewed(of_layer(kv, locations[3], 0))
        row = first_page(kv, locations[3], NUM_PAGES) + 2 * row_step(kv, locations[3])
        begin = own.lanes_of_page[0] if platform == "tpu" else 0
        marked = own.data.at[row, 0, begin].set(jnp.asarray(7.0, jnp.float32).view(own.data.dtype))
        kv = replace(kv, data=marked.reshape(kv.data.shape))
        found = {layer: largest_of_layer(kv, locations[layer], NUM_PAGES) for layer in locations}
        assert {layer: float(jnp.max(k)) for layer, (k, _) in found.items()} == {
            **dict.fromkeys(locations, 0.0),
            3: 7.0,
        }


def test_codes_of_layers_that_keep_other_things_have_scales_of_their_own():
    """Two layers keep latents, in which values are; a third keeps keys of an indexer in the place of values."""
    latents, both = KVSpec(1, 8, 1, 34, 30, "int8", values_in_keys=True), KVSpec(1, 8, 1, 32, 16, "int8")
    groups = [Paged((0, 3), 9, (latents,) * 2), Paged((1,), None, (both,))]
    locations, scales = layer_locations(groups), np.array([[0.5], [0.01], [0.1]], np.float32)
    pool = alloc(pool_spec(groups, NUM_PAGES), platform="cpu")
    pool = replace(pool, k_scale=jnp.asarray(scales), v_scale=jnp.asarray(3 * scales))
    given = {}
    for index, layer in enumerate(sorted(locations)):
        own = as_viewed(of_layer(pool, locations[layer], index))
        first = first_page(own, locations[layer], NUM_PAGES) + row_step(own, locations[layer]) * (layer % NUM_PAGES)
        drawn = np.random.default_rng(layer).uniform(-127, 127, (2, 8, 1, 34)) * scales[index]
        k, v = drawn[0, ..., : own.spec.head_dim], 3 * drawn[1, ..., : own.spec.v_head_dim]
        given[layer] = k, v = k.astype(np.float32), None if own.spec.values_in_keys else v.astype(np.float32)
        slots = first * 8 + jnp.arange(8, dtype=jnp.int32)
        written = kv_cache_update(own, jnp.asarray(k), None if v is None else jnp.asarray(v), slots)
        pool = replace(pool, data=as_stored(written, pool).data)
    for index, (layer, (k, v)) in enumerate(sorted(given.items())):
        own = as_viewed(of_layer(pool, locations[layer], index))
        first = first_page(own, locations[layer], NUM_PAGES) + row_step(own, locations[layer]) * (layer % NUM_PAGES)
        codes = np.asarray(own.data[first]).view(np.int8).ravel()
        for part, stored in ((k, codes[: k.size]), (v, codes[k.size :])):
            if part is not None:
                scale = scales[index, 0] * (1 if part is k else 3)
                np.testing.assert_allclose(stored * scale, part.ravel(), atol=0.501 * scale)


@pytest.mark.thorough("compiles a model twice")
def test_codes_of_a_model_with_such_layers_are_rounded_keys_and_values(monkeypatch):
    """Dots 3 Note's logits are those of float32 pages that get what codes stand for."""
    model, prompt = load_recorded("dots3_note").model, np.random.default_rng(0).integers(0, 100, 40)
    k_scale, v_scale = np.float32(6.5 / 127), np.float32(4.2 / 127)

    def logits(run: PagedRun) -> np.ndarray:
        return run.step({"a": prompt}, num_tokens=40)["a"]

    coded, exact = PagedRun(model), logits(PagedRun(model))
    kv = alloc(pool_spec(model.cache_groups(PAGE_SIZE, "int8", hybrid=False), PAGES_PER_LAYER))
    scales = np.ones((model.config.num_layers, 1), np.float32)
    coded.kv = replace(kv, k_scale=jnp.asarray(k_scale * scales), v_scale=jnp.asarray(v_scale * scales))
    found = logits(coded)
    for module in (mla, sparse_mla):
        update = module.kv_cache_update

        def rounding(kv, k, v, slots, *, schedule, update=update):
            k = jnp.round(jnp.clip(k / k_scale, -127, 127)) * k_scale
            v = None if v is None else jnp.round(jnp.clip(v / v_scale, -127, 127)) * v_scale
            return update(kv, k, v, slots, schedule=schedule)

        monkeypatch.setattr(module, "kv_cache_update", rounding)
    with own_traces():
        np.testing.assert_allclose(found, logits(PagedRun(model)), atol=1e-3)
    assert np.abs(found - exact).max() > 0.1


@each_row(
    ("windows", "widths", "groups"),
    [
        # Two narrow layers to the room of a wide one: as many rows of each.
        ((9, 9, None) * 2, (1, 1, 2) * 2, [(9, (0, 1, 3, 4)), (None, (2, 5))]),
        ((9, None), (3, 2), [(9, (0,)), (None, (1,))]),
        ((None,) * 3, (2, 1, 1), [(None, (0, 1, 2))]),
    ],
)
def test_narrow_layers_count_by_their_share(windows, widths, groups):
    assert group_layers(windows, widths) == groups


@pytest.mark.parametrize(
    ("raw", "bytes_of_token", "rows"),
    [
        # Layers with pages, of 35 and 42: the others read theirs. Bytes in bfloat16: 2 * 2 * heads * head_dim.
        pytest.param(GEMMA3N_E2B, 20 * 2048, 4, id="3n E2B"),
        pytest.param(GEMMA4_E2B, 12 * 1024 + 3 * 2048, 3, id="E2B"),
        pytest.param(GEMMA4_E4B, 20 * 2048 + 4 * 4096, 2, id="E4B"),
        pytest.param(GEMMA4_26B, 25 * 8192 + 5 * 4096, 5, id="26B"),
        pytest.param(GEMMA4_31B, 50 * 16384 + 10 * 8192, 5, id="31B"),
    ],
)
def test_published_models_allocate_what_their_layers_keep(raw, bytes_of_token, rows):
    model = build_model(read_hf(raw), Build(jnp.bfloat16))
    groups, page_size = paged_groups(model.cache_groups(16, "bfloat16")), 16
    kept = [layer for group in groups for layer in group.layers]
    assert sorted(kept) == [n for n, layer in enumerate(model.config.attention) if layer.kv_source is None]
    assert rows_per_page(groups) == rows
    taken = page_bytes_of_group(groups, platform="tpu") * len(groups)
    # A page of every group is a page of every layer, but for the rows that the smallest group leaves empty.
    assert page_size * bytes_of_token <= taken <= 1.2 * page_size * bytes_of_token
    assert page_bytes_of_group(groups, platform="cpu") == page_bytes_of_group(groups, platform="tpu")
    shapes = jax.eval_shape(lambda: alloc(pool_spec(groups, 7), platform="tpu"))
    assert shapes.data.size * 2 == 7 * page_bytes_of_group(groups, platform="tpu")


def recorded_config(name: str) -> Any:
    return read_folder(CHECKPOINTS / name)


@pytest.mark.parametrize("num_tokens", [pytest.param(2, marks=pytest.mark.thorough("as the other")), 5])
def test_such_a_pool_is_updated_in_place(num_tokens):
    model = build_model(recorded_config("gemma4"), Build(jnp.float32))
    graph, state = nnx.split(model)
    groups = paged_groups(model.cache_groups(4, "float32"))
    kv = jax.eval_shape(lambda: alloc(pool_spec(groups, 8192)))

    def int32(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    one = int32()
    ragged = RaggedBatch(int32(2), int32(1), int32(1, 8), int32(num_tokens), one, one)
    batch = ForwardBatch(int32(num_tokens), int32(num_tokens), int32(1), (ragged,) * len(groups))

    def forward(state, batch, kv):
        return nnx.merge(graph, state)(batch, kv)

    memory = jax.jit(forward, donate_argnums=2).lower(state, batch, kv).compile().memory_analysis()
    assert memory is not None
    size = kv.data.size * kv.data.dtype.itemsize
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 50


def resolved(name: str, **options: Any) -> Any:
    return EngineConfig.from_options(**options).resolved(recorded_config(name), PLATFORMS["cpu"])


@each_row(
    ("name", "options", "message"),
    [
        (
            "gemma4_plain",
            {"kv_cache_dtype": "int8"},
            "kv_cache_dtype is 'int8'; allowed: auto, float32 or bfloat16",
        ),
        ("gemma4", {"kv_cache_dtype": "int8_per_token_head"}, "whose layers keep pages of different sizes"),
        (
            "gemma3n",
            {"capture_layers": [1, 6]},
            "allowed: 6, after the last norm: before it a token of",
        ),
        (
            "gemma3n",
            {"capture": ["residual:1"]},
            "allowed: attention_output:0-5, mlp_output:0-5, final_norm",
        ),
        ("gemma4", {"record_steps": "/tmp"}, "keep pages of different sizes, which is not supported yet"),
    ],
)
def test_what_such_layers_cannot_do_is_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        resolved(name, **options)


def test_what_a_layer_takes_from_another_one_is_not_read():
    """Published checkpoints store keys and values of all layers."""
    model = build_model(recorded_config("gemma4"), Build(jnp.float32))
    stored = [f"model.layers.{layer}.self_attn.{part}.weight" for layer in (4, 5) for part in ("k_proj", "v_norm")]
    assert [is_unread(model, name) for name in stored] == [False, False, True, True]
    assert is_unread(model, "model.vision_tower.patch_embedder.weight") and not is_unread(model, "model.norm.weight")


def test_a_stage_has_the_layers_whose_keys_it_reads():
    config = recorded_config("gemma4")
    engine = resolved("gemma4", pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match="layer 5 attends to keys and values of layer 3, which is in an earlier"):
        build_split(config, engine, MeshLayout(), Stage(4, 7, is_first=False))
    model = build_split(config, engine, MeshLayout(), Stage(3, 7, is_first=False))
    assert sorted(layer_locations(model.cache_groups(4, "float32"))) == [3, 4]
