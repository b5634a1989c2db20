"""The option `quantization`, and whole engines with quantised weights."""

from __future__ import annotations

import json
import shutil

import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxengine import LLM, ModelFileError, SamplingParams
from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.models.build import Build
from jaxengine.models.params.declare import declared_params
from jaxengine.models.quantization.registry import ROUNDED, rounded
from jaxengine.models.registry import build_model
from tests.conftest import TINY_CHECKPOINT, TINY_OPTIONS
from tests.fixtures.quantized_models import shapes_of, write
from tests.models.quantization import readings, test_gguf
from tests.models.quantization.test_damage import COMPRESSED
from tests.tables import each_row

PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 6, 7, 8, 9, 10, 11], [40, 3])]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
OPTIONS = TINY_OPTIONS | {
    "max_model_len": 48,
    "compilation_config": {"cudagraph_capture_sizes": [], "prefill_sizes": []},
}


def method_of(**options):
    quantization = open_model(EngineConfig(skip_tokenizer_init=True, **options)).config.quantization
    return None if quantization is None else quantization.method


def test_a_checkpoint_is_what_its_configuration_says(tmp_path):
    folders = {name: str(write(tmp_path, name)) for name in ("fp8 block", "awq", "gptq 4", "ct packed 4")}
    for asked in (None, "fp8"):
        assert method_of(model=folders["fp8 block"], quantization=asked) == "fp8"
    for asked in ("awq", "awq_marlin"):
        assert method_of(model=folders["awq"], quantization=asked) == "awq"
    assert method_of(model=folders["gptq 4"], quantization="gptq_marlin") == "gptq"
    assert method_of(model=folders["ct packed 4"], quantization="compressed-tensors") == "compressed-tensors"
    with pytest.raises(
        ConfigError, match="quantization is 'fp8', but the checkpoint is quantised as 'awq'; .*'awq_marlin'"
    ):
        method_of(model=folders["awq"], quantization="fp8")


def test_a_product_of_modules_that_are_stored_differently_is_one_error(tmp_path):
    folder = write(tmp_path, "awq")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["k_proj"]
    (folder / "config.json").write_text(json.dumps(config))
    said = "modules of one product must be stored in one way, got .*q_proj as AwqGemm.*, .*k_proj as it is, .*v_proj"
    with pytest.raises(ModelFileError, match=said) as error:
        LLM(str(folder), **OPTIONS)
    assert error.value.path == str(folder)


@pytest.mark.parametrize("name", ROUNDED)
def test_a_plain_checkpoint_can_be_rounded(name):
    assert method_of(model=str(TINY_CHECKPOINT), quantization=name) == name
    with pytest.raises(
        ConfigError, match="quantization is 'awq', but the checkpoint is not quantised; .*'int8' or 'fp8'"
    ):
        method_of(model=str(TINY_CHECKPOINT), quantization="awq")


def test_a_gguf_file_is_as_it_is():
    assert method_of() is None and method_of(quantization="gguf") == "gguf"
    with pytest.raises(ConfigError, match="quantization is 'int8', but the checkpoint is quantised as 'gguf'"):
        method_of(quantization="int8")


@pytest.mark.thorough("as a kept GGUF file's")
def test_tokens_are_those_of_the_dequantised_weights(tmp_path, caplog):
    folder, plain = write(tmp_path, "awq"), tmp_path / "plain"
    shutil.copytree(folder, plain)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    settings = config.pop("quantization_config")
    (plain / "config.json").write_text(json.dumps(config))
    shapes = shapes_of(config)
    kept = {name: array for name, array in tensors.items() if name.rpartition(".")[0] not in shapes}
    matrices = {f"{name}.weight": readings.matrix(tensors, name, settings, shape) for name, shape in shapes.items()}
    save_file(kept | matrices, plain / "model.safetensors")
    options = OPTIONS | {"disable_log_stats": False}
    tokens, rows = [], []
    for path in (folder, plain):
        with caplog.at_level("INFO", "jaxengine"):
            llm = LLM(str(path), **options)
        tokens.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)])
        rows.append({row["modules"]: row for row in llm.core.utility("weights")})
        params = declared_params(build_model(llm.core.inputs.model_config, Build("float32")))
        assert llm.core.runner.plan.weights == sum(param.num_bytes for param in params)
        assert {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}["jaxengine:compilations_since_ready"] == 0
        llm.core.shutdown()
    assert tokens[0] == tokens[1] and len(set(tokens[0][0])) > 2
    row = rows[0]["layers.*.mlp.down"]
    assert (row["format"], row["dtype"], row["product"]) == ("awq", "int4", "matmul.cpu.quantized")
    assert row["bytes"] == 64 * 96 // 2 + 2 * 3 * 64 * 4, "codes of half a byte, scales and zeros of groups of 32"
    assert rows[0]["lm_head"]["format"] == rows[1]["layers.*.mlp.down"]["format"] == "as it is"
    assert caplog.text.count("weights:\n") == 1 and "int4 0.0 MiB" in caplog.text


@pytest.mark.thorough("tests/sharding/test_gguf_table.py compares a kept file over two devices")
def test_tokens_of_a_kept_gguf_file_are_those_of_the_dequantised_one(tmp_path):
    """Formats mixed as llama.cpp's Q4_K_M mixes them."""
    kinds = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K"}
    path = test_gguf.write(
        tmp_path / "model.gguf", test_gguf.LLAMA, lambda name: kinds.get(name.split(".")[-2], "Q4_K")
    )
    tokens, logprobs = [], []
    for quantization in (None, "gguf"):
        llm = LLM(path, **OPTIONS | {"quantization": quantization})
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY.clone_with(logprobs=0), use_tqdm=False)]
        tokens.append([output.token_ids for output in outputs])
        logprobs.append([output.cumulative_logprob for output in outputs])
        assert llm.core.runner.compiles.count == 0
        llm.core.shutdown()
    assert tokens[0] == tokens[1] and len({*tokens[0][0], *tokens[0][1]}) > 2
    assert logprobs[0] == pytest.approx(logprobs[1], rel=1e-4)


def test_every_rounding_keeps_routers_tables_and_heads():
    config = open_model(EngineConfig(model=str(TINY_CHECKPOINT), skip_tokenizer_init=True, quantization="int8")).config
    names = [param.name for param in declared_params(build_model(config, Build("float32")))]
    assert "embed.weight.values" in names and "layers.0.mlp.down.weight.codes" in names
    assert type(rounded("int8")("lm_head")).__name__ == "Plain"


@each_row(
    ("name", "ignored"),
    [
        ("bert_score", ["classifier", "bert.pooler.dense"]),
        ("roberta_labels", ["re:classifier.*"]),
        ("distilbert_labels", ["classifier", "pre_classifier"]),
        ("modernbert_score", ["classifier", "head.dense"]),
        ("embedding_gemma", []),
    ],
)
def test_what_makes_the_answers_of_an_encoder_stays_as_it_is(encoder_folder, name, ignored):
    """Rounded at load, and in a checkpoint that leaves its heads out under its own names for them."""
    stored = {"hf_overrides": {"quantization_config": COMPRESSED | {"ignore": ignored}}}
    for options in ({"quantization": "int8"}, stored):
        config = open_model(EngineConfig(model=encoder_folder(name), load_format="dummy", **options)).config
        model = build_model(config, Build("float32"))
        kept = model.dense.products if config.pooler.dense else (model.labels.dense, model.labels.labels)
        assert [type(each.weight).__name__ for each in kept] == ["PlainWeight"] * 2
        assert "QuantizedWeight" in {type(module).__name__ for _, module in nnx.iter_modules(model.layers)}
