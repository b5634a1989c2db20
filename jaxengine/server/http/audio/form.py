"""Reading of multipart/form-data (RFC 7578): text fields and one file, with limits of their number and sizes."""

from __future__ import annotations

from email.message import Message
from typing import NamedTuple

from starlette.requests import Request

from jaxengine.scheduler.errors import RequestError, show_value
from jaxengine.server.http.errors import ApiError

FILE = "file"
_MAX_PARTS, _MAX_HEADER, _MAX_TEXT = 64, 4096, 1 << 16


class Form(NamedTuple):
    """Content of a form.

    Attributes:
      fields: values of each text field, in order; names that end in "[]" are without it.
      file: the field FILE, None if there is none.
    """

    fields: dict[str, list[str]]
    file: bytes | None


async def read_form(request: Request) -> Form:
    """Read the body of a request as a form. Raises ApiError: 415 for another type, 400 for one that is damaged."""
    boundary = _param(request.headers.get("content-type", ""), "multipart/form-data", "boundary")
    if boundary is None or not 1 <= len(boundary) <= 70:
        raise ApiError(415, "Content-Type must be multipart/form-data, with a boundary")
    return parse_form(await request.body(), boundary.encode("latin-1", "replace"))


def parse_form(body: bytes, boundary: bytes) -> Form:
    """Parse a form. Raises ApiError for one that is damaged, RequestError for a field that is too long or repeated."""
    fields: dict[str, list[str]] = {}
    file: bytes | None = None
    mark = b"\r\n--" + boundary
    at = 0 if body.startswith(mark[2:]) else body.find(mark) + 2
    if at == 1:
        raise ApiError(400, "the body is no form: it does not contain its boundary")
    at += len(mark) - 2
    for _ in range(_MAX_PARTS):
        if body.startswith(b"--", at):
            return Form(fields, file)
        head = body.find(b"\r\n\r\n", at, at + _MAX_HEADER)
        end = -1 if head < 0 else body.find(mark, head + 2)
        if end < 0:
            raise ApiError(400, "the form is cut short, or a part has no header")
        name, content = _name(body[at:head]), body[head + 4 : end]
        at = end + len(mark)
        if name == FILE:
            if file is not None:
                raise RequestError("file is given twice; allowed is one", param=FILE)
            file = content
            continue
        if len(content) > _MAX_TEXT:
            problem = f"{show_value(name)} has {len(content)} bytes; allowed are {_MAX_TEXT}"
            raise RequestError(problem, param=name[:64])
        try:
            fields.setdefault(name.removesuffix("[]"), []).append(content.decode())
        except UnicodeError:
            raise RequestError(f"{show_value(name)} is not text in UTF-8", param=name[:64]) from None
    raise ApiError(400, f"the form has more than {_MAX_PARTS} parts")


def _name(head: bytes) -> str:
    """Return the name of a part, from its header. Raises ApiError for a part without one."""
    for line in head.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition" and (found := _param(value, "form-data", "name")):
            return found
    raise ApiError(400, "a part of the form has no name")


def _param(value: str, kind: str, name: str) -> str | None:
    """Return a parameter of a header's value of this kind; None for another kind, or without it."""
    message = Message()
    message["content-type"] = value.strip() if "/" in kind else f"text/{value.strip()}"
    wanted = kind if "/" in kind else f"text/{kind}"
    found = message.get_param(name) if message.get_content_type() == wanted else None
    return found if isinstance(found, str) else None
