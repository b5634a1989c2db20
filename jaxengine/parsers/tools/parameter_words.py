"""Marker words of the formats of tool calls with plain-text arguments, which tools.parameters reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from jaxengine.parsers.scan.parameter_json import with_characters


@dataclass(frozen=True)
class ParameterWords:
    """Marker words of a format.

    Attributes:
      section: words around calls; None if there are none. others: alternative spellings of the first one.
      call, parameter: words before the name, between name and content, and after the content. A call's second word may
        be "" if the next word ends its name.
      value: word before a value, if the name has its own closing word.
      lines: words and values are on separate lines.
      says: text between a parameter's name and what the format says of its value: whether it is a string ("true",
        "false"), or its JSON type; "" if it says nothing.
      attributes: a call's name may be followed by '"' and attributes, which are dropped; &quot; and &amp; in names
        stand for characters.
      quotes: words around a value in which no other word ends it; None if there are none.
      references: XML's references, such as &lt;, stand for characters in a value without quotes.
      dropped: words around an answer, which are not content.
      verbatim: a line break at the beginning of a value is part of it; otherwise it belongs to the format, as does one
        at the end of the same value.
    """

    call: tuple[str, str, str]
    parameter: tuple[str, str, str]
    section: tuple[str, str] | None = None
    value: str = ""
    lines: bool = False
    says: str = ""
    attributes: bool = False
    quotes: tuple[str, str] | None = None
    references: bool = False
    dropped: tuple[str, ...] = ()
    verbatim: bool = False
    others: tuple[str, ...] = ()

    @property
    def value_ends(self) -> tuple[str, ...]:
        """Words that may end a value: a parameter's closing word, a call's, the word that begins a parameter, and a
        section's closing word.
        """
        return (self.parameter[2], self.call[2], self.parameter[0], *(self.section or ())[1:])

    @property
    def quoted_end(self) -> str:
        """Word that ends a value within `quotes`; "" without them."""
        return "" if self.quotes is None else self.quotes[1] + self.parameter[2]

    def said(self, types: AbstractSet[str]) -> list[str]:
        """Return what may follow `says` for a value of these JSON types: "true" if they have a string, else "false". In
        a format with attributes "string" or else all the types, sorted, where an integer is a "number".
        """
        if not self.attributes:
            return ["true" if "string" in types else "false"]
        return ["string"] if "string" in types else sorted({"number" if each == "integer" else each for each in types})

    def written(self, name: str) -> str:
        """Return a name as it is written in an attribute, with & and " escaped; unchanged in formats without."""
        return name.replace("&", "&amp;").replace('"', "&quot;") if self.attributes else name

    def written_value(self, text: str) -> str:
        """Return a text as it is written as a value: with &amp; for & if it would be read as another text."""
        changes = self.references and with_characters(text) != text
        return text.replace("&", "&amp;") if changes else text

    def read(self, name: str) -> str:
        """Return the parameter's name that is written as `name`: without escapes, nor attributes after it. `name`
        itself in formats without attributes.
        """
        return name.partition('"')[0].replace("&quot;", '"').replace("&amp;", "&") if self.attributes else name

    def may_follow(self, end: str, names: Iterable[str]) -> Sequence[str | tuple[str, ...]]:
        """Return the words, or sequences of words, of which one must follow `end` for `end` to end a value. The end of
        the output may follow too.

        end: one of `value_ends`. names: parameters that may be next.
        """
        if end == self.parameter[0]:
            after = (self.says,) if self.says else (self.parameter[1], *filter(None, [self.value]))
            return [(self.written(name), *after) for name in names]
        if end in (self.parameter[2], self.quoted_end):
            return [self.parameter[0], self.call[2], *(self.section or ())[1:]]
        begins = [self.call[0], *(self.section or ())[:1]]
        return [*begins, *(self.section or ())[1:]] if end == self.call[2] else begins


_FUNCTION = ("<function=", ">", "</function>")
_PARAMETER = ("<parameter=", ">", "</parameter>")
QWEN3_CODER = ParameterWords(_FUNCTION, _PARAMETER, ("<tool_call>", "</tool_call>"), lines=True)
SEED_OSS = ParameterWords(_FUNCTION, _PARAMETER, ("<seed:tool_call>", "</seed:tool_call>"))
MINIMAX_M2 = ParameterWords(
    ('<invoke name="', '">', "</invoke>"),
    ('<parameter name="', '">', "</parameter>"),
    ("<minimax:tool_call>", "</minimax:tool_call>"),
    verbatim=True,
)
DEEPSEEK_V32 = ParameterWords(
    ('<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>"),
    ('<｜DSML｜parameter name="', '">', "</｜DSML｜parameter>"),
    ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    says='" string="',
    verbatim=True,
)
DEEPSEEK_V4 = replace(
    DEEPSEEK_V32,
    section=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    others=("<｜DSML｜toolcalls>", "<｜DSML｜tool>"),
)
DEEPSEEK_V41 = replace(
    DEEPSEEK_V32,
    call=('<｜DSML｜ invoke name="', '">', "</｜DSML｜ invoke>"),
    parameter=('<｜DSML｜ parameter name="', '">', "</｜DSML｜ parameter>"),
    section=("<｜DSML｜ calls>", "</｜DSML｜ calls>"),
)
MIMO = replace(QWEN3_CODER, lines=False, verbatim=True)
DOTS = replace(MINIMAX_M2, section=("<dots_function_call>", "</dots_function_call>"))
GLM45 = ParameterWords(
    ("<tool_call>", "", "</tool_call>"),
    ("<arg_key>", "</arg_key>", "</arg_value>"),
    value="<arg_value>",
    verbatim=True,
)
STEP3 = ParameterWords(
    ('<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="', '">', "</steptml:invoke><｜tool_call_end｜>"),
    ('<steptml:parameter name="', '">', "</steptml:parameter>"),
    ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
)
K2_HORIZON = ParameterWords(
    ("<ifm|tool_call>", "", "</ifm|tool_call>"),
    ("<ifm|arg_key>", "</ifm|arg_key>", "</ifm|arg_value>"),
    ("<ifm|tool_calls>", "</ifm|tool_calls>"),
    value="<ifm|arg_value>",
    verbatim=True,
)
KIMI_K3 = ParameterWords(
    ('<|open|>call tool="', '"<|sep|>', "<|close|>call<|sep|>"),
    ('<|open|>argument key="', '"<|sep|>', "<|close|>argument<|sep|>"),
    ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    says='" type="',
    attributes=True,
    verbatim=True,
    dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
)
MINICPM5 = ParameterWords(
    ('<function name="', '">', "</function>"),
    ('<param name="', '">', "</param>"),
    quotes=("<![CDATA[", "]]>"),
    references=True,
)
_GROUP = ("<tool_calls>", "</tool_calls>")


def hy_v4(suffix: str = "") -> ParameterWords:
    """Return the words of Hy4: GLM-4.5's in a section, each with a checkpoint's suffix, as in <tool_call:6124c78e>."""
    words = replace(GLM45, section=_GROUP)
    if not suffix:
        return words
    call, parameter, section, value = (
        tuple(word.replace(">", f"{suffix}>") for word in each)
        for each in (words.call, words.parameter, _GROUP, (words.value,))
    )
    return replace(words, call=call, parameter=parameter, section=section, value=value[0])


HY_V3 = replace(GLM45, call=("<tool_call>", "<tool_sep>", "</tool_call>"), section=_GROUP)
