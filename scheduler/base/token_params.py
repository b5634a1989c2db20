"""Parameters of a request that steps need in order to sample: numbers and token ids, no text.

A caller gives SamplingParams, which checks them. TokenParams is the part of them that the engine gets.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import or_

from jaxengine.scheduler.base.kv_transfer import KVTransferParams
from jaxengine.scheduler.base.sampling_fields import PENALTIES, ROWS, SamplingFields

# Features that a request needs besides argmax sampling, one bit each. The programs of a step skip what no row needs.
# LAST_TOKEN: the allowed next tokens depend on the last sampled one, which the host must see before the next choice.
# ADAPTER: the request runs with one. FEW_ADAPTERS, of a step: its requests use few of their slots. The scheduler sets
# both.
BIAS, MASK, LOGPROBS, PROMPT_LOGPROBS, LAST_TOKEN = (1 << bit for bit in range(3, 8))
ADAPTER, FEW_ADAPTERS = 1 << 8, 1 << 9
CAPTURE = 1 << 10
# Logits processors of users: PROCESSOR << index is the bit of each. All bits must fit an int32.
PROCESSOR, MAX_PROCESSORS = 1 << 11, 20
# Features that act on prompt tokens whose successor is known.
PROMPT_FEATURES = PROMPT_LOGPROBS
# Limit of an engine's max_logprobs: if one row of a step wants logprobs, however few, the sampler sorts as many best
# tokens for every row. A whole vocabulary would slow down all requests with logprobs, not just those that want it.
MAX_LOGPROBS = 1024
# Most tokens whose logprobs a request may ask for by id, in output and prompt together. vLLM has the same limit for the
# output. The devices reserve room for as many in every slot.
MAX_LOGPROB_TOKEN_IDS = 128


# Kind of a Grammar that allows every token, for a request that only limits its reasoning.
FREE = "free"


@dataclass(frozen=True, kw_only=True)
class ThinkingBudget:
    """Limit on the reasoning of an output.

    Attributes:
      num_tokens: number of reasoning tokens after which `closing` is forced.
      ends: token sequences that end reasoning, see Grammar.reasoning_end.
      closing: token ids, at least one.
    """

    num_tokens: int
    ends: tuple[tuple[str, ...], ...]
    closing: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """Grammar of an output, compiled by jaxengine.grammars.

    Attributes:
      kind: "json", "regex", "choice", "grammar", "structural_tag" or FREE (no constraint).
      text: a JSON schema, a regular expression, a JSON list of strings, a context-free grammar, or the rules of
        jaxengine.requests.structured.structural_tags as JSON.
      options: llguidance's options for reading a JSON schema.
      reasoning_end: token sequences, any of which ends the unconstrained reasoning before the constrained part. If it
        is empty, the output is constrained from the start.
      reasoning_begin: tokens with which an output begins if it has reasoning; empty if every output has reasoning.
      budget: limit of the reasoning; None for none. Needs reasoning_end or the kind FREE.
    """

    kind: str
    text: str
    options: dict[str, str | bool] = field(default_factory=dict)
    reasoning_end: tuple[tuple[str, ...], ...] = ()
    reasoning_begin: tuple[int, ...] = ()
    budget: ThinkingBudget | None = None


# Columns in which the devices keep a request's parameters, with their neutral values: those of SamplingFields, and the
# two halves of the seed. Packed, each has 32 bits.
COLUMNS: dict[str, float | int] = {name: row.neutral for name, row in ROWS.items()} | {"seed_low": 0, "seed_high": 0}
_PACKED = struct.Struct("<" + "".join("f" if isinstance(row.neutral, float) else "i" for row in ROWS.values()) + "II")
_WORDS = struct.Struct(f"<{len(COLUMNS)}i")


@dataclass(kw_only=True)
class TokenParams(SamplingFields):
    """Parameters of one request, as the scheduler and the devices use them. They never change after construction.

    Names are those of SamplingParams; fields of SamplingFields are described there.

    Attributes:
      min_tokens: number of output tokens before which no stop token ends the request.
      logprobs, prompt_logprobs: number of entries to report for each token, None for none.
      prompt_logprob_start: prompt tokens up to this index have no entries; only with prompt_logprobs.
      logprob_token_ids: tokens to report in addition, only with logprobs.
      prompt_logprob_token_ids: tokens to report in addition for prompt tokens, only with prompt_logprobs.
      return_sampling_mass, return_sampling_mask: see SamplingParams; only with logprobs.
      trace_decode_token_ids: tokens that replace the sampled ones; empty to sample.
      routed_experts_prompt_start: prompt tokens up to this index are returned without their experts.
      logit_bias: values added to the logits of tokens, by id.
      allowed_token_ids: the only tokens that the request may sample; None for all.
      bad_words: token sequences that the request must not complete.
      no_repeat: (size, window, exempt): a token must not complete a sequence of `size` tokens that is among the last
        `window` output tokens already, unless it is in `exempt`; None for any.
      grammar: grammar that its output must follow; None for none.
      capture: names of the captured activations that the request gets.
      steer: steering vectors to add to activations: (name of a tap, f32 [hidden size] as bytes).
      processors: values of all columns of each logits processor that the request uses, by the processor's index.
      uses_counts: whether one of these processors needs token counts.
      reads_prompt: whether every token of the prompt has to be computed, so that none comes from the prefix cache.
      alignment: (first, positions): the prompt's tokens from index `first` on are aligned with the first `positions`
        positions of its sound; None for none.
      token_results: whether to return each prompt token's row of results.
      kv_transfer: parameters for pages that another engine has or gets; None for none.
      capabilities: further feature bits, which do not follow from the other fields.
    """

    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_start: int = 0
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprob_token_ids: tuple[int, ...] = ()
    return_sampling_mass: bool = False
    return_sampling_mask: bool | None = None
    trace_decode_token_ids: tuple[int, ...] = ()
    routed_experts_prompt_start: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    no_repeat: tuple[int, int, tuple[int, ...]] | None = None
    grammar: Grammar | None = None
    capture: tuple[str, ...] = ()
    steer: tuple[tuple[str, bytes], ...] = ()
    processors: Mapping[int, tuple[float | int | bool, ...]] = field(default_factory=dict)
    uses_counts: bool = False
    reads_prompt: bool = False
    alignment: tuple[int, int] | None = None
    token_results: bool = False
    kv_transfer: KVTransferParams | None = None
    capabilities: int = 0

    @cached_property
    def forbids_by_output(self) -> bool:
        """Whether forbidden tokens depend on the tokens before: those of `no_repeat`, and the last one of a bad word of
        several tokens, which is forbidden only after the others.
        """
        return self.no_repeat is not None or any(len(word) > 1 for word in self.bad_words)

    @cached_property
    def steer_digest(self) -> bytes:
        """SHA-256 of `steer`, computed once for the n outputs that share these parameters."""
        digest = hashlib.sha256()
        for at, values in self.steer:
            digest.update(f"{at} {len(values)} ".encode() + values)
        return digest.digest()

    @property
    def given_token_ids(self) -> tuple[int, ...]:
        """Token ids whose logprobs are reported in addition: first for output tokens, then for prompt tokens."""
        return (*self.logprob_token_ids, *self.prompt_logprob_token_ids)

    @property
    def most_cached(self) -> int | None:
        """Number of leading prompt tokens that may come from the prefix cache: 0 if `reads_prompt`,
        prompt_logprob_start with prompt_logprobs, otherwise None for no limit.
        """
        if self.reads_prompt:
            return 0
        return None if self.prompt_logprobs is None else self.prompt_logprob_start

    @cached_property
    def features(self) -> int:
        """Optional parts of a step that a request with these parameters needs: bits of this module (BIAS, MASK, ...)
        and of sampling_fields, 0 for none. ADAPTER is not included.
        """
        biased = self.logit_bias or self.allowed_token_ids is not None or self.bad_words or self.min_tokens > 0
        biased = biased or self.no_repeat is not None
        features = (
            *((row.feature, getattr(self, name) not in (row.neutral, row.off)) for name, row in ROWS.items()),
            (PENALTIES, self.uses_counts),
            (BIAS, biased),
            (MASK, self.grammar is not None),
            (LOGPROBS, self.logprobs is not None),
            (PROMPT_LOGPROBS, self.prompt_logprobs is not None),
            (LAST_TOKEN, self.grammar is not None or self.forbids_by_output),
        )
        processors = sum(PROCESSOR << index for index in self.processors)
        return reduce(or_, (feature for feature, needed in features if needed), self.capabilities | processors)


def row_words(params: SamplingFields, seed: int) -> tuple[int, ...]:
    """Return the values of COLUMNS for a request, in order, each as an int32 with the same 32 bits. A value below its
    Row.least is replaced by Row.least.

    seed: any 64-bit integer, signed or unsigned; its low half comes first. Raises struct.error or OverflowError for a
    value that does not fit 32 bits.
    """
    values = (max(getattr(params, name), row.least) for name, row in ROWS.items())
    return _WORDS.unpack(_PACKED.pack(*values, seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
