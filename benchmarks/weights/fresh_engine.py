"""Tokens of an engine that is started with given weights in a separate process, for `weight_updates`.

The weights are written as a checkpoint and the adapter as a PEFT folder, and both are read as a user's are. No weights
are updated here.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from benchmarks.drafts.first_layers import write_checkpoint
from benchmarks.engines import engine_options
from benchmarks.processes import ROOT, command
from jaxengine import LLM, LoRARequest, SamplingParams
from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.engine_config import EngineConfig

ASKED, FOUND, ADAPTER = "asked.json", "found.json", "adapter"


class Asked(NamedTuple):
    """Tokens that one set of weights has chosen.

    Attributes:
      before: ids of the prompt, and of the output before `tokens`.
      tokens: token ids, chosen greedily.
      has_adapter: whether the request has the adapter.
    """

    before: list[int]
    tokens: list[int]
    has_adapter: bool


def differences(
    model: EngineConfig,
    tensors: Mapping[str, np.ndarray],
    adapter: Mapping[str, np.ndarray],
    adapter_config: Mapping[str, Any],
    asked: Sequence[Asked],
) -> int:
    """Return the number of entries of `asked` for which an engine started with these weights chooses other tokens.

    model: options that name a model of the same sizes. tensors: the weights by name. adapter, adapter_config: matrices
    of the adapter by name, and the content of its adapter_config.json. Raises CalledProcessError if the engine's
    process fails.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = open_model(model)
        sizes = source.config
        source.close()
        tied = {"architectures": [sizes.architecture], "tie_word_embeddings": sizes.tie_word_embeddings}
        write_checkpoint(folder, dict(tensors), sizes, sizes.num_layers, **tied)
        (folder / ADAPTER).mkdir()
        save_file(dict(adapter), folder / ADAPTER / "adapter_model.safetensors")
        (folder / ADAPTER / "adapter_config.json").write_text(json.dumps(adapter_config))
        (folder / ASKED).write_text(json.dumps(asked))
        subprocess.run(command(answer, folder=name), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        found = json.loads((folder / FOUND).read_text())
    return sum(each.tokens != tokens for each, tokens in zip(asked, found, strict=True))


def answer(folder: str) -> None:
    """Start an engine with the checkpoint and the adapter (ADAPTER) in `folder`. For each Asked of the file ASKED
    there, choose as many tokens as it has, greedily; write them to FOUND there, a JSON list of lists.
    """
    asked = [Asked(*each) for each in json.loads(Path(folder, ASKED).read_text())]
    adapter = LoRARequest("policy", 1, str(Path(folder, ADAPTER)))
    sizes = engine_options(dtype="float32", max_model_len=256, max_num_batched_tokens=256, max_num_seqs=32)
    rank = json.loads(Path(folder, ADAPTER, "adapter_config.json").read_text())["r"]
    own = {"skip_tokenizer_init": True, "enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    with LLM(folder, **sizes | own) as llm:
        outputs = llm.generate(
            [each.before for each in asked],
            [SamplingParams(temperature=0, max_tokens=len(each.tokens), ignore_eos=True) for each in asked],
            lora_request=[adapter if each.has_adapter else None for each in asked],
            use_tqdm=False,
        )
    Path(folder, FOUND).write_text(json.dumps([list(each.outputs[0].token_ids) for each in outputs]))
