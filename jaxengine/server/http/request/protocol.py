"""Base classes of requests: common fields, refused fields, and conversion to SamplingParams.

Types are checked strictly here: true, 1.0 and "1" are not integers. Ranges are checked by SamplingParams. A field is
either declared, and takes effect, or is in `REFUSED` with the values that have no effect.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from jaxengine.requests.beam_search import BeamSearchParams
from jaxengine.requests.inputs import InputProcessor
from jaxengine.requests.params.activations import MAX_STEER
from jaxengine.requests.params.options import RequestOptions, check_session
from jaxengine.requests.params.prepared import verify_salt
from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams
from jaxengine.scheduler.base.errors import RequestError, invalid, show_value
from jaxengine.scheduler.base.sampling_fields import ROWS
from jaxengine.server.base.names import REQUEST_ID
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.base.output_limit import limited
from jaxengine.server.http.request.errors import renamed
from jaxengine.server.http.request.fields import (
    MAX_OPTIONS,
    JsonObject,
    Texts,
    TokenIds,
    at_most,
    bias_by_id,
    check_n,
    check_truncation,
)
from jaxengine.server.http.request.kv_transfer import ExtraArgs, TransferParams, with_kv_transfer

_MAX_USER = 1024  # characters, as logs and answers repeat it

# Earlier names of vLLM's fields -> present names. Ignoring the earlier ones would give unconstrained answers.
EARLIER = {
    "guided_decoding": "structured_outputs",
    **{
        f"guided_{name}": f"structured_outputs.{name}"
        for name in ("choice", "grammar", "json", "json_object", "regex", "whitespace_pattern")
    },
}

# Unsupported fields of vLLM and OpenAI, with the values that have no effect.
REFUSED: dict[str, tuple[Any, ...]] = {
    "capture": ([],),
    "ec_transfer_params": (),
    "kv_transfer_params": (),
    "length_penalty": (1.0, 1),
    "logprob_token_ids": (),
    "prompt_logprob_start": (),
    "prompt_logprob_token_ids": (),
    "repetition_detection": (),
    **dict.fromkeys(("return_hidden_states", "return_sampling_mask", "return_sampling_mass"), (False,)),
    **dict.fromkeys(("return_token_offsets", "return_weight_versions"), (False,)),
    "routed_experts_prompt_start": (0,),
    "steer": ([],),
    "stream_interval": (1,),
    "trace_decode_token_ids": (),
    "use_beam_search": (False,),
    "watermarking": (False,),
    **dict.fromkeys(EARLIER, ()),
}

# Fields of REFUSED that text requests support.
_OF_TEXT = {
    *("capture", "kv_transfer_params", "length_penalty", "logprob_token_ids", "prompt_logprob_start"),
    *("prompt_logprob_token_ids", "repetition_detection", "return_hidden_states", "return_sampling_mask"),
    *("return_sampling_mass", "return_weight_versions", "routed_experts_prompt_start", "steer", "stream_interval"),
    *("trace_decode_token_ids", "use_beam_search"),
}
TEXT_REFUSED = {name: neutral for name, neutral in REFUSED.items() if name not in _OF_TEXT}

# Fields of OpenAI and vLLM that do not affect the answer: hints for billing, caches, speed, length or the grammars'
# library. They are accepted, and listed in the response's X-Ignored-Fields.
HINTS = frozenset(
    (
        "guided_decoding_backend",
        "metadata",
        "mm_payload",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "return_mm_kwargs",
        "safety_identifier",
        "service_tier",
        "store",
        "verbosity",
    )
)

logger = logging.getLogger(__name__)

# Keys that every choice of vLLM's complete answers has, and that are null here: see answers.NullBody.
NULL_CHOICE = dict.fromkeys(("token_ids", "routed_experts"))

_SAMPLING_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))
# A beam search samples nothing, and has no output before its end.
_NOT_WITH_BEAMS = sorted(
    {
        *_SAMPLING_FIELDS,
        "vllm_xargs",
        "kv_transfer_params",
        "stream",
        "echo",
        "top_logprobs",
        "response_format",
        "tools",
    }
    - {"n", "max_tokens", "temperature", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"}
)


class RequestModel(BaseModel):
    """A JSON object of a request.

    refused: fields that are refused, with the values that have no effect. ignored: fields that are accepted.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False, protected_namespaces=())
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def known_fields(cls) -> frozenset[str]:
        """Return the names of the fields that this model declares or refuses, without those that it ignores."""
        return frozenset((*cls.model_fields, *cls.refused))

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        """Return the data unchanged. Raises RequestError for a field of `refused` with a value other than None and
        those listed there.
        """
        for name in cls.refused.keys() & data.keys() if isinstance(data, dict) else ():
            value = data[name]
            if value is not None and not any(type(value) is type(one) and value == one for one in cls.refused[name]):
                allowed = " or ".join(("to leave it out", *map(repr, cls.refused[name])))
                problem = f"{name} is {show_value(value)}, but it is not supported; allowed: {allowed}"
                if name in EARLIER:
                    problem = f"{name} is {show_value(value)}, but the field is now called {EARLIER[name]}"
                raise RequestError(problem, param=name, value=value)
        return data


class ClosedModel(RequestModel):
    """An object without additional fields."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_others(cls, data: Any) -> Any:
        """Return the data unchanged. Raises ValueError for a field that the model neither declares nor refuses."""
        known = cls.known_fields()
        other = next((name for name in data if name not in known), None) if isinstance(data, dict) else None
        if other is not None:
            raise ValueError(f"{other[:100]} is not allowed here")
        return data


class StreamOptions(ClosedModel):
    """Options of a stream: token counts in a last chunk (include_usage), and in all (continuous_usage_stats)."""

    refused = {"include_obfuscation": (False,)}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(RequestModel):
    """OpenAI's wrapper of a schema. name and description are ignored.

    strict: False: keywords that no grammar can enforce are ignored; otherwise they are refused. All others are
      enforced.
    """

    name: str | None = None
    description: str | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestModel):
    """OpenAI's request for JSON, and vLLM's for text with a structural tag.

    Attributes:
      json_schema: schema for type "json_schema".
      format, structures, triggers: parts of a tag for type "structural_tag": its format, or the other two.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: JsonObject | None = None
    structures: Annotated[list[JsonObject], at_most(MAX_OPTIONS)] | None = None
    triggers: Annotated[list[str], at_most(MAX_OPTIONS)] | None = None

    def structured_outputs(self) -> dict[str, Any] | None:
        """Return the equivalent value of vLLM's field structured_outputs; None for type "text". A json_schema with
        strict false is read leniently. Raises RequestError for json_schema without a schema, and for a json_schema or a
        part of a tag under another type; the schema and the tag themselves are not checked.
        """
        if self.json_schema is not None and self.type != "json_schema":
            text = "response_format.json_schema is only allowed with the type json_schema"
            raise RequestError(text, param="response_format", value=self.type)
        tag = self.model_dump(exclude={"type", "json_schema"}, exclude_none=True)
        if self.type == "structural_tag":
            return {"structural_tag": {"type": self.type, **tag}}
        for name, value in tag.items():
            text = f"response_format.{name} is only allowed with the type structural_tag"
            raise RequestError(text, param="response_format", value=value)
        if self.type == "json_object":
            return {"json_object": True}
        if self.type == "text":
            return None
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise RequestError("response_format has no json_schema.schema", param="response_format")
        lenient = {"lenient": True} if self.json_schema.strict is False else {}
        return {"json": self.json_schema.schema_, **lenient}


class NamedRequest(RequestModel):
    """Fields of every request to the engine.

    Attributes:
      user: caller's name of the end user, for log and traces. It is not a client of the fair policy: made-up names
        would get more service.
      timeout: seconds after arrival at which the request is aborted.
      request_id: id of the request, in the response and for `abort`.
    """

    model: str | None = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        """Return this request. Raises RequestError for an invalid request_id, cache_salt or user, timeout <= 0."""
        if self.request_id is not None and not REQUEST_ID.fullmatch(self.request_id):
            raise invalid("request_id", self.request_id, "1 to 128 letters, digits, '-' and '_'")
        if self.timeout is not None and self.timeout <= 0:
            raise RequestError(f"timeout is {self.timeout}; allowed: numbers above 0", param="timeout")
        verify_salt(self.cache_salt)
        if self.user is not None and len(self.user) > _MAX_USER:
            problem = f"user has {len(self.user)} characters; allowed: {_MAX_USER}"
            raise RequestError(problem, param="user")
        return self

    def options(self, request: Request, config: ServerConfig, lora: str | None = None) -> RequestOptions:
        """Return the request's scheduling options: its priority, but not more urgent than `request.state.priority`; its
        timeout, or else the server's; the client, arrival and owner of `request`; and the session, the first of
        session_id, X-Session-Id and the session_id of vllm_xargs that is not empty. Raises RequestError for an invalid
        one. lora: name of the adapter, or None.
        """
        state, timeout = request.state, self.timeout or config.request_timeout
        priority = self.priority or 0 if state.priority is None else max(self.priority or 0, state.priority)
        own, further = getattr(self, "session_id", None), (getattr(self, "vllm_xargs", None) or {}).get("session_id")
        sessions = {"session_id": own, "X-Session-Id": request.headers.get("x-session-id")}
        given = (sessions | {"vllm_xargs.session_id": further}).items()
        session = next((check_session(name, each) for name, each in given if each not in (None, "")), None)
        return RequestOptions(priority, timeout, state.client, state.arrival, lora, state.owner_tag, session)

    def register(self, prefix: str, request: Request) -> str:
        """Return the request's id for the response, the engine and `abort`: `prefix`, such as "chatcmpl", a hyphen, and
        the given request_id or else a unique one. Stores the user in the request's state, and logs both at debug level.
        """
        request.state.user = self.user
        name = f"{prefix}-{self.request_id or request.state.unique_id}"
        logger.debug("%s is requested by user %r", name, self.user)
        return name


# Fields of SamplingFields in the form that pydantic's create_model takes: (type, default).
NUMBERS: dict[str, Any] = {name: (type(row.neutral) | None, None) for name, row in ROWS.items()}
_Numbers: Any = create_model("_Numbers", __base__=NamedRequest, **NUMBERS)


class GenerationRequest(_Numbers, NamedRequest):
    """Fields of every request that generates text, besides SamplingFields. None: the model's default or else vLLM's.

    Attributes:
      session_id: the request's conversation, in place of X-Session-Id; lora_routes go by the header alone.
    """

    ignored = HINTS

    seed: int | None = None
    stop: str | Texts | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: JsonObject | None = None
    structured_outputs: Annotated[JsonObject, at_most(MAX_OPTIONS)] | None = None
    vllm_xargs: ExtraArgs | None = None
    stream: bool | None = None
    session_id: str | None = None


class ConversationRequest(GenerationRequest):
    """Fields of every request whose answer may begin with reasoning.

    Attributes:
      stop_in_reasoning: look for `stop` in the reasoning too; default: only in the answer.
      thinking_token_budget: tokens of reasoning after which the answer is begun; -1 or None for no limit.
    """

    stop_in_reasoning: bool | None = None
    thinking_token_budget: int | None = None


class TextRequest(GenerationRequest):
    """Fields that completions and chat completions share.

    Attributes:
      truncate_prompt_tokens: number of prompt tokens to keep, from the end, or with truncation_side "right" from the
        beginning; -1: as many as leave room for max_tokens.
      prompt_logprob_start: the prompt's tokens up to this one, from 0, have null in prompt_logprobs.
      logprob_token_ids: tokens that each position of the output lists with the sampled one, in place of the likeliest.
      prompt_logprob_token_ids: tokens whose log-probabilities are returned in addition, at each position of the prompt
        that has any.
      return_sampling_mass: also return what sampling made of each token.
      return_sampling_mask: also return which tokens could have been sampled in place of each token.
      trace_decode_token_ids: the tokens that are decoded, whatever would be sampled.
      routed_experts_prompt_start: the prompt's tokens up to this one, from 0, are left out of routed_experts.
      return_weight_versions: also return which version of the weights made which tokens, with the end of each choice.
      capture: names of the engine's taps whose activations to return, as SamplingParams.capture.
      return_hidden_states: also return the hidden states of the engine's capture_layers.
      steer: vectors that are added to activations: objects with `at`, `vector` and `scale`, as SamplingParams.steer.
      repetition_detection: an object with the fields of RepetitionDetectionParams: ends an output that repeats itself.
      stream_interval: tokens of an output that are sent together with stream=true.
      kv_transfer_params: vLLM's description of the prompt's pages that another engine has computed or is to fetch.
      use_beam_search: return the n best sequences of a beam search, with length_penalty.
    """

    refused = TEXT_REFUSED

    n: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    stop_token_ids: TokenIds | None = None
    min_tokens: int | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Texts | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: TokenIds | None = None
    prompt_logprob_token_ids: TokenIds | None = None
    capture: Texts | None = None
    return_hidden_states: bool | None = None
    steer: Annotated[list[JsonObject], Field(fail_fast=True), at_most(MAX_STEER)] | None = None
    return_sampling_mass: bool | None = None
    return_sampling_mask: bool | None = None
    trace_decode_token_ids: TokenIds | None = None
    routed_experts_prompt_start: int | None = None
    repetition_detection: Annotated[JsonObject, at_most(MAX_OPTIONS)] | None = None
    stream_interval: int | None = None
    kv_transfer_params: TransferParams | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_weight_versions: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_once(cls, data: Any) -> Any:
        """Return the data without fields under earlier names (guided_...) whose values structured_outputs repeats;
        unchanged if it is not an object with structured_outputs.
        """
        if not isinstance(data, dict) or not isinstance(asked := data.get("structured_outputs"), dict):
            return data
        return {name: value for name, value in data.items() if name[:7] != "guided_" or value != asked.get(name[7:])}

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """Return this request. Raises RequestError for stream_options without stream, prompt_logprobs with it, lists of
        token ids without the logprobs that they extend, an invalid truncate_prompt_tokens, and as `_check_beams` does.
        """
        if self.stream_options is not None and self.stream_options.model_fields_set and not self.stream:
            raise RequestError("stream_options is only allowed with stream=true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs is not available with stream=true", param="prompt_logprobs")
        # As in vLLM: without `logprobs` an answer has no field for them.
        if self.logprob_token_ids and getattr(self, "logprobs", None) in (None, False):
            raise RequestError("logprob_token_ids is only allowed with logprobs", param="logprob_token_ids")
        if self.prompt_logprob_token_ids and self.prompt_logprobs is None:
            problem = "prompt_logprob_token_ids is only allowed with prompt_logprobs"
            raise RequestError(problem, param="prompt_logprob_token_ids")
        check_truncation(self.truncate_prompt_tokens)
        self._check_beams()
        return self

    def _check_beams(self) -> None:
        """Raise RequestError for length_penalty without a beam search, and for fields that a beam search does not
        support.
        """
        if not self.use_beam_search:
            if self.length_penalty not in (None, 1.0):
                raise RequestError("length_penalty is only allowed with use_beam_search=true", param="length_penalty")
            return
        neutral = SamplingParams()
        for name in _NOT_WITH_BEAMS:
            value = getattr(self, name, None)
            if value is not None and value is not False and value != getattr(neutral, name, None):
                raise RequestError(f"{name} is not allowed with use_beam_search=true", param=name)

    def beam_params(
        self, inputs: InputProcessor, params: SamplingParams, width: int | None = None
    ) -> BeamSearchParams | None:
        """Return the parameters of a beam search; None if the request has none. params: result of `sampling_params`.
        width: best_of, the number of beams; None for n, or 1. Raises RequestError for values that are not allowed.
        """
        if not self.use_beam_search:
            return None
        beams = BeamSearchParams(
            beam_width=width or self.n or 1,
            max_tokens=params.max_tokens or inputs.config.max_model_len,
            ignore_eos=params.ignore_eos,
            temperature=1.0 if self.temperature is None else self.temperature,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )
        try:
            beams.verify(inputs.config.max_logprobs, inputs.config.logprobs_mode)
        except RequestError as error:
            if error.param != "beam_width":
                raise
            raise renamed(error, "best_of" if width else "n") from None
        return beams

    def sampling_params(self, inputs: InputProcessor, config: ServerConfig, **changes: Any) -> SamplingParams:
        """Return the request's fields as SamplingParams; a field that is None gets the model's default. changes: fields
        of SamplingParams by name that replace these, also by None. With use_beam_search the temperature is always 1, as
        `beam_params` has the request's; max_tokens is `limited`. Raises RequestError for values that are not allowed.
        """
        check_n(self.n, config)
        given = {name: getattr(self, name) for name in type(self).model_fields if name in _SAMPLING_FIELDS}
        if self.logit_bias is not None:
            given["logit_bias"] = bias_by_id(self.logit_bias, inputs.model_config.vocab_size)
        given["structured_outputs"] = self._structure()
        further = {name: value for name, value in (self.vllm_xargs or {}).items() if name != "session_id"} or None
        given["extra_args"] = with_kv_transfer(further, self.kv_transfer_params, bool(self.stream))
        given["output_kind"] = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        given["return_sampling_mask"] = bool(self.return_sampling_mask)
        given = {name: value for name, value in given.items() if value is not None}
        if self.use_beam_search:  # temperature 0 allows n > 1 here; beam_params checks it
            changes["temperature"] = 1.0
        return limited(SamplingParams(**{**inputs.generation_defaults, **given, **changes}), inputs)

    def names_tokens_by_id(self, config: ServerConfig) -> bool:
        """Whether tokens of logprobs are written as token_id:N: as the request says, or else the server's option."""
        asked = self.return_tokens_as_token_ids
        return config.return_tokens_as_token_ids if asked is None else asked

    def _structure(self) -> dict[str, Any] | None:
        """Return structured_outputs, or the equivalent of response_format; None if neither is given. Raises
        RequestError if both are given.
        """
        asked = None if self.response_format is None else self.response_format.structured_outputs()
        if asked is None or self.structured_outputs is None:
            return asked or self.structured_outputs
        raise RequestError(
            "response_format and structured_outputs are both given; give one", param="structured_outputs"
        )


def usage_in_stream(asked: StreamOptions | None, config: ServerConfig) -> tuple[bool, bool]:
    """Return (whether a stream ends with an event with the token counts, whether every event has token counts), from a
    request's stream_options, `asked`; both with enable_force_include_usage. The second is True only if the first is.
    """
    if config.enable_force_include_usage:
        return True, True
    options = asked or StreamOptions()
    return bool(options.include_usage), bool(options.include_usage and options.continuous_usage_stats)


def usage(num_prompt_tokens: int, num_completion_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    """Return OpenAI's usage object. num_cached_tokens: number of prompt tokens that were found in the prefix cache."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "completion_tokens": num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }
