"""Certificate of how far a trainer and its sampler agree: log-probabilities of the same tokens, compared bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.rl.forward_pass import log_probs
from jaxengine.version import __version__


@dataclass(frozen=True)
class Agreement:
    """Comparison of two computations of the same log-probabilities.

    Attributes:
      mismatches: number of float32 values whose bits differ.
      largest: the largest absolute difference; NaN if either side has a NaN.
    """

    mismatches: int
    largest: float

    @classmethod
    def of(cls, one: np.ndarray, other: np.ndarray) -> Agreement:
        """Compare two float32 arrays of one shape. The largest difference of empty arrays is 0."""
        differing = int((one.view(np.int32) != other.view(np.int32)).sum())
        return cls(differing, float(np.abs(one - other).max(initial=0.0)))


@dataclass(frozen=True)
class Certificate:
    """Result of `certify` for the tokens that an engine generated.

    Attributes:
      rollout, recomputed, trainer: sums of the log-probabilities reported during generation, returned by
        `get_logprobs`, and computed by the trainer's forward pass.
      rollout_recomputed, rollout_trainer: agreement of the individual numbers.
      num_tokens: tokens that were generated and compared.
      rl_exact, dtype, weight_version: those of the engine.
      versions: versions of jaxengine, jax and jaxlib, the platform, and the kind of device, by name.
    """

    rollout: float
    recomputed: float
    trainer: float
    rollout_recomputed: Agreement
    rollout_trainer: Agreement
    num_tokens: int
    rl_exact: bool
    dtype: str
    weight_version: int | str
    versions: dict[str, str]

    @property
    def holds(self) -> bool:
        """Whether all three computations gave the same bits."""
        return not self.rollout_recomputed.mismatches and not self.rollout_trainer.mismatches

    def __str__(self) -> str:
        """Return the certificate as text: a line for each computation, and one for the engine."""

        def line(name: str, total: float, found: Agreement) -> str:
            differing = f"{found.mismatches} of {self.num_tokens} bit patterns differ"
            return f"{name:<11}{total:.9g}  {differing}, at most by {found.largest:.3g}"

        exact = "rl_exact" if self.rl_exact else "not rl_exact"
        return "\n".join(
            (
                f"{'rollout':<11}{self.rollout:.9g}  {self.num_tokens} tokens",
                line("recomputed", self.recomputed, self.rollout_recomputed),
                line("trainer", self.trainer, self.rollout_trainer),
                f"{self.dtype}, {exact}, weights {self.weight_version}, "
                + ", ".join(f"{name} {text}" for name, text in self.versions.items()),
            )
        )


def certify(
    llm: Any,
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    params: Any = None,
    sampling_params: SamplingParams | None = None,
) -> Certificate:
    """Generate with an engine, and compare the log-probabilities of its tokens with those of two recomputations.

    The trainer's forward pass is `log_probs`, with exact=True if the engine has rl_exact, on rows padded to the
    longest.

    Args:
      llm: a jaxengine.LLM that reports raw_logprobs.
      model: model of the trainer, as returned by `jaxengine.open_model`, or its module together with `params`.
      prompts: token ids of each prompt.
      params: weights of the trainer, an `nnx.State`; by default those of `model`.
      sampling_params: parameters of each request, of which n and logprobs are replaced, without sampling masks; by
        default 16 tokens of temperature 1 without regard to the end token, and a seed for each prompt. One completion
        of a prompt is compared.

    Raises ValueError if there are no prompts or one is empty, and for a model without weights, and the errors of
    `generate`, `get_logprobs` and `log_probs`.
    """
    module = getattr(model, "module", model)
    params = getattr(model, "params", None) if params is None else params
    if params is None:
        raise ValueError(f"params must be given with a {type(model).__name__}, which holds none")
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError(f"prompts must be lists of token ids, none of them empty, got {len(prompts)} prompts")
    config = llm.core.config
    chosen = sampling_params or SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
    given = [chosen.clone_with(logprobs=0, n=1, return_sampling_mask=False) for _ in prompts]
    if sampling_params is None:
        given = [own.clone_with(seed=number) for number, own in enumerate(given)]
    outputs = llm.generate([list(prompt) for prompt in prompts], given, use_tqdm=False)
    completions = [list(output.outputs[0].token_ids) for output in outputs]
    rollout = _joined(
        [position[token].logprob for token, position in zip(own, output.outputs[0].logprobs, strict=True)]
        for own, output in zip(completions, outputs, strict=True)
    )
    recomputed = llm.get_logprobs([list(prompt) for prompt in prompts], completions).values
    trainer = _trained(module, params, prompts, completions, config.rl_exact)
    sums = [float(each.sum(dtype=np.float64)) for each in (rollout, recomputed, trainer)]
    return Certificate(
        rollout=sums[0],
        recomputed=sums[1],
        trainer=sums[2],
        rollout_recomputed=Agreement.of(rollout, recomputed),
        rollout_trainer=Agreement.of(rollout, trainer),
        num_tokens=len(rollout),
        rl_exact=config.rl_exact,
        dtype=config.dtype,
        weight_version=llm.weight_version,
        versions=_versions(),
    )


def _joined(values: Any) -> np.ndarray:
    """Concatenate the numbers of several sequences, at least one, to one array f32[N]."""
    return np.concatenate([np.asarray(own, np.float32) for own in values])


def _trained(
    module: Any, params: Any, prompts: Sequence[Sequence[int]], completions: list[list[int]], exact: bool
) -> np.ndarray:
    """Compute log-probabilities f32[N] of the tokens of all completions, concatenated, by the trainer's forward pass.

    module, params: model and weights. prompts: token ids before each completion. exact: argument of `log_probs`.
    """
    rows = [[*prompt, *own] for prompt, own in zip(prompts, completions, strict=True)]
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    segments = np.full(tokens.shape, -1, np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)], segments[index, : len(row)] = row, 0
    found = np.asarray(log_probs(module, params, jnp.asarray(tokens), jnp.asarray(segments), exact=exact))
    return _joined(own[len(prompt) : len(row)] for own, prompt, row in zip(found, prompts, rows, strict=True))


def _versions() -> dict[str, str]:
    """Return the versions "jaxengine", "jax" and "jaxlib", and the "platform" and kind ("device") of this process's
    first device.
    """
    device = jax.devices()[0]
    return {
        "jaxengine": __version__,
        **{name: version(name) for name in ("jax", "jaxlib")},
        "platform": device.platform,
        "device": device.device_kind,
    }
