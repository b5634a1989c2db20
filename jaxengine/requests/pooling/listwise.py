"""Prompts and scores of a reranker that reads a query with all of its documents (jina-reranker-v3, Wang et al. 2025,
arXiv:2509.25085): a prompt has a token after each document and one after the query, whose embeddings are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxengine.requests.pooling.outputs import PoolingRequestOutput, ScoringOutput, ScoringRequestOutput
from jaxengine.requests.pooling.params import PoolingParams
from jaxengine.scheduler.base.errors import RequestError

# Tokens after the query and after a document.
_QUERY, _DOCUMENT = "<|rerank_token|>", "<|embed_token|>"
# The words of the model's training.
_SYSTEM = (
    "You are a search relevance expert who can determine a ranking of the passages based on how relevant they are to "
    "the query. If the query is a question, how relevant a passage is depends on how well it answers the question. If "
    "not, try to analyze the intent of the query and assess how well each passage satisfies the intent. If an "
    "instruction is provided, you should follow the instruction when determining the ranking."
)
_USER = (
    "I will provide you with {count} passages, each indicated by a numerical identifier. Rank the passages based on "
    "their relevance to query: {query}\n{instruct}{passages}\n<query>\n{query}{mark}\n</query>"
)
_PROMPT = (
    "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    "<think>\n\n</think>\n\n"
)


def list_prompts(pairs: Sequence[tuple[Any, Any]], instruction: str | None = None) -> list[tuple[str, int]]:
    """Return (prompt, number of its documents) for pairs of a query and a document, in order: one prompt if all have
    the same query, otherwise one for each pair. instruction: what counts as relevant. Raises RequestError for a side
    that is not a text, with images.
    """
    texts = [(query, document) for query, document in pairs if isinstance(query, str) and isinstance(document, str)]
    if len(texts) < len(pairs):
        raise RequestError("this model reads texts alone, without images and videos", param="model")
    if len({query for query, _ in texts}) == 1:
        return [(_prompt(texts[0][0], [document for _, document in texts], instruction), len(texts))]
    return [(_prompt(query, [document], instruction), 1) for query, document in texts]


def refuse_cut(params: PoolingParams | None, keep: int | None = None) -> None:
    """Raise RequestError if truncate_prompt_tokens, of `params` or given as `keep`, is not None: it would cut documents
    off.
    """
    keep = params.truncate_prompt_tokens if keep is None and params is not None else keep
    if keep is not None:
        text = f"truncate_prompt_tokens is {keep}; allowed: None for a model that reads all "
        raise RequestError(f"{text}documents together; max_tokens_per_doc cuts each", param="truncate_prompt_tokens")


def list_scores(
    output: PoolingRequestOutput[Any], number: int, token_id: Callable[[str], int | None]
) -> list[ScoringRequestOutput]:
    """Return the score of each of a prompt's `number` documents, the cosine of its embedding and the query's, 0 if one
    has length 0. The first has the prompt's token ids, which they share.

    output: embeddings of all tokens of a prompt of `list_prompts`. token_id: maps a token of the vocabulary to its id.
    Raises RequestError if the tokenizer lacks the marking tokens.
    """
    ids = np.asarray(output.prompt_token_ids)
    query, documents = (output.outputs.data[ids == token_id(token)].astype(np.float64) for token in (_QUERY, _DOCUMENT))
    if (len(query), len(documents)) != (1, number):
        problem = f"the tokenizer makes {len(query)} {_QUERY} and {len(documents)} {_DOCUMENT} of a prompt with"
        raise RequestError(f"{problem} {number} documents: it must have these tokens", param="model")
    lengths = np.linalg.norm(documents, axis=1) * np.linalg.norm(query)
    scores = np.divide(documents @ query[0], lengths, out=np.zeros(number), where=lengths > 0)
    first = (output.prompt_token_ids, output.num_cached_tokens)
    return [
        ScoringRequestOutput(output.request_id, ScoringOutput(float(score)), *(([], 0) if index else first))
        for index, score in enumerate(scores)
    ]


def _prompt(query: str, documents: Sequence[str], instruction: str | None) -> str:
    """Return the prompt of a query, documents and an instruction, if it is not empty, from whose texts the marking
    tokens are removed.
    """
    query, instruction, *documents = map(_unmarked, (query, instruction or "", *documents))
    instruct = f"<instruct>\n{instruction}\n</instruct>\n" if instruction else ""
    passages = "\n".join(
        f'<passage id="{index}">\n{text}{_DOCUMENT}\n</passage>' for index, text in enumerate(documents)
    )
    user = _USER.format(count=len(documents), query=query, instruct=instruct, passages=passages, mark=_QUERY)
    return _PROMPT.format(system=_SYSTEM, user=user)


def _unmarked(text: str) -> str:
    """Return a text without the marking tokens, and without those that its rest would make."""
    while (found := text.replace(_QUERY, "").replace(_DOCUMENT, "")) != text:
        text = found
    return text
