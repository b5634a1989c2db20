"""Parser of tool calls of MiniMax M3, whose arguments are nested elements:

  ]<]minimax[>[<tool_call>
  ]<]minimax[>[<invoke name="order">
  ]<]minimax[>[<items>]<]minimax[>[<item>]<]minimax[>[<sku>7]<]minimax[>[</sku>]<]minimax[>[</item>]<]minimax[>[</items>
  ]<]minimax[>[</invoke>
  ]<]minimax[>[</tool_call>

`]<]minimax[>[` precedes every tag. The function's schema says which elements are arrays, and the types of texts. A
call's arguments are written when the call is complete, because a name that comes again turns its value into an array.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from jaxengine.parsers.scan.argument_forms import argument_forms
from jaxengine.parsers.scan.call_grammar import CallGrammar, Schema, literal
from jaxengine.parsers.scan.events import Event
from jaxengine.parsers.scan.markers import Marker
from jaxengine.parsers.scan.typed_text import as_json, types_at
from jaxengine.parsers.tools.parameter_words import ParameterWords
from jaxengine.parsers.tools.parameters import ParameterToolParser
from jaxengine.schema_references import Place, SchemaDocument, mapping

TAG = "]<]minimax[>["
WORDS = ParameterWords(
    (f'{TAG}<invoke name="', '">', f"{TAG}</invoke>"),
    (f"{TAG}<", ">", f"{TAG}</"),
    (f"{TAG}<tool_call>", f"{TAG}</tool_call>"),
)
_MAX_DEPTH = 128
# Name for text between the elements of an object.
_TEXT = "$text"


@dataclass(slots=True)
class Element:
    """An element of a call.

    Attributes:
      name: of the parameter, property or array item.
      text: text directly in it.
      children: elements in it, in their order.
    """

    name: str
    text: str = ""
    children: list[Element] = field(default_factory=list)


def grammar(calls: CallGrammar) -> Iterator[str]:
    """Yield Lark rules for calls, with the top rule `calls`. Arguments have the order of their schema; values other
    than strings are JSON, which the parser reads in place of elements.

    A string is only constrained if its schema lists values. Raises ValueError for a schema with too many alternatives
    or levels, UnresolvedError for a reference that leads nowhere, and the errors of calls.json.
    """
    forms = [(name, form) for name, schema in calls.functions.items() for form in argument_forms(schema)]
    one = f"({' | '.join(f'call_{at}' for at in range(len(forms)))})"
    opening, closing = map(calls.word, WORDS.section or ())
    yield f'calls: {opening} "\\n" {calls.listed(one, chr(10))} "\\n" {closing}'
    for at, (name, form) in enumerate(forms):
        parts = [calls.word(f"{WORDS.call[0]}{name}{WORDS.call[1]}")]
        for number, parameter in enumerate(form.places):
            rule, end = f"parameter_{at}_{number}", f"{TAG}</{parameter}>"
            parts.append(rule if parameter in form.required else f"{rule}?")
            head = calls.word(f"{TAG}<{parameter}>")
            if texts := form.texts(parameter):
                yield f"{rule}: {head} ({' | '.join(map(literal, texts))}) {calls.word(end)}"
            elif "string" not in form.types(parameter):
                yield f"{rule}: {head} {rule}_value {calls.word(end)}"
                yield f"{rule}_value: {calls.json(form.schema(parameter))}"
            elif calls.token_id(TAG) is None:
                yield f"{rule}: {head} {rule}_text"
                yield f"{rule}_text[suffix={literal(end)}]: /(?s:.*)/"
            else:
                yield f"{rule}: {head} /(?s:.*)/ {calls.word(end)}"
        yield f"call_{at}: {' '.join(parts)} {calls.word(WORDS.call[2])}"


class ElementToolParser(ParameterToolParser):
    """Parser of calls with nested elements. functions: schemas of arguments, by function name.

    Elements after the first one that is malformed or more than 128 levels deep are left out of their call.
    """

    def __init__(self, new_id: Iterable[str], functions: Mapping[str, Schema]):
        super().__init__(new_id, functions, WORDS)
        self._end = Marker(WORDS.call[2])
        self._body: list[str] = []
        self._schema: Schema | None = None

    def finish(self) -> list[Event]:
        """End the output; return the events of text that was held back: content, or the complete arguments of a call in
        which the output ends, whose object stays open unless only the end of the call is missing.
        """
        if self._state == self._in_body:
            held = self._end.take()
            elements, is_whole = elements_of("".join(self._body))
            # Half of the word that ends the call is no text, unless it begins another tag.
            is_whole &= len(held) > len(TAG) + 1 or not held
            self._out.arguments(arguments_of(elements, self._schema)[: None if is_whole else -1])
        return super().finish()

    def _open_call(self, name: str, word: str) -> None:
        """Enter the elements of a call of the function `name`. word: not used."""
        self._schema, self._body, self._state = self._functions.get(name), [], self._in_body

    def _in_body(self, text: str, at: int) -> int:
        """Process the elements of a call, up to its closing word, with which its arguments are written. Reads `text`
        from `at`; returns the index after what it read.
        """
        plain, at, word = self._end.read(text, at)
        self._body.append(plain)
        if word:
            self._out.arguments(arguments_of(elements_of("".join(self._body))[0], self._schema))
            self._leave_call()
        return at


def elements_of(body: str) -> tuple[list[Element], bool]:
    """Return the elements of a call's body, and whether they are all of it but white space. An element that is
    malformed, open at the end, or more than 128 levels deep is left out with all that follows.
    """
    root = Element("")
    stack = [root]
    first, *tags = body.split(TAG)
    if first.strip():
        return [], False
    for tag in tags:
        name, closed, text = tag.partition(">")
        here = stack[-1]
        if name == f"</{here.name}" and closed and len(stack) > 1:
            stack.pop()
            stack[-1].children.append(here)
            stack[-1].text += text
        elif name.startswith("<") and name[1:].strip() and name[1] != "/" and closed and len(stack) <= _MAX_DEPTH:
            stack.append(Element(name[1:], text))
        else:
            return root.children, False
        if len(stack) == 1 and text.strip():
            return root.children, False
    return root.children, len(stack) == 1


def arguments_of(elements: list[Element], schema: Schema | None) -> str:
    """Return a call's arguments as JSON. schema: of the function's arguments, None if unknown."""
    document = SchemaDocument(schema)
    return _object(elements, "", document, [document.root])


def _value(element: Element, document: SchemaDocument, places: list[Place]) -> str:
    """Return the value of an element as JSON: of its text if it has no children, else an array of its children (text
    between them is dropped) where a schema names arrays, by its types or by `items` alone, else an object. White space
    alone is [] where schemas name arrays, else {} where they name objects, if none names strings.

    places: its schemas in `document`, all of which may apply.
    """
    rules = _rules(document, places)
    types = types_at(document, places)
    # A schema with items means an array, also if it names no type.
    if any("items" in each.schema and "type" not in each.schema for each in rules):
        types |= {"array"}
    if not element.children:
        # Templates write an empty array or object as an empty element.
        if "string" not in types and not element.text.strip() and types & {"array", "object"}:
            return "[]" if "array" in types else "{}"
        return as_json(element.text, types)
    if "array" in types:
        items = [each.inside(each.schema["items"]) for each in rules if "items" in each.schema]
        return f"[{', '.join(_value(child, document, items) for child in element.children)}]"
    return _object(element.children, element.text, document, places)


def _object(elements: list[Element], text: str, document: SchemaDocument, places: list[Place]) -> str:
    """Return the JSON object of these elements, with the values of a repeated name as an array. text: text between the
    elements, which is kept under a name of its own unless it is white space. places: schemas of the object.
    """
    rules = _rules(document, places)
    found: dict[str, list[str]] = {}
    for element in elements:
        named = [
            each.inside(properties[element.name])
            for each in rules
            if element.name in (properties := mapping(each.schema, "properties"))
        ]
        others = "additionalProperties"
        inside = named or [each.inside(each.schema[others]) for each in rules if others in each.schema]
        found.setdefault(element.name, []).append(_value(element, document, inside))
    if text.strip():
        name = _TEXT
        while name in found:
            name = f"${name}"
        found[name] = [json.dumps(text, ensure_ascii=False)]
    values = {name: each[0] if len(each) == 1 else f"[{', '.join(each)}]" for name, each in found.items()}
    return f"{{{', '.join(f'{json.dumps(name, ensure_ascii=False)}: {value}' for name, value in values.items())}}}"


def _rules(document: SchemaDocument, places: list[Place]) -> list[Place]:
    """Return the schemas that may apply to the same value as `places`, by references and combinations.

    Each is returned once, even if a schema contains itself.
    """
    found = {id(each.schema): each for place in places for each in document.applicable(place)}
    return list(found.values())
