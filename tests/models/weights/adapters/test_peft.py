"""Adapters' files: what PEFT writes is read, what is wrong is one error that names it."""

from __future__ import annotations

import json
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxengine.models.build import Build
from jaxengine.models.config.lora import LoraSpec
from jaxengine.models.config.readers.name_patterns import Effort
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import build_model, read_folder
from jaxengine.models.weights.adapters import config
from jaxengine.models.weights.adapters.folder import read_adapter
from jaxengine.models.weights.adapters.pools import targets_of
from jaxengine.models.weights.adapters.tensors import PREFIX
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import check_source
from jaxengine.models.weights.views.merged import MergedSource
from tests.conftest import TINY_CHECKPOINT
from tests.fixtures.adapters import CONFIG, damaged, write_adapter
from tests.fixtures.drawn_weights import FOLDER as CHECKPOINTS
from tests.fixtures.drawn_weights import checkpoint
from tests.tables import each_row

Q = "model.layers.0.self_attn.q_proj"
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# As unsloth_zoo.peft_utils.get_peft_regex writes it for the language layers of a model.
_PARTS, _LINEAR = "self_attn|attention|attn|mlp|feed_forward|ffn|dense", "|".join(SEVEN)
_LANGUAGE = "language|text|model.layers"
UNSLOTH = (
    rf"(?:.*?(?:{_LANGUAGE}).*?(?:{_PARTS}).*?(?:{_LINEAR}).*?)"
    rf"|(?:\bmodel\.layers\.[\d]{{1,}}\.(?:{_PARTS})\.(?:(?:{_LINEAR})))"
)
A, B = (f"base_model.model.{Q}.lora_{side}.weight" for side in "AB")


@pytest.fixture(scope="module")
def targets():
    model = build_model(read_folder(TINY_CHECKPOINT), Build(jnp.float32, lora=LoraSpec(2, 16)))
    return targets_of([model])


@pytest.fixture
def folder(tmp_path):
    return write_adapter(tmp_path / "adapter", TINY_CHECKPOINT, seed=1)


def read(folder, targets, dtype=jnp.float32):
    return read_adapter(folder, targets, 16, dtype)


def test_what_takes_adapters(targets):
    names = {name.rpartition(".")[2] for name in targets.shapes}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert len(targets.shapes) == 14 and targets.shapes[Q] == (64, 64)
    assert {"model.embed_tokens", "model.norm"} <= targets.others


def test_scales_are_folded_in(folder, targets):
    tensors, adapter = load_file(folder / "adapter_model.safetensors"), read(folder, targets)
    assert adapter.rank == 8 and len(adapter.matrices) == 14
    np.testing.assert_array_equal(adapter.matrices[Q][0], tensors[A])
    np.testing.assert_array_equal(adapter.matrices[Q][1], tensors[B] * np.float32(2))


def test_matrices_that_are_stored_transposed(tmp_path):
    """GPT-2's matrices are stored transposed, which its adapters say in `fan_in_fan_out`."""
    shapes = {"transformer.h.0.attn.c_proj": (64, 64), "transformer.h.1.mlp.c_fc": (256, 64)}
    changes = {"fan_in_fan_out": True, "target_modules": "all-linear", "r": 3, "lora_alpha": 6}
    write_adapter(tmp_path, shapes, seed=1, **changes)
    source, tensors = SafetensorsCheckpoint(checkpoint("gpt2")), load_file(tmp_path / "adapter_model.safetensors")
    model = build_model(read_folder(CHECKPOINTS / "gpt2"), Build(jnp.float32, lora=LoraSpec(1, 4)))
    try:
        adapter = read(tmp_path, targets_of([model]))
        found = check_source(model, MergedSource(source, adapter.matrices))[0]
        for module in shapes:
            a, b = (tensors[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
            merged = source.read(f"{module}.weight").T + 2 * (b @ a)
            name = f"{module.replace('transformer.h', 'model.layers')}.weight"
            np.testing.assert_allclose(found.read(name), merged, rtol=1e-5, atol=1e-6)
    finally:
        source.close()


def test_keys_and_values_that_a_layer_takes_from_another_are_left_unread(tmp_path):
    """transformers 4 has their projections in all layers of Gemma 3n, and PEFT has adapted them."""
    targets = targets_of([build_model(read_folder(CHECKPOINTS / "gemma3n"), Build(jnp.float32, lora=LoraSpec(1, 4)))])
    shapes = {f"model.layers.{layer}.self_attn.k_proj": (24, 64) for layer in range(6)}
    write_adapter(tmp_path, shapes, seed=1, r=3, target_modules=["k_proj"])
    assert read(tmp_path, targets).matrices.keys() == {f"model.layers.{layer}.self_attn.k_proj" for layer in range(4)}


def test_the_first_pattern_that_fits_counts(folder, targets):
    """As PEFT goes through them, whether they are names or expressions; many names cost little."""
    config = json.loads((folder / "adapter_config.json").read_text())
    others = {f"model.layers.{layer}.self_attn.q_proj": 3 for layer in range(2, 9000)}
    for patterns, scale in (
        ({"q_proj": 32, r"[a-z]_proj": 64}, 4),
        ({r"[kq]_proj": 64, "q_proj": 32}, 8),
        ({r"layers\.1\..*": 64, "self_attn.q_proj": 32, "q_proj": 8}, 4),
        ({"proj": 64, "layers": 64}, 2),
    ):
        (folder / "adapter_config.json").write_text(json.dumps(config | {"alpha_pattern": patterns | others}))
        b = load_file(folder / "adapter_model.safetensors")[B]
        np.testing.assert_array_equal(read(folder, targets).matrices[Q][1], b * np.float32(scale))


def test_names_without_the_prefix_of_peft(folder, targets):
    """As transformers saves an adapter with `save_peft_format=False`; vLLM reads such files too."""
    wanted = read(folder, targets).digest
    damaged(lambda tensors: [tensors.update({name.removeprefix(PREFIX): tensors.pop(name)}) for name in [*tensors]])(
        folder
    )
    assert read(folder, targets).digest == wanted


def test_no_layers_to_transform_are_all(folder, targets):
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"layers_to_transform": []}))
    assert len(read(folder, targets).matrices) == 14


@each_row(
    "changes",
    [
        {"target_modules": UNSLOTH},
        {"ensure_weight_tying": True},
        {
            "target_modules": UNSLOTH.replace(
                f"(?:{_LANGUAGE})", f"(?:{_LANGUAGE}|{'|'.join(f'part{n}' for n in range(50))})"
            )
        },
        {"target_modules": "all-linear"},
        {"target_modules": r"^(?!.*vision)(?=model\.).*(?:proj)(?<!x_proj)$"},
        {"target_modules": "((.*)*)*proj"},
        {"target_modules": [*SEVEN, "lm_tail", "query_key_value", "experts"]},
        {"target_modules": [*SEVEN, "lm_head", "embed_tokens"], "exclude_modules": ["lm_head", "embed_tokens"]},
        {"target_modules": [*SEVEN, "lm_head"], "exclude_modules": r".*(?:lm_head|norm)"},
        {"exclude_modules": ["vision_tower", "router"]},
        {"modules_to_save": ["classifier", "score"]},
        {"target_parameters": ["experts.gate_up_proj"]},
        {"layers_to_transform": [0, 1, 7], "layers_pattern": ["h", "layers"]},
        {"layers_to_transform": [0, 1], "layers_pattern": r"(?:lay|block)ers"},
        {"rank_pattern": {r"^model\.layers\.(?:0|1)\.mlp\.(?:up|down)_proj": 8, "^q_proj": 3, "(?:no)+": 2}},
    ],
)
def test_what_peft_accepts_is_read(folder, targets, changes):
    """Names without a module in the model say nothing, and expressions are as in Python."""
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    assert len(read(folder, targets).matrices) == 14


def test_layers_and_expressions_choose_modules(tmp_path, targets):
    for number, changes in enumerate(
        [
            {"layers_to_transform": 1, "layers_pattern": "layers"},
            {"layers_to_transform": [1]},
            {"target_modules": r"model\.layers\.(?!0\b)\d+\..*(?:proj)"},
            {"target_modules": r"(?!model\.layers\.0\.).*(?:proj)"},
            {"exclude_modules": r".*\.0\..*"},
            {"target_modules": [f"layers.1.{name}" for name in ("self_attn.q_proj", "mlp.up_proj")]},
            {"target_modules": r"layers\.1\..*(?:proj)"},  # of the model without its head
        ]
    ):
        folder = write_adapter(tmp_path / str(number), TINY_CHECKPOINT, seed=1)
        kept = {"layers.1.self_attn.q_proj", "layers.1.mlp.up_proj"} if number == 5 else {"layers.1."}
        tensors = load_file(folder / "adapter_model.safetensors")
        chosen = {name: each for name, each in tensors.items() if any(part in name for part in kept)}
        save_file(chosen, folder / "adapter_model.safetensors")
        change_config(folder, **changes)
        assert len(read(folder, targets).matrices) == len(chosen) // 2, changes
        save_file(tensors, folder / "adapter_model.safetensors")
        with pytest.raises(ModelFileError, match="target_modules does not name it"):
            read(folder, targets)
        del chosen[next(name for name in chosen if "up_proj.lora_A" in name)]
        del chosen[next(name for name in chosen if "up_proj.lora_B" in name)]
        save_file(chosen, folder / "adapter_model.safetensors")
        with pytest.raises(ModelFileError, match="target_modules names it, but the file has no matrices"):
            read(folder, targets)


def test_names_may_be_those_of_the_model_without_its_head(folder, targets):
    """As PEFT writes adapters of AutoModel, of embedders for instance."""
    tensors, matrices = load_file(folder / "adapter_model.safetensors"), read(folder, targets).matrices
    short = {name.replace("base_model.model.model.", "base_model.model."): each for name, each in tensors.items()}
    assert short.keys().isdisjoint(tensors)
    save_file(short, folder / "adapter_model.safetensors")
    found = read(folder, targets).matrices
    assert found.keys() == matrices.keys()
    assert all(np.array_equal(found[module][side], matrices[module][side]) for module in matrices for side in (0, 1))
    save_file({**short, **tensors}, folder / "adapter_model.safetensors")
    with pytest.raises(ModelFileError, match="stands for .*, as does"):
        read(folder, targets)


def test_names_may_be_those_of_transformers_class_where_files_have_others(tmp_path):
    """Cohere Transcribe's files name the layers' parts by number."""
    targets = targets_of(
        [build_model(read_folder(CHECKPOINTS / "cohere_asr_sound"), Build("float32", lora=LoraSpec(1, 4)))]
    )
    named = {"self_attn.q_proj": "first_sub_layer.query_net", "encoder_attn.q_proj": "second_sub_layer.query_net"}
    named |= {"mlp.fc2": "third_sub_layer.dense_out"}
    wanted = {
        f"model.decoder.layers.{layer}.{own}": f"model.layers.{layer}.{stored}"
        for layer in range(2)
        for own, stored in named.items()
    }
    shapes = {own: targets.shapes[stored][::-1] for own, stored in wanted.items()}
    expression = r"model\.decoder\..*\.(q_proj|fc2)"  # q_proj alone is the encoder's, too
    folder = write_adapter(tmp_path, shapes, seed=1, r=2, target_modules=expression)
    assert {*read_adapter(folder, targets, 4, "float32").matrices} == {*wanted.values()}


def test_what_is_excluded_by_the_names_of_transformers_class_is_not_missing(tmp_path):
    """The tower's matrices, under names that begin otherwise than those of published files."""
    targets = targets_of([build_model(read_folder(CHECKPOINTS / "aya_vision"), Build("float32", lora=LoraSpec(1, 4)))])
    names = [f"model.language_model.layers.{layer}.self_attn.q_proj" for layer in range(3)]
    shapes = {name: targets.shapes[targets.module(name)][::-1] for name in names}
    excluded = r"model\.vision_tower\..*"
    folder = write_adapter(tmp_path, shapes, seed=1, r=2, target_modules=["q_proj"], exclude_modules=excluded)
    assert len(read_adapter(folder, targets, 4, "float32").matrices) == 3


@each_row("field", ["target_modules", "exclude_modules", "modules_to_save", "layers_pattern", "rank_pattern"])
def test_an_expression_that_takes_too_long_is_one_error(folder, targets, field, monkeypatch):
    monkeypatch.setattr(config, "Effort", partial(Effort, 5000))
    costly = r"(?:(?:(?:x|.?){200}){200}){200}!"
    value = {"rank_pattern": {costly: 8}, "layers_pattern": [costly], "modules_to_save": [costly]}.get(field, costly)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | {"layers_to_transform": [0, 1], field: value}))
    with pytest.raises(ModelFileError, match=f"{field} must hold regular expressions that match .* in 5,000 steps"):
        read(folder, targets)


def test_digests_tell_contents_apart(folder, targets):
    before = read(folder, targets).digest
    assert read(folder, targets).digest == before
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[A][3, 5] += 1e-3
    save_file(tensors, folder / "adapter_model.safetensors")
    assert read(folder, targets).digest != before
    change_config(folder, lora_alpha=17)
    assert read(folder, targets).digest != before


def change_config(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"peft_type": "IA3"}, "peft_type must be 'LORA', got 'IA3'"),
        ({"r": 0}, r"r must be a whole number of 1 to 2\^16, got 0"),
        ({"r": True}, "r must be a whole number"),
        ({"r": 1 << 17}, r"r must be a whole number of 1 to 2\^16, got 131072"),
        ({"lora_alpha": -1e10}, "lora_alpha must be a number between -1e9 and 1e9, got -1"),
        ({"rank_pattern": []}, "rank_pattern must be an object of names and numbers"),
        ({"alpha_pattern": 0}, "alpha_pattern must be an object of names and numbers, got 0"),
        ({"modules_to_save": False}, "modules_to_save must be a list of names, got False"),
        ({"exclude_modules": 0}, "exclude_modules must be a list of names, got 0"),
        ({"layers_pattern": False}, "layers_pattern must be a list of names, got False"),
        ({"r": 17}, r"rank is 17; allowed: at most 16 \(max_lora_rank\)"),
        ({"r": 4}, r"shape must be \(4, \d+\), got \(8, \d+\)"),
        ({"rank_pattern": {"q_proj": 32}}, "rank is 32; allowed: at most 16"),
        ({"rank_pattern": {"q_proj": 4}}, r"shape must be \(4, 64\), got \(8, 64\)"),
        ({"rank_pattern": {r"(a)\1": 4}}, "rank_pattern must hold a regular expression without backreferences"),
        ({"lora_alpha": "x"}, "lora_alpha must be a number between -1e9 and 1e9"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a number between -1e9 and 1e9"),
        ({"use_dora": True}, "use_dora is True, which is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save names it, which is not supported.*lm_head"),
        ({"modules_to_save": ["(?!x).*norm"]}, "modules_to_save names it, which is not supported"),
        ({"modules_to_save": "lm_head"}, "modules_to_save must be a list of names"),
        ({"bias": "all"}, "bias must be 'none', got 'all'"),
        ({"lora_bias": True}, "lora_bias is True, which is not supported"),
        ({"some_day": {"a": 1}}, "some_day is .*, which is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "which changes the base model"),
        ({"use_rslora": 1}, "use_rslora must be true or false"),
        ({"target_modules": []}, "target_modules must name what is changed"),
        ({"target_modules": ["q_proj"]}, "target_modules does not name it"),
        ({"target_modules": "(x*)*"}, "target_modules does not name it"),
        ({"target_modules": "(x"}, "target_modules must hold a regular expression: missing"),
        ({"target_modules": "x" * 5000}, "target_modules must hold a regular expression of at most 4096"),
        ({"exclude_modules": "(?:.*q_proj"}, "exclude_modules must hold a regular expression: missing"),
        ({"layers_pattern": ["("], "layers_to_transform": [0, 1]}, "layers_pattern must hold a regular"),
        ({"target_modules": ["q_proj", 3]}, "target_modules must hold names"),
        ({"exclude_modules": ["q_proj"]}, "target_modules does not name it"),
        ({"layers_to_transform": [0]}, "target_modules does not name it"),
        ({"target_modules": [*SEVEN, "lm_head"]}, "target_modules names it, but the file has no .*lm_head"),
        ({"layers_to_transform": [0, 1], "layers_pattern": "blocks"}, "target_modules does not name it"),
        ({"layers_to_transform": "0"}, "layers_to_transform must be whole numbers"),
    ],
)
def test_a_configuration_that_is_wrong_is_named(folder, targets, changes, says):
    change_config(folder, **changes)
    with pytest.raises(ModelFileError, match=says):
        read(folder, targets)


def moved(old, new):
    return damaged(lambda tensors: tensors.update({new: tensors.pop(old)}))


def filled(name, value):
    return damaged(lambda tensors: tensors[name].fill(value))


@pytest.mark.parametrize(
    "damage, says",
    [
        (damaged(lambda tensors: tensors.pop(B)), r"has lora_A.weight of it and not the other matrix"),
        (damaged(lambda tensors: (tensors.pop(A), tensors.pop(B))), "the file has no matrices of it"),
        (damaged(lambda tensors: tensors.clear()), "holds no matrices"),
        (moved(A, "x"), "a tensor must be called"),
        (moved(A, f"base_model.model.{Q}.lora_magnitude_vector"), "a tensor must be called"),
        (moved(A, f"{Q}.lora_A.default.weight"), "a tensor must be called"),
        (damaged(lambda tensors: tensors.update({A.removeprefix(PREFIX): tensors[A]})), f"stands for {Q}.*, as does"),
        (moved(A, "base_model.model.lm_head.base_layer.weight"), "adapter of a token table or an LM head"),
        (moved(A, "base_model.model.model.embed_tokens.lora_embedding_A"), "adapter of a token table or an LM head"),
        (moved(A, "base_model.model.lm_head.lora_A.weight"), "adapters of it are not supported"),
        (moved(A, "base_model.model.model.embed_tokens.lora_A.weight"), "adapters of it are not supported"),
        (moved(A, "base_model.model.model.mtp.0.up_proj.lora_A.weight"), "in a tower or a part that is not read"),
        (moved(A, "base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight"), "for another base"),
        (moved(A, "base_model.model.model.layers.7.mlp.up_proj.lora_A.weight"), "for another base model"),
        (
            damaged(lambda tensors: tensors.update({A: tensors[A][:, :-1].copy()})),
            r"shape must be \(8, 64\), got \(8, 63\)",
        ),
        (damaged(lambda tensors: tensors.update({A: tensors[A].astype(np.int32)})), "must hold floating-point numbers"),
        (filled(A, np.nan), "must be finite in float32, multiplied by .* .at .*lora_"),
        (filled(B, np.inf), "must be finite in float32, multiplied by .* .at .*lora_"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "has no adapter_config.json"),
        (lambda folder: (folder / "adapter_config.json").write_text("[1]"), "must hold a JSON object"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
        (
            lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"),
            "holds pickle weights",
        ),
        (
            lambda folder: (folder / "adapter_model.safetensors").write_bytes(
                (folder / "adapter_model.safetensors").read_bytes()[:-4]
            ),
            "the header describes",
        ),
    ],
)
def test_a_file_that_is_wrong_is_named(folder, targets, damage, says):
    damage(folder)
    with pytest.raises(ModelFileError, match=says):
        read(folder, targets)


def test_what_overflows_the_models_dtype_is_refused(folder, targets):
    filled(B, 3e38)(folder)
    with pytest.raises(ModelFileError, match="finite"):
        read(folder, targets, jnp.bfloat16)
