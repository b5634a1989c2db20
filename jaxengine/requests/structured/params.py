"""StructuredOutputsParams, vLLM's parameters for the form that a request's output must have, and their validation.

Everything that can be checked without compiling a grammar, such as sizes and nesting, is checked here. Grammars are
compiled in a process that can be killed (jaxengine.grammars).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from jaxengine.requests.structured.closed_objects import forbid_additional_properties
from jaxengine.requests.structured.json_schema import fit_for_grammar
from jaxengine.requests.structured.structural_tags import lark_regex, tag_rules
from jaxengine.scheduler.base.errors import RequestError, refuse, show_value
from jaxengine.scheduler.base.token_params import Grammar

MAX_SCHEMA_BYTES = 256 << 10
MAX_NESTING = 64
MAX_REGEX_BYTES = 10 << 10
MAX_CHOICES = 10_000
MAX_WHITESPACE_BYTES = 1 << 10
MAX_WORDS, MAX_WORD_BYTES = 4, 256
# Default white space between the parts of JSON: up to two blanks, or a line break with an indentation. If all of JSON's
# white space were allowed, a weak model could write blank lines until max_tokens.
WHITE_SPACE = r"[ \t]{0,2}|\r?\n[ \t]{0,40}"

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
# Constraints that may have JSON in them, to which _JSON_OPTIONS apply.
_OF_JSON = ("json", "json_object", "structural_tag")
_JSON_OBJECT = '{"type":"object"}'
_JSON_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern", "lenient")
# Keywords whose values are data, not schemas.
_DATA = frozenset(("const", "enum", "default", "examples"))


def _invalid(name: str, value: Any, allowed: str, owner: str = "structured_outputs") -> RequestError:
    """Return a RequestError, which the caller raises, about the value of the field owner.name."""
    return refuse(f"{owner}.{name}", value, allowed)


def _text(name: str, value: Any, at_most: int, owner: str = "structured_outputs", *, least: int = 1) -> str:
    """Return `value` if it is a string of `least` to `at_most` bytes of UTF-8; otherwise raise RequestError, about the
    field owner.name.
    """
    allowed = f"a string of {least} to {at_most} bytes of UTF-8"
    if not isinstance(value, str) or not least <= len(value) <= at_most:
        raise _invalid(name, value, allowed, owner)
    try:
        size = len(value.encode())
    except UnicodeEncodeError:  # a lone surrogate
        raise _invalid(name, value, allowed, owner) from None
    if size > at_most:
        raise _invalid(name, value, allowed, owner)
    return value


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one constraint, checked and normalised at construction. Field names and meanings are vLLM's.

    Attributes:
      json: a JSON schema, as a dict or as text; stored as text.
      regex: pattern that the entire output must match, without look-around and back references; "" for an empty
        output.
      choice: the allowed outputs; stored as a tuple.
      grammar: a context-free grammar, in Lark's notation or GBNF.
      json_object: True for any JSON object.
      disable_any_whitespace: no white space between the parts of JSON.
      disable_additional_properties: objects have only the properties that their schema lists, unless it says otherwise
        and if that is safe (jaxengine.requests.structured.closed_objects); None: as in structured_outputs_config, True
        by default.
      lenient: ignore keywords of the schema that no grammar can enforce (not, contains, uniqueItems, ...), and read
        oneOf as anyOf; otherwise the request is refused with the keyword's name.
      whitespace_pattern: regex of the white space between the parts of JSON; None for up to two blanks, or a line break
        with an indentation of up to 40.
      reasoning_end: text that ends the reasoning, or a list of alternatives, each a text or a list of consecutive
        texts. Text before it is free, text after it is constrained. None: all text is constrained.
      reasoning_begin: text that begins the reasoning, for models that may omit it; None: every output begins with
        reasoning. Only with reasoning_end.
      structural_tag: text in which certain words begin parts that have a form, in the notation of XGrammar, as a dict
        or as text (jaxengine.requests.structured.structural_tags); stored as text.

    Raises:
      RequestError: an invalid value, no constraint or several, an option that would have no effect, a text above the
    module's limits (MAX_SCHEMA_BYTES, ...), or a schema that refers to another file.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    lenient: bool = False
    reasoning_end: str | Sequence[str | Sequence[str]] | None = None
    reasoning_begin: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.json_object is not None and not isinstance(self.json_object, bool):
            raise _invalid("json_object", self.json_object, "True, or None")
        for name in ("disable_any_whitespace", "lenient"):
            if not isinstance(getattr(self, name), bool):
                raise _invalid(name, getattr(self, name), "True or False")
        if not isinstance(self.disable_additional_properties, bool | None):
            raise _invalid("disable_additional_properties", self.disable_additional_properties, "True, False or None")
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs must have exactly one of {', '.join(CONSTRAINTS)}, got {given or 'none'}",
                param="structured_outputs",
                value=given,
            )
        if self.json is not None:
            self._normalize("json", _schema(self.json))
        if self.structural_tag is not None:
            self._normalize("structural_tag", _schema(self.structural_tag, "structural_tag"))
        if self.regex is not None:
            _text("regex", self.regex, MAX_REGEX_BYTES, least=0)
        if self.grammar is not None:
            _text("grammar", self.grammar, MAX_SCHEMA_BYTES)
        if self.choice is not None:
            self._normalize("choice", _choices(self.choice))
        if self.whitespace_pattern is not None:
            _text("whitespace_pattern", self.whitespace_pattern, MAX_WHITESPACE_BYTES)
            if self.disable_any_whitespace:
                raise _invalid("whitespace_pattern", self.whitespace_pattern, "None with disable_any_whitespace")
        for name in _JSON_OPTIONS:
            if getattr(self, name) and given[0] not in _OF_JSON:
                raise _invalid(name, getattr(self, name), f"left out unless {' or '.join(_OF_JSON)} is given")
        if self.structural_tag is not None:
            self._tag_rules()
        if self.reasoning_end is not None:
            ends = words_of("structured_outputs", "reasoning_end", self.reasoning_end)
            self._normalize("reasoning_end", ends)
        if self.reasoning_begin is not None:
            _text("reasoning_begin", self.reasoning_begin, MAX_WORD_BYTES)
            if self.reasoning_end is None:
                raise _invalid("reasoning_begin", self.reasoning_begin, "None without reasoning_end")

    def _normalize(self, name: str, value: Any) -> None:
        """Set a field of the frozen dataclass; for __post_init__ only."""
        object.__setattr__(self, name, value)

    @property
    def kind(self) -> str:
        """Name of the given constraint, one of CONSTRAINTS."""
        return next(name for name in CONSTRAINTS if getattr(self, name) not in (None, False))

    def switched_on(self, names: Iterable[str]) -> StructuredOutputsParams:
        """Return a copy with the fields `names` set to True, except those that another field contradicts. Returns the
        object itself if none is left to set, or if the constraint is not JSON.

        names: switches of the engine's structured_outputs_config.
        """
        if self.kind not in _OF_JSON:
            return self
        contradicted = {
            "disable_any_whitespace": self.whitespace_pattern is not None,
            "disable_additional_properties": self.disable_additional_properties is False,
        }
        chosen = [name for name in names if not contradicted.get(name)]
        return replace(self, **dict.fromkeys(chosen, True)) if chosen else self

    def compiled_from(self, encode: Callable[[str], Sequence[int]]) -> Grammar:
        """Return the grammar from which jaxengine.grammars computes masks.

        encode: returns the token ids of reasoning_begin; () if the model cannot write that text, in which case the
        grammar allows no reasoning.
        """
        text, kind, options = str(getattr(self, self.kind)), self.kind, {}
        if kind in ("json", "json_object"):
            kind, text, options = "json", self._fitted_json(), self._guidance()
        elif kind == "choice":
            text = json.dumps(self.choice)
        elif kind == "structural_tag":
            text = json.dumps(self._tag_rules())
        begin = () if self.reasoning_begin is None else tuple(encode(self.reasoning_begin))
        # A model that cannot write the opening word does not reason.
        end = tuple(map(tuple, self.reasoning_end or ())) if begin or self.reasoning_begin is None else ()
        return Grammar(kind=kind, text=text, options=options, reasoning_end=end, reasoning_begin=begin)

    def in_lark(self) -> str:
        """Return the body of a Lark rule equivalent to the constraint. Raises RequestError for a grammar or structural
        tag, which has rules of its own.
        """
        if self.kind == "choice":
            assert self.choice is not None
            return "(" + " | ".join(json.dumps(each, ensure_ascii=False) for each in self.choice) + ")"
        if self.kind == "regex":
            return lark_regex(str(self.regex))
        if self.kind in ("grammar", "structural_tag"):
            text = f"structured_outputs.{self.kind} is only allowed without tools, or with tool_choice 'none'"
            raise RequestError(text, param="structured_outputs", value=getattr(self, self.kind))
        schema = json.loads(self._fitted_json())
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        return "%json " + json.dumps({**schema, "x-guidance": self._guidance()}, ensure_ascii=False)

    def _tag_rules(self) -> list[Any]:
        """Return the rules of the structural tag, see tag_rules. Raises RequestError."""
        options = {name: getattr(self, name) for name in _JSON_OPTIONS}

        def term(schema: Any) -> str:
            whole = ({} if schema else {"not": {}}) if isinstance(schema, bool) else schema
            return StructuredOutputsParams(json=whole, **options).in_lark()

        return tag_rules(json.loads(str(self.structural_tag)), term)

    def _fitted_json(self) -> str:
        """Return the schema as JSON text for the grammar compiler, with objects closed if disable_additional_properties
        is set.
        """
        text = _JSON_OBJECT if self.json is None else fit_for_grammar(str(self.json), self.lenient)
        return forbid_additional_properties(text) if self.disable_additional_properties else text

    def _guidance(self) -> dict[str, Any]:
        """Return llguidance's options for the schema: "lenient" if it is set, and either "whitespace_flexible" (False,
        with disable_any_whitespace) or "whitespace_pattern".
        """
        options: dict[str, Any] = {"lenient": True} if self.lenient else {}
        if self.disable_any_whitespace:
            return {**options, "whitespace_flexible": False}
        return {**options, "whitespace_pattern": self.whitespace_pattern or WHITE_SPACE}


def structured_outputs(name: str, value: Any) -> StructuredOutputsParams:
    """Return a value of SamplingParams.structured_outputs, a StructuredOutputsParams or a dict of its fields, as a
    StructuredOutputsParams.

    Raises RequestError about `name` for other types and unknown fields, and the errors of StructuredOutputsParams for
    invalid values.
    """
    if isinstance(value, StructuredOutputsParams):
        return value
    known = {field.name for field in fields(StructuredOutputsParams)}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise RequestError(
            f"{name} must be a StructuredOutputsParams or a dict of its fields, got {show_value(value)}",
            param=name,
            value=value,
        )
    unknown = next((key for key in value if key not in known), None)
    if unknown is not None:
        raise RequestError(
            f"{name} must be a dict of {', '.join(sorted(known))}, got the key {show_value(unknown)}",
            param=name,
            value=unknown,
        )
    return StructuredOutputsParams(**value)


def words_of(owner: str, name: str, value: Any) -> tuple[tuple[str, ...], ...]:
    """Return the alternatives that a field names, each as a tuple of consecutive words.

    value: one word (any text; it is not split), or a list of alternatives, each a word or a list of consecutive words.
    Raises RequestError, about the field owner.name, for other values, for more than MAX_WORDS alternatives, for more
    than MAX_WORDS words in an alternative, and for words of more than MAX_WORD_BYTES.
    """
    ends = _few(owner, name, (value,) if isinstance(value, str) else value)
    words = [_few(owner, name, (end,) if isinstance(end, str) else end) for end in ends]
    return tuple(tuple(_text(name, word, MAX_WORD_BYTES, owner) for word in end) for end in words)


def _few(owner: str, name: str, value: Any) -> Any:
    """Return a list or tuple of 1 to MAX_WORDS entries unchanged. Raises RequestError, about owner.name, for other
    values.
    """
    if not isinstance(value, (list, tuple)) or not 1 <= len(value) <= MAX_WORDS:
        allowed = f"a string, or a list of 1 to {MAX_WORDS} strings or lists of strings"
        raise _invalid(name, value, allowed, owner)
    return value


def _choices(value: Any) -> tuple[str, ...]:
    """Return the field `choice`, a list or tuple of 1 to MAX_CHOICES different strings, as a tuple.

    Raises RequestError for other values, for empty or repeated strings, and for too many bytes.
    """
    allowed = f"a list of 1 to {MAX_CHOICES} different strings, none of them empty"
    if not isinstance(value, (list, tuple)) or not 1 <= len(value) <= MAX_CHOICES:
        raise _invalid("choice", value, allowed)
    total = 0
    for text in value:
        total += len(_text("choice", text, MAX_SCHEMA_BYTES).encode())
    if len(set(value)) < len(value):
        raise _invalid("choice", value, allowed)
    if total > MAX_SCHEMA_BYTES:
        raise _invalid("choice", value, f"strings of at most {MAX_SCHEMA_BYTES} bytes of UTF-8 altogether")
    return tuple(value)


def _schema(value: Any, name: str = "json") -> str:
    """Return a schema or a structural tag, given as JSON text or as a mapping, as JSON text. name: the field.

    Raises RequestError for invalid JSON, a value that is not a schema, one above MAX_SCHEMA_BYTES or MAX_NESTING, or
    one that refers to another file.
    """
    kind = "a JSON schema" if name == "json" else "a JSON object"
    allowed = f"{kind} of at most {MAX_SCHEMA_BYTES} bytes, nested at most {MAX_NESTING} deep"
    try:
        if isinstance(value, str):
            text = _text(name, value, MAX_SCHEMA_BYTES)
            schema = json.loads(text, parse_constant=int)  # int("NaN") raises ValueError
        else:
            if not isinstance(value, Mapping):
                raise _invalid(name, value, allowed)
            text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
            schema = value
    except RequestError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise _invalid(name, value, f"{allowed} ({type(error).__name__})") from None
    text = _text(name, text, MAX_SCHEMA_BYTES)
    if not isinstance(schema, (Mapping, bool)) or (name != "json" and isinstance(schema, bool)):
        raise _invalid(name, value, "a JSON schema, which is an object, true or false" if name == "json" else allowed)
    for depth, key, item in _items(schema):
        if depth > MAX_NESTING:
            raise _invalid(name, value, allowed)
        if key in ("$ref", "$dynamicRef") and isinstance(item, str) and not item.startswith("#"):
            raise _invalid(name, item, "a schema that refers only to parts of itself (#...); nothing is fetched")
    return text


def _items(schema: Any) -> Iterator[tuple[int, str | None, Any]]:
    """Yield (depth, key, value) for the schema and all values nested in it, without recursion.

    key is None for items of lists, and for data: the values of const, enum, default and examples, and all within them.
    """
    waiting: list[tuple[int, str | None, Any]] = [(0, None, schema)]
    while waiting:
        depth, key, value = waiting.pop()
        yield depth, None if key in _DATA else key, value
        if isinstance(value, Mapping):
            inside = value.items()
        elif isinstance(value, (list, tuple)):
            inside = [(None, item) for item in value]
        else:
            continue
        data = key in _DATA
        waiting += [(depth + 1, "const" if data else name, item) for name, item in inside]
