"""Runs chat templates, Jinja programs that come with a model and are not trusted.

The environment offers what Hugging Face templates use (transformers' chat_template_utils) in Jinja's immutable sandbox.
A template only sees plain JSON values. Its output and the length of its ranges are limited; time and memory are limited
by the process that it runs in (template_worker).
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_OUTPUT_CHARS = 1 << 24
FUNCTIONS = frozenset({"raise_exception", "strftime_now", "namespace", "dict", "range", "lipsum", "cycler", "joiner"})


class TemplateRefusal(ValueError):
    """Error of a template that called raise_exception because its input does not suit it."""


@lru_cache(maxsize=16)
def compile_template(source: str) -> jinja2.Template:
    """Return the compiled template of Jinja source, in the sandbox and with FUNCTIONS. The last 16 results are cached.
    Raises jinja2.TemplateSyntaxError for a source that is not a template.
    """
    environment = _environment()
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _PublicNamespace
    environment.globals["dict"] = _make_dict
    return environment.from_string(source)


def parse(source: str) -> nodes.Template:
    """Return the syntax tree of a template's Jinja source, without running it. Raises jinja2.TemplateSyntaxError."""
    return _environment().parse(source)


def render(source: str, variables: dict[str, Any]) -> str:
    """Return the text that a template, given as Jinja source, produces for `variables`, which are plain JSON values.

    Raises TemplateRefusal, jinja2.TemplateError (syntax, security, undefined), OverflowError for more than
    MAX_OUTPUT_CHARS characters, and any other error of the template's program (TypeError, ZeroDivisionError, ...).
    """
    pieces, length = [], 0
    for piece in compile_template(source).generate(variables):
        length += len(piece)
        if length > MAX_OUTPUT_CHARS:
            raise OverflowError(f"the output has more than {MAX_OUTPUT_CHARS} characters")
        pieces.append(piece)
    return "".join(pieces)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return a new immutable sandbox that trims blocks and supports loop controls and {% generation %}."""
    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )


class _GenerationBlock(Extension):
    """Jinja extension for the block {% generation %} ... {% endgeneration %}, which marks assistant text for training.
    Its body is rendered as if the tags were absent.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block that begins at the next tag of the stream, and return its body as a scope node."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _PublicNamespace(Namespace):
    """Jinja namespace that raises SecurityError when an attribute with a leading underscore is set. On Python objects
    such names lead out of the sandbox.
    """

    def __init__(*args: Any, **attributes: Any):
        # Like jinja2's own, so that an attribute may be called "self".
        self, positional = args[0], args[1:]
        attributes = dict(*positional, **attributes)
        for name in attributes:
            _check_public(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        Namespace.__setitem__(self, name, value)


def _check_public(name: Any) -> None:
    """Raise SecurityError for a name that is not a string or begins with an underscore."""
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace attribute must not begin with an underscore, got {name!r}")


def _make_dict(*args: Any, **entries: Any) -> dict[Any, Any]:
    """Return a plain dict of the arguments, as the function `dict` of templates."""
    return dict(*args, **entries)


def _raise_exception(message: Any) -> None:
    """Raise TemplateRefusal with the template's message, converted to a text."""
    raise TemplateRefusal(str(message))


def _strftime_now(form: str) -> str:
    """Return the local time, formatted by strftime with the format string `form`."""
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return the value as JSON by json.dumps with these arguments. Unlike json.dumps, does not escape non-ASCII
    characters by default. It is the filter `tojson` of templates.
    """
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
