"""Types of the responses of pooling models' endpoints, for /openapi.json."""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

from pydantic import Field

from jaxengine.server.http.answer.answers import ABSENT, Answer, Usage

Entry = TypeVar("Entry")


class Embedding(Answer):
    """An embedding: a list of numbers, or base64 of the requested number format and byte order. Where the model's task
    is token_embed: a list of numbers for each token, in base64 one after the other.
    """

    index: int
    object: Literal["embedding"]
    embedding: list[float] | list[list[float]] | str


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
    text: str | None
    multi_modal: list[dict[str, Any]] | None


class ApiVersion(Answer):
    version: Literal["2"]


class BilledUnits(Answer):
    input_tokens: int
    image_tokens: int


class CohereMeta(Answer):
    api_version: ApiVersion
    billed_units: BilledUnits


class TypedEmbeddings(Answer):
    """Embeddings in each form that was requested: numbers, 8 signs in an int, base64 of little-endian float32."""

    float_: list[list[float]] = Field(default_factory=list, alias="float")
    binary: list[list[int]] = ABSENT
    ubinary: list[list[int]] = ABSENT
    base64: list[str] = ABSENT


class EmbeddingsByType(Answer):
    id: str
    embeddings: TypedEmbeddings
    texts: list[str] = ABSENT
    meta: CohereMeta
    response_type: Literal["embeddings_by_type"]


class Ranked(Answer):
    index: int
    document: Document = ABSENT
    relevance_score: float


class Ranking(Answer):
    id: str
    model: str
    results: list[Ranked]
    usage: Usage
