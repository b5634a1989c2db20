"""Pages of a list in OpenAI's format, and the error for records that do not exist."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Literal, TypeVar

from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.server.http.answer.answers import Answer
from jaxengine.server.http.request.errors import ApiError

T = TypeVar("T")


class Listed(Answer):
    """Fields of a list besides its `data`."""

    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


def page(records: Iterator[dict[str, Any]], after: str | None, limit: int) -> dict[str, Any]:
    """Return OpenAI's list object with at most `limit` records: the first ones or, if `after` is given, those that
    follow the record with that id. `records` is consumed.

    Raises RequestError if no record has the id `after`.
    """
    if after is not None and not any(record["id"] == after for record in records):
        raise RequestError(f"after is {show_value(after)}, which is not in the list", param="after")
    data = list(islice(records, limit))
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": next(records, None) is not None}


def there(found: T | None, kind: str, given: str, param: str | None = None) -> T:
    """Return `found`, or raise ApiError (404) if it is None, because there is no such record or it is another client's.

    kind: kind of the record, such as "response". given: the id that the caller gave. param: name of the field with the
    id, for the error; None for KIND_id, such as "response_id".
    """
    if found is None:
        shown = f"{kind.capitalize()} with id {show_value(given)} not found."
        raise ApiError(404, shown, param=param or f"{kind}_id", kept=shown)
    return found
