"""Beam search against a plain one over full logits, computed here by numpy in float64."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxengine import BeamSearchParams, RequestError

PROMPTS = [[5, 17, 40, 3, 90, 8], [7], [100, 2, 50]]
WIDTH, EOS = 3, 2


class Reference:
    """The tiny llama as its equations: all logits of a sequence at once."""

    def __init__(self, folder: str):
        self.config = json.loads((Path(folder) / "config.json").read_text())
        self.weights = {
            name: value.astype(np.float64) for name, value in load_file(f"{folder}/model.safetensors").items()
        }

    def logprobs(self, token_ids: list[int]) -> np.ndarray:
        """f64[V] of the next token."""
        config, weights = self.config, self.weights
        num_heads, num_kv = config["num_attention_heads"], config["num_key_value_heads"]
        embed = weights["model.embed_tokens.weight"]
        x, count = embed[token_ids], len(token_ids)
        head_dim = x.shape[1] // num_heads
        theta = (config.get("rope_parameters") or config).get("rope_theta", 10000.0)
        angles = np.outer(np.arange(count), theta ** (-np.arange(0, head_dim, 2) / head_dim))
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

        def rope(heads: np.ndarray) -> np.ndarray:
            one, other = np.split(heads, 2, axis=-1)
            return np.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)

        def norm(values: np.ndarray, name: str) -> np.ndarray:
            return values / np.sqrt((values**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weights[name]

        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            normed = norm(x, f"{prefix}.input_layernorm.weight")
            q, k, v = (
                (normed @ weights[f"{prefix}.self_attn.{part}_proj.weight"].T).reshape(count, -1, head_dim)
                for part in "qkv"
            )
            q, k = rope(q), np.repeat(rope(k), num_heads // num_kv, axis=1)
            scores = np.einsum("qnh,knh->nqk", q, k) / head_dim**0.5
            scores[:, np.triu(np.ones((count, count), bool), 1)] = -np.inf
            probs = np.exp(scores - scores.max(-1, keepdims=True))
            probs /= probs.sum(-1, keepdims=True)
            mixed = np.einsum("nqk,knh->qnh", probs, np.repeat(v, num_heads // num_kv, axis=1)).reshape(count, -1)
            x = x + mixed @ weights[f"{prefix}.self_attn.o_proj.weight"].T
            normed = norm(x, f"{prefix}.post_attention_layernorm.weight")
            gate, up = (normed @ weights[f"{prefix}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{prefix}.mlp.down_proj.weight"].T
        logits = norm(x[-1], "model.norm.weight") @ embed.T
        return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())

    def search(
        self, prompt: list[int], max_tokens: int, penalty: float, ignore_eos: bool
    ) -> list[tuple[list[int], float]]:
        def score(beam: tuple[list[int], float]) -> float:
            return beam[1] / max(1, len(beam[0]) - len(prompt)) ** penalty

        beams, ended = [(prompt, 0.0)], []
        for _ in range(max_tokens):
            grown = []
            for tokens, total in beams:
                logprobs = self.logprobs(tokens)
                for token in np.argsort(-logprobs)[: 2 * WIDTH].tolist():
                    found = ([*tokens, token], total + float(logprobs[token]))
                    (ended if token == EOS and not ignore_eos else grown).append(found)
            beams = sorted(grown, key=score, reverse=True)[:WIDTH]
        return sorted([*ended, *beams], key=score, reverse=True)[:WIDTH]


@pytest.mark.parametrize(("penalty", "ignore_eos"), [(1.0, False), (0.0, True), (3.0, False)])
def test_sequences_are_those_of_a_plain_search(make_llm, tiny_model, penalty, ignore_eos):
    reference, llm = Reference(tiny_model), make_llm()
    params = BeamSearchParams(beam_width=WIDTH, max_tokens=6, length_penalty=penalty, ignore_eos=ignore_eos)
    outputs = llm.beam_search([{"prompt_token_ids": ids} for ids in PROMPTS], params)
    again = llm.beam_search(PROMPTS[0], params)
    assert [each.tokens for each in again[0].sequences] == [each.tokens for each in outputs[0].sequences]
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = reference.search(prompt, 6, penalty, ignore_eos)
        assert [each.tokens for each in output.sequences] == [tokens for tokens, _ in expected]
        for sequence, (tokens, total) in zip(output.sequences, expected, strict=True):
            assert abs(sequence.cum_logprob - total) < 1e-3
            stopped = tokens[-1] == EOS and not ignore_eos
            assert sequence.finish_reason == ("stop" if stopped else "length")
            assert len(sequence.logprobs) == len(tokens) - len(prompt) and sequence.text is None


def test_an_end_of_sequence_is_met(make_llm, tiny_model, monkeypatch):
    """The tiny model hardly ever says it: a token that it likes stands in for it."""
    llm = make_llm()
    inputs = llm.core.inputs
    liked = int(np.argsort(-Reference(tiny_model).logprobs(PROMPTS[0]))[1])
    monkeypatch.setattr(type(inputs), "eos_token_ids", lambda self: (liked,))
    params = BeamSearchParams(beam_width=WIDTH, max_tokens=4, length_penalty=0.0)
    sequences = llm.beam_search(PROMPTS[0], params)[0].sequences
    (stopped,) = [each for each in sequences if each.tokens == [*PROMPTS[0], liked]]
    assert stopped.finish_reason == "stop"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"beam_width": 0}, "beam_width is 0; allowed: a whole number of at least 1"),
        ({"beam_width": 11}, "beam_width is 11; allowed: 1 to 10, half of max_logprobs"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": 0.5}, "temperature is 0.5; allowed: 0 or 1 with logprobs_mode='raw_logprobs'"),
        ({"length_penalty": float("nan")}, "length_penalty is nan"),
        ({"ignore_eos": 1}, "ignore_eos is 1; allowed: True or False"),
    ],
)
def test_what_is_wrong_is_said(make_llm, changes, problem):
    with pytest.raises(RequestError, match=problem):
        make_llm().beam_search(PROMPTS[0], BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **changes}))
