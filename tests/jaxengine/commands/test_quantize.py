"""`jaxengine convert --quantize`: the written folder is what quantization= makes of the model as it reads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from jaxengine.checkpoint.model_source import open_model
from jaxengine.commands.cli import main
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.build import Build
from jaxengine.models.params.declare import declared_params
from jaxengine.models.quantization.registry import ROUNDED
from jaxengine.models.registry import build_model
from jaxengine.models.weights import compress
from jaxengine.models.weights.load import load_params
from tests.conftest import TINY_CHECKPOINT
from tests.fixtures.drawn_weights import checkpoint
from tests.fixtures.quantized_models import MOE_CONFIG, plain_tensors, shapes_of


def arrays(path, quantization=None) -> dict[str, np.ndarray]:
    """All that devices hold of a model, by name."""
    source = open_model(EngineConfig(model=str(path), quantization=quantization, skip_tokenizer_init=True))
    model = build_model(source.config, Build("float32"))
    assert source.weights is not None and not isinstance(source.weights, Path)
    state = dict(nnx.to_flat_state(load_params(model, source.weights)))
    source.close()
    return {param.name: np.asarray(state[param.path].get_value()) for param in declared_params(model)}


def quantized(model, folder) -> int:
    return main(["convert", str(model), str(folder), "--quantize", "int8", "--disable-log-stats"])


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory):
    """A plain checkpoint with experts, whose inputs are no multiple of a group."""
    folder, rng = tmp_path_factory.mktemp("experts") / "model", np.random.default_rng(0)
    folder.mkdir()
    config = {**MOE_CONFIG, "hidden_size": 200, "moe_intermediate_size": 136}
    matrices = {f"{name}.weight": rng.standard_normal(shape, np.float32) for name, shape in shapes_of(config).items()}
    save_file(plain_tensors(config) | matrices, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_fields_of_the_user_are_written(tmp_path):
    words = ["convert", str(TINY_CHECKPOINT), str(tmp_path / "x"), "--quantize", "int8", "--disable-log-stats"]
    assert main([*words, "--hf-overrides", '{"rope_theta": 5000}']) == 0
    model = open_model(EngineConfig(model=str(tmp_path / "x"))).config
    assert model.attention[0].rope.theta == 5000


@pytest.mark.parametrize("name", ROUNDED)
def test_what_devices_hold_is_the_same(tmp_path, capsys, with_experts, name):
    for number, source in enumerate((TINY_CHECKPOINT, with_experts)):
        folder = tmp_path / str(number)
        assert main(["convert", str(source), str(folder), "--quantize", name, "--disable-log-stats"]) == 0
        said = capsys.readouterr().out
        assert "model.layers.*.self_attn.q_proj: relative error" in said and str(folder) in said
        written, expected = arrays(folder), arrays(source, name)
        assert written.keys() == expected.keys()
        for param, array in expected.items():
            np.testing.assert_array_equal(written[param], array, param)
        settings = json.loads((folder / "config.json").read_text())["quantization_config"]
        assert ("model.layers.0.mlp.gate" in settings["ignore"]) == (number == 1)
        assert "model.layers.0.self_attn.q_proj" not in settings["ignore"]


def test_what_devices_hold_wide_anyway_is_not_rounded(tmp_path, capsys):
    """Matrices of heads of latent attention: devices hold them dequantised, so that rounding would save nothing."""
    plain, folder = checkpoint("deepseek_v3"), tmp_path / "model"
    assert main(["convert", str(plain), str(folder), "--quantize", "int4", "--disable-log-stats"]) == 0
    assert "self_attn.o_proj" in (said := capsys.readouterr().out) and "kv_b_proj" not in said
    written, rounded, wide = arrays(folder), arrays(plain, "int4"), arrays(plain)
    assert written.keys() == rounded.keys()
    for param, array in rounded.items():
        np.testing.assert_array_equal(written[param], array, param)
    of_heads = [param for param in rounded if ".w_uk." in param or ".w_uv." in param]
    assert len(of_heads) == 4
    for param in of_heads:
        np.testing.assert_array_equal(rounded[param], wide[param], param)


@pytest.mark.thorough("two engines for two numbers")
def test_perplexity_before_and_after(tmp_path, capsys):
    model, text = tmp_path / "model", tmp_path / "text"
    shutil.copytree(TINY_CHECKPOINT, model)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{index}": index for index in range(128)}, "w1"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(model / "tokenizer.json"))
    text.write_text(" ".join(f"w{index}" for index in np.random.default_rng(0).integers(0, 128, 90)))
    command = ["convert", str(model), str(tmp_path / "out"), "--quantize", "int4", "--disable-log-stats"]
    assert main([*command, "--perplexity", str(text)]) == 0
    said = capsys.readouterr().out
    before, after = (float(word) for word in said.partition("perplexity on ")[2].split()[1:4:2])
    assert before > 1 and after > 1 and before != after


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--quantize", "int8", "--dtype", "float32"], "dtype is 'float32'; allowed: absent with --quantize"),
        (["--quantize", "int8", "-tp", "2"], "tensor_parallel_size is 2; allowed: absent with --quantize"),
        (["--quantize", "int8", "--perplexity", "/no/file"], "perplexity '/no/file' cannot be read"),
        (["--perplexity", "x"], "perplexity is 'x'; allowed: absent without --quantize"),
    ],
)
def test_what_is_refused(tmp_path, capsys, options, message):
    assert main(["convert", str(TINY_CHECKPOINT), str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_what_is_no_number_and_what_is_quantised_already(tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(TINY_CHECKPOINT, model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    save_file(tensors, model / "model.safetensors")
    assert main(["convert", str(model), str(tmp_path / "bad"), "--quantize", "int8", "--disable-log-stats"]) == 2
    assert (
        "holds a value that is not a finite number, or too large to be rounded (at model.layers.1.mlp.up_proj.weight)"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "bad" / "config.json").exists()
    done = ["convert", str(TINY_CHECKPOINT), str(tmp_path / "one"), "--quantize", "int8", "--disable-log-stats"]
    assert main(done) == 0 and main(done) == 2
    assert "exists; a checkpoint is written to a new folder" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "one"), str(tmp_path / "two"), "--quantize", "int8"]) == 2
    assert "is quantised already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "part"), [("llama", None), ("llava_vision", "vision_tower"), ("qwen2_5_vl_vision", "visual")]
)
def test_what_others_must_not_take_for_quantised(tmp_path, model, part):
    """A head that is the embeddings, and parts whose modules others call by longer names than checkpoints do."""
    assert quantized(checkpoint(model), tmp_path / "out") == 0
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    patterns = [entry for entry in ignored if entry.startswith("re:")]
    assert "lm_head" in ignored and (not patterns if part is None else f"re:.*{part}[.]" in patterns)
    # A matrix whose name begins those of rounded ones.
    assert compress._ignored({"a.b", "a.b.c"}, {"a.b.c"}) == ["a.b", "lm_head"]


def test_shapes_of_what_is_not_rounded_and_who_may_read(tmp_path):
    assert quantized(checkpoint("apertus"), tmp_path / "out") == 0
    before, after = (load_file(path / "model.safetensors") for path in (checkpoint("apertus"), tmp_path / "out"))
    kept = before.keys() & after.keys()
    scalars = [name for name in kept if before[name].ndim == 0]
    assert scalars and all(before[name].shape == after[name].shape for name in kept if name in scalars)
    modes = {file.stat().st_mode for file in (tmp_path / "out").iterdir()}
    assert len(modes) == 1


def test_a_pooling_model_saved_without_its_head(tmp_path, pooling_folder, capsys):
    assert quantized(pooling_folder("last"), tmp_path / "out") == 0
    written, expected = arrays(tmp_path / "out"), arrays(pooling_folder("last"), "int8")
    assert written.keys() == expected.keys()
    assert all(np.array_equal(written[name], array) for name, array in expected.items())
    first, second = (
        open_model(EngineConfig(model=str(path))).pooling for path in (pooling_folder("last"), tmp_path / "out")
    )
    assert first is not None and first == second
    command = ["convert", str(pooling_folder("last")), str(tmp_path / "no"), "--quantize", "int8"]
    (tmp_path / "text").write_text("w5 w9")
    assert main([*command, "--perplexity", str(tmp_path / "text")]) == 2
    assert "allowed: absent for a pooling model" in capsys.readouterr().err and not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("fault", "status", "said"),
    [
        (SafetensorError("No space left on device"), 2, "cannot be written: No space left"),
        (OSError(28, "No space left on device"), 2, "cannot be written: [Errno 28]"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_nothing_is_left_of_what_did_not_end_well(tmp_path, monkeypatch, capsys, fault, status, said):
    def fail(*_):
        raise fault

    monkeypatch.setattr(compress, "save_file", fail)
    assert quantized(TINY_CHECKPOINT, tmp_path / "out") == status
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_folders_that_are_taken(tmp_path, capsys):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "begun.part").mkdir()
    assert quantized(TINY_CHECKPOINT, tmp_path / "link") == 2
    assert "exists; a checkpoint is written to a new folder" in capsys.readouterr().err
    assert quantized(TINY_CHECKPOINT, tmp_path / "begun") == 2
    assert "begun.part: exists, for a checkpoint is being written" in capsys.readouterr().err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["begun.part", "link"]
