"""Types of the responses of pooling models' endpoints, for /openapi.json."""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from jaxengine.server.http.answer.answers import ABSENT, Answer, Usage

Entry = TypeVar("Entry")


class Embedding(Answer):
    """An embedding: a list of numbers, or base64 of little-endian float32."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class Pooled(Answer):
    """The vector of a prompt, in the form of Embedding.embedding; of a task about tokens a list of numbers for each
    token, in base64 one after the other.
    """

    index: int
    object: Literal["pooling"]
    data: list[float] | list[list[float]] | str


class Classified(Answer):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Scored(Answer):
    index: int
    object: Literal["score"]
    score: float


class Listed(Answer, Generic[Entry]):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Entry]
    usage: Usage


class Document(Answer):
    text: str
    multi_modal: None


class Ranked(Answer):
    index: int
    document: Document = ABSENT
    relevance_score: float


class Ranking(Answer):
    id: str
    model: str
    results: list[Ranked]
    usage: Usage
