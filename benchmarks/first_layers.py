"""Writes a draft model for the default model: its own first layers, and its head behind them, nothing trained.

    python -m benchmarks.first_layers FOLDER [--layers 20]
    python -m benchmarks.drafts --draft FOLDER --drafts 3

It shows what a draft model costs and that it changes no token, not what a good one brings: a draft costs as many of the
model's layers as it has, and layers that were not trained to be the last are seldom of the model's mind.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from safetensors.numpy import save_file

from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.engine_config import EngineConfig


def write_first_layers(folder: Path, num_layers: int) -> None:
    """A Hugging Face folder of the default model's first layers."""
    source = open_model(EngineConfig())
    model, weights = source.config, source.weights
    assert weights is not None and not isinstance(weights, Path)
    attention = model.attention[0]
    assert attention.rope is not None and attention.rope.scaling is None
    tensors = {}
    for name in weights.names():
        layer = re.match(r"model\.layers\.([0-9]+)\.", name)
        if layer is None or int(layer[1]) < num_layers:
            tensors[name] = weights.read(name)
    config = {
        "architectures": [model.architecture],
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
        "tie_word_embeddings": model.tie_word_embeddings,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    source.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=20)
    args = parser.parse_args()
    write_first_layers(args.folder, args.layers)


if __name__ == "__main__":
    main()
