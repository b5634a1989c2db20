"""Outputs of formats whose arguments are elements with attributes, or in each other: Kimi K3, MiniCPM5, MiniMax M3."""

from __future__ import annotations

from typing import Any

from jaxengine.parsers.tools.messages import MUSE_WORDS
from tests.jaxengine.parsers import writers
from tests.jaxengine.parsers.outputs import NOW, PARIS, Format, Output
from tests.jaxengine.parsers.writers import Call

K3_TYPES = {str: "string", bool: "boolean", int: "number", float: "number", dict: "object", list: "array"}


def kimi_k3(calls: list[Call]) -> str:
    said = []
    for at, (name, given) in enumerate(calls, 1):
        pairs = (
            f'<|open|>argument key="{key}" type="{K3_TYPES.get(type(each), "null")}"<|sep|>{writers.plain(each)}'
            "<|close|>argument<|sep|>"
            for key, each in given.items()
        )
        said.append(f'<|open|>call tool="{name}" index="{at}"<|sep|>{"".join(pairs)}<|close|>call<|sep|>')
    return f"<|open|>tools<|sep|>{''.join(said)}<|close|>tools<|sep|>"


def minicpm5(calls: list[Call]) -> str:
    said = []
    for name, given in calls:
        quoted = {
            key: f"<![CDATA[{each}]]>" if isinstance(each, str) and set(each) & set("<&\n") else writers.plain(each)
            for key, each in given.items()
        }
        pairs = (f'<param name="{key}">{each}</param>' for key, each in quoted.items())
        said.append(f'<function name="{name}">{"".join(pairs)}</function>')
    return "\n".join(said)


def beam(calls: list[Call]) -> str:
    said = []
    for name, given in calls:
        pairs = (
            f'<rfl:parameter name="{key}">\n{writers.plain(each)}\n</rfl:parameter>' for key, each in given.items()
        )
        said.append(f" to={name}<|channel|>analysis <|constrain|>xml<|message|>{''.join(pairs)}")
    return "<|end|><|start|>assistant".join(said) + "<|call|>"


BEAM_NOW = beam([NOW])


def muse(calls: list[Call]) -> str:
    said = []
    for name, given in calls:
        pairs = (
            f'<atem:parameter name="{key}">{writers.plain(each)}</atem:parameter>\n' for key, each in given.items()
        )
        invoked = f'<atem:invoke name="{name}">\n{"".join(pairs)}</atem:invoke>'
        said.append(f" to={name}<|message|><atem:function_calls>\n{invoked}\n</atem:function_calls>")
    return "<|eom|><|start|>assistant".join(said) + "<|eot|>"


MUSE_NOW = muse([NOW])
TAG = "]<]minimax[>["


def element(name: str, value: Any) -> str:
    inside = value if isinstance(value, str) else writers.as_json(value)
    if isinstance(value, list):
        inside = "".join(element("item", each) for each in value)
    return f"{TAG}<{name}>{inside}{TAG}</{name}>"


def minimax_m3(calls: list[Call]) -> str:
    said = (
        f'{TAG}<invoke name="{name}">{"".join(element(key, each) for key, each in given.items())}{TAG}</invoke>\n'
        for name, given in calls
    )
    return f"{TAG}<tool_call>\n{''.join(said)}{TAG}</tool_call>"


def order(inside: str) -> str:
    return f'{TAG}<tool_call>{TAG}<invoke name="weather">{inside}{TAG}</invoke>{TAG}</tool_call>'


MUSE_FORMAT = Format(
    lambda calls: "<|start|>assistant" + muse(calls),
    [
        Output(" to=user<|message|>done<|eot|>", [], "done"),
        Output(MUSE_NOW.removesuffix("<|eot|>"), [NOW]),
        Output(MUSE_NOW.replace("<|eot|>", "<|eom|><|start|>"), [NOW], "<|start|>"),
        Output(f" to=user<|message|>I look.<|eom|><|start|>assistant{MUSE_NOW}", [NOW], "I look."),
        # The name with the one of its tool, two calls in a message, and words of another format around a value.
        Output(MUSE_NOW.replace('"now"', '"now.now"'), [NOW]),
        Output(MUSE_NOW.replace('"now"', '"now.other"'), [("now.other", {})]),
        Output(
            ' to=x<|message|><atem:invoke name="weather"><atem:parameter name="city">A'
            '<atem:parameter name="n">5</atem:parameter></atem:invoke><atem:invoke name="now"></atem:invoke>'
            "<|eom|>",
            [("weather", {"city": "A", "n": 5}), NOW],
        ),
        # Calls that are quoted, a message to a tool without one, one that breaks off, and no message at all.
        Output(f" to=user{MUSE_NOW[7:]}", [], MUSE_NOW[18:-7]),
        Output(" to=now<|message|>a to=b<|eom|>", [], "a to=b"),
        Output(' to=now<|message|><atem:invoke name="now">\n<|eom|><|start|>assistant to=user<|message|>x', [NOW], "x"),
        Output(" to=self<|message|>Hm<|eom|>", [], " to=self<|message|>Hm<|eom|>"),
        Output(" to=now<|messa", [], " to=now<|messa"),
    ],
    [
        *("<|message|>", "<|start|>assistant", "<|eom|>", "<|eot|>", " to=f", " to=self", " to=user", "1"),
        *(MUSE_WORDS.section or ()),
        *('<atem:invoke name="f">', '<atem:parameter name="a">', "</atem:parameter>", "</atem:invoke>"),
    ],
)


ELEMENT_FORMATS: dict[str, Format] = {
    "muse_glimmer": MUSE_FORMAT._replace(odd=[*MUSE_FORMAT.odd, Output("<|message|>done", [], "done")]),
    "muse": MUSE_FORMAT._replace(
        odd=[
            *MUSE_FORMAT.odd,
            Output(" to=commentary<|message|>I look.<|eom|><|start|>assistant" + MUSE_NOW, [NOW], "I look."),
            Output("<|message|>Hm<|eom|>", [], "<|message|>Hm<|eom|>"),
            Output(" to=developer<|message|>Hm<|eom|>", [], " to=developer<|message|>Hm<|eom|>"),
        ]
    ),
    "musespark1x": MUSE_FORMAT,
    "kimi_k3": Format(
        kimi_k3,
        [
            Output(f"<|open|>response<|sep|>I look.<|close|>response<|sep|>{kimi_k3([PARIS])}", [PARIS], "I look."),
            Output(f"I look.<|close|>response<|sep|>{kimi_k3([NOW])}<|close|>message<|sep|>", [NOW], "I look."),
            Output(kimi_k3([("weather", {"city": "7", "n": 7})]), [("weather", {"city": "7", "n": 7})]),
            # The type that is written counts where the schema has none, and the schema where they disagree.
            Output(kimi_k3([("other", {"a": 7, "b": "7"})]), [("other", {"a": 7, "b": "7"})]),
            Output(kimi_k3([("weather", {"city": 7, "n": "7"})]), [("weather", {"city": "7", "n": 7})]),
            Output(
                '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="a &quot;b&quot; &amp;quot;" type="string"'
                "<|sep|>&amp;<|close|>argument<|sep|><|close|>call<|sep|>",
                [("f", {'a "b" &quot;': "&amp;"})],
            ),
            Output("<|open|>tools<|sep|>no", [], "<|open|>tools<|sep|>no"),
        ],
        [
            *("<|open|>", "<|close|>", "<|sep|>", "tools", 'call tool="', 'f" index="1"', "call", "argument", "1"),
            *('argument key="', 'a" type="string"'),
        ],
    ),
    "minicpm5": Format(
        minicpm5,
        [
            Output('<function name="weather"><param name="n">\n5\n</param></function>', [("weather", {"n": 5})]),
            Output(
                '<function name="weather"><param name="city"> <![CDATA[\n a</param></function>]]]>\n]]></param>'
                '<param name="n"><![CDATA[5]]></param></function>',
                [("weather", {"city": "\n a</param></function>]]]>\n", "n": 5})],
            ),
            Output(
                '<function name="weather"><param name="city">a]]></param></function>', [("weather", {"city": "a]]>"})]
            ),
            Output(
                '<function name="weather"><param name="properties">{\'n\': 5}</param></function>',
                [("weather", {"n": 5})],
            ),
            # References of XML stand for characters, but not in quotes, nor where they would break JSON.
            Output(
                '<function name="weather"><param name="city">a &lt; b &amp;amp; &#x43;&#68; &no; &#0; &</param>'
                "</function>"
                '<function name="weather"><param name="city"><![CDATA[&lt;]]></param></function>'
                '<function name="weather"><param name="days">["&lt;"]</param></function>'
                '<function name="weather"><param name="days">["&quot;"]</param></function>',
                [
                    ("weather", {"city": "a < b &amp; CD &no; &#0; &"}),
                    ("weather", {"city": "&lt;"}),
                    ("weather", {"days": ["<"]}),
                    ("weather", {"days": ["&quot;"]}),
                ],
            ),
            Output("<function name=now></function>", [], "<function name=now></function>"),
        ],
        [
            "&",
            "&lt;",
            "#65;",
            '<function name="f">',
            '<param name="',
            'a">',
            "<![CDATA[",
            "1",
            "]]>",
            "</param>",
            "</function>",
            "\n",
        ],
    ),
    "beam": Format(
        lambda calls: "<|start|>assistant" + beam(calls),
        [
            Output("<|channel|>final<|message|>done<|call|>", [], "done"),
            Output(BEAM_NOW.removesuffix("<|call|>"), [NOW]),
            Output(BEAM_NOW.replace("<|call|>", "<|end|><|start|>"), [NOW], "<|start|>"),
            Output("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + BEAM_NOW, [NOW], "I look."),
            # A value whose closing word is missing, and text that is no parameter.
            Output(
                ' to=weather<|channel|>analysis <|constrain|>xml<|message|><rfl:parameter name="city">\nA\n'
                '<rfl:parameter name="n">\n5<|call|>',
                [("weather", {"city": "A", "n": 5})],
            ),
            Output(" to=now<|channel|>analysis <|constrain|>xml<|message|>a to=b<|call|>", [NOW], "a to=b"),
            Output("<|channel|>analysis<|message|>Hm<|end|>", [], "<|channel|>analysis<|message|>Hm<|end|>"),
            Output(" to=now<|channel|>analysis <|constrain|>xml", [], " to=now<|channel|>analysis <|constrain|>xml"),
        ],
        [
            "<|channel|>analysis",
            " <|constrain|>xml",
            "<|message|>",
            "<|start|>assistant",
            "<|end|>",
            "<|call|>",
            " to=f",
            '<rfl:parameter name="a">\n',
            "1",
            "\n</rfl:parameter>",
        ],
    ),
    "minimax_m3": Format(
        minimax_m3,
        [
            Output(order(element("n", " 5 ") + element("days", "")), [("weather", {"n": 5, "days": []})]),
            Output(order(element("city", "\n a <b> ")), [("weather", {"city": "\n a <b> "})]),
            Output(order(element("days", "[1, 2]") + element("x", "{}")), [("weather", {"days": [1, 2], "x": {}})]),
            # What comes again is a list, and text between elements has a name of its own.
            Output(order(element("x", "a") * 2), [("weather", {"x": ["a", "a"]})]),
            Output(
                order(element("x", element("a", "1") + element("b", ""))), [("weather", {"x": {"a": "1", "b": ""}})]
            ),
            Output(
                order(element("x", f"a {element('$text', '')}")), [("weather", {"x": {"$text": "", "$$text": "a "}})]
            ),
            # Up to what is malformed, or too deep.
            Output(order(element("n", "5") + "no" + element("city", "A")), [("weather", {"n": 5})]),
            Output(order(f"{TAG}<n>5{TAG}</x>"), [("weather", {})]),
            Output(order(f"{TAG}<n>5"), [("weather", {})]),
            Output(order(f"{TAG}<a>" * 129 + f"{TAG}</a>" * 129), [("weather", {})]),
            Output(f'{TAG}<invoke name="now">{TAG}</invoke>', [NOW]),
            Output(f"{TAG}<tool_call>no", [], f"{TAG}<tool_call>no"),
        ],
        [TAG, "<tool_call>", '<invoke name="f">', "<a>", "1", "</a>", "</invoke>", "</tool_call>", "\n", "]<"],
    ),
}
