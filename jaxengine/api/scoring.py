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

    params: one for all, one per prompt, or None for defaults. truncate_prompt_tokens, task: values for these fields
    where they are None. Raises RequestError for another type or number of params.
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


def pairs_of(
    data_1: str | Sequence[str], data_2: str | Sequence[str], names: tuple[str, str] = ("data_1", "data_2")
) -> list[tuple[str, str]]:
    """Return the pairs of texts to compare: one text of data_1 with each of data_2, or the i-th with the i-th.

    names: names of both arguments for the caller, for errors. Raises RequestError if a text is empty, a list is empty,
    or data_1 has neither one text nor as many as data_2.
    """
    first: Any = [data_1] if isinstance(data_1, str) else data_1
    second: Any = [data_2] if isinstance(data_2, str) else data_2
    for name, texts in zip(names, (first, second), strict=True):
        if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise RequestError(f"{name} must be a text or a list of texts, none of them empty", param=name)
    if len(first) not in (1, len(second)):
        name, other = names
        text = f"{name} has {len(first)} texts and {other} {len(second)}; allowed: as many of both, or one in {name}"
        raise RequestError(text, param=name)
    return list(zip([*first] * len(second) if len(first) == 1 else first, second, strict=True))


def pair_prompt(inputs: InputProcessor, query: str, document: str, chat_template: str | None = None) -> str | list[int]:
    """Return a cross-encoder's prompt for a pair of texts, as text or as token ids.

    With `chat_template` or the engine's option it is the text that the template returns for the messages. Otherwise an
    encoder's tokenizer joins both to token ids; a model whose files say that it takes messages gets token ids by its
    own template; any other gets both texts, one after the other. Raises RequestError for a model that does not have
    exactly one label, and if the template fails.
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
    """Whether the model embeds the two texts of a pair separately, so that their embeddings are compared."""
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


def by_role(pairs: Iterable[tuple[str, str]], roles: tuple[PoolingParams, PoolingParams]) -> Iterator[tuple[int, str]]:
    """Yield (index of the role in `roles`, text) for both texts of every pair, query first.

    The index is 0 for all texts if both roles have equal parameters.
    """
    second = 0 if roles[0] == roles[1] else 1
    for query, document in pairs:
        yield 0, query
        yield second, document


def compare(
    pairs: Sequence[tuple[str, str]],
    roles: tuple[PoolingParams, PoolingParams],
    encode: Callable[[list[str], list[PoolingParams]], Sequence[Any]],
) -> list[ScoringRequestOutput]:
    """Return the score of each pair of texts, computed from their embeddings (`ScoringRequestOutput.of_pair`). Each
    different (role, text) is encoded once.

    roles: result of `role_params`. encode: (texts, parameters of each) -> outputs in the same order.
    """
    texts = list(dict.fromkeys(by_role(pairs, roles)))
    outputs = encode([text for _, text in texts], [roles[number] for number, _ in texts])
    found = dict(zip(texts, outputs, strict=True))
    own = iter(found[each] for each in by_role(pairs, roles))
    return [ScoringRequestOutput.of_pair(one, other) for one, other in zip(own, own, strict=True)]


def refuse_template(chat_template: str | None) -> None:
    """Raise RequestError if chat_template is not None. It is called for embedding models, which take the texts of a
    pair separately.
    """
    if chat_template is not None:
        raise RequestError("chat_template is for models that read both texts at once", param="chat_template")
