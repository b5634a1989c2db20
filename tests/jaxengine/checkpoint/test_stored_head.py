"""Whether head and embedding are one: what text_config says, what its wrapper says, and what the weights are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxengine.checkpoint.model_source import open_model
from jaxengine.checkpoint.stored_head import MAX_ROWS, say_head, with_plain_modules, with_stored_head
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.architectures import usual_name
from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.readers.hf import hf_architecture, read_config_json
from jaxengine.models.model_classes import MODELS
from jaxengine.models.params.source import WHOLE
from jaxengine.models.registry import build_model, read_hf
from jaxengine.models.weights.load import load_params
from tests.fixtures.drawn_weights import FOLDER, TENSORS, checkpoint
from tests.fixtures.quantized_models import FORMATS
from tests.tables import each_row

TIED = "tie_word_embeddings"
WRAPPERS = sorted(
    path.parent.name for path in FOLDER.glob("*/config.json") if "text_config" in json.loads(path.read_text())
)
# Outside, inside of text_config, result; None where nothing is said and the family's default counts.
SAID = ((True, False, False), (False, True, True), (True, None, True), (False, None, False), (True, True, True))


def said(raw: dict, outside: bool | None, inside: bool | None) -> dict:
    text = {name: value for name, value in raw["text_config"].items() if name != TIED}
    raw = {name: value for name, value in raw.items() if name != TIED} | {"text_config": text}
    text.update({} if inside is None else {TIED: inside})
    raw.update({} if outside is None else {TIED: outside})
    return raw


@each_row("name", WRAPPERS)
def test_text_config_goes_before_its_wrapper(name: str):
    raw = json.loads((FOLDER / name / "config.json").read_text())
    for outside, inside, result in SAID:
        # Thinkers have no such field inside: transformers writes its class's default there and reads it nowhere. Of
        # Granite Speech, GLM-ASR, MOSS and Fun-ASR it reads the wrapper's, whose default is true, and of PerceptionLM.
        # It never ties the heads of Molmo 2, VibeVoice and Inkling.
        (own,) = raw["architectures"]
        result = result and not own.startswith(("Molmo2", "VibeVoice", "Inkling"))
        outer = own.startswith(("GraniteSpeech", "GlmAsr", "MossTranscribe", "FunAsr", "PerceptionLM"))
        expected = (
            bool(outside)
            if "OmniThinker" in own or "OmniMoeThinker" in own
            else outside is not False
            if outer
            else result
        )
        if own.startswith("MiniMaxM3"):  # transformers ties its head if either says so
            expected = bool(outside) or bool(inside)
        if expected and own.startswith("Mllama"):  # its table has rows that its head lacks
            with pytest.raises(ModelConfigError, match="^tie_word_embeddings must be false or absent"):
                read_hf(said(raw, outside, inside))
        else:
            assert read_hf(said(raw, outside, inside)).tie_word_embeddings == expected, (outside, inside)


def test_every_wrapper_is_recorded():
    recorded = {usual_name(hf_architecture(ConfigFields(read_config_json(FOLDER / name)))) for name in WRAPPERS}
    # Configurations of models that transcribe, and Keye-VL's, are flat; classes of DeepSeek-OCR and V4.1 have names of
    # text models, and that of Nemotron-H Omni has one of its own.
    names = "Whisper", "CohereAsr", "Moonshine", "Keye", "KeyeVL1_5"
    flat = {f"{name}ForConditionalGeneration" for name in names}
    named = {name for name in MODELS if name.endswith("ForConditionalGeneration")}
    assert recorded == named - flat | {
        *("DeepseekOCRForCausalLM", "DeepseekV41ForCausalLM", "NemotronH_Omni_Reasoning_V3"),
    }


class Weights:
    """WeightSource of these arrays."""

    path = "weights"

    def __init__(self, tensors):
        self.tensors = tensors

    def names(self):
        return self.tensors

    def shape(self, name):
        return self.tensors[name].shape

    def read(self, name, rows=WHOLE, columns=WHOLE):
        return self.tensors[name][rows, columns]

    def close(self):
        raise AssertionError("it stays open")


ROWS = np.arange(4 * MAX_ROWS * 2, dtype=np.float32).reshape(4 * MAX_ROWS, 2)
EMBEDDING, HEAD = "model.language_model.embed_tokens.weight", "lm_head.weight"
OLD_EMBEDDING, OLD_HEAD = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"


@each_row(
    "outside,inside,tensors,result",
    [
        (True, False, {EMBEDDING: ROWS, HEAD: ROWS + 1}, False),
        (True, False, {EMBEDDING: ROWS, HEAD: ROWS}, False),
        (True, False, {EMBEDDING: ROWS}, True),  # transformers ties them, and nothing else can be done
        (True, False, {EMBEDDING: ROWS, "lm_head.weight_packed": ROWS}, False),
        (False, False, {EMBEDDING: ROWS}, False),  # refused when it is loaded: a tensor is missing
        (None, False, {EMBEDDING: ROWS}, False),
        (True, None, {EMBEDDING: ROWS, HEAD: ROWS + 1}, False),
        (False, True, {OLD_EMBEDDING: ROWS, OLD_HEAD: ROWS + 1}, False),
        (True, True, {OLD_EMBEDDING: ROWS, OLD_HEAD: ROWS.astype(np.float16)}, True),
        (True, True, {EMBEDDING: ROWS}, True),
        (True, True, {EMBEDDING: ROWS, HEAD: ROWS[:5]}, True),  # refused when it is loaded: another shape
    ],
)
def test_weights_decide(outside, inside, tensors, result):
    raw = said(read_config_json(FOLDER / "mistral3_vision"), outside, inside)
    assert with_stored_head(read_hf(raw), raw, Weights(tensors)).tie_word_embeddings == result


def test_a_written_config_says_what_was_loaded():
    for name in ("mistral3_vision", "llama"):
        for tied in (True, False):
            assert read_hf(say_head(read_config_json(FOLDER / name), tied)).tie_word_embeddings == tied


@pytest.mark.parametrize("differs", [True, False])
@pytest.mark.parametrize(
    ("name", "table", "head"),
    [
        ("llama", "model.embed_tokens.weight", HEAD),
        ("whisper_sound", "model.decoder.embed_tokens.weight", "proj_out.weight"),
    ],
)
def test_fine_tune_with_a_head_of_its_own(tmp_path: Path, name: str, table: str, head: str, differs: bool, caplog):
    shutil.copytree(checkpoint(name), folder := tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    stored = tensors[table] + np.float32(differs)
    save_file({**tensors, head: stored}, folder / "model.safetensors")
    source = open_model(EngineConfig(model=str(folder), skip_tokenizer_init=True))
    assert source.config.tie_word_embeddings != differs
    model = build_model(source.config, Build("float32"))
    nnx.update(model, load_params(model, source.weights))
    source.close()
    if differs:
        np.testing.assert_array_equal(model.lm_head.weight.values[...].T, stored)
    assert ("so they are not tied" in caplog.text) == differs


def test_stacks_of_plain_numbers_are_experts_that_are_not_quantised():
    """No list of a configuration names them, because in memory they are parameters and no linear layers."""
    granite, aria = "model.layers.1.block_sparse_moe", "model.layers.1.mlp"
    others = (("llama4", "model.layers.1.feed_forward"), ("dbrx", "model.layers.1.ffn"))
    for name, experts in (("granite_hybrid", granite), ("aria_text", aria), *others):
        raw = json.loads((FOLDER / name / "config.json").read_text())
        read = read_hf(raw | {"quantization_config": FORMATS["ct int channel"][0]})
        shapes = json.loads((FOLDER / name / TENSORS).read_text())["shapes"]
        stored = Weights({tensor: np.broadcast_to(np.int8(0), shape) for tensor, shape in shapes.items()})
        chosen = with_plain_modules(read, stored).quantization
        assert read.quantization is not None and chosen is not None
        parts = ("w1", "v1", "w2") if name == "dbrx" else ("gate_proj", "up_proj", "down_proj")
        modules = [f"{experts}.experts.{{expert}}.{each}" for each in parts]
        assert [type(read.quantization(each)).__name__ for each in modules] == 3 * ["Quantized"], name
        assert [type(chosen(each)).__name__ for each in modules] == 3 * ["Plain"], name
        assert type(chosen("model.layers.1.self_attn.o_proj")).__name__ == "Quantized", name
        assert with_plain_modules(read, None) is read
    # Stacks with scales are quantised, and experts with tensors of their own unless those of all are plain.
    scaled = {f"{aria}.experts.{each}": ROWS for each in ("gate_up_proj", "down_proj", "down_proj_scale_inv")}
    apart = {f"{aria}.experts.{expert}.gate_proj.weight": ROWS for expert in range(2)}
    mixed = apart | {f"{aria}.experts.1.gate_proj.weight_scale": ROWS}
    for tensors in (scaled, mixed):
        assert with_plain_modules(read, Weights(tensors)) is read
    chosen = with_plain_modules(read, Weights(apart)).quantization
    assert chosen is not None
    parts = [type(chosen(f"{aria}.experts.{{expert}}.{part}_proj")).__name__ for part in ("gate", "down")]
    assert parts == ["Plain", "Quantized"]


def test_matrices_of_plain_numbers_are_not_quantised():
    """Whatever the configuration lists: InternVL's AWQ checkpoints list nothing, and have a plain tower."""
    raw = json.loads((FOLDER / "internvl_vision" / "config.json").read_text())
    text, half, start = raw.pop("text_config"), np.zeros((2, 2), np.float16), "language_model.model.layers.0.self_attn"
    plain = "vision_model.encoder.layers.0.mlp.fc1", f"{start}.o_proj"
    tensors = {f"{module}.{kind}": half for module in plain for kind in ("weight", "bias")}
    tensors |= {f"{start}.q_proj.{kind}": half for kind in ("qweight", "qzeros", "scales")}
    tensors |= {f"{start}.k_proj.weight": half.astype(np.int8), f"{start}.v_proj.weight": half}
    tensors[f"{start}.v_proj.weight_scale"] = half
    own = {"quantization_config": FORMATS["awq"][0]}
    modules = *(f"model.layers.0.self_attn.{each}_proj" for each in "oqkv"), "vision_tower.encoder.layer.0.mlp.fc1"
    for changes in ({"text_config": text, **own}, {"text_config": text | own}, {"llm_config": text | own}):
        chat = {"architectures": ["InternVLChatModel"]} if "llm_config" in changes else {}
        read = read_hf(raw | chat | changes)
        chosen = with_plain_modules(read, Weights(tensors)).quantization
        assert read.quantization is not None and chosen is not None
        found = ["".join(type(each(name)).__name__[0] for name in modules) for each in (read.quantization, chosen)]
        assert found == ["QQQQQ", "PQQQP"], changes
