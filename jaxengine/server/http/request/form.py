"""Parsing of multipart/form-data (RFC 7578): text fields and one file, with limits of their number and sizes.

A form is parsed as it arrives. Besides the text fields, only one piece of it, or one header, is in memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from email.message import Message
from typing import NamedTuple

from starlette.requests import Request

from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.server.http.request.errors import ApiError

FILE = "file"
_MAX_PARTS, _MAX_HEADER, _MAX_TEXT = 64, 4096, 1 << 16
_END_OF_HEADER = b"\r\n\r\n"


class Form(NamedTuple):
    """Fields of a form, without the content of its file.

    Attributes:
      fields: values of each text field, in order. A name that ends with "[]" is stored without it.
      filename: file name of the field FILE, "" if it has none; None if there is no file.
    """

    fields: dict[str, list[str]]
    filename: str | None

    def once(self, name: str) -> str | None:
        """Return the value of a text field; None if it is not given. Raises RequestError if it is given repeatedly."""
        given = self.fields.get(name, [])
        if len(given) > 1:
            raise RequestError(f"{show_value(name)} is given {len(given)} times; allowed: once", param=name[:64])
        return given[0] if given else None


async def read_form(request: Request, write: Callable[[bytes], Awaitable[None]]) -> Form:
    """Parse the body of a request as a form, and pass the content of its file to `write`, piece by piece.

    Raises ApiError: 415 for another content type or without a boundary of 1 to 70 characters, 400 for a form that is
    damaged or has too many parts. Raises RequestError for a text field that is too long or not UTF-8 and for a second
    file, and the errors of `write`.
    """
    boundary = _param(request.headers.get("content-type", ""), "multipart/form-data", "boundary")
    if boundary is None or not 1 <= len(boundary) <= 70:
        raise ApiError(415, "Content-Type must be multipart/form-data, with a boundary")
    return await parse_form(request.stream(), boundary.encode("latin-1", "replace"), write)


async def parse_form(pieces: AsyncIterator[bytes], boundary: bytes, write: Callable[[bytes], Awaitable[None]]) -> Form:
    """Parse a form that arrives in pieces. Text fields may repeat, and their names lose a "[]" at the end; the content
    of the field FILE is passed to `write`, piece by piece.

    boundary: the parameter of Content-Type, without preceding hyphens. Raises ApiError (400) for a form that is damaged
    or has more than _MAX_PARTS parts; RequestError for a text field that has more than _MAX_TEXT bytes or is not UTF-8,
    and for a second file; and the errors of `write`.
    """
    body = _Body(pieces, b"\r\n--" + boundary)
    fields: dict[str, list[str]] = {}
    filename: str | None = None
    async for _ in body.part():  # text before the first boundary has no meaning
        pass
    for _ in range(_MAX_PARTS):
        head = await body.header()
        if head is None:
            return Form(fields, filename)
        name, own = _names(head)
        if name == FILE:
            if filename is not None:
                raise RequestError("file is given twice; allowed: one", param=FILE)
            filename = own
            async for piece in body.part():
                await write(piece)
            continue
        content = bytearray()
        async for piece in body.part():
            content += piece
            if len(content) > _MAX_TEXT:
                problem = f"{show_value(name)} has more than {_MAX_TEXT} bytes, which are allowed"
                raise RequestError(problem, param=name[:64])
        try:
            fields.setdefault(name.removesuffix("[]"), []).append(content.decode())
        except UnicodeError:
            raise RequestError(f"{show_value(name)} is not text in UTF-8", param=name[:64]) from None
    raise ApiError(400, f"the form has more than {_MAX_PARTS} parts")


class _Body:
    """Body of a form that is still arriving, parsed part by part: call `part` once, then `header` and `part` for each
    field.

    mark: separator of parts: a line break, two hyphens and the boundary.
    """

    def __init__(self, pieces: AsyncIterator[bytes], mark: bytes):
        self._pieces, self._mark = pieces, mark
        self._held = bytearray(b"\r\n")  # a body that begins with the boundary has no line break before it

    async def part(self) -> AsyncIterator[bytes]:
        """Yield the content up to the next boundary, and drop the boundary. Raises ApiError (400) if there is none."""
        while (at := self._held.find(self._mark)) < 0:
            sure = len(self._held) - len(self._mark) + 1  # the rest may be the beginning of a boundary
            if sure > 0:
                yield bytes(self._held[:sure])
                del self._held[:sure]
            await self._more()
        if at:
            yield bytes(self._held[:at])
        del self._held[: at + len(self._mark)]

    async def header(self) -> bytes | None:
        """Return the header after a boundary; None at the end of the form. Raises ApiError (400) for a header that is
        longer than _MAX_HEADER bytes or incomplete.
        """
        while len(self._held) < 2:
            await self._more()
        if self._held.startswith(b"--"):
            return None
        while (end := self._held.find(_END_OF_HEADER)) < 0 and len(self._held) <= _MAX_HEADER:
            await self._more()
        if not 0 <= end <= _MAX_HEADER:
            raise ApiError(400, f"a part of the form has no header, or one of more than {_MAX_HEADER} bytes")
        head = bytes(self._held[:end])
        del self._held[: end + len(_END_OF_HEADER)]
        return head

    async def _more(self) -> None:
        """Wait for the next piece of the body, and append it to the buffer. Raises ApiError (400) if the body has
        ended.
        """
        async for piece in self._pieces:
            if piece:  # the last one of a body may be empty
                self._held += piece
                return
        raise ApiError(400, "the form is cut short, or does not contain its boundary")


def _names(head: bytes) -> tuple[str, str]:
    """Return the field name and the file name ("" without one) in a part's header. Raises ApiError (400) for a part
    without a field name.
    """
    for line in head.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition" and (found := _param(value, "form-data", "name")):
            return found, _param(value, "form-data", "filename") or ""
    raise ApiError(400, "a part of the form has no name")


def _param(value: str, kind: str, name: str) -> str | None:
    """Return the parameter `name` of a header's value; None if the value is of another kind or has no such parameter.

    kind: a media type such as "multipart/form-data", or a disposition such as "form-data".
    """
    message = Message()
    message["content-type"] = value.strip() if "/" in kind else f"text/{value.strip()}"
    wanted = kind if "/" in kind else f"text/{kind}"
    found = message.get_param(name) if message.get_content_type() == wanted else None
    return found if isinstance(found, str) else None
