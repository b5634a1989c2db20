"""vLLM's SamplingParams with its validation rules: how tokens of a request are sampled, stopped and reported.

All rules about values are here. `_RULES` are applied whenever a field is set. Rules between fields are checked at
construction and when a request takes its copy. `verify_against` checks what depends on the engine. An invalid value
raises one RequestError, which names the field, the value and what is allowed. A field of vLLM's that is not supported
is refused unless it has its default.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from jaxengine.requests.params import param_limits as limits
from jaxengine.requests.params.activations import Steer, captured_fields, read_captured, read_steer
from jaxengine.requests.params.param_limits import INT32_MAX, MAX_EXTRA_ARGS, MIN_TEMPERATURE, RequestOutputKind
from jaxengine.requests.params.repetition import RepetitionDetectionParams, read_repetition_detection
from jaxengine.requests.params.stop_after import StopAfter, stop_after
from jaxengine.requests.params.stop_strings import texts_rule
from jaxengine.requests.params.thinking import ThinkingWords, limited, thinking_words
from jaxengine.requests.structured.params import StructuredOutputsParams, structured_outputs
from jaxengine.scheduler.base.errors import RequestError, plain_scalar, refuse, show_value
from jaxengine.scheduler.base.sampling_fields import FLOAT_LIMIT, ROWS, TRUNCATION, Row, SamplingFields
from jaxengine.scheduler.base.token_params import MAX_LOGPROB_TOKEN_IDS, MAX_LOGPROBS, TokenParams

if TYPE_CHECKING:
    from jaxengine.scheduler.base.logits_processor import LogitsProcessor

_log = logging.getLogger(__name__)

# Fields that are passed to a step unchanged.
_TOKEN_FIELDS = (*ROWS, "min_tokens", "return_sampling_mass", "return_sampling_mask", "routed_experts_prompt_start")

# Fields that hold token ids.
_ID_FIELDS = (
    *("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids", "prompt_logprob_token_ids"),
    "trace_decode_token_ids",
)

# (name of a field, value) -> the checked and normalised value. Rules raise RequestError for all other values.
Rule = Callable[[str, Any], Any]


def _int(low: int, high: int, allowed: str) -> Rule:
    """Return a rule that accepts integers from `low` to `high`, but no bool, and returns an int. allowed: what is
    allowed, for the error's text. The error for an integer above `high` says "at most" that limit instead.
    """

    def check(name: str, value: Any) -> int:
        whole = isinstance(value, Integral) and not isinstance(value, bool)  # 1.0 and True are not integers here
        if not whole or not low <= int(value) <= high:
            raise refuse(name, value, f"at most {high}" if whole and int(value) > high else allowed)
        return int(value)

    return check


def _float(low: float, high: float, allowed: str) -> Rule:
    """Return a rule that turns numbers from `low` to `high`, but no bool or NaN, into floats. allowed: for errors."""

    def check(name: str, value: Any) -> float:
        # NaN is in no range. numpy's scalars are Real, but their comparison with floats is not typed.
        inside = isinstance(value, Real) and not isinstance(value, bool) and low <= value <= high  # pyright: ignore
        if not inside:
            raise refuse(name, value, allowed)
        return float(value)

    return check


def _of(kind: type, allowed: str) -> Rule:
    """Return a rule that accepts values of the type `kind`, and numpy's scalars as such. allowed: for errors."""

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kind) and not isinstance(value := plain_scalar(value), kind):
            raise refuse(name, value, allowed)
        return value

    return check


def _optional(rule: Rule, none: Any = None) -> Rule:
    """Return a rule that turns None into `none`, accepts `none`, and applies `rule` to all other values."""
    return lambda name, value: none if value is None or value is none else rule(name, value)


def _read_as(rule: Rule, value: Any, meaning: Any) -> Rule:
    """Return a rule that applies `rule` and returns its result, or `meaning` if the result equals `value`."""
    return lambda name, given: meaning if (checked := rule(name, given)) == value else checked


def _number(row: Row) -> Rule:
    """Return the rule of a row of ROWS: numbers from low to high, of the type of `neutral`, which replaces `off`."""
    rule = (_float if isinstance(row.neutral, float) else _int)(row.low, row.high, row.allowed)  # pyright: ignore
    return rule if row.off is None else _read_as(rule, row.off, row.neutral)


def _temperature(name: str, value: Any) -> float:
    """Return a valid temperature, one in (0, MIN_TEMPERATURE) raised to that with a warning; or raise RequestError."""
    temperature = _number(ROWS[name])(name, value)
    if 0 < temperature < MIN_TEMPERATURE:
        _log.warning("temperature %g is so small that logits may overflow: raised to %g", temperature, MIN_TEMPERATURE)
        return MIN_TEMPERATURE
    return temperature


def _num_logprobs(name: str, value: Any) -> int:
    """Return a number of logprobs: an int32 >= -1, 1 for True. Raises RequestError for other values."""
    allowed = "None, an int >= 0, -1 (the whole vocabulary) or True (1)"
    return 1 if value is True else _int(-1, INT32_MAX, allowed)(name, value)


def _token_ids(name: str, value: Any, most: int = limits.MAX_TOKEN_IDS) -> tuple[int, ...]:
    """Return int32 token ids >= 0 as a tuple without repeats, () for None; RequestError for others or over `most`."""
    ids = () if value is None else value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(ids, (list, tuple, set, frozenset, range)) or len(ids) > most:
        raise refuse(name, value, f"a list of at most {most} token ids")
    # Checking a million ids one by one would take a second.
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= INT32_MAX:
        return tuple(dict.fromkeys(ids))
    allowed_id = _int(0, INT32_MAX, "one flat list of token ids, each an int >= 0")
    return tuple(dict.fromkeys(allowed_id(name, token_id) for token_id in ids))


def _allowed_token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Return token ids, at least one, as a tuple without repeats; raise RequestError for other values and for none."""
    if not (ids := _token_ids(name, value)):
        raise refuse(name, value, "None or a list with at least one token id")
    return ids


def _trace(name: str, value: Any) -> tuple[int, ...]:
    """Return 1 to MAX_TOKEN_IDS token ids as a tuple, which keeps repeats; raise RequestError for other values."""
    ids = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(ids, (list, tuple, range)) or not 0 < len(ids) <= limits.MAX_TOKEN_IDS:
        raise refuse(name, value, f"None or a list of 1 to {limits.MAX_TOKEN_IDS} token ids")
    _token_ids(name, ids)
    return tuple(map(int, ids))


def _logit_bias(name: str, value: Any) -> dict[int, float]:
    """Return a copy of a mapping from token id to a finite number, at most 1e20 in size, with int keys and float
    values. Raises RequestError for other values, and for more than MAX_TOKEN_IDS ids.
    """
    if not isinstance(value, Mapping):
        raise refuse(name, value, "a dict from token id to a number")
    if len(value) > limits.MAX_TOKEN_IDS:
        raise refuse(name, len(value), f"a dict of at most {limits.MAX_TOKEN_IDS} token ids")
    token_id = _int(0, INT32_MAX, "a dict whose keys are token ids, each an int >= 0")
    bias = _float(-FLOAT_LIMIT, FLOAT_LIMIT, "a dict whose values are finite numbers, at most 1e20 in size")
    return {token_id(name, key): bias(name, added) for key, added in value.items()}


def _extra_args(name: str, value: Any) -> dict[str, Any] | None:
    """Return a copy of a mapping of at most MAX_EXTRA_ARGS names, None if empty; otherwise raise RequestError."""
    if not isinstance(value, Mapping) or len(value) > MAX_EXTRA_ARGS or not all(isinstance(key, str) for key in value):
        raise refuse(name, value, f"None or a dict of at most {MAX_EXTRA_ARGS} names")
    return dict(value) or None


_flag = _of(bool, "True or False")
_logprob_token_ids: Rule = _optional(lambda name, value: _token_ids(name, value, MAX_LOGPROB_TOKEN_IDS) or None)
_BUDGET = "an int >= 0, or None or -1 for no limit"
_SEED = "None or an int of 64 bits (-1 means None)"
_RULES: dict[str, Rule] = {
    **{name: _number(row) for name, row in ROWS.items()},
    "temperature": _temperature,
    "n": _int(1, limits.MAX_N, f"an int from 1 to {limits.MAX_N}"),
    "seed": _optional(_read_as(_int(-limits.INT64_MAX - 1, limits.INT64_MAX, _SEED), -1, None)),
    "stop": _optional(texts_rule(limits.MAX_STOP_STRINGS, limits.MAX_STOP_CHARS), ()),
    "stop_after": _optional(stop_after),
    "stop_token_ids": _token_ids,
    "ignore_eos": _flag,
    "max_tokens": _optional(_int(1, INT32_MAX, "an int >= 1, or None for the rest of the context")),
    "min_tokens": _int(0, INT32_MAX, "an int >= 0"),
    "logprobs": _optional(_num_logprobs),
    "prompt_logprobs": _optional(_num_logprobs),
    "prompt_logprob_start": _optional(_int(0, INT32_MAX, "None or an int >= 0")),
    "logprob_token_ids": _logprob_token_ids,
    "prompt_logprob_token_ids": _logprob_token_ids,
    "return_sampling_mass": _flag,
    "return_sampling_mask": _optional(_flag),
    "trace_decode_token_ids": _optional(_trace),
    "routed_experts_prompt_start": _int(0, INT32_MAX, "an int >= 0"),
    "detokenize": _flag,
    "skip_special_tokens": _flag,
    "spaces_between_special_tokens": _flag,
    "include_stop_str_in_output": _flag,
    "output_kind": _of(RequestOutputKind, "RequestOutputKind.CUMULATIVE, DELTA or FINAL_ONLY"),
    "logit_bias": _optional(_logit_bias),
    "allowed_token_ids": _optional(_allowed_token_ids),
    "bad_words": _optional(texts_rule(limits.MAX_BAD_WORDS, limits.MAX_BAD_WORDS_CHARS), ()),
    "structured_outputs": _optional(structured_outputs),
    "thinking_token_budget": _optional(_read_as(_int(-1, INT32_MAX, _BUDGET), -1, None)),
    "thinking_words": _optional(thinking_words),
    "extra_args": _optional(_extra_args),
    "return_hidden_states": _flag,
    "capture": _optional(read_captured),
    "steer": _optional(read_steer),
    "stream_interval": _optional(_int(1, INT32_MAX, "None or an int >= 1")),
    "flat_logprobs": _flag,
    "skip_reading_prefix_cache": _optional(_flag),
    "repetition_detection": _optional(read_repetition_detection),
}


@dataclass(kw_only=True)
class SamplingParams(SamplingFields):
    """Parameters of how a request's tokens are sampled, stopped and reported. Each request takes its own copy.

    Values are checked and normalised at construction and whenever a field is set. Rules between fields are checked at
    construction, and again when a request is submitted. Field names, defaults and meanings are vLLM's; those of
    SamplingFields are not repeated here. Sequences become tuples. `stop` and `bad_words` may also be a single string;
    they and `stop_token_ids` may be None, which means empty. `structured_outputs` may also be a dict of its fields.

    Attributes:
      n: number of outputs for a prompt.
      seed: makes a request's samples reproducible in any batch; without it the engine's seed determines them.
      stop: texts that end the output, which contains them only with include_stop_str_in_output.
      stop_after: the words around reasoning, within which `stop` has no effect: a dict with reasoning_end and, for
        models that may omit reasoning, reasoning_begin.
      stop_token_ids: tokens that end the output, in addition to the model's own.
      ignore_eos: continue after the model's end-of-sequence tokens.
      max_tokens: limit of the output, in tokens.
      min_tokens: number of tokens before which neither an end-of-sequence token nor one of stop_token_ids is sampled.
      logprobs: number of likeliest tokens whose log-probabilities are returned at each position, in addition to the
        sampled token's.
      prompt_logprobs: the same for the tokens of the prompt.
      prompt_logprob_start: index of the prompt token after which prompt_logprobs begin. Tokens up to this one have no
        log-probabilities and may come from the prefix cache.
      logprob_token_ids: tokens whose log-probabilities are returned at each position of the output, with the sampled
        token's, in place of the likeliest tokens that `logprobs` would list.
      prompt_logprob_token_ids: tokens whose log-probabilities are returned at each position of the prompt that has
        any, in addition to those of `prompt_logprobs`, which is then 0 if it is None; at most 128 together with
        logprob_token_ids.
      return_sampling_mass: return each token's raw and processed log-probability, and the log of the probability mass
        that truncation kept; `logprobs` is then 0 if it is None. Needs enable_sampling_mass.
      return_sampling_mask: return which tokens could have been sampled in place of each token; None: in an engine with
        the option return_sampling_mask, which True needs. Needs temperature > 0 and top_k.
      trace_decode_token_ids: tokens to decode one after the other instead of sampling. The output ends after the last
        one; end-of-sequence tokens among them do not end it. Needs enable_trace_replay.
      routed_experts_prompt_start: index of the prompt token after which routed_experts begins. Needs
        enable_return_routed_experts.
      detokenize: convert tokens to text.
      skip_special_tokens: leave special tokens out of the text.
      spaces_between_special_tokens: put spaces between special tokens that are in the text.
      include_stop_str_in_output: keep the text of `stop` that ended the output.
      output_kind: what a stream yields: everything so far, only what is new, or only the finished output.
      logit_bias: added to the logits of these token ids.
      allowed_token_ids: sample only these tokens.
      bad_words: words that are not generated, neither at the beginning of a text nor after a space.
      structured_outputs: the form that the text must have.
      thinking_token_budget: limit of reasoning tokens. Then reasoning is closed and the answer begins, whatever the
        model would write. Needs thinking_words.
      thinking_words: the words around reasoning: a dict with reasoning_end; reasoning_begin, for models that may omit
        reasoning; and closing, the text that is written when the budget is used up.
      extra_args: parameters of the engine's logits_processors, by name; ngram_size, window_size, whitelist_token_ids
        and kv_transfer_params, as in vLLM; `alignment`.
      return_hidden_states: return the hidden states of the engine's capture_layers at every token, as in SGLang.
      capture: names, from the engine's `capture`, of activations to return at every token. No token of the prompt is
        then taken from the prefix cache.
      steer: vectors to add to activations at every token, prompt included: dicts with `at`, one of the names in the
        engine's `steer`; `vector`, numbers or a name in its steering_vectors; and `scale`, 1 by default.
      stream_interval: number of tokens that a stream sends together; overrides the engine's option.
      flat_logprobs: return log-probabilities as FlatLogprobs: a few arrays that behave like the list of dicts.
      skip_reading_prefix_cache: compute every token of the prompt; other requests may still use its pages.
      repetition_detection: ends an output whose last tokens repeat one pattern, with finish_reason "repetition".

    Raises:
      RequestError: an invalid value, fields that contradict each other, or an unsupported field.
    """

    n: int = 1
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_after: StopAfter | Mapping[str, Any] | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    prompt_logprob_token_ids: Sequence[int] | None = None
    return_sampling_mass: bool = False
    return_sampling_mask: bool | None = None
    trace_decode_token_ids: Sequence[int] | None = None
    routed_experts_prompt_start: int = 0
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    thinking_token_budget: int | None = None
    thinking_words: ThinkingWords | Mapping[str, Any] | None = None
    extra_args: Mapping[str, Any] | None = None
    return_hidden_states: bool = False
    capture: Sequence[str] | None = None
    steer: Sequence[Mapping[str, Any] | Steer] | None = None
    stream_interval: int | None = None
    flat_logprobs: bool = False
    skip_reading_prefix_cache: bool | None = None
    repetition_detection: RepetitionDetectionParams | Mapping[str, int] | None = None
    # Not supported yet: only the default is accepted.
    logits_processors: Any = None

    def __new__(cls, *_: Any, **values: Any) -> Any:
        """Return a new object. Raises TypeError for an unknown field, with the name of what to use."""
        if unknown := values.keys() - _FIELDS.keys():
            raise TypeError(limits.no_field(min(unknown), _RULES))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.is_greedy:
            if self.n > 1:
                raise refuse("n", self.n, "1 when temperature is 0 (every output would be the same)")
            for name, row in ROWS.items():
                if row.feature == TRUNCATION:
                    setattr(self, name, row.neutral)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise refuse("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        given, most = self.prompt_logprob_token_ids or (), MAX_LOGPROB_TOKEN_IDS - len(self.logprob_token_ids or ())
        if len(given) > most:
            raise refuse("prompt_logprob_token_ids", given, f"at most {most} token ids beside logprob_token_ids")
        if self.prompt_logprob_start is not None and self.num_prompt_logprobs is None:
            raise refuse("prompt_logprob_start", self.prompt_logprob_start, "None without prompt_logprobs")
        if (trace := self.trace_decode_token_ids) is not None:
            if self.n > 1:
                raise refuse("n", self.n, "1 with trace_decode_token_ids (every output would be the same)")
            if self.min_tokens > len(trace):
                raise refuse("min_tokens", self.min_tokens, f"at most {len(trace)}, as trace_decode_token_ids has")
        if self.thinking_token_budget is not None and self.thinking_words is None:
            allowed = "None without thinking_words, such as {'reasoning_end': '</think>'}"
            raise refuse("thinking_token_budget", self.thinking_token_budget, allowed)
        if self.skip_reading_prefix_cache is False and self.num_prompt_logprobs is not None:
            allowed = "None or True with prompt_logprobs (prompt_logprob_start names the tokens that need none)"
            raise refuse("skip_reading_prefix_cache", False, allowed)
        if self.stop and not self.detokenize:
            raise refuse("stop", self.stop, "empty when detokenize is False (strings are found in the text)")

    def __setattr__(self, name: str, value: Any) -> None:
        """Check and normalise a value and set the field to it. Raises RequestError for an invalid value or an
        unsupported field, and AttributeError, which names a similar field, for an unknown field.
        """
        if name not in _FIELDS:
            raise AttributeError(limits.no_field(name, _RULES))
        rule, default = _RULES.get(name), _FIELDS[name]
        if rule is not None:
            value = rule(name, value)
        elif type(value) is not type(default) or value != default:
            text = f"{name} is not supported yet: leave it at {default!r}, got {show_value(value)}"
            raise RequestError(text, param=name, value=value)
        object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always chosen: a temperature below 1e-5."""
        return self.temperature < limits.GREEDY_BELOW

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens with log-probabilities at each position of the output, -1 for all; None if no
        token has any. It is 0 with logprob_token_ids, which replace these tokens, and with return_sampling_mass alone.
        """
        return 0 if self.logprob_token_ids or (self.return_sampling_mass and not self.logprobs) else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of likeliest tokens with log-probabilities at each position of the prompt, -1 for all; None
        if no token has any. It is 0 with prompt_logprob_token_ids alone.
        """
        return 0 if self.prompt_logprobs is None and self.prompt_logprob_token_ids else self.prompt_logprobs

    def token_params(
        self,
        bad_words: Iterable[Iterable[int]] = (),
        json_switches: Iterable[str] = (),
        processors: Sequence[type[LogitsProcessor]] = (),
        encode: Callable[[str], Sequence[int]] = lambda text: (),
    ) -> TokenParams:
        """Return the parameters that the engine needs for its steps. bad_words: token ids of that field. json_switches:
        names of fields for StructuredOutputsParams.switched_on. processors: the engine's logits processors. encode:
        returns the token ids of a text around reasoning, () if the model cannot write it. Raises RequestError for
        extra_args that no processor has, and for a thinking_token_budget that would have no effect.
        """
        more: dict[str, Any] = {}
        if self.extra_args or processors:
            from jaxengine.requests.params.extra_args import extra_fields  # it needs numpy

            more = extra_fields(self.extra_args, processors, self.n)
        shape, allowed = self.structured_outputs, self.allowed_token_ids
        assert shape is None or isinstance(shape, StructuredOutputsParams)
        grammar = None if shape is None else shape.switched_on(json_switches).compiled_from(encode)
        if self.thinking_token_budget is not None:
            assert isinstance(self.thinking_words, ThinkingWords)
            grammar = limited(grammar, self.thinking_token_budget, self.thinking_words, encode)
        more["reads_prompt"] = bool(self.skip_reading_prefix_cache)
        if self.return_hidden_states or self.capture:
            more |= captured_fields(self.return_hidden_states, self.capture)
        return TokenParams(
            **{name: getattr(self, name) for name in _TOKEN_FIELDS},
            logprobs=0 if self.num_logprobs is None and self.return_sampling_mask else self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            prompt_logprob_start=self.prompt_logprob_start or 0,
            logprob_token_ids=tuple(self.logprob_token_ids or ()),
            prompt_logprob_token_ids=tuple(self.prompt_logprob_token_ids or ()),
            trace_decode_token_ids=tuple(self.trace_decode_token_ids or ()),
            logit_bias=self.logit_bias or {},
            allowed_token_ids=None if allowed is None else tuple(allowed),
            bad_words=tuple(map(tuple, bad_words)),
            grammar=grammar,
            **more,
        )

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """Return parameters in which a field given as None, except max_tokens, has its default. Raises RequestError."""
        fields: Any = {name: value for name, value in given.items() if value is not None or name == "max_tokens"}
        return cls(**fields)

    def clone(self) -> SamplingParams:
        """Return an unchecked copy; logit_bias and extra_args are copied too, but not values within extra_args."""
        mine = copy.copy(self)
        for name in ("logit_bias", "extra_args"):  # all other fields are immutable
            if (own := getattr(self, name)) is not None:
                object.__setattr__(mine, name, dict(own))
        return mine

    def clone_with(self, **changes: Any) -> SamplingParams:
        """Return a copy with `changes`, with all rules checked. Raises RequestError."""
        return replace(self, **changes)

    def checked(self) -> SamplingParams:
        """Return a checked copy; RequestError for an invalid field, which may have been set since construction."""
        mine = self.clone()
        mine.logit_bias = mine.logit_bias
        mine.__post_init__()
        return mine

    def child_seed(self, index: int) -> int | None:
        """Return the seed of output `index`, 0 to n - 1: `seed` for output 0, otherwise the low 63 bits of seed +
        index; None without a seed.
        """
        if self.seed is None or not index:
            return self.seed
        return (self.seed + index) & limits.INT64_MAX  # never -1, which would mean unseeded

    def verify_against(
        self, vocab_size: int, max_logprobs: int, max_model_len: int, has_tokenizer: bool, num_prompt_tokens: int = 1
    ) -> None:
        """Raise RequestError for values that this engine or prompt does not allow: more logprobs than max_logprobs (-1:
        no limit), ids outside of the vocabulary, texts without a tokenizer, max_tokens above max_model_len, starts
        beyond the prompt, min_tokens or a trace that does not fit after it. num_prompt_tokens: 1 if unknown. max_tokens
        may exceed the room after the prompt; the output then ends with "length".
        """
        most = vocab_size if max_logprobs == -1 else max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value == -1 and most < vocab_size:
                served = vocab_size <= MAX_LOGPROBS
                way = "needs an engine with max_logprobs=-1" if served else "is more than any engine here reports"
                whole = f"-1, the whole vocabulary of {vocab_size} tokens, {way}"
                raise refuse(name, value, f"at most max_logprobs ({most}); {whole}")
            if value is not None and value > most:
                raise refuse(name, value, f"at most max_logprobs ({most})")
        for name in _ID_FIELDS:
            ids = getattr(self, name) or ()
            if max(ids, default=0) >= vocab_size:
                outside = [token_id for token_id in ids if token_id >= vocab_size]
                raise refuse(name, outside, f"token ids inside the vocabulary (0 to {vocab_size - 1})")
        no_text = {"stop": "empty", "bad_words": "empty", "structured_outputs": "None", "thinking_words": "None"}
        for name, empty in no_text.items():
            if getattr(self, name) and not has_tokenizer:
                raise refuse(name, getattr(self, name), f"{empty} when the engine has no tokenizer")
        if (self.max_tokens or 0) > max_model_len:
            allowed = f"at most max_model_len ({max_model_len}), or None for the rest of the context"
            raise refuse("max_tokens", self.max_tokens, allowed)
        room = max_model_len - num_prompt_tokens
        for name in ("prompt_logprob_start", "routed_experts_prompt_start"):
            if (start := getattr(self, name)) and start >= num_prompt_tokens:
                raise refuse(name, start, f"at most {num_prompt_tokens - 1}, the prompt's last token")
        if (trace := self.trace_decode_token_ids) and len(trace) > room:
            allowed = f"at most {room} tokens, which the prompt leaves of max_model_len ({max_model_len})"
            raise refuse("trace_decode_token_ids", trace, allowed)
        if self.min_tokens > room:
            allowed = f"at most {room}, which the prompt leaves of max_model_len ({max_model_len})"
            raise refuse("min_tokens", self.min_tokens, allowed)


_FIELDS: dict[str, Any] = {field.name: field.default for field in fields(SamplingParams)}
