"""Lines of a batch: a request or its result, one JSON object per line, in the form of OpenAI and vLLM."""

from __future__ import annotations

import codecs
import hashlib
import json
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxengine.config.base.errors import ConfigError
from jaxengine.scheduler.base.errors import show_value
from jaxengine.server.http.request.errors import ApiError
from jaxengine.server.http.request.limits import read_json

# Routes that a line may name: their answer is a single JSON object that depends only on the line.
URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/score",
    "/classify",
    "/pooling",
)
# A custom_id is repeated in the result.
MAX_ID_CHARS = 512


@dataclass(frozen=True)
class BatchLine:
    """A request of a batch.

    Attributes:
      number: number of its line in the file, from 1.
      custom_id: the caller's name for it, unique in the file.
      url: the route that answers it.
      body: the request's body as JSON.
      problem: why it is not answered; None for a request that is. Such a line has an error as its result, as in vLLM,
        and the others are answered.
    """

    number: int
    custom_id: str
    url: str
    body: bytes
    problem: str | None = None

    @property
    def order(self) -> tuple[str, bytes]:
        """Sort key, (url, JSON of the tools and the prompt), that brings requests with the same beginning next to each
        other. The prompt is the first of the body's fields messages, prompt, input, query and text_1.
        """
        fields = json.loads(self.body)
        start = next(
            (fields[name] for name in ("messages", "prompt", "input", "query", "text_1") if name in fields), None
        )
        return self.url, json.dumps([fields.get("tools"), start], sort_keys=True).encode()


class LineError(ConfigError):
    """Error of a file of requests: a line that is not a valid request, too many requests, or none.

    Attributes:
      number: number of the line, from 1; None for the file as a whole.
      problem: description of what is wrong, without the name of the file.
    """

    number: int | None
    problem: str

    @classmethod
    def at(cls, path: str, number: int | None, problem: str) -> LineError:
        """Return the error for a problem with a file or one of its lines, with `number` and `problem` set.

        number: the line's number, from 1; None for the file as a whole.
        """
        where, advice = path, "give a file with one JSON object a line"
        if number is not None:
            where, advice = f"{path}, line {number}", "correct that line"
        error = cls.because("input_file", f"{where}: {problem}", advice)
        assert isinstance(error, cls)
        error.number, error.problem = number, problem
        return error


def read_lines(path: str, only_url: str | None = None, most: int | None = None) -> tuple[list[BatchLine], str]:
    """Return the requests of a file, [] if there are none, and the SHA-256 of the file's bytes in hexadecimal. Empty
    lines are skipped.

    only_url: the url that every line must have; None for any of URLS, and then a line with another url, or that
    requests a stream, is returned with its `problem`. most: largest number of requests; None for no limit.

    Raises:
      LineError: a line is not a request, has the custom_id of an earlier one or, with `only_url`, another url or a
        problem, or there are too many requests. The message has the line's number.
      ConfigError: the path is not that of a file.
      OSError: the file cannot be read.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError("input_file", path, "a file on this machine, with one JSON object a line")
    data = file.read_bytes()
    found: list[BatchLine] = []
    numbers: dict[str, int] = {}
    for number, text in enumerate(data.split(b"\n"), 1):
        if not text.strip():
            continue
        line = _read_line(path, number, text)
        if (first := numbers.setdefault(line.custom_id, number)) != number:
            raise LineError.at(path, number, f"custom_id {show_value(line.custom_id)} is that of line {first} too")
        if only_url is not None and line.problem is not None:
            raise LineError.at(path, number, line.problem)
        if only_url not in (None, line.url):
            raise LineError.at(path, number, f"url must be the batch's endpoint, {only_url}, got {line.url}")
        found.append(line)
        if most is not None and len(found) > most:
            raise LineError.at(path, number, f"it is one request too many; allowed: {most}")
    return found, hashlib.sha256(data).hexdigest()


def _read_line(path: str, number: int, text: bytes) -> BatchLine:
    """Return the request on a line of an input file. number: the line's number, from 1; a byte order mark may begin
    line 1.

    Its `problem` says that the url is none of URLS, or that the body requests a stream. Raises LineError unless the
    line is a JSON object with a custom_id of 1 to MAX_ID_CHARS characters, the method "POST", a url and a body.
    """
    try:
        fields = read_json(text.removeprefix(codecs.BOM_UTF8) if number == 1 else text)
    except ApiError as error:  # invalid JSON, or content that no request may have, such as half a surrogate pair
        raise LineError.at(path, number, error.detail.replace("the body", "it", 1)) from None
    if not isinstance(fields, dict):
        raise LineError.at(path, number, "it is not a JSON object")
    custom_id, method, url, body = (fields.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
        allowed = f"a string of 1 to {MAX_ID_CHARS} characters"
        raise LineError.at(path, number, f"custom_id must be {allowed}, got {show_value(custom_id)}")
    if method != "POST":
        raise LineError.at(path, number, f"method must be 'POST', got {show_value(method)}")
    if not isinstance(url, str):
        raise LineError.at(path, number, f"url must be one of {', '.join(URLS)}, got {show_value(url)}")
    if not isinstance(body, dict):
        raise LineError.at(path, number, f"body must be a JSON object, got {show_value(body)}")
    problem = None
    if url not in URLS:
        problem = f"url must be one of {', '.join(URLS)}, got {show_value(url)}"
    elif body.get("stream"):
        problem = "body.stream must be false: a batch has whole answers"
    return BatchLine(number, custom_id, url, json.dumps(body).encode(), problem)


def result_line(line: BatchLine, status: int, answer: Any) -> bytes:
    """Return the result of a request as a line of the output file, line break included, with new random ids.

    status: HTTP status. answer: JSON value of the answer's body; for a status of 400 and above, OpenAI's object with
    `error`, which the line then repeats as its own `error`.
    """
    failed = status >= 400
    error = answer.get("error", answer) if failed and isinstance(answer, dict) else None
    response = {"status_code": status, "request_id": f"batch-{uuid.uuid4().hex}", "body": answer}
    return _encoded(line, response, error)


def expired_line(line: BatchLine) -> bytes:
    """Return a line of the error file, line break included, for a request that was not answered in time: it has no
    response, and the error code "batch_expired".
    """
    text = "This request could not be executed before the completion window expired."
    return _encoded(line, None, {"code": "batch_expired", "message": text})


def _encoded(line: BatchLine, response: Any, error: Any) -> bytes:
    """Return a result as a line of JSON with the keys id (new and random), custom_id, response and error, line break
    included. response, error: JSON values of these keys, or None.
    """
    result = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id, "response": response, "error": error}
    return json.dumps(result, ensure_ascii=False).encode() + b"\n"
