"""Pictures through processors, towers and text models, against what Hugging Face transformers recorded
(tests/fixtures/recorders/unit_pictures.py)."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxengine.media.registry import processor_for
from jaxengine.models.build import Build
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.config.tower import BOTH_WAYS
from jaxengine.models.layers.pictures import picture_limits
from jaxengine.models.registry import build_model, read_hf
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from tests.fixtures.drawn_weights import checkpoint
from tests.fixtures.unit_pictures import CASES, SIZES, picture, text_of, video, video_text, write_checkpoint
from tests.models.conftest import forward, load_recorded
from tests.models.families.unit_runs import open_case, recorded_path, run_prompt

PROMPTS = ((), (0,), (1,), (0, 2), (3, 1))
POSITION_STEP, PIXEL_STEP = 6, 13
TOLERANCE = 1e-4
# What the others have too; those in a thorough run.
ALWAYS = ("llava_next_vision", "internvl_rms_vision", "gemma3_sees_vision", "granite4_plain_vision")


def recorded_with(name: str) -> list[str]:
    """Cases of which an array of this name is recorded."""
    found = []
    for case in CASES:
        with np.load(recorded_path(case)) as arrays:
            found += [case] * (name in arrays.files)
    return found


WITH_VIDEO = recorded_with("tokens_video")
FURTHER_VIDEOS = frozenset(
    (
        *("smolvlm_split_vision", "internvl_vision", "llava_onevision_odd_vision", "llava_next_video_max_vision"),
        "molmo2_odd_vision",
    )
)


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    yield open_case(request.param, tmp_path_factory.mktemp(request.param))
    forward.clear_cache()


def test_pixels(case):
    assert ("video" in case.processor.modalities) == (case.name in WITH_VIDEO)
    for index in range(len(SIZES)):
        units = squares(case.model.config.tower, case.processor.process("image", picture(index), {}))
        assert len(units) == case.recorded[f"units_{index}"]
        values = np.concatenate([unit.ravel() for unit in units])
        np.testing.assert_allclose(values[::PIXEL_STEP], case.recorded[f"pixels_{index}"], rtol=0, atol=1e-5)


def squares(tower, item):
    """The units of an item, f32[3, side, side] each; of some families the smaller ones are corners of units."""
    grid, patch = tower.vit.grid, tower.vit.patch_size
    by_unit = item.patches.reshape(-1, tower.unit, item.patches.shape[1])[:, : grid**2]  # behind them ends of lines
    by_patch = by_unit.reshape(-1, grid, grid, 3, patch, patch)
    sides = item.columns[0, :: tower.unit] if "side" in tower.columns else [grid] * len(by_patch)
    corners = (unit[:side, :side] for unit, side in zip(by_patch, sides, strict=True))
    return [unit.transpose(2, 0, 3, 1, 4).reshape(3, len(unit) * patch, -1) for unit in corners]


@pytest.mark.thorough("a further shape of a tower", but=ALWAYS)
def test_logits_and_answers(case):
    """Of prompts without a picture, with one, with two, each with the answer that transformers gave behind it."""
    placeholder = case.processor.placeholder("image")
    for number, pictures in enumerate(PROMPTS):
        answer = case.recorded[f"greedy_{number}"]
        text = text_of(placeholder, number, len(pictures))
        token_ids, logits = run_prompt(case, text, pictures, answer[:-1])
        assert token_ids == case.recorded[f"tokens_{number}"].tolist()
        end = len(token_ids)
        kept = np.unique([*range(0, end, POSITION_STEP), end - 1])
        golden = case.recorded[f"logits_{number}"]
        assert np.abs(logits[kept] - golden).max() <= TOLERANCE * np.abs(golden).max()
        assert logits[end - 1 :].argmax(axis=1).tolist() == answer.tolist()


def test_a_prefix_sees_all_of_itself():
    """Tokens of a prefix, with rows or not, then those after it, then another prompt's prefix."""
    index = np.asarray([BOTH_WAYS, 3, 4, BOTH_WAYS, -1, -1, BOTH_WAYS, 0], np.int32)
    positions = np.asarray([0, 1, 2, 3, 4, 5, 0, 1], np.int32)
    assert picture_limits(jnp.asarray(index), jnp.asarray(positions)).tolist() == [4, 4, 4, 4, 5, 6, 2, 2]


@pytest.mark.thorough("a further shape of a tower", but=frozenset(WITH_VIDEO) - FURTHER_VIDEOS)
@pytest.mark.parametrize("case", WITH_VIDEO, indirect=True)
def test_a_video_before_a_picture(case):
    text = video_text(case.name)
    pictures = (3,) if CASES[case.name]["placeholder"] in text else ()
    token_ids, logits = run_prompt(case, text, pictures, np.zeros(0, np.int32), video())
    assert token_ids == case.recorded["tokens_video"].tolist()
    golden = case.recorded["logits_video"]
    found = logits[: len(token_ids)][::POSITION_STEP]
    assert np.abs(found - golden).max() <= TOLERANCE * np.abs(golden).max()


# Of InternVLChatModel, as OpenGVLab publishes it, after transformers' names of the same.
FIRST_NAMES = (
    (r"vision_tower.embeddings.cls_token", "vision_model.embeddings.class_embedding"),
    (r"vision_tower.embeddings.patch_embeddings.projection", "vision_model.embeddings.patch_embedding"),
    (r"vision_tower.embeddings.position_embeddings", "vision_model.embeddings.position_embedding"),
    (r"vision_tower.encoder.layer", "vision_model.encoder.layers"),
    (r"attention.projection_layer", "attn.proj"),
    (r"attention.([qk]_norm)", r"attn.\1"),
    (r"layernorm_before", "norm1"),
    (r"layernorm_after", "norm2"),
    (r"lambda_([12])", r"ls\1"),
    (r"multi_modal_projector.layer_norm", "mlp1.0"),
    (r"multi_modal_projector.linear_1", "mlp1.1"),
    (r"multi_modal_projector.linear_2", "mlp1.3"),
)


def write_first(folder, name):
    """The recorded checkpoint of InternVL, as it was published first."""
    write_checkpoint(folder, name, checkpoint(name))
    raw, tensors, found = read_config_json(folder), load_file(folder / "model.safetensors"), {}
    for stored, values in tensors.items():
        if match := re.search(r"attention.q_proj.(weight|bias)", stored):
            parts = [tensors[stored.replace("q_proj", f"{letter}_proj")] for letter in "qkv"]
            stored, values = stored.replace(match[0], f"attn.qkv.{match[1]}"), np.concatenate(parts)
        elif "vision" in stored and re.search(r"[kv]_proj", stored):
            continue
        for theirs, first in FIRST_NAMES:
            stored = re.sub(theirs, first, stored)
        found[stored] = values
    save_file(found, folder / "model.safetensors")
    vision, text = raw["vision_config"], raw["text_config"]
    names = {"qkv_bias": "attention_bias", "qk_normalization": "use_qk_norm", "norm_type": "norm_type"}
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "layer_norm_eps")
    first = {
        "architectures": ["InternVLChatModel"],
        "llm_config": text,
        "vision_config": {key: vision[key] for key in kept}
        | {new: vision[old] for new, old in names.items()}
        | {"image_size": 24, "patch_size": 6, "hidden_act": "gelu", "model_type": "intern_vit_6b"},
        "downsample_ratio": 0.5,
        "select_layer": raw["vision_feature_layer"],
        "ps_version": "v2",
        "force_image_size": 24,
        "min_dynamic_patch": 1,
        "max_dynamic_patch": 4,
        "dynamic_image_size": True,
        "use_thumbnail": True,
    }
    (folder / "config.json").write_text(json.dumps(first))
    settings = {key: value for key, value in CASES[name]["images"].items() if "patches" not in key}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | {"size": 24, "do_center_crop": True}))


def test_internvl_as_it_was_published_first(tmp_path):
    """The same weights, and the same of pictures, as of the files of transformers."""
    name = "internvl_rms_vision"
    case = open_case(name, tmp_path / "transformers")
    write_first(tmp_path, name)
    raw, source = read_config_json(tmp_path), SafetensorsCheckpoint(tmp_path)
    config = read_hf(raw)
    model = build_model(config, Build("float32"))
    nnx.update(model, load_params(model, source))
    source.close()
    for ours, wanted in zip(*(jax.tree.leaves(nnx.state(each)) for each in (model, case.model)), strict=True):
        np.testing.assert_array_equal(ours, wanted)
    processor = processor_for(tmp_path, raw, config, case.tokenizer)
    assert processor is not None
    for index in range(len(SIZES)):
        ours, wanted = (each.process("image", picture(index), {}) for each in (processor, case.processor))
        np.testing.assert_array_equal(ours.patches, wanted.patches)
        expanded = [each.expand([5, 127, 6], {"image": [wanted]}).token_ids for each in (processor, case.processor)]
        assert expanded[0] == expanded[1]
    # As the published code writes an image, and as transformers does.
    for text in ("w5 <image> w6", "w5 <IMG_CONTEXT> w6"):
        assert processor.encode(text, case.tokenizer.encode(text)) == [5, 127, 6]
    assert [processor.placeholder(modality) for modality in processor.modalities] == ["<image>", "<video>"]
    assert read_hf(raw | {"architectures": ["SkyworkR1VChatModel"]}) == config
    for text in "internvl_moe_vision", "internvl_gpt_oss_vision":  # by the kind of text in either form
        of_text = read_config_json(checkpoint(text))["text_config"]
        first, whole = read_hf(raw | {"llm_config": of_text}), open_case(text, tmp_path / text).model.config
        assert replace(first, tower=None) == replace(whole, tower=None)


def test_internvl_with_internlm2_as_it_was_published(tmp_path):
    """InternVL 2.5's text has the weights of that model alone, and its tower those of others."""
    write_first(tmp_path, "internvl_rms_vision")
    raw, text = read_config_json(tmp_path), load_recorded("internlm2")
    tensors = load_file(tmp_path / "model.safetensors")
    seen = {stored: values for stored, values in tensors.items() if not stored.startswith("language_model.")}
    heard = load_file(checkpoint("internlm2") / "model.safetensors")
    heard = {f"language_model.{stored}": values for stored, values in heard.items()}
    save_file(seen | heard, tmp_path / "both.safetensors")
    (tmp_path / "both.safetensors").rename(tmp_path / "model.safetensors")
    config = read_hf(raw | {"llm_config": read_config_json(checkpoint("internlm2"))})
    assert config.architecture == "InternVLForConditionalGeneration[InternLM2ForCausalLM]"
    model, source = build_model(config, Build("float32")), SafetensorsCheckpoint(tmp_path)
    nnx.update(model, load_params(model, source))
    source.close()
    ours, wanted = (dict(nnx.to_flat_state(nnx.state(each))) for each in (model, text.model))
    assert {path for path in ours if path[0] != "tower"} == wanted.keys()
    for path, each in wanted.items():
        np.testing.assert_array_equal(ours[path].get_value(), each.get_value())
    case = open_case("internvl_rms_vision", tmp_path / "transformers")
    for mine, theirs in zip(*(jax.tree.leaves(nnx.state(each.tower)) for each in (model, case.model)), strict=True):
        np.testing.assert_array_equal(mine, theirs)
