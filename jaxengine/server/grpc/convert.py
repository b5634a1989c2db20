"""Conversion of requests of inference.proto: prompt, sampling parameters, and the parts of outputs to return.

Every field that is set takes effect or is refused.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct
from google.protobuf.unknown_fields import UnknownFieldSet

from jaxengine.media.embeds import EMBEDS, GRID
from jaxengine.media.parts import MediaPart, PlacedPart
from jaxengine.requests.inputs import InputProcessor
from jaxengine.requests.params.extra_args import ALIGNMENT
from jaxengine.requests.params.param_limits import MAX_TOKEN_IDS, RequestOutputKind
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.requests.run_in_thread import make_ready, with_media
from jaxengine.scheduler.base.errors import RequestError, prompt_length_error
from jaxengine.scheduler.base.sampling_fields import ROWS
from jaxengine.server.base.names import REQUEST_ID
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.base.output_limit import limited
from jaxengine.server.base.prompts import PromptEncoder
from jaxengine.server.grpc import admin_pb2 as admin_pb
from jaxengine.server.grpc import inference_pb2 as pb

# Field of GenerateRequest -> field of SamplingParams, copied unchanged.
SAMPLING_FIELDS = {
    **{row.grpc: name for name, row in ROWS.items()},
    "sampling.num_sequences": "n",
    "sampling.seed": "seed",
    "decoding.logit_bias": "logit_bias",
    "decoding.allowed_token_ids": "allowed_token_ids",
    "decoding.bad_words": "bad_words",
    "decoding.extra_args": "extra_args",
    "decoding.trace_decode_token_ids": "trace_decode_token_ids",
    "stopping.max_new_tokens": "max_tokens",
    "stopping.min_new_tokens": "min_tokens",
    "stopping.stop_token_ids": "stop_token_ids",
    "stopping.stop_strings": "stop",
    "stopping.include_stop_strings": "include_stop_str_in_output",
    "stopping.ignore_eos": "ignore_eos",
    "response.skip_special_tokens": "skip_special_tokens",
    "response.spaces_between_special_tokens": "spaces_between_special_tokens",
    "response.logprob_token_ids": "logprob_token_ids",
    **{f"response.{name}": name for name in ("capture", "return_hidden_states", "return_sampling_mask")},
}
GROUPS = ("sampling", "decoding", "stopping", "response")
# Parameter -> field that errors about it name.
_OTHER_FIELDS = {
    "cache_salt": "kv.cache_salt",
    "prompt_token_ids": "token_ids",
    "chat_template_kwargs": "messages.chat_template_kwargs",
    "mm_processor_kwargs": "messages.mm_processor_kwargs",
    "add_generation_prompt": "messages.add_generation_prompt",
    "continue_final_message": "messages.continue_final_message",
}
MAX_CHAT_MESSAGES, MAX_CONTENT_PARTS = 10_000, 100_000
MAX_TEMPLATE_VARIABLES_BYTES, _MAX_UNKNOWN_BYTES = 64 << 10, 4096
_PARAM_FIELDS = {param: field for field, param in SAMPLING_FIELDS.items()}


@dataclass(frozen=True)
class Wanted:
    """Parts of an output that the caller has requested.

    Attributes:
      text, token_ids: those of the output.
      logprobs, candidates: log-probabilities of the output's tokens, and of other tokens at their positions.
      prompt_token_ids, prompt_logprobs, prompt_candidates: the same three parts of the prompt.
    """

    text: bool = False
    token_ids: bool = False
    logprobs: bool = False
    candidates: bool = False
    prompt_token_ids: bool = False
    prompt_logprobs: bool = False
    prompt_candidates: bool = False


@dataclass(frozen=True)
class Generation:
    """Generation request in the engine's terms.

    Attributes:
      request_id: the caller's, or a new one.
      prompt: the prompt that EngineClient.stream takes.
      params: sampling parameters.
      priority: field of RequestOptions.
      wanted: parts of the output that the answer contains.
    """

    request_id: str
    prompt: dict[str, Any]
    params: SamplingParams
    priority: int
    wanted: Wanted


class RequestReader:
    """Reader of gRPC requests for one engine. Its methods raise RequestError for invalid requests."""

    def __init__(self, inputs: InputProcessor, config: ServerConfig):
        self._inputs = inputs
        self._config = config
        self.encoder = PromptEncoder(inputs)

    async def generation(self, request: pb.GenerateRequest, *, stream: bool) -> Generation:
        """Convert a request to generate: check it, tokenize its prompt and read its media. stream: whether the answer
        is sent in chunks. Raises RequestError for an invalid request, OverloadedError if too many calls wait.
        """
        request_id = read_request_id(request)
        wanted = _wanted(request.response)
        params = self._sampling_params(request, wanted, stream)
        return Generation(request_id, await self._prompt(request), params, request.priority, wanted)

    async def score(self, request: pb.ScoreRequest) -> Generation:
        """Convert a request to score to a generation of one token, of which the caller uses only the prompt's
        log-probabilities. These include candidates if the request has the field.

        Raises RequestError for an invalid request, OverloadedError if too many calls wait.
        """
        request_id = read_request_id(request)
        asked = request.HasField("candidates")
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            return_sampling_mask=False,
            prompt_logprobs=_num_candidates(request.candidates, "candidates") if asked else 0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        wanted = Wanted(prompt_token_ids=True, prompt_logprobs=True, prompt_candidates=asked)
        return Generation(request_id, await self._prompt(request), params, request.priority, wanted)

    async def encode(self, text: str, add_special_tokens: bool = True, cut_side: str | None = None) -> list[int]:
        """Return the token ids of a text. Arguments and errors are those of PromptEncoder.encode; also raises
        RequestError for an empty text.
        """
        if not text:
            raise RequestError("text is empty; at least one character is needed", param="text", value=text)
        special = add_special_tokens
        return (await self.encoder.encode([text], add_special_tokens=special, param="text", cut_side=cut_side))[0]

    async def encode_messages(self, chat: pb.ChatMessages) -> list[int]:
        """Return the token ids of a conversation. Its images and videos are read, as the number of their placeholder
        tokens depends on them. Raises RequestError for an invalid one, OverloadedError if too many calls wait.
        """
        token_ids, parts = await self._read_chat(chat)
        prompt = await with_media(self._inputs, {"prompt_token_ids": token_ids}, parts, _processor_kwargs(chat))
        return prompt["prompt_token_ids"]

    async def _read_chat(self, chat: pb.ChatMessages) -> tuple[list[int], list[MediaPart]]:
        """Render and tokenize a conversation on a thread; return its token ids and its media parts, which are not read
        yet.

        A generation prompt is added if add_generation_prompt is true or, without that field, unless the last message is
        continued. Raises RequestError for more than MAX_CHAT_MESSAGES messages or MAX_CONTENT_PARTS
        parts, a message with both content and parts, an empty part, a content that cannot fit, template variables that
        are not allowed, errors of the template, and without a tokenizer; OverloadedError if too many calls wait.
        """
        if (count := len(chat.messages)) > MAX_CHAT_MESSAGES:
            raise RequestError(f"there are {count} messages; allowed: {MAX_CHAT_MESSAGES}", param="messages")
        if (count := sum(len(message.parts) for message in chat.messages)) > MAX_CONTENT_PARTS:
            raise RequestError(f"there are {count} parts of messages; allowed: {MAX_CONTENT_PARTS}", param="messages")
        self.encoder.verify_length(max((len(each.content) for each in chat.messages), default=0), "messages")
        variables = None
        if chat.HasField("chat_template_kwargs"):
            variables = _read_struct(chat.chat_template_kwargs, "chat_template_kwargs", "template variables")
            if not self._config.chat_template_kwargs_allowed:
                raise RequestError("this server does not accept template variables", param="chat_template_kwargs")
        given = chat.HasField("add_generation_prompt")
        messages, parts = self._inputs.media_reader.collect(
            [_chat_message(message, f"messages.messages[{at}]") for at, message in enumerate(chat.messages)]
        )
        prompt = await self.encoder.run(
            lambda: self._inputs.chat_prompt(
                messages,
                add_generation_prompt=chat.add_generation_prompt if given else not chat.continue_final_message,
                continue_final_message=chat.continue_final_message,
                chat_template_kwargs={**(self._config.default_chat_template_kwargs or {}), **(variables or {})},
            )
        )
        return prompt["prompt_token_ids"], parts

    async def _prompt(self, request: pb.GenerateRequest | pb.ScoreRequest) -> dict[str, Any]:
        """Return the request's prompt in the form that the engine takes: token ids or embeddings, media, and the cache
        salt. To bypass the prefix cache, the salt is a new random one. Raises RequestError, also for a missing prompt
        and for a salt together with bypass_prefix_cache, and OverloadedError.
        """
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise RequestError("a prompt is needed: text, token_ids, messages or prompt_embeds", param="prompt")
        if isinstance(request, pb.GenerateRequest) and kind == "prompt_embeds":
            prompt = await self._embedded(request)
        else:
            prompt = await self._tokens(request, kind)
        if request.kv.bypass_prefix_cache:
            if request.kv.cache_salt:
                raise RequestError(
                    "kv.bypass_prefix_cache reads no cached pages, so kv.cache_salt must be empty", param="cache_salt"
                )
            # Cached pages are found only with their salt, and this one is new.
            prompt["cache_salt"] = secrets.token_hex(16)
        elif request.kv.cache_salt:
            prompt["cache_salt"] = request.kv.cache_salt
        return prompt

    async def _embedded(self, request: pb.GenerateRequest) -> dict[str, Any]:
        """Return a prompt made of the request's embeddings. Raises RequestError for embeddings that cannot be read, and
        for truncate_prompt_tokens and response.prompt_token_ids, as the prompt has no tokens.
        """
        for name, value in (
            ("truncate_prompt_tokens", request.truncate_prompt_tokens),
            ("response.prompt_token_ids", request.response.prompt_token_ids),
        ):
            if value:
                problem = f"{name} is {value}; allowed with prompt_embeds: to leave it out, as the prompt has no tokens"
                raise RequestError(problem, param=name, value=value)
        ready: Any = await make_ready(self._inputs, {"prompt_embeds": request.prompt_embeds})
        return ready

    async def _tokens(self, request: pb.GenerateRequest | pb.ScoreRequest, kind: str) -> dict[str, Any]:
        """Return a prompt of tokens and media. If `truncate_prompt_tokens` is not 0, only that many of the last tokens
        are kept.

        kind: name of the field that has the prompt. Raises RequestError for a prompt that is empty or, after
        truncation, has more than max_model_len - 1 tokens, for one with media that would be truncated, and for media
        that cannot be read; OverloadedError.
        """
        keep = request.truncate_prompt_tokens
        parts: list[MediaPart] = []
        if kind == "token_ids":
            token_ids = request.token_ids.ids
        elif kind == "text":
            token_ids = await self.encode(request.text, cut_side=self.encoder.cut_side(keep or None, "left"))
        else:
            token_ids, parts = await self._read_chat(request.messages)
        count = min(len(token_ids), keep) if keep else len(token_ids)
        longest = self._inputs.config.max_model_len - 1
        if not 1 <= count <= longest:
            raise prompt_length_error("prompt", count, longest, longest + 1)
        if parts and count < len(token_ids):
            problem = "messages with images or videos are too long, and cannot be cut short"
            raise RequestError(problem, param="truncate_prompt_tokens")
        prompt: dict[str, Any] = {"prompt_token_ids": token_ids[-count:]}
        if kind == "messages":
            prompt = await with_media(self._inputs, prompt, parts, _processor_kwargs(request.messages))
        return prompt

    def _sampling_params(self, request: pb.GenerateRequest, wanted: Wanted, stream: bool) -> SamplingParams:
        """Return the sampling parameters of a request; the model's defaults apply to fields that it does not set. With
        messages, max_tokens is None unless the request or the defaults set it; in any case it is `limited`.

        wanted: decides on log-probabilities and texts. stream: whether each output has only new tokens. Raises
        RequestError for an invalid value, n above max_n, candidates that select nothing, and extra_args with alignment.
        """
        values: dict[str, Any] = {"max_tokens": None} if request.WhichOneof("prompt") == "messages" else {}
        values.update(self._inputs.generation_defaults)
        vocab_size, max_n = self._inputs.model_config.vocab_size, self._config.max_n
        for field, value in _fields_set(request):
            if field in SAMPLING_FIELDS:
                param = SAMPLING_FIELDS[field]
                # A trace may repeat tokens, so its limit is the context length and not the vocabulary.
                longest = MAX_TOKEN_IDS if param == "trace_decode_token_ids" else vocab_size
                values[param] = _plain(field, value, param, longest)
        if ALIGNMENT in values.get("extra_args", {}):
            raise RequestError("extra_args has alignment, which answers over gRPC do not have", param="extra_args")
        if values.get("n", 1) > max_n:
            raise RequestError(f"n is {values['n']}; allowed: 1 to {max_n}", param="n", value=values["n"])
        response = request.response
        if wanted.logprobs or wanted.candidates:
            values["logprobs"] = _num_candidates(
                response.output_candidates, "response.output_candidates", response.HasField("output_candidates")
            )
        if wanted.prompt_logprobs or wanted.prompt_candidates:
            values["prompt_logprobs"] = _num_candidates(
                response.prompt_candidates, "response.prompt_candidates", wanted.prompt_candidates
            )
        kind = request.decoding.WhichOneof("structured_output")
        if kind is not None:
            value = getattr(request.decoding, kind)
            if kind == "choice":
                value = _plain("decoding.choice", value.choices, "structured_outputs", vocab_size)
            values["structured_outputs"] = {kind: value}
        # Stop strings are searched in the text, even if it is not returned.
        values["detokenize"] = wanted.text or bool(values.get("stop"))
        values["output_kind"] = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
        return limited(SamplingParams(**{"return_sampling_mask": False, **values}), self._inputs)


def _chat_message(message: pb.ChatMessage, where: str) -> dict[str, Any]:
    """Convert a message to the form that chat templates and media.parts take.

    where: path of the message, for errors. Raises RequestError for a message with both content and parts, and for an
    empty part.
    """
    if not message.parts:
        return {"role": message.role, "content": message.content}
    if message.content:
        raise RequestError(f"{where} has both content and parts; give one", param="messages")
    return {
        "role": message.role,
        "content": [_part(part, f"{where}.parts[{at}]") for at, part in enumerate(message.parts)],
    }


def _read_struct(struct: Struct, param: str, what: str) -> dict[str, Any]:
    """Convert a Struct to a dict. Raises RequestError if it has more than MAX_TEMPLATE_VARIABLES_BYTES or a number that
    is not finite.

    param, what: name of the field and a description of its content, for errors.
    """
    if struct.ByteSize() > MAX_TEMPLATE_VARIABLES_BYTES:
        raise RequestError(f"{what} are too long; allowed: {MAX_TEMPLATE_VARIABLES_BYTES} bytes", param=param)
    try:
        return json_format.MessageToDict(struct)
    except ValueError:
        raise RequestError(f"{what} must be finite numbers", param=param) from None


def _processor_kwargs(chat: pb.ChatMessages) -> dict[str, Any] | None:
    """Return a conversation's mm_processor_kwargs, with whole numbers as integers; None if the field is not set. Raises
    RequestError for more than MAX_TEMPLATE_VARIABLES_BYTES and for numbers that are not finite.
    """
    if not chat.HasField("mm_processor_kwargs"):
        return None
    found = _read_struct(chat.mm_processor_kwargs, "mm_processor_kwargs", "arguments of the processor")
    return {name: _with_integers(value) for name, value in found.items()}


def _with_integers(value: Any) -> Any:
    """Return a JSON value in which whole floats are integers, in its lists and dicts too: a Struct has only floats."""
    if isinstance(value, dict):
        return {name: _with_integers(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_integers(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _part(part: pb.ContentPart, where: str) -> dict[str, Any]:
    """Convert a part of a message to the form that media.parts takes: a dict, and a PlacedPart unless it is text.

    where: path of the part, for errors. Raises RequestError for an empty part or one without data.
    """
    kind = part.WhichOneof("part")
    if kind is None:
        raise RequestError(f"{where} is empty; allowed: text, image, video, audio and image_embeds", param="messages")
    if kind == "text":
        return {"type": "text", "text": part.text}
    if kind == EMBEDS:
        given = part.image_embeds
        if not given.data:
            raise RequestError(f"{where}.{kind} is empty; data is required", param="messages")
        return PlacedPart({"type": kind, kind: {EMBEDS: given.data, GRID: list(given.image_grid_thw) or None}}, where)
    media: pb.Media = getattr(part, kind)
    source = media.WhichOneof("source")
    if source is None:
        raise RequestError(f"{where}.{kind} is empty; allowed: data and url", param="messages")
    return PlacedPart({"type": kind, kind: getattr(media, source)}, where)


def read_request_id(request: pb.GenerateRequest | pb.ScoreRequest) -> str:
    """Return the caller's request id or, if it is empty, a new one: "grpc-" and 32 hex digits. Raises RequestError for
    an id that does not match names.REQUEST_ID.
    """
    if not request.request_id:
        return f"grpc-{uuid.uuid4().hex}"
    if not REQUEST_ID.fullmatch(request.request_id):
        raise RequestError(
            f"request_id is {request.request_id[:40]!r}; allowed: 1 to 128 letters, digits, '-' and '_'",
            param="request_id",
            value=request.request_id,
        )
    return request.request_id


def field_of(request: Message, param: str | None) -> str | None:
    """Return the name of the proto field that corresponds to a RequestError's param, "group.field" for a field in a
    group and, for a oneof, the field that is set; what follows a dot in `param` is kept. Returns `param` itself, which
    may be None, if no field corresponds to it.
    """
    names = request.DESCRIPTOR.fields_by_name
    if param is None or param in names:
        return param
    if param == "prompt" and "prompt" in request.DESCRIPTOR.oneofs_by_name:
        return request.WhichOneof("prompt") or "prompt"
    if param in ("logprobs", "prompt_logprobs") and "response" in names:
        return f"response.{'output' if param == 'logprobs' else 'prompt'}_candidates"
    if param == "prompt_logprobs":
        return "candidates"
    if param == "structured_outputs" and isinstance(request, pb.GenerateRequest):
        return f"decoding.{request.decoding.WhichOneof('structured_output')}"
    if param == "version" and isinstance(request, admin_pb.UpdateWeightsRequest):
        return f"options.{request.options.WhichOneof('version') or 'weight_version'}"
    name, dot, rest = param.partition(".")
    return (_PARAM_FIELDS.get(name) or _OTHER_FIELDS.get(name) or name) + dot + rest


def refuse_unknown_fields(message: Message) -> None:
    """Raise RequestError if a message, or a message within it, has a field that this server does not know or that was
    sent with another type. The error names the field unless the unknown fields have more than _MAX_UNKNOWN_BYTES.
    """
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    size = message.ByteSize() - known.ByteSize()
    if size == 0:
        return
    # Finding the name takes time and memory in proportion to the size.
    if size <= _MAX_UNKNOWN_BYTES:
        _name_unknown_field(message, "")
    raise RequestError(f"the {message.DESCRIPTOR.full_name} has fields that are not supported")


def _name_unknown_field(message: Message, path: str) -> None:
    """Raise RequestError, with the field's name or number, for the first unknown field of a message or of a message
    within it; return if there is none. Only the first MAX_CHAT_MESSAGES messages of a repeated field are searched, and
    no values of maps.

    path: the message's, with a dot at the end; "" for the outermost one.
    """
    for unknown in UnknownFieldSet(message):
        field = message.DESCRIPTOR.fields_by_number.get(unknown.field_number)
        if field is not None:
            name = path + field.name
            raise RequestError(f"{name} has the wrong type on the wire", param=name)
        name = f"{path}{unknown.field_number}"
        raise RequestError(f"field {name} of {message.DESCRIPTOR.full_name} is not supported", param=name)
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in [value] if isinstance(value, Message) else islice(value, MAX_CHAT_MESSAGES):
            _name_unknown_field(part, f"{path}{field.name}.")


def _fields_set(request: pb.GenerateRequest) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for each field that is set, the prompt's included. A field in a group is "group.field"."""
    for field, value in request.ListFields():
        if field.name in GROUPS:
            yield from ((f"{field.name}.{inner.name}", part) for inner, part in value.ListFields())
        else:
            yield field.name, value


def _plain(field: str, value: Any, param: str, longest: int) -> Any:
    """Convert a field's value to a scalar, dict or list.

    field, param: names in the proto and in SamplingParams, for errors. longest: largest number of entries. Raises
    RequestError for more entries, for a Struct with kv_transfer_params, and for one that `_read_struct` refuses.
    """
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Struct):
        if "kv_transfer_params" in value.fields:
            problem = f"{field} has kv_transfer_params, which only HTTP takes and returns"
            raise RequestError(problem, param=param, value="kv_transfer_params")
        return _with_integers(_read_struct(value, param, field))
    if len(value) > longest:
        raise RequestError(f"{field} has {len(value)} entries; allowed: {longest}", param=param, value=len(value))
    return dict(value) if isinstance(value, Mapping) else list(value)


def _wanted(response: pb.ResponseOptions) -> Wanted:
    """Return the parts of an output that a request selects: texts by default, candidates also by logprob_token_ids."""
    return Wanted(
        text=response.output_text if response.HasField("output_text") else True,
        token_ids=response.output_token_ids,
        logprobs=response.output_logprobs,
        candidates=response.HasField("output_candidates") or bool(response.logprob_token_ids),
        prompt_token_ids=response.prompt_token_ids,
        prompt_logprobs=response.prompt_logprobs,
        prompt_candidates=response.HasField("prompt_candidates"),
    )


def _num_candidates(candidates: pb.CandidateTokens, field: str, asked: bool = True) -> int:
    """Return the number of likeliest tokens to report: top_n, or -1 for all. Return 0, which reports only the sampled
    token, if not `asked`.

    field: name for the error. Raises RequestError if `candidates` selects nothing.
    """
    if not asked:
        return 0
    chosen = candidates.WhichOneof("select")
    if chosen == "top_n":
        return candidates.top_n
    if chosen == "all" and candidates.all:
        return -1
    raise RequestError(f"{field} must have top_n or all = true", param=field)
