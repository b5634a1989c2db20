"""Splittings by name, against the published regular expressions run by another engine (the `regex` package).

The expressions are written out whole, as the models' tokenizer.json files have them or, where those are not known, as
llama.cpp has them (src/llama-vocab.cpp). They are applied as both do: each expression splits every piece that the
former ones left.
"""

from __future__ import annotations

import random
import time
import unicodedata
from functools import cache
from typing import Any

import pytest
import regex
from tokenizers import pre_tokenizers

from jaxengine.tokens.vocabularies.splits import SPLITTINGS, Splitting

NUM_TEXTS = 1000
GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPARK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]"
    r"|\s+(?!\S)|\s+"
)
CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
WIDE = "[一-龥\u0800-一가-\ud7ff]+"
BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
# Expressions by names, in the order in which they apply.
EXPRESSIONS: dict[str, tuple[str, ...]] = {
    "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe gigachat a.x-4.0 mellum "
    "exaone4 jais trillion granite-docling mpt olmo modern-bert": (GPT2,),
    "smollm starcoder refact codeshell exaone minerva-7b mellum2 command-r": (r"\p{N}", GPT2),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe glm4 chatglm-bpe": (
        LLAMA3,
    ),
    "qwen2 deepseek-r1-qwen f2llmv2 hunyuan kormo megrez stablelm2 solar-open grok-2": (QWEN2,),
    "qwen35": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m": (GPT4O,),
    "tekken": (TEKKEN,),
    "kimi-k2 kimi-k25": (KIMI,),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": (r"\p{N}{1,3}", CJK, DEEPSEEK3),
    "spark2_5": (r"\p{N}{1,3}", CJK, SPARK, r"\p{N}"),
    # Letters with case, but for some scripts that the texts below do not have.
    "deepseek-llm": (
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
        r"\s+$",
        WIDE,
        r"\p{N}",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", WIDE, r"\p{N}"),
    "bloom gpt3-finnish poro-chat": (BLOOM,),
    "viking": (BLOOM, r"\p{N}"),
    "jais-2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)"
        r"|\s{1,2}(?!\S)|\s{1}",
    ),
    "minicpm5": (
        r"\p{N}{1,3}",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    ),
    "bailingmoe bailingmoe2 llada-moe": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "seed-coder": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    ),
    "ufakzeka": (r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",),
    "laguna": (r"[^\n]+|[\n]+", QWEN2),
    "youtu": (
        "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+",
        GPT4O.replace(r"\p{N}{1,3}", r"\p{N}"),
    ),
    # The end is \b there, and a half is a character of words in Oniguruma, which Hugging Face's tokenizers have.
    "tiny_aya cohere2moe": (r"\d{1,3}(?=(?:\d{3})*(?![\w\p{N}]))", GPT4O),
    "exaone-moe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "chameleon": (
        r"<sentinel:[0-9]+>",
        r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        r"([\t\n]|    |  )",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        GPT2,
    ),
    "gemma4 granite-embed-multi-311m sarvam-moe": (r"[^\n]+|[\n]+",),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
# These group digits from the right or split within the spelling of characters, which is written out in Python.
BY_HAND = ("superbpe", "afmoe", "falcon")
AFMOE_CJK = (
    "[一-鿿㐀-䶿\uf900-\ufaff\u3040-ゟ゠-ヿ･-\uff9f⼀-\u2fdfเ-\u0e7f\u0e80-\u0effក-\u17ff\u1000-႟ꩠ-ꩿꧠ-\ua9ff"
    "가-\ud7afᄀ-ᇿ]+"
)
ATOMS = (
    *("Hello world", "don't", "WE'LL", "it'S", "camelCaseXMLParser", "def f(x):", "return x**2", "a != b"),
    *("// x", "<p>"),
    *("你好世界", "日本語テキスト", "ひらがな", "カタカナ", "한국어", "ㄱㄴ", "ㄅㄆ", "，。", "：；", "“q”"),
    *("…—", "～！"),
    *("Привет МИР", "Ёлка", "ΑΒΓδε", "Ǆǅǆ", "العربية", "हिन्दी", "বাংলা", "ไทย", "ខ្មែរ", "မြန်မာ", "עברית", "ʰˢ"),
    *("e\u0301", "n\u0303o", "a\u0308\u0301", "\u0301", "ﬁ", "ß", "İi", "Å", "naïve café", "\u093f"),
    *("🦄🎉", "👩\u200d👩\u200d👧", "🇩🇪", "☃\ufe0f", "1️⃣", "$", "€", "+-=", "`t`", "^~|", "_x_", "@#%&", "\\n", "a/b/c"),
    *("1", "12", "123", "1234", "1234567", "3.14159", "1,000", "١٢٣", "１２３４", "½²Ⅷ", "0x1F", "2024-01-02"),
    *(" ", "  ", "    ", "\t", "\n", "\n\n", "\r\n", "\r", "\u00a0", "\u3000", "\u2003 ", "\u200b", "\u2028"),
    *(" \n ", "\x0b"),
    *("<sentinel:12>", "IMGIMGABCZ", "/\n", "!\n\n", "...\r\n", "'", "''s", "’s", "x'Re", "\x00", "\x7f", "\ufeff"),
)  # fmt: skip


@cache
def texts() -> list[str]:
    rng = random.Random(20261126)
    joints = ("", "", " ", "\n")
    return [
        "".join(rng.choice(ATOMS) + rng.choice(joints) for _ in range(rng.randint(1, 12))) for _ in range(NUM_TEXTS)
    ]


def split(pieces: list[str], pattern: str) -> list[str]:
    """Matches of an expression in each piece, and what lies between."""
    compiled = regex.compile(pattern, regex.V1)
    found = []
    for piece in pieces:
        end = 0
        for match in compiled.finditer(piece):
            found += [piece[end : match.start()], match[0]]
            end = match.end()
        found.append(piece[end:])
    return [piece for piece in found if piece]


@cache
def parts_of(row: Splitting) -> tuple[Any, Any]:
    return row.normalizer(), row.pre_tokenizer()  # whose expressions take long to compile


def pieces_of(name: str, text: str) -> list[str]:
    """What our splitting makes of a text."""
    normalizer, pre_tokenizer = parts_of(SPLITTINGS[name])
    text = text if normalizer is None else normalizer.normalize_str(text)
    return [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]


@cache
def spelling() -> dict[int, str]:
    """How GPT-2 spells bytes, by the table of its encoder.py."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return dict(zip(shown + hidden, [*map(chr, shown), *(chr(256 + at) for at in range(len(hidden)))], strict=True))


def spelt(text: str) -> str:
    return "".join(map(spelling().__getitem__, text.encode()))


def in_threes(text: str, digits: str) -> list[str]:
    """A text cut where three, six, ... digits are left of a run of `digits`, and nowhere else."""
    cuts = {0, len(text)}
    for run in regex.finditer(digits, text):
        cuts.update(range(run.end() - 3, run.start() - 1, -3))
    return [text[start:end] for start, end in zip(sorted(cuts), sorted(cuts)[1:], strict=False)]


def by_hand(name: str, text: str) -> list[str]:
    if name == "falcon":
        marks = "$+<=>^`|~"
        pieces, was = [], None
        for char in text:
            is_mark = unicodedata.category(char).startswith("P") or char in marks
            pieces[-1:] = [pieces[-1] + char] if is_mark == was else [*pieces[-1:], char]
            was = is_mark
        spelling = [spelt(piece) for piece in split(pieces, GPT2)]
        return split(split(spelling, r"\p{N}+"), "[0-9][0-9][0-9]")
    pieces = split([text], r"\p{N}+")
    pieces = [part for piece in pieces for part in in_threes(piece, r"\d+" if name == "superbpe" else r"\p{N}+")]
    if name == "afmoe":
        pieces = split(split(pieces, AFMOE_CJK), DEEPSEEK3)
    return [*map(spelt, pieces)]


@pytest.mark.parametrize("names", EXPRESSIONS, ids=lambda names: names.split()[0])
def test_pieces_are_those_of_the_published_expressions(names):
    rows = {SPLITTINGS[name]: name for name in names.split()}
    for row, name in rows.items():
        for text in texts() if row == SPLITTINGS[names.split()[0]] else texts()[:200]:
            given = unicodedata.normalize("NFC", text) if row.composes else text
            expected = [given if row.spells_bytes else given.replace(" ", "\u2581")]
            for pattern in EXPRESSIONS[names]:
                expected = split(expected, pattern)
            assert pieces_of(name, text) == [spelt(each) if row.spells_bytes else each for each in expected], repr(text)


@pytest.mark.parametrize("name", BY_HAND)
def test_pieces_of_splittings_that_are_written_out(name):
    for text in texts():
        assert pieces_of(name, text) == by_hand(name, text), repr(text)


def test_every_name_is_tested():
    assert {name for names in EXPRESSIONS for name in names.split()} | set(BY_HAND) == SPLITTINGS.keys()
    assert len(SPLITTINGS) >= 40


def test_the_texts_tell_the_splittings_apart():
    rows = {(row.patterns, row.composes, row.spells_bytes): name for name, row in SPLITTINGS.items()}
    shown = {tuple(tuple(pieces_of(name, text)) for text in texts()) for name in rows.values()}
    assert len(shown) == len(rows)


@pytest.mark.parametrize("name", ["superbpe", "afmoe", "tiny_aya"])
def test_long_numbers_take_time_by_their_length(name):
    """Their expressions alone take ten times as long for these; and up to 1,200 digits are grouped as they say."""
    start = time.process_time()
    assert pieces_of(name, "7" * 36_000) == ["777"] * 12_000
    assert time.process_time() - start < 5
    assert pieces_of(name, "1" + "7" * 999) == ["1"] + ["777"] * 333


def test_long_runs_of_blanks_take_time_by_their_length():
    """DeepSeek LLM's expression for blanks at the end alone takes ten times as long."""
    start = time.process_time()
    assert pieces_of("deepseek-llm", " " * 40_000 + "\u4e2d") == ["\u0120" * 40_000, "\u00e4\u00b8\u0143"]
    assert time.process_time() - start < 3


def test_spelling_is_that_of_the_library():
    assert set(pre_tokenizers.ByteLevel.alphabet()) >= set(spelt("".join(ATOMS)))
