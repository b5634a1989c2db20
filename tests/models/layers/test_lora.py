"""A product with adapters: NumPy's sum for rows that have one, the product alone, bit for bit, for all others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxengine.models.adapters import Adapters
from jaxengine.models.build import Build
from jaxengine.models.config.lora import LoraSpec
from jaxengine.models.families.gemma4 import LayerInputs
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.lora import FLAT, GROUPED, groups_on, with_visits
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.lora import PoolArray
from jaxengine.models.params.declare import Source, parts_of
from jaxengine.models.quantization.base.plain import PlainWeight
from jaxengine.models.registry import build_model, read_folder
from jaxengine.models.weights.adapters.pools import targets_of
from jaxengine.pallas_kernels.matmul.dense import matmul
from tests.fixtures.drawn_weights import FOLDER

SPEC = LoraSpec(3, 4)
AXES = ("embed", "heads")
SOURCES = (Source("q", 8), Source("k", 4, repeat=2, group=2), *parts_of("joined", 6, 2))


def linear(lora):
    layer = Linear(12, SOURCES, axes=AXES, build=Build(jnp.float32, lora=lora, layer=0))
    drawn = np.random.default_rng(0)
    for variable in jax.tree.leaves(nnx.state(layer), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        variable.set_value(jnp.asarray(drawn.normal(size=variable.get_value().shape), jnp.float32))
    return nnx.split(layer)


def rows(slots, form, spec=SPEC):
    slots = jnp.asarray(slots, jnp.int32)
    return Rows(slots >= -1, with_visits(Adapters(slots, jnp.int32(form)), spec, "cpu"))


def test_rows_of_different_adapters_at_once():
    graph, state = linear(SPEC)
    layer = nnx.merge(graph, state)
    x = np.random.default_rng(1).normal(size=(6, 12)).astype(np.float32)
    slots = [2, -1, 0, 2, -1, 1]
    call = jax.jit(lambda state, x, rows: nnx.merge(graph, state)(x, rows))
    found = np.asarray(call(state, x, rows(slots, FLAT)))
    alone = np.asarray(call(state, x, rows(slots, 0)))
    pools = layer.lora
    assert pools is not None and pools.module == (0, 1, 2, 2)
    a, bs = np.asarray(pools.a[...], np.float64), [np.asarray(b[...], np.float64) for b in pools.b]
    for row, slot in enumerate(slots):
        if slot < 0:
            np.testing.assert_array_equal(found[row], alone[row])
            continue
        inner = [a[module * 12 + slot * 4 :][:4] @ x[row] for module in range(3)]
        added = [inner[module] @ b[slot * 4 :][:4] for module, b in zip(pools.module, bs, strict=True)]
        np.testing.assert_allclose(found[row], alone[row] + np.concatenate(added), rtol=1e-4, atol=1e-4)
    plain_graph, _ = linear(None)
    weight = nnx.filter_state(state, lambda path, value: not isinstance(value, PoolArray))
    np.testing.assert_array_equal(alone, jax.jit(lambda s, x: nnx.merge(plain_graph, s)(x))(weight, x))


def test_the_grouped_form_gives_what_the_flat_one_does():
    """With room for more adapters than a few; with less there is one form, whatever is asked for."""
    many, x = LoraSpec(17, 4), np.random.default_rng(1).normal(size=(18, 12)).astype(np.float32)
    slots = [16, -1, 0, 16, -1, 9] * 3
    assert all(groups_on(many, platform) for platform in ("cpu", "gpu", "tpu")) and not groups_on(many, "gpu_xla")
    assert not groups_on(LoraSpec(16, 4), "cpu")
    for spec in (many, SPEC):
        graph, state = linear(spec)
        call = jax.jit(lambda state, x, rows, graph=graph: nnx.merge(graph, state)(x, rows))
        own = [min(slot, spec.max_loras - 1) for slot in slots]
        given = [rows(own, form, spec) for form in (0, FLAT, GROUPED)]
        assert (given[2].adapters.visits is not None) == (spec is many)
        alone, flat, grouped = (np.asarray(call(state, x, each)) for each in given)
        np.testing.assert_allclose(grouped, flat, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(grouped[[1, 4]], alone[[1, 4]])
        assert np.abs(grouped - alone)[[0, 2, 3, 5]].max(axis=1).min() > 0.1


def test_a_product_before_the_layers_takes_the_adapters_of_its_tokens():
    """Gemma 4's projection to the inputs of all layers, which PEFT's "all-linear" has, too."""
    model = build_model(read_folder(FOLDER / "gemma4"), Build(jnp.float32, lora=SPEC))
    assert "model.per_layer_model_projection" in targets_of([model]).shapes
    inputs, drawn = LayerInputs(model.config, Build(jnp.float32, lora=SPEC)), np.random.default_rng(0)
    for variable in jax.tree.leaves(nnx.state(inputs), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        variable.set_value(jnp.asarray(drawn.normal(size=variable.get_value().shape), jnp.float32))
    ids, x = jnp.array([3, 5]), jnp.asarray(drawn.normal(size=(2, model.config.hidden_size)), jnp.float32)
    alone, found = inputs(ids, x, rows([-1, -1], 0)), inputs(ids, x, rows([1, -1], FLAT))
    pools, weight = inputs.project.lora, inputs.project.weight
    assert pools is not None and isinstance(weight, PlainWeight)
    weight.values.set_value(weight.values[...] + pools.a[4:8].T @ pools.b[0][4:8])
    np.testing.assert_allclose(found[0], inputs(ids, x, rows([-1, -1], 0))[0], rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(found[1], alone[1])
    assert np.abs(found[0] - alone[0]).max() > 0.1


@pytest.mark.parametrize(("num_rows", "forms"), [(15, 3), (14, 2)])
def test_rows_too_few_to_have_most_slots_have_the_grouped_form_alone(num_rows, forms):
    """Of 17 slots 14 are few; what a host says that counts other ranks' rows, too, is then the same."""
    spec, x = LoraSpec(17, 4), np.random.default_rng(1).normal(size=(num_rows, 12)).astype(np.float32)
    graph, state = linear(spec)
    given = [rows([16, -1, *range(num_rows - 2)], form, spec) for form in (FLAT, GROUPED)]

    def call(state, x, rows):
        return nnx.merge(graph, state)(x, rows)

    conditionals = [eqn for eqn in jax.make_jaxpr(call)(state, x, given[0]).eqns if eqn.primitive.name == "cond"]
    assert len(conditionals[-1].params["branches"]) == forms  # those before it choose by platform
    flat, grouped = (np.asarray(jax.jit(call)(state, x, each)) for each in given)
    np.testing.assert_allclose(grouped, flat, rtol=1e-5, atol=1e-5)
    assert (forms == 3) or (grouped == flat).all()


def test_without_room_for_adapters_the_program_is_the_product():
    graph, state = linear(None)
    x = jax.ShapeDtypeStruct((6, 12), jnp.float32)

    def f(state, x, rows):
        return nnx.merge(graph, state)(x, rows)

    def g(state, x, rows):
        return matmul(x, state["weight"]["values"][...]).astype(x.dtype)

    of_rows = Rows(jnp.ones(6, jnp.bool_))
    texts = [jax.jit(each, keep_unused=True).lower(state, x, of_rows).as_text() for each in (f, g)]
    assert texts[0].replace("jit_f", "jit_g") == texts[1]
    with_room, own = linear(SPEC)
    text = (
        jax.jit(lambda state, x, rows: nnx.merge(with_room, state)(x, rows))
        .lower(own, x, rows([0] * 6, FLAT))
        .as_text()
    )
    assert text.count("stablehlo.case") + text.count("stablehlo.if") > texts[0].count("stablehlo.case")


def test_a_product_that_takes_adapters_asks_what_its_rows_are():
    graph, state = linear(SPEC)
    with pytest.raises(ValueError, match="needs `rows`"):
        nnx.merge(graph, state)(jnp.zeros((1, 12)))
