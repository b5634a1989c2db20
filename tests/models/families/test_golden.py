"""Logits of every family against those that Hugging Face transformers recorded (tests/fixtures/recorders/models.py)."""

from __future__ import annotations

import numpy as np
import pytest

from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.families.declared_dense import DENSE_ROWS
from jaxengine.models.families.declared_experts import EXPERT_ROWS
from jaxengine.models.families.declared_hub import HUB_ROWS
from jaxengine.models.families.declared_kinds import KIND_ROWS
from jaxengine.models.families.declared_mixtures import MIXTURE_ROWS
from jaxengine.models.model_classes import MODELS
from jaxengine.models.registry import read_hf
from tests.models.conftest import CHECKPOINTS, forward

NAMES = sorted(path.parent.name for path in CHECKPOINTS.glob("*/golden.npz"))
TOLERANCE = 1e-4  # of the largest logit


def assert_close(ours: np.ndarray, golden: np.ndarray) -> None:
    assert ours.shape == golden.shape
    assert np.abs(ours - golden).max() <= TOLERANCE * np.abs(golden).max()


def padded(count: int) -> int:
    """Few shapes, one for most checkpoints: compiling is what takes time."""
    return -(-count // 40) * 40


def step_size(case) -> int:
    """Tokens of every step of a checkpoint: one shape, with room for its longest prompt."""
    return padded(max(map(len, case.prompts)))


def architecture(name: str) -> str:
    return read_hf(read_config_json(CHECKPOINTS / name)).architecture


# A checkpoint of each family always, and those of further kinds of rope; others in a thorough run.
ROPES = ("llama_yarn", "llama3_sharded", "phi3_longrope", "mistral_large4_vision")
FIRSTS = {architecture(name): name for name in reversed(NAMES)}
# Families that mix what others have: six rows that have every part once that no other family shows are left.
MIXED = {*DENSE_ROWS, *EXPERT_ROWS, *KIND_ROWS, *("MambaForCausalLM", "FalconMambaForCausalLM", "BambaForCausalLM")}
MIXED |= {"OlmoHybridForCausalLM", "MptForCausalLM", "BaichuanForCausalLM"}
MIXED |= {*HUB_ROWS, *MIXTURE_ROWS, "Lfm3ForCausalLM", "BailingHybridForCausalLM", "Gemma4UnifiedForCausalLM"}
MIXED |= {"SolarForCausalLM", "AXK2ForCausalLM", "LaraMiniForCausalLM", "BailingMoeV3ForCausalLM"}
MIXED |= {"NanbeigeForCausalLM", "Rnj1ForCausalLM", "JAISLMHeadModel", "AliceAIForCausalLM"}
MIXED |= {"DeepseekV41ForCausalLM"}  # takes long: tests/models/layers/test_ngrams.py has its parts
MIXED |= {"Glm5NextForConditionalGeneration", "Dots3NoteForCausalLM", "MistralLarge4ForConditionalGeneration"}
# Pictures, Muse Spark and the others' text show them.
MIXED |= {
    "MuseGlimmerForConditionalGeneration",
    "MiniMaxM3SparseForConditionalGeneration",
    "NemotronH_Omni_Reasoning_V3",
}
MIXED -= {"MiMoV2FlashForCausalLM", "AfmoeForCausalLM", "Mistral4ForCausalLM", "NanoChatForCausalLM"}
MIXED -= {"BeamForCausalLM", "Step3p7ForConditionalGeneration", "XGLMForCausalLM"}
ALWAYS = frozenset((*(name for family, name in FIRSTS.items() if family not in MIXED), *ROPES))
# Named otherwise than a family's text models, and computed as they are: that they load shows most of it.
RENAMED = frozenset(name for name in ALWAYS if name.endswith(("_vision", "_wrapped"))) - {*ROPES}
# Families whose class or row computes nothing of its own: it sets what others of ALWAYS have, or names weights anew.
_SIMILAR = """arcee codegen cwm dots1 ernie4_5 gemma glm glm4_moe glm4_moe_lite glm_moe_dsa gpt_bigcode
gpt_neo granite_moe granite_moe_shared granite_moe_swa helium hunyuan_moe internlm3 jais2 lfm2_moe minicpm ministral3
mistral mllama_text olmo olmo3 olmoe persimmon qwen3_5_moe seed_oss"""
SIMILAR = frozenset(_SIMILAR.split())
WITHOUT_ONE_FILE = frozenset(("llama_yarn", "llama3_sharded"))


# Whose prompts have sounds: tests/jaxengine/engine/test_sounds.py, test_attended_sounds.py, test_prompt_sounds.py and
# test_omni.py.
_HEARING = (
    "Whisper",
    "CohereAsr",
    "Moonshine",
    "Qwen2Audio",
    "Voxtral",
    "Qwen3ASR",
    "AudioFlamingo3",
    "MusicFlamingo",
    "MossTranscribeDiarize",
    "FunAsrNano",
    "VibeVoiceAsr",
    "GlmAsr",
    "GraniteSpeech",
    "GraniteSpeechPlus",
    "Qwen2_5OmniThinker",
    "Qwen3OmniMoeThinker",
)
HEARING = frozenset(f"{name}ForConditionalGeneration" for name in _HEARING)

# Whose layers attend to pictures: tests/jaxengine/engine/test_crossed_pictures.py.
ATTENDING = frozenset(("MllamaForConditionalGeneration",))


def test_every_family_is_recorded():
    assert {name.partition("[")[0] for name in FIRSTS} == set(MODELS) - HEARING - ATTENDING


VERSIONS = frozenset(("gemma2", "llama_yarn", "qwen3_moe"))


def marks(name: str) -> list[pytest.MarkDecorator]:
    if name not in ALWAYS or name in RENAMED | SIMILAR:
        return [pytest.mark.thorough("a further shape of a family, or computed as another one")]
    return [pytest.mark.versions] if name in VERSIONS else []


@pytest.fixture(scope="module", params=[pytest.param(name, marks=marks(name)) for name in NAMES])
def case(request, recorded):
    """One checkpoint after the other: its programs are compiled once, and then forgotten."""
    yield recorded(request.param)
    forward.clear_cache()


@pytest.mark.parametrize("name", sorted(RENAMED | SIMILAR))
def test_weights_of_families_computed_as_others_load(name, recorded):
    assert recorded(name).config.architecture.partition("[")[0] in MODELS


def test_whole_prompt(case, paged_run):
    run = paged_run(case.model)
    for index, prompt in enumerate(case.prompts):
        logits = run.step({str(index): prompt}, num_tokens=step_size(case))[str(index)]
        assert_close(logits, case.logits[index])


def test_prefill_in_chunks_then_decode(case, paged_run):
    run, prompt = paged_run(case.model), case.prompts[0]
    chunks = [chunk for chunk in np.split(prompt[:-8], [7, 8, len(prompt) - 11]) if len(chunk)]
    parts = [run.step({"a": chunk}, num_tokens=step_size(case))["a"] for chunk in chunks]
    parts += [run.step({"a": token[None]}, num_tokens=step_size(case))["a"] for token in prompt[-8:]]
    assert_close(np.concatenate(parts), case.logits[0])


def test_two_sequences_at_different_stages(case, paged_run):
    run, (long, short) = paged_run(case.model), case.prompts
    a, b = len(long) - 9, len(short) - 3
    first = run.step({"long": long[:a]}, num_tokens=step_size(case))["long"]
    mixed = run.step({"long": long[a : a + 1], "short": short[:b]}, num_tokens=step_size(case))
    decode = [
        run.step({"short": short[b + i :][:1], "long": long[a + 1 + i :][:1]}, num_tokens=step_size(case))
        for i in range(3)
    ]
    assert_close(np.concatenate([first, mixed["long"], *(d["long"] for d in decode)]), case.logits[0][: a + 4])
    assert_close(np.concatenate([mixed["short"], *(d["short"] for d in decode)]), case.logits[1])
