"""A model family of your own: a class, registered for the checkpoints that name it.

    python examples/custom_model.py FOLDER [COPY]

FOLDER is a Hugging Face Llama checkpoint. The family here is Llama with capped logits; its checkpoint is a copy of the
folder, kept at COPY if that is given, with another architecture in config.json. This file is a plugin as well, so that
every command runs the copy:

    jaxengine serve COPY --plugin examples/custom_model.py

A family that differs more overrides more: the reading of config.json, the layers, the whole forward pass.
models/families has examples, and CONTRIBUTING.md describes how to add one for everybody.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxengine import LLM, SamplingParams, register_model
from jaxengine.models.families.llama import LlamaForCausalLM

CAP = 30.0


class CappedLlamaForCausalLM(LlamaForCausalLM):
    """Llama whose logits stay within -CAP and CAP, in the same order."""

    gguf_architecture = None  # has no GGUF files

    def token_logits(self, hidden: jax.Array) -> jax.Array:
        """Return capped logits f32[R, V] of hidden states [R, D]."""
        # Not in `logits`, which makes those of padding -inf.
        return CAP * jnp.tanh(super().token_logits(hidden) / CAP)


def checkpoint_of(folder: Path, architecture: str, target: Path) -> Path:
    """Copy `folder` to `target`, with another architecture in its config.json; return `target`."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    return target


def describe(model: Path) -> str:
    """Start an engine with the model, and return a text with six greedy tokens and their log-probabilities."""
    # One short prompt: few shapes, and enforce_eager compiles each when it first occurs.
    options = {"max_model_len": 64, "max_num_seqs": 1, "max_num_batched_tokens": 8, "num_gpu_blocks_override": 8}
    options |= {"skip_tokenizer_init": True, "enforce_eager": True, "disable_log_stats": True}
    llm = LLM(str(model), dtype="float32", **options)
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=0, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7, 8]}], params, use_tqdm=False)
    (completion,) = output.outputs
    chosen = zip(completion.token_ids, completion.logprobs, strict=True)
    return f"{completion.token_ids} {[round(position[token].logprob, 2) for token, position in chosen]}"


register_model("CappedLlamaForCausalLM", CappedLlamaForCausalLM)

if __name__ == "__main__":
    folder, *copy = map(Path, sys.argv[1:])
    print("Llama: ", describe(folder))
    with tempfile.TemporaryDirectory() as target:
        print("capped:", describe(checkpoint_of(folder, "CappedLlamaForCausalLM", *(copy or [Path(target)]))))
