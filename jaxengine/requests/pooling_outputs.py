"""What a request to a pooling model gives back: vLLM's PoolingRequestOutput and what is made of it for each task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from scheduler.errors import RequestError

Output = TypeVar("Output")
STOP = "stop"


@dataclass(slots=True)
class PoolingOutput:
    """data: f32[N], an embedding or the scores of labels."""

    data: np.ndarray


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Output]):
    """The answer to a request to a pooling model.

    Attributes:
      num_cached_tokens: prompt tokens found in the prefix cache.
      finished: always; there is one output.
      finish_reason: "stop"; "abort" or "error" where there is no answer and `outputs` is empty.
      stop_reason: what more is known of that.
    """

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    finish_reason: str = STOP
    stop_reason: int | str | None = None

    def check(self) -> None:
        """Raises RequestError where there is no answer."""
        if self.finish_reason != STOP:
            why = f"{self.finish_reason} ({self.stop_reason})" if self.stop_reason else self.finish_reason
            raise RequestError(f"request {self.request_id!r} has no answer: {why}")


@dataclass(slots=True)
class EmbeddingOutput:
    """embedding: the vector, a list of floats."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """probs: of each label; scores as they are without use_activation."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """score: how well two texts go together."""

    score: float


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """`outputs.embedding`"""

    __slots__ = ()

    @staticmethod
    def from_base(output: PoolingRequestOutput[PoolingOutput]) -> EmbeddingRequestOutput:
        return EmbeddingRequestOutput(*_rest(output, EmbeddingOutput(output.outputs.data.tolist())))


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """`outputs.probs`"""

    __slots__ = ()

    @staticmethod
    def from_base(output: PoolingRequestOutput[PoolingOutput]) -> ClassificationRequestOutput:
        return ClassificationRequestOutput(*_rest(output, ClassificationOutput(output.outputs.data.tolist())))


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """`outputs.score`"""

    __slots__ = ()

    @staticmethod
    def from_base(output: PoolingRequestOutput[PoolingOutput]) -> ScoringRequestOutput:
        """Of a request whose data is one score."""
        return ScoringRequestOutput(*_rest(output, ScoringOutput(float(output.outputs.data.item()))))

    @staticmethod
    def of_pair(
        first: PoolingRequestOutput[PoolingOutput], second: PoolingRequestOutput[PoolingOutput]
    ) -> ScoringRequestOutput:
        """The cosine of two embeddings, 0 where one has no length; the prompts one behind the other, as in vLLM."""
        one, other = (each.outputs.data.astype(np.float64) for each in (first, second))
        lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
        score = float(one @ other) / lengths if lengths else 0.0
        return ScoringRequestOutput(
            request_id=f"{first.request_id}_{second.request_id}",
            outputs=ScoringOutput(score),
            prompt_token_ids=first.prompt_token_ids + second.prompt_token_ids,
            num_cached_tokens=first.num_cached_tokens + second.num_cached_tokens,
        )


def _rest(output: PoolingRequestOutput[PoolingOutput], outputs: Any) -> tuple[Any, ...]:
    """The fields of an answer in their order, with other `outputs`."""
    return output.request_id, outputs, output.prompt_token_ids, output.num_cached_tokens
