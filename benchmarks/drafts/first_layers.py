"""Writes a draft model for the default model: its own first layers with its head after them, not trained.

    python -m benchmarks first_layers FOLDER
    python -m benchmarks drafts --draft FOLDER --drafts 3

It shows what a draft model costs and that it changes no token, not what a good one gains: a draft costs as many of the
model's layers as it has, and layers that were not trained to be the last seldom predict what the model does.
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from benchmarks.harness import Option
from benchmarks.recorder import Recorder
from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.config.model_config import ModelConfig

FOLDER = Option(help="where it is written", kind=Path, positional=True)
OPTIONS = {"folder": FOLDER, "layers": Option(20, "how many")}


def run(args: Namespace, recorder: Recorder) -> None:
    write_first(args.folder, args.layers)


def write_first(folder: Path, layers: int, tokens: int | None = None) -> None:
    """Write the default model's first `layers` layers, its final norm, and the embeddings (and LM head, if it has one
    of its own) of its first `tokens` tokens, as a Hugging Face folder.

    folder: created if it is missing. tokens: None for the whole vocabulary.
    """
    source = open_model(EngineConfig())
    weights, model = source.weights, source.config
    assert weights is not None and not isinstance(weights, Path)
    tensors = {}
    for name in weights.names():
        layer = re.match(r"model\.layers\.([0-9]+)\.", name)
        if layer is None or int(layer[1]) < layers:
            tensors[name] = weights.read(name)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = tensors[name][:tokens]
    more = {"architectures": [model.architecture], "tie_word_embeddings": model.tie_word_embeddings}
    more["vocab_size"] = min(tokens or model.vocab_size, model.vocab_size)
    write_checkpoint(folder, tensors, model, layers, **more)
    source.close()


def write_checkpoint(folder: Path, tensors: dict[str, Any], model: ModelConfig, num_layers: int, **more: Any) -> None:
    """Write model.safetensors and config.json of a Llama with `num_layers` layers of the sizes of `model`, whose RoPE
    must not be scaled (AssertionError).

    folder: created if it is missing. tensors: arrays by name on the hub. more: entries of config.json that are added or
    replaced.
    """
    attention = model.attention[0]
    assert attention.rope is not None and attention.rope.scaling is None
    config = {
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": attention.rope.theta,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | more, indent=2) + "\n")
