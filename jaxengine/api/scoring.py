"""Parameters and prompts of requests to a pooling model, shared by `LLM` and the server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from jaxengine.config.features.pooling_model import DOCUMENT, QUERY, PoolingModel
from jaxengine.models.config.pooler import EMBED, TOKEN_EMBED
from jaxengine.requests.inputs import InputProcessor
from jaxengine.requests.pooling.outputs import ScoringRequestOutput
from jaxengine.requests.pooling.params import PoolingParams
from jaxengine.scheduler.base.errors import RequestError


def params_for(
    count: int,
    params: PoolingParams | Sequence[PoolingParams] | None,
    truncate_prompt_tokens: int | None = None,
    task: str | None = None,
) -> list[PoolingParams]:
    """Return copies of pooling parameters, one for each of `count` prompts.

    params: one for all, one per prompt, or None for defaults. truncate_prompt_tokens, task: values for params that
    leave these fields at None. Raises RequestError for anything else.
    """
    each: Any = [params or PoolingParams()] * count if params is None or isinstance(params, PoolingParams) else params
    if not isinstance(each, Sequence) or len(each) != count or not all(isinstance(one, PoolingParams) for one in each):
        raise RequestError(
            f"pooling_params must be one PoolingParams or one for each of the {count} prompts",
            param="pooling_params",
            value=params,
        )
    keep = truncate_prompt_tokens
    return [
        replace(
            one,
            task=one.task if one.task is not None else task,
            truncate_prompt_tokens=one.truncate_prompt_tokens if one.truncate_prompt_tokens is not None else keep,
        )
        for one in each
    ]


def pairs_of(data_1: str | Sequence[str], data_2: str | Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs of texts to compare: one with one, one of data_1 with each of data_2, or pairwise.

    Raises RequestError for an empty text or none, and if data_1 has neither one text nor as many as data_2.
    """
    first: Any = [data_1] if isinstance(data_1, str) else data_1
    second: Any = [data_2] if isinstance(data_2, str) else data_2
    for name, texts in (("data_1", first), ("data_2", second)):
        if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise RequestError(f"{name} must be a text or a list of texts, none of them empty", param=name)
    if len(first) not in (1, len(second)):
        text = f"data_1 has {len(first)} texts and data_2 {len(second)}; allowed are as many of both, or one in data_1"
        raise RequestError(text, param="data_1")
    return list(zip([*first] * len(second) if len(first) == 1 else first, second, strict=True))


def pair_prompt(inputs: InputProcessor, query: str, document: str, chat_template: str | None = None) -> str | list[int]:
    """Return a cross-encoder's prompt for a pair of texts: formatted by a template, as token ids if that is the
    checkpoint's own; without one, token ids joined by the tokenizer of an encoder, or the texts of a decoder one after
    the other.

    chat_template: None for the engine's option, or the checkpoint's own if its files say that it reads messages. Raises
    RequestError for a model that does not score pairs, and if the template fails.
    """
    model = inputs.require_pooling()
    classifier = model.pooler.classifier
    if classifier is None or classifier.num_labels != 1:
        num_labels = 0 if classifier is None else classifier.num_labels
        raise RequestError(
            f"the model has {num_labels} labels; a model that scores pairs of texts has 1", param="model"
        )
    template = chat_template or inputs.config.chat_template
    if template is None and model.token_rows is not None:
        return inputs.require_tokenizer().encode_pair(query, document, model.token_rows if model.has_token_types else 0)
    if template is None and not model.reads_messages:
        return query + document
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    tokenizer = inputs.require_tokenizer()
    text = tokenizer.apply_chat_template(
        messages, add_generation_prompt=False, continue_final_message=False, chat_template=template
    )
    return text if template is not None else tokenizer.encode(text, add_special_tokens=False)


def reads_apart(model: PoolingModel) -> bool:
    """Whether the model reads the texts of a pair one by one, and their embeddings are compared."""
    return model.task in (EMBED, TOKEN_EMBED)


def role_params(model: PoolingModel, params: PoolingParams | None) -> tuple[PoolingParams, PoolingParams]:
    """Return the parameters of queries and of documents whose embeddings are to be compared: with the prompts that a
    ColBERT model has for both, unless `params` name one.
    """
    params = params or PoolingParams()
    sentence = model.sentence
    by_tokens = sentence is not None and sentence.by_tokens and {QUERY, DOCUMENT} <= {*sentence.prompts}
    if not by_tokens or params.prompt_name is not None:
        return params, params
    return replace(params, prompt_name=QUERY), replace(params, prompt_name=DOCUMENT)


def by_role(pairs: Iterable[tuple[str, str]], roles: tuple[PoolingParams, PoolingParams]) -> Iterator[tuple[int, str]]:
    """Iterate over the texts of the pairs, each with the number of its role in `roles`; 0 for all if both are equal."""
    second = 0 if roles[0] == roles[1] else 1
    for query, document in pairs:
        yield 0, query
        yield second, document


def compare(
    pairs: Sequence[tuple[str, str]],
    roles: tuple[PoolingParams, PoolingParams],
    encode: Callable[[list[str], list[PoolingParams]], Sequence[Any]],
) -> list[ScoringRequestOutput]:
    """Return the score of each pair of texts that a model reads one by one, each text once.

    roles: from `role_params`. encode: (texts, their parameters) -> their outputs.
    """
    texts = list(dict.fromkeys(by_role(pairs, roles)))
    outputs = encode([text for _, text in texts], [roles[number] for number, _ in texts])
    found = dict(zip(texts, outputs, strict=True))
    own = iter(found[each] for each in by_role(pairs, roles))
    return [ScoringRequestOutput.of_pair(one, other) for one, other in zip(own, own, strict=True)]


def refuse_template(chat_template: str | None) -> None:
    """Raise RequestError if a pair template is given to an embedding model, which reads texts one by one."""
    if chat_template is not None:
        raise RequestError("chat_template is for models that read both texts at once", param="chat_template")
