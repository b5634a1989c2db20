"""Qwen3's forced aligner, as published: scores of times for the tokens of a transcript, with its sound."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxengine import AsyncLLM
from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.params.errors import ModelFileError
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from tests.fixtures import sound_checkpoints as sounds
from tests.jaxengine.engine.test_prompt_sounds import goldens
from tests.jaxengine.server.asgi_client import post
from tests.jaxengine.server.http.test_audio import wav

NAME = "qwen3_asr_wide_sound"
# Of transformers' names -> the first published ones.
PUBLISHED = {
    "model.audio_tower.": "thinker.audio_tower.",
    "model.multi_modal_projector.linear_": "thinker.audio_tower.proj",
    "model.language_model.": "thinker.model.",
    "lm_head.": "thinker.lm_head.",
}


def make_aligner(folder, number=268):
    """A folder with Qwen3-ASR whose LM head scores times."""
    sounds.whole_checkpoint(NAME, folder)
    config = json.loads((folder / "config.json").read_text())
    thinker = {name: config.pop(name) for name in ("audio_config", "text_config", "audio_token_id")}
    (folder / "config.json").write_text(json.dumps(config | {"thinker_config": thinker | {"classify_num": number}}))
    named = {
        new + name.removeprefix(old): values
        for name, values in load_file(folder / "model.safetensors").items()
        for old, new in PUBLISHED.items()
        if name.startswith(old)
    }
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


async def test_times_of_tokens(tmp_path, executables_dir):
    """Rows are the logits of the model that generates, whose last ones are recorded."""
    options = {"dtype": "float32", "max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    options |= {"num_gpu_blocks_override": 24}
    options |= {"compilation_config": {"cudagraph_capture_sizes": [], "prefill_sizes": []}}
    folder = make_aligner(tmp_path)
    engine = AsyncLLM(str(folder), **options, max_audio_seconds=6, compile_cache_dir=executables_dir)
    try:
        app, recorded, asked = create_app(engine, ServerConfig()), goldens(NAME), []
        template = "{% for part in messages[0].content %}{{ part.text or MARKS }}{% endfor %}"
        engine.inputs.tokenizer.chat_template = template.replace("MARKS", repr("".join(sounds.marks(NAME))))
        for prompt in sounds.prompts(NAME).values():
            parts = [
                {"type": "text", "text": part}
                if isinstance(part, str)
                else {"type": "input_audio", "input_audio": {"data": data_of(part), "format": "wav"}}
                for part in prompt
            ]
            asked.append([{"role": "user", "content": parts}])
        answer = await post(app, "/pooling", messages=asked, task="token_classify", use_activation=False)
        assert answer.status == 200, answer.body
        for name, found in zip(sounds.prompts(NAME), answer.json["data"], strict=True):
            golden = recorded[f"{name}_logits"]
            rows = np.array(found["data"])
            assert rows.shape == (len(recorded[f"{name}_ids"]), 268)
            assert np.abs(rows[-len(golden) :] - golden).max() <= 1e-3 * np.abs(golden).max()  # 16 bits of a sample
    finally:
        engine.shutdown()


def data_of(part) -> str:
    return base64.b64encode(wav(np.clip(sounds.sound(*part), -1, 1))).decode()


def test_a_wrong_number_of_times_is_named(tmp_path):
    folder = make_aligner(tmp_path, 0)
    with pytest.raises(ModelFileError, match="thinker_config.classify_num must be"):
        open_model(EngineConfig(model=str(folder)))
