"""Prompts with pictures and videos against what transformers makes of them (tests/fixtures/recorders/pictures.py)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.layers.taps import routers_of
from tests.fixtures.picture_cases import PROMPTS, SECOND_SHAPES
from tests.fixtures.picture_checkpoints import golden_path
from tests.models.families.pictures import Run, load, prepared, see
from tests.models.families.test_golden import assert_close

# Of the others' parts: Qwen3-VL's tower and prompts, a tower that is the others' without what they add, second shapes.
FURTHER = frozenset(
    (
        *("qwen3_vl_moe_vision", "qwen3_5_pictures_vision", "qwen2_vl_vision", "pixtral_vision"),
        *("glm4v_moe_vision", "kimi_vl_vision", "kimi_k3_vision", "kimi_k25_groups_vision", *SECOND_SHAPES),
        *(name for name in PROMPTS if "ocr" in name),
        *("glm46v_vision", "minicpmv4_7_vision", "mistral4_pictures_vision", "hyperclovax_vision"),
        *("video_llama3_vision", "mistral_large4_vision", "ovis2_6_moe_vision"),
        "gemma4_pictures_vision",
        *("hy_v4_vl_vision", "lfm3_vl_vision"),
        *("minicpmv4_5_vision", "minimax_m3_vision"),
        *("h2ovl_vision", "nvlm_d_vision", "eagle2_5_vision"),
        *("opencua_vision", "keye_vision", "keye1_5_vision", "llama_nemotron_vl_vision", "nemotron_nano_vl_vision"),
    )
)
WITH_EMBEDDINGS = []  # of a video; of the others logits show them
for _name in PROMPTS:
    with np.load(golden_path(_name), allow_pickle=False) as _golden:
        WITH_EMBEDDINGS += [_name] * ("video_seen" in _golden.files)
# With windows, and with learned positions; the others' patches know less of their neighbours.
PACKED = frozenset(("qwen2_5_vl_vision", "qwen3_vl_vision"))


@pytest.fixture(scope="module", params=PROMPTS)
def case(request, tmp_path_factory):
    yield load(request.param, tmp_path_factory.mktemp(request.param))


def test_prompts_are_those_of_transformers(case):
    for name, prompt in PROMPTS[case.name].items():
        expanded, items = prepared(case, prompt)
        np.testing.assert_array_equal(expanded.token_ids, case.goldens[f"{name}_ids"])
        if f"{name}_places" in case.goldens and expanded.order:
            *plain, time, height, width = case.goldens[f"{name}_places"]  # some have plain ones, too
            np.testing.assert_array_equal(expanded.rope_positions, [time, height, width])
            assert all((each == np.arange(len(each))).all() for each in plain)
        if f"{name}_pixels" in case.goldens:
            wanted = case.goldens[f"{name}_pixels"]
            shown = items["video"] or items["image"]
            # Towers with windows take patches in another order: compared as sets.
            ours = {tuple(np.round(patch, 3)) for item in shown for patch in item.patches}
            assert {tuple(np.round(patch, 3)) for patch in wanted} <= ours


@pytest.mark.parametrize("case", WITH_EMBEDDINGS, indirect=True)
def test_embeddings_of_a_video_are_those_of_transformers(case):
    _, items = prepared(case, PROMPTS[case.name]["video"])
    (ours,), wanted = see(case, items["video"]), case.goldens["video_seen"]
    np.testing.assert_allclose(ours[::3], wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.thorough("made of other families' parts", but=PROMPTS.keys() - FURTHER)
def test_logits_and_answers_are_those_of_transformers(case):
    prompts = PROMPTS[case.name]
    bucket = max(Run(case, prompt).bucket for prompt in prompts.values())  # one program for all
    for name, prompt in prompts.items():
        run = Run(case, prompt, bucket=bucket)
        wanted = case.goldens[f"{name}_logits"]
        logits = run.prompt()
        assert_close(logits[-len(wanted) :], wanted)
        answer, last = [], logits[-1]
        for _ in case.goldens[f"{name}_greedy"]:
            answer.append(int(last.argmax()))
            last = run.token(answer[-1])
        np.testing.assert_array_equal(answer, case.goldens[f"{name}_greedy"])


@pytest.mark.thorough("packed as another family's patches are", but=PACKED)
def test_what_a_picture_becomes_does_not_depend_on_its_neighbours(case):
    """Not by a bit, wherever in a call of as many patches it begins, at multiples of the tower's unit."""
    _, items = prepared(case, PROMPTS[case.name]["both"])
    second, first = sorted(items["image"], key=lambda item: len(item.patches))
    unit = case.config.tower.unit
    # Crops that are units are padded to one size.
    assert len(first.patches) == len(second.patches) == unit or unit > len(first.patches) > len(second.patches)
    forward, backward = see(case, [first, second], align=unit), see(case, [second, first], align=unit)
    np.testing.assert_array_equal(forward[0], backward[1])
    np.testing.assert_array_equal(forward[1], backward[0])
    # Side by side they share blocks, whose sums are made in another order.
    for ours, apart in zip(see(case, [first, second]), forward, strict=True):
        np.testing.assert_allclose(ours, apart, rtol=1e-5, atol=1e-5 * np.abs(apart).max())


@pytest.mark.parametrize("case", ["ernie4_5_vl_vision"], indirect=True)  # the others have experts of one kind
def test_each_kind_of_experts_is_picked_for_its_own_tokens(case):
    """Both kinds' load and picked experts count as one layer's; padding goes to none, and gets the shared MLP alone."""
    mlp = case.model.layers[1].mlp
    routers = routers_of(mlp)
    for each in routers:
        each.notes_experts = True
    x = jnp.asarray(np.random.RandomState(0).randn(6, case.config.hidden_size), jnp.float32)
    is_image = jnp.asarray([0, 1, 1, 0, 0, 0], bool)
    rows = Rows(jnp.asarray([1, 1, 1, 1, 1, 0], bool), None, is_image)
    y, picked, load = mlp(x, rows), mlp.picked[...], mlp.load[...]
    text, images = (each.route(x)[1] for each in (mlp.of_text, mlp.of_images))
    np.testing.assert_array_equal(picked, jnp.where(is_image[:, None], images, text))
    np.testing.assert_array_equal(load, np.bincount(np.asarray(picked[:5]).ravel(), minlength=len(load)))
    shared = mlp.of_text.shared(x, rows)
    np.testing.assert_allclose(y[5], shared[5], rtol=1e-5, atol=1e-6)
    assert np.abs(y[:5] - shared[:5]).max(axis=1).min() > 1e-3
    for each in routers:
        each.notes_experts = False
        for name in ("picked", "logits"):
            if hasattr(each, name):
                delattr(each, name)
    del mlp.picked, mlp.load
