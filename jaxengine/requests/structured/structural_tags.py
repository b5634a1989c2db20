"""Structural tags: text whose parts between certain words have a form, in the notation of XGrammar that vLLM takes.

A tag is translated into rules of Lark's notation. Which words are tokens of their own is only known where the
vocabulary is, so rules are lists of pieces: a text as it is, {"word": text} for a text that the output must have, and
{"until": text} for any text up to and including the first occurrence of a text (jaxengine.grammars.tag_rules).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxengine.scheduler.base.errors import RequestError, refuse

Piece = str | dict[str, str]
Pieces = list[Piece]
_ANY_TEXT = "/(?s:.*)/"
# Characters of all formats that are written, each with the formats in it: a content is written once for each text that
# may end it, and a small tag could have copies without end.
_MOST_CHARS = 4 << 20
# Fields of each format, with the default of those that may be left out. Other fields are refused.
_FIELDS: dict[str, dict[str, Any]] = {
    "const_string": {"value": ...},
    "json_schema": {"json_schema": ...},
    "regex": {"pattern": ...},
    "any_text": {},
    "token": {"token": ...},
    "sequence": {"elements": ...},
    "or": {"elements": ...},
    "tag": {"begin": ..., "content": ..., "end": ...},
    "triggered_tags": {"triggers": ..., "tags": ..., "at_least_one": False, "stop_after_first": False},
    "tags_with_separator": {"tags": ..., "separator": ..., "at_least_one": False, "stop_after_first": False},
    "optional": {"content": ...},
    "plus": {"content": ...},
    "star": {"content": ...},
    "repeat": {"content": ..., "min": ..., "max": ...},
}
# Values of fields of XGrammar that have no effect, and are therefore allowed.
_WITHOUT_EFFECT = (None, False, [], "json", -1)
_FREE = ("any_text", "triggered_tags")
_NOTHING = {"type": "const_string", "value": ""}
_LARK_ESCAPES = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}


def tag_rules(tag: Mapping[str, Any], json_term: Callable[[Any], str]) -> list[Pieces]:
    """Return the rules of a structural tag, with the top rule `start`.

    tag: {"type": "structural_tag", "format": ...}, or the earlier form with "structures" (begin, schema, end) and
    "triggers". json_term: returns the Lark term of a JSON schema. Raises RequestError for unknown formats, fields that
    are missing, of another type or not supported, and text whose end nothing marks.
    """
    if tag.get("type") != "structural_tag":
        raise _invalid("type", tag.get("type"), "'structural_tag'")
    structure = tag.get("format")
    _only(tag, "type", *(("structures", "triggers") if structure is None else ("format",)))
    if structure is None:
        structure = _from_structures(tag)
    writer = _Writer(json_term)
    writer.rules.append(["start: ", *writer.write(structure, "")])
    return writer.rules


def _from_structures(tag: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tag of the earlier form, with structures and triggers, as a format of the type "triggered_tags" with a
    json_schema in each tag. Raises RequestError for other values.
    """
    structures = tag.get("structures")
    if not isinstance(structures, list) or not all(isinstance(each, Mapping) for each in structures):
        raise _invalid("structures", structures, "a list of objects, if there is no format")
    for each in structures:
        _only(each, "begin", "schema", "end")
    contents = ({"type": "json_schema", "json_schema": each.get("schema") or {}} for each in structures)
    tags = [
        {"type": "tag", "begin": each.get("begin"), "content": content, "end": each.get("end")}
        for each, content in zip(structures, contents, strict=True)
    ]
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


def _invalid(name: str, value: Any, allowed: str) -> RequestError:
    """Return a RequestError, which the caller raises, about the field `name` of a structural tag."""
    return refuse(f"structured_outputs.structural_tag.{name}", value, allowed)


def _only(value: Mapping[str, Any], *names: str) -> None:
    """Raise RequestError if an object has other fields than these, unless they are None."""
    for name, given in value.items():
        if name not in names and given is not None:
            raise _invalid(name, given, f"left out: the fields here are {', '.join(names)}")


class _Writer:
    """Translator of formats. json_term: see tag_rules.

    Attributes:
      rules: rules that terms refer to.
    """

    def __init__(self, json_term: Callable[[Any], str]):
        self._json_term = json_term
        self._num_chars = 0
        self.rules: list[Pieces] = []

    def write(self, value: Any, end: str | None) -> Pieces:
        """Return the term of a format that is followed by the text `end`, which the term includes; "" if nothing
        follows, or a token, which no text is; None if it is not known what follows. Raises RequestError for an invalid
        format, for one that ends with text without a form while `end` is None, and for formats of more than _MOST_CHARS
        characters in all.
        """
        form = _checked(value)
        kind = form["type"]
        self._num_chars += len(json.dumps(value)) + len(end or "")
        if self._num_chars > _MOST_CHARS:
            allowed = f"smaller: with a copy of each content for each of its ends it has over {_MOST_CHARS} characters"
            raise _invalid("format", kind, allowed)
        if kind in _FREE and end is None:
            raise _invalid("format", kind, "followed by a const_string, a tag or the end of the output")
        if kind == "any_text":
            return [{"until": end}] if end else [_ANY_TEXT]
        if kind == "or":
            return _choice([self.write(each, end) for each in _listed(form, "elements")])
        if kind == "optional":
            return _choice([_word(end), self.write(form["content"], end)])
        if kind == "sequence":
            return self._sequence(_listed(form, "elements"), end)
        if kind == "tag":
            return [*_marker(form, "begin"), *self._content(form, end)]
        if kind == "triggered_tags":
            return self._triggered(form, end or "")
        return [*self._plain(form, kind), *_word(end)]

    def _plain(self, form: Mapping[str, Any], kind: str) -> Pieces:
        """Return the term of a format that ends by itself: kind "const_string", "token", "json_schema", "regex",
        "tags_with_separator", "plus", "star" or "repeat". form: the format, with defaults. Raises RequestError for
        invalid fields.
        """
        if kind == "const_string":
            return _word(_text(form, "value"))
        if kind == "token":
            return _marker({"token": form}, "token")
        if kind == "json_schema":
            if not isinstance(form["json_schema"], (Mapping, bool, str)):
                raise _invalid("json_schema", form["json_schema"], "a JSON schema")
            return self._rule([self._json_term(form["json_schema"])])
        if kind == "regex":
            return [lark_regex(_text(form, "pattern"))]
        if kind == "tags_with_separator":
            one = _choice([self.write(each, None) for each in _tags(form)])
            more = [] if form["stop_after_first"] else [" (", *_word(_text(form, "separator")), " ", *one, ")*"]
            return ["(", *one, *more, ")" if form["at_least_one"] else ")?"]
        signs = {"plus": "+", "star": "*"}
        return ["(", *self.write(form["content"], None), ")", signs[kind] if kind in signs else _times(form)]

    def _content(self, form: Mapping[str, Any], after: str | None) -> Pieces:
        """Return the term of a tag's content and its end, which may be a list of alternatives, and of the text `after`
        the tag (see `write`), which ends a content whose own end is "". Raises RequestError for invalid fields.
        """
        ends = form["end"] if isinstance(form["end"], list) else [form["end"]]
        terms = []
        for end in ends:
            text = end.get("token") if isinstance(end, Mapping) else end
            if isinstance(text, int):
                terms.append([*self.write(form["content"], ""), *_marker({"end": end}, "end"), *_word(after)])
            elif _text({"end": text}, "end"):
                terms.append([*self.write(form["content"], text), *_word(after)])
            else:
                terms.append(self.write(form["content"], after))
        if not terms:
            raise _invalid("end", ends, "a text, or a list of one or more")
        return _choice(terms)

    def _sequence(self, elements: Sequence[Any], end: str | None) -> Pieces:
        """Return the term of formats one after the other, and of the text `end` (see `write`). Text without a form of
        its own must be followed by a constant or by a tag, whose beginning ends it.
        """
        found: Pieces = []
        waiting = [form for form in map(_checked, elements) if form != _NOTHING]
        while waiting:
            form = waiting.pop(0)
            if not waiting:
                found += self.write(form, end)
            elif form["type"] not in _FREE:
                found += self.write(form, None)
            else:
                following = waiting.pop(0)
                after = None if waiting else end
                if following["type"] == "const_string":
                    found += [*self.write(form, _text(following, "value")), *_word(after)]
                elif following["type"] == "tag" and following["begin"] and isinstance(following["begin"], str):
                    found += [*self.write(form, following["begin"]), " ", *self._content(following, after)]
                else:
                    raise _invalid("elements", following["type"], f"a const_string or a tag after {form['type']}")
            found.append(" ")
        return found

    def _triggered(self, form: Mapping[str, Any], end: str) -> Pieces:
        """Return the term of text in which a tag follows each of its triggers, up to the text `end`; with
        at_least_one a tag comes first, and with stop_after_first one tag ends it. Raises RequestError for invalid
        fields, and for a tag that begins with none of the triggers.
        """
        triggers = [_text({"triggers": each}, "triggers") for each in _listed(form, "triggers")]
        whole, after = [], []
        for tag in map(_checked, _tags(form)):
            if tag["type"] != "tag":
                raise _invalid("tags", tag["type"], "a list of formats of the type tag")
            begin = _text(tag, "begin")
            trigger = next((each for each in triggers if begin.startswith(each)), None)
            if trigger is None:
                raise _invalid("begin", begin, f"a text that begins with one of the triggers {triggers}")
            content = self._rule(self._content(tag, None))
            whole.append([*_word(begin), *content])
            after.append([{"until": trigger}, *_word(begin.removeprefix(trigger)), *content])
        rest: Pieces = [{"until": end}] if end else [_ANY_TEXT]
        first, later = _choice(whole), _choice(after)
        if form["stop_after_first"]:
            return [*first, *_word(end)] if form["at_least_one"] else ["(", *later, *_word(end), " | ", *rest, ")"]
        return [*(first if form["at_least_one"] else []), " ", *later, "* ", *rest]

    def _rule(self, term: Pieces) -> Pieces:
        """Add a rule of this term; return its name."""
        name = f"part_{len(self.rules)}"
        self.rules.append([f"{name}: ", *term])
        return [f" {name} "]


def lark_regex(pattern: str) -> str:
    """Return a regular expression as a Lark pattern, /.../, with slashes and line breaks escaped."""
    return "/" + re.sub(r"(?s:\\.)|/|\n", lambda found: _LARK_ESCAPES.get(found[0], found[0]), pattern) + "/"


def _checked(value: Any) -> dict[str, Any]:
    """Return a format with the defaults of the fields that it leaves out, and without unsupported fields whose values
    have no effect. Raises RequestError for an unknown type, a missing field, a switch that is not a bool, and an
    unsupported field with another value.
    """
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(kind, str) or kind not in _FIELDS:
        given = value.get("type") if isinstance(value, Mapping) else value
        raise _invalid("the type of a format", given, f"one of {', '.join(_FIELDS)}")
    fields = _FIELDS[kind]
    for name, given in value.items():
        if name not in fields and name != "type" and given not in _WITHOUT_EFFECT:
            raise _invalid(f"{kind}.{name}", given, "left out (not supported)")
    found = {name: value.get(name, default) for name, default in fields.items()}
    for name, each in found.items():
        if each is ...:
            raise _invalid(f"{kind}.{name}", None, "given")
        if fields[name] is False and not isinstance(each, bool):
            raise _invalid(f"{kind}.{name}", each, "true or false")
    return {"type": kind, **found}


def _listed(form: Mapping[str, Any], name: str) -> list[Any]:
    """Return a field that is a list of one or more entries. Raises RequestError for other values."""
    if not isinstance(form[name], list) or not form[name]:
        raise _invalid(name, form[name], "a list of one or more")
    return form[name]


def _tags(form: Mapping[str, Any]) -> list[Any]:
    """Return the field `tags` as `_listed` does; entries without a type get the type "tag"."""
    return [{"type": "tag", **each} if isinstance(each, Mapping) else each for each in _listed(form, "tags")]


def _text(form: Mapping[str, Any], name: str) -> str:
    """Return a field that is a text. Raises RequestError for other values, and for a trigger without a character."""
    if not isinstance(form[name], str) or (name == "triggers" and not form[name]):
        raise _invalid(name, form[name], "a text")
    return form[name]


def _marker(form: Mapping[str, Any], name: str) -> Pieces:
    """Return the term of a field that is a text, or a format of the type "token" with a token's text or id. Raises
    RequestError for other values.
    """
    value = form[name]
    if isinstance(value, Mapping):
        value = _checked(value).get("token")
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return [f" <[{value}]> "]
    return _word(_text({name: value}, name))


def _word(text: str | None) -> Pieces:
    """Return the term of a text; nothing for "" and None."""
    return [" ", {"word": text}, " "] if text else []


def _choice(terms: Sequence[Pieces]) -> Pieces:
    """Return the term of alternatives, in brackets. An empty one is the empty text."""
    found: Pieces = ["("]
    for at, term in enumerate(terms):
        found += [*([" | "] if at else []), *(term or ['""'])]
    return [*found, ")"]


def _times(form: Mapping[str, Any]) -> str:
    """Return the Lark operator of a repetition, {min,max}, with 1 <= max >= min >= 0 or, for no limit, max -1. Raises
    RequestError for other values.
    """
    least, most = form["min"], form["max"]
    whole = all(isinstance(each, int) and not isinstance(each, bool) for each in (least, most))
    if not whole or least < 0 or (most != -1 and most < max(least, 1)):
        raise _invalid("repeat", f"{least} to {most}", "0 <= min <= max and 1 <= max, or max -1")
    return f"{{{least},{'' if most == -1 else most}}}"
