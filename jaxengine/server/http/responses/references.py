"""References in a request's input to items of stored responses, which clients send in place of the items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.server.http.lists import there
from jaxengine.server.http.responses.keeping import Held, read_back
from jaxengine.server.http.responses.output import response_of
from jaxengine.server.stored.records import Responses

_KIND = "item_reference"


async def with_items(
    items: str | Sequence[dict[str, Any]], store: Responses, owner: str, held: Held
) -> str | list[dict[str, Any]]:
    """Return a request's `input` with each reference replaced by the item of a response's output that it names.
    A reference is an item of type item_reference, or with nothing but an id.

    owner: the client, who finds only its own responses. held: takes the bytes of the responses, each once. Raises
    RequestError for a reference without an id, and for a second one to the same item; ApiError (404) for an item that
    is not stored; OverloadedError if `held` has no room; and EngineDeadError.
    """
    if isinstance(items, str):
        return items
    outputs: dict[str, dict[str, dict[str, Any]]] = {}
    seen: set[str] = set()
    found: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        kind = item.get("type")
        if kind != _KIND and (kind is not None or item.keys() - {"type"} != {"id"}):
            found.append(item)
            continue
        item_id = item.get("id")
        if not isinstance(item_id, str):
            text = f"input[{number}].id is {show_value(item_id)}; allowed: the id of an item of a stored response"
            raise RequestError(text, param="input")
        if item_id in seen:  # a short request could repeat a long item without end
            text = f"input[{number}].id is {show_value(item_id)}, which is given twice; allowed: an item once"
            raise RequestError(text, param="input")
        seen.add(item_id)
        response_id = response_of(item_id)
        if response_id not in outputs:
            there(await store.find(response_id, owner), "item", item_id, "input")
            _, (response,) = await read_back(store, response_id, owner, "response", held, list)
            outputs[response_id] = {each["id"]: each for each in response["output"]}
        found.append(there(outputs[response_id].get(item_id), "item", item_id, "input"))
    return found
