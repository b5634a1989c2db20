"""Parameters and prompts of requests to a pooling model, shared by `LLM` and the server."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxengine.config.features.pooling_model import DOCUMENT, QUERY, PoolingModel
from jaxengine.media.messages import MediaReader
from jaxengine.media.parts import MediaPart, PlacedPart
from jaxengine.models.config.pooler import EMBED, TOKEN_EMBED
from jaxengine.requests.inputs import InputProcessor
from jaxengine.requests.media.inputs import DATA
from jaxengine.requests.params.lora import LoRARequest
from jaxengine.requests.pooling.outputs import ScoringRequestOutput
from jaxengine.requests.pooling.params import PoolingParams
from jaxengine.scheduler.base.errors import RequestError, refuse, show_value


@dataclass(frozen=True, eq=False)
class Content:
    """Query or document with images or videos. Equal only to itself.

    Attributes:
      text: its prompt: the placeholders of its media, and then its texts, a line each.
      parts: its media, in order; nothing is loaded yet.
    """

    text: str
    parts: tuple[MediaPart, ...]


Side = str | Content
# Place in a text of llama.cpp's converter; not Jinja's.
_PLACE = re.compile(r"(?<!\{)\{(query|document)\}")


def params_for(
    count: int,
    params: PoolingParams | Sequence[PoolingParams] | None,
    truncate_prompt_tokens: int | None = None,
    task: str | None = None,
) -> list[PoolingParams]:
    """Return copies of pooling parameters, one for each of `count` prompts.

    params: one for all, one per prompt, or None for defaults. truncate_prompt_tokens, task: values for these fields
    where they are None. Raises RequestError for another type or number of params.
    """
    each: Any = [params or PoolingParams()] * count if params is None or isinstance(params, PoolingParams) else params
    if not isinstance(each, Sequence) or len(each) != count or not all(isinstance(one, PoolingParams) for one in each):
        given = len(each) if isinstance(each, list | tuple) and len(each) != count else show_value(each)
        problem = f"pooling_params must be one PoolingParams or one for each of the {count} prompts, got {given}"
        raise RequestError(problem, param="pooling_params", value=params)
    keep = truncate_prompt_tokens
    return [
        replace(
            one,
            task=one.task if one.task is not None else task,
            truncate_prompt_tokens=one.truncate_prompt_tokens if one.truncate_prompt_tokens is not None else keep,
        )
        for one in each
    ]


def pairs_of(
    data_1: Any, data_2: Any, reader: MediaReader, names: tuple[str, str] = ("data_1", "data_2")
) -> list[tuple[Side, Side]]:
    """Return the pairs to compare: one text of data_1 with each of data_2, or the i-th with the i-th.

    Either may be a text, an object with a `content` (`content_of`), or a list of these. reader: reader of the media.
    names: names of both arguments for the caller, for errors. Raises RequestError for other values, if a text is empty,
    a list is empty, or data_1 has neither one text nor as many as data_2, and for media that cannot be used.
    """
    first, second = ([each] if isinstance(each, (str, Mapping)) else each for each in (data_1, data_2))
    for name, texts in zip(names, (first, second), strict=True):
        if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str | Mapping) for text in texts):
            raise refuse(name, texts, "a text or a list of texts, none of them empty")
    first, second = (
        [content_of(each, name, reader) for each in texts] for name, texts in zip(names, (first, second), strict=True)
    )
    if len(first) not in (1, len(second)):
        name, other = names
        text = f"{name} has {len(first)} texts and {other} {len(second)}; allowed: as many of both, or one in {name}"
        raise RequestError(text, param=name)
    return list(zip([*first] * len(second) if len(first) == 1 else first, second, strict=True))


def content_of(given: Any, name: str, reader: MediaReader) -> Side:
    """Return a text unchanged, and of an object {"content": parts of a chat message} its Content, placeholders of its
    media before its texts, which are joined by line ends; its text if it has no media.

    name: the field, for errors. reader: reader of the media. Raises RequestError for an empty text, an object of
    another form, and media that cannot be used.
    """
    if isinstance(given, Mapping):
        parts = given.get("content")
        if len(given) != 1 or not isinstance(parts, (list, tuple)):
            problem = f"{name} has {show_value(given)}; allowed: a text, or an object with `content` alone, a list"
            raise RequestError(problem, param=name)
        placed = [
            PlacedPart(part, f"{name}.content[{number}]") if isinstance(part, Mapping) else part
            for number, part in enumerate(parts)
        ]
        _, media = reader.collect([{"role": "user", "content": placed}])
        own = [part for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
        texts = [part["text"] for part in own if isinstance(part.get("text"), str)]
        if len(texts) + len(media) != len(parts):
            raise RequestError(f"{name} has a content of other parts than texts, images and videos", param=name)
        given, placeholder = "\n".join(texts), reader.placeholder
        if media and placeholder is not None:
            return Content("".join(placeholder(part.modality) for part in media) + given, tuple(media))
    if not given:
        raise RequestError(f"{name} must be a text or a list of texts, none of them empty", param=name)
    return given


def pair_prompt(
    inputs: InputProcessor,
    query: Side,
    document: Side,
    chat_template: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Any:
    """Return a cross-encoder's prompt for a pair of texts, as a str or as a list of token ids.

    With `chat_template` or the engine's option it is the text that the template returns for the messages. Otherwise the
    text "rerank" of a GGUF file is written with both in their places; an encoder's tokenizer joins both to token ids; a
    model whose files say that it takes messages gets token ids by its own template; any other gets both texts, one
    after the other. variables: those of the template. Raises RequestError without a tokenizer, for a model that does
    not have exactly one label, for a Content, for variables without a template, and if the template fails;
    OverloadedError if too many templates are being rendered.
    """
    if isinstance(query, Content) or isinstance(document, Content):
        problem = "images and videos are scored by models that embed the two sides apart; this one reads both together"
        raise RequestError(problem, param="model")
    model = inputs.require_pooling()
    classifier = model.pooler.classifier
    if classifier is None or classifier.num_labels != 1:
        num_labels = 0 if classifier is None else classifier.num_labels
        raise RequestError(
            f"the model has {num_labels} labels; a model that scores pairs of texts has 1", param="model"
        )
    template, tokenizer = chat_template or inputs.config.chat_template, inputs.require_tokenizer()
    if template is None:
        named, plain = tokenizer.chat_template, None
        if isinstance(named, dict) and _PLACE.search(text := named.get("rerank", "")):
            places = {"query": query, "document": document}
            plain = tokenizer.encode(_PLACE.sub(lambda place: places[place[1]], text), add_special_tokens=False)
        elif model.token_rows is not None:
            plain = tokenizer.encode_pair(query, document, model.token_rows if model.has_token_types else 0)
        elif not model.reads_messages:
            plain = query + document
        if plain is not None:
            refuse_variables(variables)
            return plain
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    text = tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=False,
        continue_final_message=False,
        chat_template=template,
        chat_template_kwargs=variables,
    )
    return text if template is not None else tokenizer.encode(text, add_special_tokens=False)


def refuse_variables(variables: Mapping[str, Any] | None) -> None:
    """Raise RequestError for variables of a chat template, for prompts that none makes."""
    if variables:
        param = "instruction" if "instruction" in variables else "chat_template_kwargs"
        raise RequestError(f"{param} is a variable of a chat template, which this model's prompts lack", param=param)


def reads_apart(model: PoolingModel) -> bool:
    """Return whether the model embeds the two texts of a pair separately, so that their embeddings are compared."""
    return model.task in (EMBED, TOKEN_EMBED)


def role_params(model: PoolingModel, params: PoolingParams | None) -> tuple[PoolingParams, PoolingParams]:
    """Return the pooling parameters (of queries, of documents) for texts whose embeddings are compared.

    Both are `params`, except that a ColBERT model with prompts for both roles gets their names, unless `params` names a
    prompt. params: None for defaults.
    """
    params = params or PoolingParams()
    sentence = model.sentence
    by_tokens = sentence is not None and sentence.by_tokens and {QUERY, DOCUMENT} <= {*sentence.prompts}
    if not by_tokens or params.prompt_name is not None:
        return params, params
    return replace(params, prompt_name=QUERY), replace(params, prompt_name=DOCUMENT)


def by_role(
    pairs: Iterable[tuple[Side, Side]], roles: tuple[PoolingParams, PoolingParams]
) -> Iterator[tuple[int, Side]]:
    """Yield (index of the role in `roles`, text or Content) for both sides of every pair, query first.

    The index is 0 for all texts if both roles have equal parameters.
    """
    second = 0 if roles[0] == roles[1] else 1
    for query, document in pairs:
        yield 0, query
        yield second, document


def compare(
    pairs: Sequence[tuple[Side, Side]],
    roles: tuple[PoolingParams, PoolingParams],
    adapters: Sequence[LoRARequest | None],
    inputs: InputProcessor,
    encode: Callable[[list[Any], list[PoolingParams], list[LoRARequest | None]], Sequence[Any]],
) -> list[ScoringRequestOutput]:
    """Return the score of each pair, computed from the embeddings of its sides (`ScoringRequestOutput.of_pair`). Each
    different (role, side, name of the adapter) is encoded once. With media, max_num_seqs sides are encoded at a time,
    and their media are loaded then: all together may need a thousand times the memory.

    roles: result of `role_params`. adapters: one for both sides of each pair; None for the model alone. encode:
    (prompts, parameters of each, adapter of each) -> outputs in the same order. Raises RequestError for media that
    cannot be loaded.
    """
    of_sides = [adapter for adapter in adapters for _ in range(2)]
    names = [None if each is None else each.lora_name for each in of_sides]
    own = [(role, side, name) for (role, side), name in zip(by_role(pairs, roles), names, strict=True)]
    by_name = dict(zip(names, of_sides, strict=True))
    texts, loader = list(dict.fromkeys(own)), inputs.media_reader.loader
    step = inputs.config.max_num_seqs if any(isinstance(each, Content) for _, each, _ in texts) else len(texts)
    found: dict[tuple[int, Side, str | None], Any] = {}
    for at in range(0, len(texts), step):
        part = texts[at : at + step]
        prompts = [
            {"prompt": each.text, DATA: loader.load_now(each.parts)} if isinstance(each, Content) else each
            for _, each, _ in part
        ]
        outputs = encode(prompts, [roles[role] for role, _, _ in part], [by_name[name] for _, _, name in part])
        found |= zip(part, outputs, strict=True)
    given = iter(found[each] for each in own)
    return [ScoringRequestOutput.of_pair(one, other) for one, other in zip(given, given, strict=True)]


def refuse_template(chat_template: str | None) -> None:
    """Raise RequestError if chat_template is not None."""
    if chat_template is not None:
        raise RequestError("chat_template is for models that read both texts at once", param="chat_template")
