"""Outputs of requests to a pooling model: vLLM's PoolingRequestOutput and its variants by task."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import numpy as np

from jaxengine.scheduler.base.errors import RequestError

Output = TypeVar("Output")
STOP = "stop"


@dataclass(slots=True)
class PoolingOutput:
    """Result of a pooling model. data: f32[N], an embedding or the scores of labels; f32[n, N] for a task about tokens,
    one row for each token.
    """

    data: np.ndarray


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Output]):
    """Output of a request to a pooling model.

    Attributes:
      request_id: as given, or chosen when it was prepared.
      outputs: the result, by task.
      prompt_token_ids: token ids of the prompt, as cut by truncate_prompt_tokens.
      num_cached_tokens: prompt tokens found in the prefix cache.
      finished: always True, as there is one output.
      finish_reason: "stop"; "abort" or "error" if there is no result and `outputs` is empty.
      stop_reason: details of "abort" or "error".
    """

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    finish_reason: str = STOP
    stop_reason: int | str | None = None

    def check(self) -> None:
        """Raise RequestError, with finish_reason and stop_reason, if the request has no result."""
        if self.finish_reason != STOP:
            why = f"{self.finish_reason} ({self.stop_reason})" if self.stop_reason else self.finish_reason
            raise RequestError(f"request {self.request_id!r} has no answer: {why}")


async def checked(
    outputs: AsyncIterator[PoolingRequestOutput[Output]],
) -> AsyncGenerator[PoolingRequestOutput[Output], None]:
    """Yield the outputs of an async generator, which is closed at the end. The iteration raises the errors of `check`
    and the generator's.
    """
    async with contextlib.aclosing(cast(AsyncGenerator[PoolingRequestOutput[Output], None], outputs)):
        async for output in outputs:
            output.check()
            yield output


@dataclass(slots=True)
class EmbeddingOutput:
    """An embedding of a prompt. embedding: the vector, a list of floats."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Number of elements of the embedding."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """The labels of a prompt. probs: probability of each label; raw scores without use_activation."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """The score of a pair. score: similarity or relevance of the two texts."""

    score: float


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """Output of `embed`, with `outputs.embedding`."""

    __slots__ = ()

    @staticmethod
    def from_base(output: PoolingRequestOutput[PoolingOutput]) -> EmbeddingRequestOutput:
        """Return the output of a request whose data is an embedding f32[N] as an EmbeddingRequestOutput. The request
        must have a result (`check`): finish_reason is reset to "stop".
        """
        return EmbeddingRequestOutput(*_rest(output, EmbeddingOutput(output.outputs.data.tolist())))


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """Output of `classify`, with `outputs.probs`."""

    __slots__ = ()

    @staticmethod
    def from_base(output: PoolingRequestOutput[PoolingOutput]) -> ClassificationRequestOutput:
        """Return the output of a request whose data is a score for each label, f32[N], as a
        ClassificationRequestOutput. The request must have a result (`check`): finish_reason is reset to "stop".
        """
        return ClassificationRequestOutput(*_rest(output, ClassificationOutput(output.outputs.data.tolist())))


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """Output of `score`, with `outputs.score`."""

    __slots__ = ()

    @staticmethod
    def from_base(output: PoolingRequestOutput[PoolingOutput]) -> ScoringRequestOutput:
        """Return the output of a request whose data is a single score as a ScoringRequestOutput. Raises ValueError for
        several scores.
        """
        return ScoringRequestOutput(*_rest(output, ScoringOutput(float(output.outputs.data.item()))))

    @staticmethod
    def of_pair(
        first: PoolingRequestOutput[PoolingOutput], second: PoolingRequestOutput[PoolingOutput]
    ) -> ScoringRequestOutput:
        """Return the score of a query (`first`) and a document (`second`), both outputs with a result.

        For embeddings of prompts it is the cosine, 0 if one has length 0. For embeddings of tokens it is the sum, over
        the query's tokens, of the largest dot product with a token of the document. Token ids of the prompts are
        concatenated and request ids joined by "_", as in vLLM; the numbers of cached tokens are added.
        """
        one, other = (each.outputs.data.astype(np.float64) for each in (first, second))
        if one.ndim == 2:
            score = float((one @ other.T).max(axis=1).sum())
        else:
            lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
            score = float(one @ other) / lengths if lengths else 0.0
        return ScoringRequestOutput(
            request_id=f"{first.request_id}_{second.request_id}",
            outputs=ScoringOutput(score),
            prompt_token_ids=first.prompt_token_ids + second.prompt_token_ids,
            num_cached_tokens=first.num_cached_tokens + second.num_cached_tokens,
        )


def _rest(output: PoolingRequestOutput[PoolingOutput], outputs: Any) -> tuple[Any, ...]:
    """Return (request_id, `outputs`, prompt_token_ids, num_cached_tokens), the first four fields of `output` with its
    own outputs replaced.
    """
    return output.request_id, outputs, output.prompt_token_ids, output.num_cached_tokens
