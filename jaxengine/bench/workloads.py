"""Workloads: the recorded W1, W2, W3 and CHAT, random requests of fixed lengths, and a ragged trace.

Of the recorded ones, whose greedy continuations are those of Hugging Face transformers in float32 for the default
model, `workloads.json` has the number of token ids of each text, and then the ids, uint16, in this order, as base64 of
their LZMA compression.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import lzma
from dataclasses import dataclass
from importlib.resources import files

NAMES = ("W1", "W2", "W3", "CHAT")


@dataclass(frozen=True)
class Workload:
    """Requests that arrive at once.

    Attributes:
      name: for reports.
      prompts: token ids of each prompt.
      max_tokens: new tokens of each request; the end-of-sequence token does not end one unless it is a stop token.
      shared_prefix: number of leading tokens that all prompts share.
      stop_token_ids: ids that end a request.
      reference: greedy continuations; empty if there are none.
    """

    name: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    shared_prefix: int = 0
    stop_token_ids: tuple[int, ...] = ()
    reference: tuple[tuple[int, ...], ...] = ()

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def max_model_len(self) -> int:
        """Length of the longest request, prompt plus output, in tokens."""
        return max(len(prompt) + new for prompt, new in zip(self.prompts, self.max_tokens, strict=True))


def recorded(name: str) -> Workload:
    """Return the workload `name` of workloads.json, whose requests all have one output length. Raises ValueError for an
    unknown name.
    """
    if name not in NAMES:
        raise ValueError(f"workload is {name!r}; allowed: {', '.join(NAMES)}")
    every = json.loads(files("jaxengine.bench").joinpath("workloads.json").read_text())
    ids = iter(memoryview(lzma.decompress(base64.b64decode(every.pop("ids")))).cast("H"))
    for each in every.values():
        for part in ("prefix", "prompts", "reference"):
            each[part] = [tuple(itertools.islice(ids, length)) for length in each[part]]
    found = every[name]
    prefix = sum(found["prefix"], ())
    prompts = tuple(prefix + prompt for prompt in found["prompts"])
    return Workload(
        name=name,
        prompts=prompts,
        max_tokens=(found["max_tokens"],) * len(prompts),
        shared_prefix=len(prefix),
        stop_token_ids=tuple(found.get("stop_token_ids", ())),
        reference=tuple(found["reference"]),
    )


def fixed_lengths(num_prompts: int, input_len: int, output_len: int, vocab_size: int, seed: int = 0) -> Workload:
    """Return `num_prompts` requests of random token ids, with input_len prompt tokens and output_len output tokens
    each.

    vocab_size: upper bound (exclusive) of the ids. seed: seed of the random numbers. Raises ValueError if one of the
    first three is below 1.
    """
    import numpy as np

    if min(num_prompts, input_len, output_len) < 1:
        raise ValueError(f"num_prompts {num_prompts}, input_len {input_len}, output_len {output_len}: at least 1 each")
    ids = np.random.default_rng(seed).integers(0, vocab_size, (num_prompts, input_len))
    name = f"{num_prompts} x {input_len}+{output_len}"
    return Workload(name, tuple(map(tuple, ids.tolist())), (output_len,) * num_prompts)


def ragged_trace(num_prompts: int, vocab_size: int, max_model_len: int, seed: int = 0) -> Workload:
    """Return `num_prompts` requests with log-normal prompt and output lengths, as in chat traffic: many short and a few
    very long.

    vocab_size: upper bound (exclusive) of the random token ids. max_model_len: a prompt and an output have at most half
    of it each, and at least 4 and 2 tokens. seed: seed of the random numbers. Raises ValueError if max_model_len is
    below 16, or num_prompts below 1.

    Modelled on the ShareGPT trace of the paged-attention paper (Kwon et al., 2023, section 6.1), with shorter outputs
    for a CPU: medians are 96 prompt and 64 output tokens, averages about 150 and 100.
    """
    import numpy as np

    if num_prompts < 1 or max_model_len < 16:
        raise ValueError(f"num_prompts {num_prompts} must be at least 1 and max_model_len {max_model_len} at least 16")
    generator = np.random.default_rng(seed)
    half = max_model_len // 2
    inputs = np.clip(generator.lognormal(np.log(96), 1.0, num_prompts), 4, half).astype(int)
    outputs = np.clip(generator.lognormal(np.log(64), 1.0, num_prompts), 2, half).astype(int)
    prompts = tuple(tuple(generator.integers(0, vocab_size, length).tolist()) for length in inputs)
    return Workload(f"trace of {num_prompts}", prompts, tuple(outputs.tolist()))


def add_fixed_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of vLLM's benchmarks that have one value here: prompts are random tokens, the engine is this one,
    and nothing is detokenised.
    """
    parser.add_argument("--dataset-name", choices=("random",), default="random", help="prompts are random tokens")
    parser.add_argument("--backend", choices=("vllm",), default="vllm", help="this engine, by vLLM's name")
    parser.add_argument("--disable-detokenize", action="store_true", help="no effect: nothing is detokenised")
