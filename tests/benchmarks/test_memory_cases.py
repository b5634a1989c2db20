"""Models whose memory is measured: each is one that the engine reads, of another family, with its sizes."""

from __future__ import annotations

from benchmarks.pages.memory import case_options
from benchmarks.pages.memory_cases import DEFAULT, FAMILIES, devices_of
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.registry import read_folder


def test_every_case_is_a_model_and_options_for_it(tmp_path):
    families = set()
    for name in FAMILIES:
        options = case_options(name, tmp_path)
        EngineConfig.from_options(**options)
        model = read_folder(options["model"])
        families.add(model.architecture)
        assert model.hidden_size == 1024 and model.max_position_embeddings >= options["max_model_len"], name
    assert len(families) == len(FAMILIES) - 1 >= 12  # Llama is there in two ways
    for name in set(DEFAULT) - {"default, draft model"}:  # its draft has to be written
        options = case_options(name, tmp_path)
        EngineConfig.from_options(**options)
        assert options.get("quantization", "gguf") == "gguf"  # what the default model is
        assert devices_of(options) == (2 if name.endswith(" 2") else 1)
