"""A model behind a running server, for `jaxengine chat --url` and `jaxengine complete --url`.

The server may be any with OpenAI's routes for chats and completions.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import http.client
import json
import mimetypes
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.base.key_file import check_header, read_api_key
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.version import __version__

# Sampling options under another name in requests; None: requests cannot have them.
_FIELDS: dict[str, str | None] = {"extra_args": "vllm_xargs", "stop_after": None, "thinking_words": None}
_CONNECT_SECONDS, _ANSWER_SECONDS = 10.0, 600.0
_MAX_ERROR_BYTES = 65536
_T = TypeVar("_T", dict, list, str, int)
# JSON's names of the types of values in a chunk.
_JSON: dict[type, str] = {dict: "an object", list: "an array", str: "a string", int: "an integer"}


@dataclasses.dataclass(frozen=True)
class Piece:
    """Part of an answer, as it arrives.

    Attributes:
      text: text to show.
      num_tokens: tokens in the text; those of a server's answer are counted once, in a last piece without text.
      is_answer: False for reasoning, which later messages do not repeat.
    """

    text: str
    num_tokens: int = 0
    is_answer: bool = True


def add_url_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags --url, --model-name, --api-key and --api-key-file to `parser`; they name a server in place of a
    model to load.
    """
    parser.add_argument(
        "--url",
        help="talk to this running server, such as http://127.0.0.1:8000/v1, in place of loading a model",
    )
    parser.add_argument(
        "--model-name", metavar="NAME", help="with --url: the model (default: the first one that the server lists)"
    )
    parser.add_argument("--api-key", metavar="KEY", help="with --url: its key; others can see a command's arguments")
    parser.add_argument("--api-key-file", metavar="FILE", help="with --url: a file with its key")


def check_sampling_options(args: argparse.Namespace, options: Mapping[str, Any]) -> None:
    """Raise RequestError if a sampling option has a wrong value, before a model is loaded or a request sent to a
    server.

    args: parsed arguments with `url`. options: the sampling options that were given. With a server (args.url)
    thinking_token_budget is accepted without thinking_words.
    """
    of_server = args.url is not None and options.get("thinking_token_budget") is not None
    words: dict[str, Any] = {"thinking_words": {"reasoning_end": "</think>"}} if of_server else {}
    SamplingParams(**words | dict(options))


def remote_model(
    args: argparse.Namespace, engine_options: Mapping[str, Any], sampling_options: Mapping[str, Any]
) -> RemoteModel | None:
    """Return the model of the server that --url names; None without --url.

    engine_options, sampling_options: the options that were given on the command line. The server is asked for its
    models unless --model-name is given. Raises ConfigError with --url for a wrong URL, for any engine option, for
    sampling options that requests over HTTP do not have, for both or a wrong one of the API keys, and for a server that
    does not answer. Raises ConfigError without --url for --model-name, --api-key and --api-key-file.
    """
    if args.url is None:
        for name in ("model_name", "api_key", "api_key_file"):
            if getattr(args, name) is not None:
                hint = "; --model names the model to load" if name == "model_name" else ""
                raise ConfigError(
                    name, "..." if name == "api_key" else getattr(args, name), f"absent without --url{hint}"
                )
        return None
    for name, value in engine_options.items():
        instead = "; --model-name names the server's model" if name == "model" else ""
        raise ConfigError(name, value, f"absent with --url, whose server has loaded its model{instead}")
    for name in sampling_options:
        if name in _FIELDS and _FIELDS[name] is None:
            raise ConfigError(name, sampling_options[name], "absent with --url; requests over HTTP do not have it")
    key = args.api_key
    if args.api_key_file is not None:
        if key is not None:
            raise ConfigError("api_key_file", args.api_key_file, "absent with --api-key")
        key = read_api_key(args.api_key_file)
    elif key is not None:
        check_header("api_key", key)
    return RemoteModel(args.url, args.model_name, key, sampling_options)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """URL handler that follows no redirection, because a redirected request would send the API key to another host."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        """Return None, so that urllib raises HTTPError."""
        return None


class RemoteModel:
    """Client for one model of a running server.

    Attributes:
      name: the model's name in requests.
    """

    def __init__(self, url: str, name: str | None, api_key: str | None, options: Mapping[str, Any]):
        """Prepare requests to a server, and ask it for its models unless `name` is given.

        url: of the server, with or without /v1. name: None for the first model that the server lists. api_key: None for
        none. options: fields of SamplingParams to send with every request.

        Raises ConfigError for a wrong URL and, if the server is asked for its models, if it does not answer or lists
        none.
        """
        self._base = _base_of(url)
        self._headers = {"User-Agent": f"jaxengine/{__version__}"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._fields = {_FIELDS.get(field) or field: value for field, value in options.items()}
        self._opener = urllib.request.build_opener(_NoRedirect)
        self.name = name or self._first_model()

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
        """Return an iterator over the Pieces of the answer to a conversation; the request is sent when the iteration
        begins.

        messages: in the form that chat templates take. Raises RequestError for an image file that cannot be read. The
        iteration raises RequestError for a refusal and ConfigError if no server answers or the connection is lost.
        """
        return self._stream("/chat/completions", {"messages": list(map(_as_openai, messages))})

    def complete(self, prompt: str) -> Iterator[Piece]:
        """Return an iterator over the Pieces of the continuation of `prompt`; the request is sent when the iteration
        begins.

        The iteration raises RequestError for a refusal and ConfigError if no server answers or the connection is lost.
        """
        return self._stream("/completions", {"prompt": prompt})

    def _first_model(self) -> str:
        """Return the name of the first model that the server lists. Raises ConfigError if it lists none, refuses or
        does not answer.
        """
        try:
            with self._open("/models", None, _CONNECT_SECONDS) as answer:
                return str(json.load(answer)["data"][0]["id"])
        except ConfigError:
            raise
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from None
        except (RequestError, ValueError, LookupError, TypeError, RecursionError) as error:
            why = str(error) if isinstance(error, RequestError) else "it lists none"
            raise ConfigError.because("url", f"no model is found at {self._base} ({why})", "see --url") from None

    def _stream(self, route: str, body: Mapping[str, Any]) -> Iterator[Piece]:
        """Yield the Pieces of the streamed answer to a POST of `body` with the model's name and the sampling options.

        route: path after the base URL, such as "/completions". Raises RequestError for a refusal, an error in the
        stream, an event that is not a chunk as JSON, and an answer without its final "[DONE]". Raises ConfigError if no
        server answers or the connection is lost.
        """
        options = {"stream": True, "stream_options": {"include_usage": True}}
        payload = json.dumps({"model": self.name, **body, **self._fields, **options}).encode()
        with self._open(route, payload, _ANSWER_SECONDS) as answer:
            try:
                for line in answer:
                    data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                    if data == b"[DONE]":
                        return
                    if data:
                        yield from _pieces(data)
            except (OSError, http.client.HTTPException) as error:
                raise self._lost(error) from None
        raise RequestError(f"the answer of {self._base} was cut off", param="url")

    def _open(self, route: str, payload: bytes | None, timeout: float) -> Any:
        """Send a request and return the open response, which the caller closes.

        route: path after the base URL. payload: body of a POST of JSON; None for a GET. timeout: seconds. Raises
        RequestError for an HTTP error status, ConfigError if no server answers.
        """
        request = urllib.request.Request(self._base + route, payload, dict(self._headers))
        if payload is not None:
            request.add_header("Content-Type", "application/json")
        try:
            return self._opener.open(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            with error:
                raise RequestError(f"{self._base} answered {error.code}: {_reason(error)}", param="url") from None
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(getattr(error, "reason", error)) from None

    def _lost(self, why: object) -> ConfigError:
        """Return, not raise, the ConfigError for a server that does not answer. why: the reason, for the message."""
        problem = f"no server answers at {self._base} ({why})"
        return ConfigError.because("url", problem, "start one with `jaxengine serve`, or give its --url")


def _base_of(url: str) -> str:
    """Return the base URL, to which routes are appended, without a slash at the end; "/v1" is the path if `url` has
    none.

    Raises ConfigError for anything but http(s)://HOST[:PORT][/PATH], for a URL with a query or a fragment, and for a
    URL with a user name.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        usable, parts = False, urllib.parse.urlsplit("")
    if not usable or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError("url", url, "http://HOST:PORT/v1 or https://HOST:PORT/v1")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"


def _as_openai(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a chat message in OpenAI's form, in which images are image_url parts; image files become data URLs.

    A message whose content is text is returned unchanged. Raises RequestError for a file that cannot be read.
    """
    if isinstance(message["content"], str):
        return message
    return {**message, "content": [_as_part(part) for part in message["content"]]}


def _as_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a content part of a message in OpenAI's form. Parts other than images are returned unchanged.

    An image becomes an image_url part; an image that is a file (Path) becomes a base64 data URL, and a URL is kept.
    Raises RequestError for a file that cannot be read.
    """
    if part["type"] != "image":
        return part
    image = part["image"]
    if isinstance(image, Path):
        try:
            raw = image.read_bytes()
        except OSError as error:
            raise RequestError(f"the image {str(image)!r} cannot be read ({error.strerror})", param="image") from None
        kind = mimetypes.guess_type(image.name)[0] or "image/png"
        image = f"data:{kind};base64,{base64.b64encode(raw).decode()}"
    return {"type": "image_url", "image_url": {"url": image}}


def _pieces(event: bytes) -> Iterator[Piece]:
    """Yield the Pieces of one event of a stream, a chunk as JSON: for each choice its reasoning and its text, and last
    a piece without text that has the completion tokens of the usage, if the chunk has one.

    Raises RequestError for a chunk with an error, and for an event that is not such a chunk.
    """
    try:
        chunk = json.loads(event)
    except (ValueError, RecursionError):
        chunk = event
    chunk = _checked("an event", chunk, dict)
    if error := chunk.get("error"):
        raise RequestError(str(error.get("message", error) if isinstance(error, dict) else error), param="url")
    for each in _checked("choices", chunk.get("choices"), list):
        choice = _checked("a choice", each, dict)
        delta = _checked("delta", choice.get("delta"), dict)
        if thought := _checked("reasoning", delta.get("reasoning") or delta.get("reasoning_content"), str):
            yield Piece(thought, is_answer=False)
        if text := _checked("text", choice.get("text") or delta.get("content"), str):
            yield Piece(text)
    if usage := _checked("usage", chunk.get("usage"), dict):
        yield Piece("", _checked("completion_tokens", usage.get("completion_tokens"), int))


def _checked(what: str, value: Any, kind: type[_T]) -> _T:
    """Return a value of a chunk; for null the empty value of `kind`, which is 0 for int. Raises RequestError, with the
    name `what` for the value, if its type is not `kind`.
    """
    if value is None:
        return kind()
    if not isinstance(value, kind):
        problem = f"the server's stream is not OpenAI's: {what} is {show_value(value)}; allowed: {_JSON[kind]} or null"
        raise RequestError(problem, param="url")
    return value


def _reason(error: urllib.error.HTTPError) -> str:
    """Return the message in the JSON body of an HTTP error; its status text if the body has none or is cut off. Reads
    at most 64 KiB of the body.
    """
    try:
        return str(json.loads(error.read(_MAX_ERROR_BYTES))["error"]["message"])
    except (ValueError, LookupError, TypeError, RecursionError, OSError, http.client.HTTPException):
        return error.reason
