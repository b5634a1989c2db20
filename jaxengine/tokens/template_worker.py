"""Worker process that renders chat templates, which come with models and are not trusted. The process may be killed at
any time.
"""

from __future__ import annotations

import json

import jinja2
import msgspec
from jinja2.exceptions import SecurityError

from jaxengine.tokens import chat_sandbox
from jaxengine.workers.connection import Connection

MAX_MEMORY_BYTES = 512 << 20
_MAX_REASON = 300


class Render(msgspec.Struct, tag=True, array_like=True):
    """Request to render the template `source` with `variables`, a JSON object; both as `packed` encodes text."""

    source: bytes
    variables: bytes


class Ready(msgspec.Struct, tag=True, array_like=True):
    """Message of the worker that it has started."""


class Rendered(msgspec.Struct, tag=True, array_like=True):
    """Answer with the rendered text, as `packed` encodes it."""

    text: bytes


class Refused(msgspec.Struct, tag=True, array_like=True):
    """Answer with the reason why there is no rendered text.

    usable: whether the template is valid, but refused these variables.
    """

    usable: bool
    reason: str


Answer = Ready | Rendered | Refused


def packed(text: str) -> bytes:
    """Return text encoded as UTF-8, lone surrogates included."""
    return text.encode("utf-8", "surrogatepass")


def unpacked(raw: bytes) -> str:
    """Return the text that `packed` has encoded, lone surrogates included."""
    return raw.decode("utf-8", "surrogatepass")


def render(message: Render) -> Answer:
    """Render a message's template and return Rendered, or Refused with the error if it fails. Raises MemoryError, after
    which the worker must end.
    """
    try:
        return Rendered(packed(chat_sandbox.render(unpacked(message.source), json.loads(unpacked(message.variables)))))
    except (jinja2.TemplateSyntaxError, SecurityError) as error:
        return Refused(False, _brief(error))
    except MemoryError:
        raise
    except Exception as error:  # a template is a program and may raise anything
        return Refused(True, _brief(error))


def _brief(error: Exception) -> str:
    """Return the error's type and text, at most _MAX_REASON characters, lone surrogates escaped."""
    return f"{type(error).__name__}: {error}"[:_MAX_REASON].encode("utf-8", "backslashreplace").decode()


def main() -> None:
    """Answer the parent's Render messages until the connection ends. Sends Ready first. A template that needs more than
    MAX_MEMORY_BYTES is answered with Refused, and the worker then ends.
    """
    connection = Connection(Render, MAX_MEMORY_BYTES)
    connection.send(Ready())
    for message in connection.receive():
        try:
            answer = render(message)
        except MemoryError:
            connection.send(Refused(True, f"it needs more than {MAX_MEMORY_BYTES >> 20} MiB"))
            return
        connection.send(answer)
