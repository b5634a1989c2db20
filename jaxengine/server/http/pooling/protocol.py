"""Requests of a pooling model's endpoints, with OpenAI's, vLLM's, Jina's and Cohere's fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import Field, SkipValidation, model_validator

from jaxengine.requests.media.inputs import OPTIONS
from jaxengine.requests.pooling.params import PoolingParams
from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.server.http.chat.protocol import MAX_MESSAGES, Messages
from jaxengine.server.http.request.fields import TemplateVariables, at_most, check_truncation
from jaxengine.server.http.request.protocol import HINTS, NamedRequest

# A text, an object with a content, or a list of these.
Sides = str | dict[str, Any] | Annotated[list[str | dict[str, Any]], Field(fail_fast=True)]
_REFUSED: dict[str, tuple[Any, ...]] = {
    "mm_processor_kwargs": ({},),
    "padding": ("do_not_pad",),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "media_io_kwargs": ({},),
}
_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


class PoolingBody(NamedRequest):
    """Fields that these requests share.

    Attributes:
      truncate_prompt_tokens: number of prompt tokens to keep, from the end, or with truncation_side "right" from the
        beginning; -1: max_model_len.
      use_activation: normalise embeddings, or turn scores into probabilities; default: the model's.
    """

    ignored = HINTS
    refused = _REFUSED

    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None

    @model_validator(mode="after")
    def _check_pooling(self) -> Self:
        """Return this request after checking it. Raises RequestError for a truncate_prompt_tokens other than -1 and
        integers from 1.
        """
        check_truncation(self.truncate_prompt_tokens)
        return self

    def pooling_params(self, task: str | None = None) -> PoolingParams:
        """Return the request's PoolingParams. Truncation is not among them. task: None for the model's task. Values are
        validated later, when the engine prepares the request.
        """
        return PoolingParams(task=task, use_activation=self.use_activation)


class InputBody(PoolingBody):
    """Requests whose prompts are processed one by one.

    Attributes:
      input: a text, a list of token ids, or a list of texts or of lists of token ids.
      messages: a conversation instead of input, or a list of them, each of which the model's chat template makes a
        prompt; add_generation_prompt, continue_final_message and chat_template_kwargs are of the template.
      mm_processor_kwargs: options of the media processor, for messages with media.
      add_special_tokens: whether the tokenizer adds special tokens to texts; default true, false for messages.
    """

    refused = {**{name: values for name, values in _REFUSED.items() if name != OPTIONS}, "chat_template": ()}

    # Checked by read_prompts: pydantic would try the union's lists item by item.
    input: Annotated[str | list[str] | list[int] | list[list[int]] | None, SkipValidation] = None
    messages: Messages | Annotated[list[Messages], Field(fail_fast=True), at_most(MAX_MESSAGES)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _check_input(self) -> Self:
        """Return this request after checking it. Raises RequestError unless it has either input or messages, for fields
        of messages with input, and for add_generation_prompt together with continue_final_message.
        """
        if (self.input is None) == (self.messages is None):
            problem = "input is missing" if self.input is None else "input and messages are both given"
            raise RequestError(f"{problem}; give one of input and messages", param="input")
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if self.messages is None and getattr(self, name):
                raise RequestError(f"{name} is only allowed with messages", param=name)
        if self.add_generation_prompt and self.continue_final_message:
            problem = "continue_final_message cannot be combined with add_generation_prompt"
            raise RequestError(problem, param="continue_final_message")
        return self

    def conversations(self, most: int) -> list[list[dict[str, Any]]] | None:
        """Return the conversations of messages, in order; None without messages. Raises RequestError for more than
        `most`.
        """
        if not self.messages or isinstance(self.messages[0], dict):
            return None if self.messages is None else [cast(list[dict[str, Any]], self.messages)]
        if len(self.messages) > most:
            problem = f"messages holds {len(self.messages)} prompts; allowed: 1 to {most}"
            raise RequestError(problem, param="messages")
        return cast(list[list[dict[str, Any]]], self.messages)


class EmbeddingRequest(InputBody):
    """Request of /v1/embeddings. Its `input` may also be what `messages` takes, as in vLLM.

    Attributes:
      encoding_format: numbers, or base64; "bytes" and "bytes_only": the body is the bytes of all vectors, of which
        "bytes" tells the form in the header `metadata`.
      embed_dtype, endianness: of base64 and bytes: the number format, float32 by default, and the byte order, little
        by default and with "native".
      dimensions: number of leading dimensions of each embedding to keep.
      normalize: earlier name of use_activation.
      prompt_name: the model's prompt to prepend to texts, "" for none; default: the model's default.
    """

    refused = {name: values for name, values in InputBody.refused.items() if name not in ("embed_dtype", "endianness")}
    refused |= {"late_chunking_params": ()}

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    embed_dtype: Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] | None = None
    endianness: Literal["native", "big", "little"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    prompt_name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_messages(cls, given: Any) -> Any:
        """Return the request with an `input` of messages, or of conversations, under `messages`, unless that is given
        too; any other value unchanged.
        """
        first = given.get("input") if isinstance(given, dict) and given.get("messages") is None else None
        while isinstance(first, list) and first:
            first = first[0]
        if not isinstance(first, dict) or "role" not in first:
            return given
        return {name: value for name, value in given.items() if name != "input"} | {"messages": given["input"]}

    @property
    def is_binary(self) -> bool:
        """Whether the answer is bytes in place of JSON."""
        return self.encoding_format in ("bytes", "bytes_only")

    @model_validator(mode="after")
    def _check_encoding(self) -> Self:
        """Return this request after checking it. Raises RequestError for an embed_dtype or endianness that changes
        bytes, where encoding_format writes numbers.
        """
        for name, plain in (("embed_dtype", ("float32",)), ("endianness", ("native", "little"))):
            value = getattr(self, name)
            if self.encoding_format in (None, "float") and value not in (None, *plain):
                problem = f"{name} is {value}; it is only allowed with encoding_format base64, bytes and bytes_only"
                raise RequestError(problem, param=name, value=value)
        return self

    def pooling_params(self, task: str | None = None) -> PoolingParams:
        return PoolingParams(
            task=task,
            use_activation=self.use_activation,
            normalize=self.normalize,
            dimensions=self.dimensions,
            prompt_name=self.prompt_name,
        )


class PoolingRequest(EmbeddingRequest):
    """Request of /pooling. task: one of PoolingParams.task, which the model must have."""

    task: str | None = None

    def pooling_params(self, task: str | None = None) -> PoolingParams:
        """Return the request's PoolingParams with its own task; the argument is ignored. Values are validated later,
        when the engine prepares the request.
        """
        return super().pooling_params(self.task)


class ClassifyRequest(InputBody):
    """Request of /classify."""


class CohereEmbedRequest(NamedRequest):
    """Request of /v2/embed, in the form of Cohere's API.

    Attributes:
      input_type: the model's prompt to prepend to texts, or otherwise the system's message; None for none.
      texts: what is embedded.
      images: or else addresses of images, "data:" or others that the server may load, each of which the chat template
        makes a prompt.
      inputs: or else objects with a `content`, a list of texts ({"type": "text", "text": ...}) and images ({"type":
        "image_url", "image_url": {"url": ...}}), each of which the chat template makes a prompt.
      output_dimension: number of leading dimensions of each embedding to keep.
      embedding_types: forms of the embeddings in the answer: numbers; their signs, 8 in a signed or unsigned int;
        base64 of little-endian float32. Default: numbers.
      truncate: END cuts long inputs at their ends, START at their beginnings; NONE refuses them, and so does any with
        images.
      max_tokens: tokens of an input above which it is cut or refused; default: max_model_len.
    """

    ignored = HINTS

    input_type: str | None = None
    texts: Annotated[list[str], Field(min_length=1, fail_fast=True)] | None = None
    images: Annotated[list[str], Field(min_length=1, fail_fast=True), at_most(MAX_MESSAGES)] | None = None
    # Objects and not models, which would take seconds to validate and hold up other clients meanwhile.
    inputs: Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True), at_most(MAX_MESSAGES)] | None = None
    output_dimension: int | None = None
    embedding_types: (
        Annotated[list[Literal["float", "binary", "ubinary", "base64"]], Field(fail_fast=True), at_most(4)] | None
    ) = None
    truncate: Literal["NONE", "START", "END"] = "END"
    max_tokens: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _check_texts(self) -> Self:
        """Return this request after checking it. Raises RequestError unless it has one of texts, images and inputs, and
        for an input that is more than a content of texts and images. These are checked when they are rendered.
        """
        given = [name for name in ("texts", "images", "inputs") if getattr(self, name) is not None]
        if len(given) != 1:
            problem = f"{' and '.join(given)} are given" if given else "texts is missing"
            raise RequestError(f"{problem}; give one of texts, images and inputs", param="texts")
        for each in self.inputs or ():
            content = each.get("content")
            if len(each) != 1 or not content or not isinstance(content, list) or not all(map(_is_part, content)):
                allowed = (
                    """objects with `content` alone, a list of {"type": "text", ...} and {"type": "image_url", ...}"""
                )
                raise RequestError(f"inputs has {show_value(each)}; allowed: {allowed}", param="inputs")
        return self

    @property
    def has_images(self) -> bool:
        """Whether there is an image among the inputs."""
        parts = (part for each in self.inputs or () for part in each["content"])
        return self.images is not None or any(part["type"] != "text" for part in parts)

    def as_embeddings(self, max_model_len: int, prompts: Mapping[str, str]) -> EmbeddingRequest:
        """Return the request of /v1/embeddings that has the same prompts and dimensions: of the texts, or of a
        conversation for each image or input. Unless `truncate` is NONE, it cuts prompts to max_tokens, at most
        max_model_len tokens.

        max_model_len: the engine's, which also stands for a missing max_tokens. prompts: the model's prompts by name;
        input_type, if given, is one of them. Raises RequestError for values that /v1/embeddings refuses.
        """
        common: dict[str, Any] = {"dimensions": self.output_dimension}
        if self.truncate != "NONE":
            common["truncate_prompt_tokens"] = min(self.max_tokens or max_model_len, max_model_len)
            common["truncation_side"] = "left" if self.truncate == "START" else "right"
        if self.texts is not None:
            return EmbeddingRequest(input=self.texts, prompt_name=self.input_type or "", **common)
        prompt = prompts[self.input_type] if self.input_type is not None else ""
        system = [{"role": "system", "content": prompt}] if prompt else []
        shown = ([{"type": "image_url", "image_url": {"url": each}}] for each in self.images or ())
        contents = shown if self.inputs is None else (each["content"] for each in self.inputs)
        talks = [[*system, {"role": "user", "content": content}] for content in contents]
        return EmbeddingRequest(messages=talks, **common)


def _is_part(part: Any) -> bool:
    """Whether a part of a content is a text or an image, an object with its type and the field of that name alone."""
    kind = part.get("type") if isinstance(part, dict) else None
    return kind in ("text", "image_url") and part.keys() == {"type", kind}


class PairsBody(PoolingBody):
    """Fields that requests of pairs of texts share.

    Attributes:
      max_tokens_per_query, max_tokens_per_doc: number of tokens, without special ones, to which each text of the first
        and of the second side is cut before pairs are made; 0 or none: whole texts.
      instruction, chat_template_kwargs: variables of the chat template that makes the prompt of a pair; refused where
        none does, but for the instruction of a model that reads lists.
    """

    max_tokens_per_query: int | None = None
    max_tokens_per_doc: int | None = None
    instruction: str | None = None
    chat_template_kwargs: TemplateVariables | None = None

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template. The instruction in chat_template_kwargs counts, if there is one."""
        named = {} if self.instruction is None else {"instruction": self.instruction}
        return {**named, **(self.chat_template_kwargs or {})}

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        """Return this request after checking it. Raises RequestError for a negative limit of tokens."""
        for name in ("max_tokens_per_query", "max_tokens_per_doc"):
            if (limit := getattr(self, name)) is not None and limit < 0:
                raise RequestError(f"{name} is {limit}; allowed: integers from 0", param=name, value=limit)
        return self


class ScoreRequest(PairsBody):
    """Request of /score: two texts or lists of texts, under one of several pairs of names. An object with a `content`
    may stand for a text; its form is checked with the media.
    """

    text_1: Sides | None = None
    text_2: Sides | None = None
    queries: Sides | None = None
    documents: Sides | None = None
    items: Sides | None = None
    data_1: Sides | None = None
    data_2: Sides | None = None

    @property
    def sides(self) -> tuple[str, str]:
        """Names of the two fields with texts, one pair in _PAIRS. Raises RequestError unless exactly one pair is
        given.
        """
        names = {name for pair in _PAIRS for name in pair}
        given = {name for name in names if getattr(self, name) is not None}
        for pair in _PAIRS:
            if given == {*pair}:
                return pair
        allowed = " or ".join(" and ".join(pair) for pair in _PAIRS)
        raise RequestError(f"give {allowed}, got {', '.join(sorted(given)) or 'none of them'}", param="text_1")

    def texts(self) -> tuple[Any, Any]:
        """Return both sides as given. Raises the error of `sides`."""
        first, second = self.sides
        return getattr(self, first), getattr(self, second)


class RerankRequest(PairsBody):
    """Request of /rerank.

    Attributes:
      query: a text, or an object with a `content`.
      documents: texts, or objects with a "text" or a `content`; or one of these.
      top_n: number of best results to return; 0 or none: all.
      return_documents: whether results include the texts; default true.
      sides: names of the two fields with texts, as in ScoreRequest.
    """

    sides: ClassVar[tuple[str, str]] = ("query", "documents")
    refused = {**_REFUSED, "max_chunks_per_doc": (), "rank_fields": ()}

    query: str | dict[str, Any]
    documents: Sides
    top_n: int | None = None
    return_documents: bool | None = None

    @model_validator(mode="after")
    def _check_rerank(self) -> Self:
        """Return this request after checking it. Raises RequestError for a negative top_n."""
        if self.top_n is not None and self.top_n < 0:
            raise RequestError(f"top_n is {self.top_n}; allowed: integers from 0", param="top_n")
        return self

    def texts(self) -> list[str | dict[str, Any]]:
        """Return the texts of the documents, and those with a `content` as they are, in order. Raises RequestError if
        there are no documents, or one has neither a content nor a text, or an empty one.
        """
        given = self.documents if isinstance(self.documents, list) else [self.documents]
        found = [each if isinstance(each, str) or "content" in each else each.get("text") for each in given]
        if not found or not all(isinstance(text, (str, dict)) and text for text in found):
            problem = "documents must be texts, or objects with a text, none of them empty, got"
            raise RequestError(f"{problem} {show_value(self.documents)}", param="documents")
        return [each for each in found if each is not None]
