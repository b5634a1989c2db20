"""Parameters of a request that steps need in order to sample: numbers and token ids, no text.

A caller's parameters are jaxengine's SamplingParams, where they are checked; these are the part of them that the engine
gets.
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

# Features that a request needs besides argmax sampling, one bit each; the programs of a step skip what no row needs.
# LAST_TOKEN: the allowed next tokens depend on the last sampled one, so the host must see that before the next choice.
# ADAPTER: the request runs with one. FEW_ADAPTERS, of a step: its requests use few of their slots. The
# scheduler sets both.
BIAS, MASK, LOGPROBS, PROMPT_LOGPROBS, LAST_TOKEN = (1 << bit for bit in range(3, 8))
ADAPTER, FEW_ADAPTERS = 1 << 8, 1 << 9
CAPTURE = 1 << 10
# Logits processors of users: PROCESSOR << index is the bit of each. All bits must fit an int32.
PROCESSOR, MAX_PROCESSORS = 1 << 11, 20
# Features that act on prompt tokens whose successor is known.
PROMPT_FEATURES = PROMPT_LOGPROBS
# Most entries of a token's logprobs: samplers select as many top tokens as an engine allows.
MAX_LOGPROBS = 1024
# Most tokens whose logprobs a request may ask for by id, for output and prompt together. vLLM has the same limit for
# the output. The devices reserve as many for every slot.
MAX_LOGPROB_TOKEN_IDS = 128


# Kind of a Grammar that allows every token, for a request that only limits its reasoning.
FREE = "free"


@dataclass(frozen=True, kw_only=True)
class ThinkingBudget:
    """Limit on the reasoning of an output.

    Attributes:
      num_tokens: number of reasoning tokens after which `closing` is written, whatever the model would write.
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
      kind: "json", "regex", "choice", "grammar" or FREE (no constraint).
      text: a JSON schema, a regular expression, a JSON list of strings, or a context-free grammar.
      options: llguidance's options for reading a JSON schema.
      reasoning_end: token sequences, any of which ends the unconstrained reasoning before the constrained part. Empty:
        the output is constrained from the start.
      reasoning_begin: tokens with which an output with reasoning begins; empty if every output has reasoning.
      budget: limit of the reasoning; None for none. Only with reasoning_end, or kind FREE.
    """

    kind: str
    text: str
    options: dict[str, str | bool] = field(default_factory=dict)
    reasoning_end: tuple[tuple[str, ...], ...] = ()
    reasoning_begin: tuple[int, ...] = ()
    budget: ThinkingBudget | None = None


# The devices' columns of a request's parameters, by name, with their neutral values: those of SamplingFields, and the
# halves of the seed. Packed, each has 32 bits.
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
      prompt_logprob_start: prompt tokens up to this one, counted from 0, have no entries; only with prompt_logprobs.
      logprob_token_ids: tokens to report in addition, only with logprobs.
      prompt_logprob_token_ids: tokens to report in addition for prompt tokens, only with prompt_logprobs.
      return_sampling_mass: whether to report what sampling made of each token, only with logprobs.
      trace_decode_token_ids: the output tokens, whatever the model would choose; empty: the model chooses.
      routed_experts_prompt_start: prompt tokens up to this one, counted from 0, are returned without their experts.
      logit_bias: values added to the logits of tokens, by id.
      allowed_token_ids: the only tokens that the request may sample; None for all.
      bad_words: token sequences that the request must not complete.
      grammar: grammar that its output must follow; None for none.
      capture: names of the captured activations that the request gets.
      steer: steering vectors added to activations: names of taps, each with f32 [hidden size] as bytes.
      processors: values of all columns of each logits processor that the request uses, by the processor's index.
      uses_counts: whether one of these processors needs token counts.
      reads_prompt: whether every token of the prompt has to be computed, none taken from the prefix cache.
      alignment: (first, positions): its prompt's tokens from index `first` on are aligned with the first `positions`
        positions of its sound; None for none.
      token_results: whether each prompt token's row of results is returned.
      kv_transfer: parameters for pages that another engine gets or has; None for none.
      capabilities: feature bits that follow from no other field.
    """

    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_start: int = 0
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprob_token_ids: tuple[int, ...] = ()
    return_sampling_mass: bool = False
    trace_decode_token_ids: tuple[int, ...] = ()
    routed_experts_prompt_start: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
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
    def has_long_bad_words(self) -> bool:
        """Whether some bad word has several tokens, so that earlier tokens determine whether its last one is
        forbidden.
        """
        return any(len(word) > 1 for word in self.bad_words)

    @cached_property
    def steer_digest(self) -> bytes:
        """SHA-256 of `steer`. It may cover megabytes, and is computed once for the n outputs that share these
        params.
        """
        digest = hashlib.sha256()
        for at, values in self.steer:
            digest.update(f"{at} {len(values)} ".encode() + values)
        return digest.digest()

    @property
    def given_token_ids(self) -> tuple[int, ...]:
        """Token ids whose logprobs are reported in addition: those for output tokens, then those for prompt tokens."""
        return (*self.logprob_token_ids, *self.prompt_logprob_token_ids)

    @property
    def most_cached(self) -> int | None:
        """Number of leading prompt tokens that may come from the prefix cache; None for no limit."""
        if self.reads_prompt:
            return 0
        return None if self.prompt_logprobs is None else self.prompt_logprob_start

    @cached_property
    def features(self) -> int:
        """Optional parts of a step that a request with these parameters needs: bits of this module (BIAS, MASK, ...)
        and of sampling_fields, 0 for none. ADAPTER is not among them.
        """
        biased = self.logit_bias or self.allowed_token_ids is not None or self.bad_words or self.min_tokens > 0
        wanted = (
            *((row.feature, getattr(self, name) not in (row.neutral, row.off)) for name, row in ROWS.items()),
            (PENALTIES, self.uses_counts),
            (BIAS, biased),
            (MASK, self.grammar is not None),
            (LOGPROBS, self.logprobs is not None),
            (PROMPT_LOGPROBS, self.prompt_logprobs is not None),
            (LAST_TOKEN, self.grammar is not None or self.has_long_bad_words),
        )
        own = sum(PROCESSOR << number for number in self.processors)
        return reduce(or_, (feature for feature, needed in wanted if needed), self.capabilities | own)


def row_words(params: SamplingFields, seed: int) -> tuple[int, ...]:
    """Return the values of COLUMNS for a request, in order, with the 32 bits of each as an int32. A value below its
    Row.least is replaced by that.

    seed: any 64-bit integer, signed or not; its low half comes first. Raises struct.error or OverflowError for a value
    beyond 32 bits.
    """
    values = (max(getattr(params, name), row.least) for name, row in ROWS.items())
    return _WORDS.unpack(_PACKED.pack(*values, seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
