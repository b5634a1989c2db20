"""Names that GGUF files give to the splitting of texts before byte-pair encoding, and the splitting that each name
means.

A GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`) by a name of llama.cpp, whose implementation is code
(src/llama-vocab.cpp, convert_hf_to_gguf_update.py). A row here has the regular expressions of the tokenizer.json that
the name stands for. llama.cpp's differ where its regular expressions are less expressive: it takes only ASCII letters
as upper or lower case (gpt-4o, tekken and similar) and supports no marks there, composes no accents (Qwen, Command R,
OLMo), and keeps runs of digits together that the tokenizer.json splits (DeepSeek LLM, Falcon). Where no tokenizer.json
is known to differ, a row follows llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from tokenizers import Regex, normalizers, pre_tokenizers

# Stands between expressions: those after it see the bytes of the text, spelt as by GPT-2.
BYTES = ""

_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SYMBOLS_PATH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_LINES, _BLANKS = r"\s*[\r\n]+", r"\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _either(*patterns: str) -> str:
    """Return a regular expression that matches any of the patterns, the first ones preferred."""
    return "|".join(patterns)


def _cased(suffix: str, upper: str = f"[{_UPPER}]", lower: str = f"[{_LOWER}]") -> str:
    """Return a regular expression for words that end where a small letter is followed by a capital one. suffix:
    expression for what may follow a word. upper, lower: expressions for one letter of each case.
    """
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{upper}*{lower}+{suffix}|{start}{upper}+{lower}*{suffix}"


DIGIT = r"\p{N}"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = _either(_SUFFIX, _WORD, r"\p{N}{1,3}", _SYMBOLS, _LINES, _BLANKS)
QWEN2 = _either(_SUFFIX, _WORD, DIGIT, _SYMBOLS, _LINES, _BLANKS)
QWEN35 = _either(_SUFFIX, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", DIGIT, r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _LINES, _BLANKS)
GPT4O = _either(_cased(f"{_SUFFIX}?"), r"\p{N}{1,3}", _SYMBOLS_PATH, _LINES, _BLANKS)
TEKKEN = _either(_cased(""), DIGIT, _SYMBOLS_PATH, _LINES, _BLANKS)
KIMI = _either(
    r"[\p{Han}]+",
    _cased(f"{_SUFFIX}?", rf"[{_UPPER}&&[^\p{{Han}}]]", rf"[{_LOWER}&&[^\p{{Han}}]]"),
    r"\p{N}{1,3}",
    _SYMBOLS,
    _LINES,
    _BLANKS,
)
_ASCII_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_MARKED_WORD = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
DEEPSEEK3_WORDS = _either(_ASCII_WORD, _MARKED_WORD, r" ?[\p{P}\p{S}]+[\r\n]*", _LINES, _BLANKS)
SPARK_WORDS = _either(_ASCII_WORD, _MARKED_WORD, r" ?[\p{P}\p{S}]+", r"[\r\n]", _BLANKS)
DEEPSEEK3_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters with case, as the tokenizer.json of DeepSeek LLM lists them.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_YOUTU_CJK = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    "\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_AFMOE_CJK = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
# Longer runs of digits are cut from the left first: expressions that group digits from the right look at the whole run
# for each group.
_LONG_RUN = r"\p{N}{1200}"
# Digits in threes from the right.
_THREES = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_JAIS2_BLANKS = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s"


class Splitting(NamedTuple):
    """Splitting of a text before byte-pair encoding.

    Attributes:
      patterns: regular expressions, applied in order; each splits every piece into its matches and the text between
        them. BYTES stands for the step that spells pieces as bytes.
      composes: whether texts are first composed (NFC).
      ignore_merges: whether a piece that is a token becomes this token regardless of the merges.
      adds_bos: whether texts begin with BOS unless the file says otherwise.
      spells_bytes: whether pieces are spelt as bytes; otherwise they keep their characters, with spaces as U+2581 and
        unknown bytes as tokens like <0x0A>.
    """

    patterns: tuple[str, ...]
    composes: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False
    spells_bytes: bool = True

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Return a pre-tokenizer that performs this splitting."""
        return pre_tokenizers.Sequence(list(self._steps()))

    def normalizer(self) -> normalizers.Normalizer | None:
        """Return the normalizer of texts before they are split: spaces to U+2581 unless spells_bytes, otherwise NFC if
        `composes`, otherwise None.
        """
        if not self.spells_bytes:
            return normalizers.Replace(" ", "\u2581")
        return normalizers.NFC() if self.composes else None

    def _steps(self) -> Iterator[Any]:
        """Yield the pre-tokenizers in order. With spells_bytes, the one that spells bytes stands where `patterns` has
        BYTES, otherwise last.
        """
        spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        for pattern in self.patterns:
            yield spell if pattern == BYTES else pre_tokenizers.Split(Regex(pattern), "isolated")
        if self.spells_bytes and BYTES not in self.patterns:
            yield spell


_ROWS: dict[str, Splitting] = {
    "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe gigachat a.x-4.0 mellum "
    "exaone4 jais trillion granite-docling": Splitting((GPT2,)),
    "mpt olmo modern-bert": Splitting((GPT2,), composes=True),
    "smollm starcoder refact codeshell exaone minerva-7b mellum2": Splitting((DIGIT, GPT2)),
    "command-r": Splitting((DIGIT, GPT2), composes=True),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": Splitting(
        (LLAMA3,), ignore_merges=True, adds_bos=True
    ),
    "dbrx smaug-bpe glm4 chatglm-bpe": Splitting((LLAMA3,)),
    "qwen2 deepseek-r1-qwen f2llmv2 hunyuan": Splitting((QWEN2,), composes=True),
    # Ling's tokenizers (bailingmoe) have an equivalent expression.
    "kormo megrez stablelm2 solar-open grok-2 bailingmoe bailingmoe2 llada-moe": Splitting((QWEN2,)),
    "qwen35": Splitting((QWEN35,), composes=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": Splitting((GPT4O,)),
    "granite-embed-multi-97m": Splitting((GPT4O,), ignore_merges=True),
    "tekken": Splitting((TEKKEN,), ignore_merges=True, adds_bos=True),
    "kimi-k2 kimi-k25": Splitting((KIMI,), ignore_merges=True),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": Splitting((r"\p{N}{1,3}", DEEPSEEK3_CJK, DEEPSEEK3_WORDS)),
    "spark2_5": Splitting((r"\p{N}{1,3}", DEEPSEEK3_CJK, SPARK_WORDS, DIGIT)),
    "deepseek-llm": Splitting(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"(?<!\s)\s+$",  # the published \s+$ is tried at each blank of a run
            DEEPSEEK_CJK,
            DIGIT,
        )
    ),
    "deepseek-coder": Splitting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CJK, DIGIT)),
    "falcon": Splitting((r"[\p{P}$+<=>^`|~]+", GPT2, BYTES, r"\p{N}+", "[0-9][0-9][0-9]")),
    "bloom gpt3-finnish poro-chat": Splitting((BLOOM,)),
    "viking": Splitting((BLOOM, DIGIT)),
    "jais-2": Splitting((_either(_SUFFIX, _WORD, r"\p{N}{1,3}", _SYMBOLS, _LINES, _JAIS2_BLANKS),)),
    "minicpm5": Splitting(
        (r"\p{N}{1,3}", _either(_SUFFIX, _WORD, r"\p{N}+", _SYMBOLS, _LINES, _BLANKS)), ignore_merges=True
    ),
    "seed-coder": Splitting((_either(_SUFFIX, _WORD, DIGIT, r" ?[^\s\p{L}\p{N}\r\n]+", _LINES, _BLANKS),)),
    "ufakzeka": Splitting((_either(_WORD, DIGIT, _SYMBOLS, _LINES, _BLANKS),)),
    "laguna": Splitting((r"[^\n]+|[\n]+", QWEN2)),
    "youtu": Splitting(
        (_YOUTU_CJK, _either(_cased(f"{_SUFFIX}?"), DIGIT, _SYMBOLS_PATH, _LINES, _BLANKS)), ignore_merges=True
    ),
    "tiny_aya cohere2moe": Splitting((_LONG_RUN, r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O)),
    "superbpe": Splitting((r"\p{N}+", _LONG_RUN, r"(?=(\d{3})+(?!\d))")),
    "afmoe": Splitting((_LONG_RUN, _THREES, _AFMOE_CJK, DEEPSEEK3_WORDS)),
    "exaone-moe": Splitting(
        (
            _either(
                _SUFFIX,
                r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
                DIGIT,
                r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
                r"\s*[\r\n]",
                _BLANKS,
            ),
        )
    ),
    "chameleon": Splitting(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            DIGIT,
            r"[\p{P}!-/:-@\[-`{-~]",
            GPT2,
        ),
        adds_bos=True,
    ),
    "gemma4 granite-embed-multi-311m": Splitting(
        (r"[^\n]+|[\n]+",), ignore_merges=True, adds_bos=True, spells_bytes=False
    ),
    "sarvam-moe": Splitting((r"[^\n]+|[\n]+",), ignore_merges=True, spells_bytes=False),
    # Used for files that name no pre-tokenizer.
    "default": Splitting((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
# By name.
SPLITTINGS: dict[str, Splitting] = {name: row for names, row in _ROWS.items() for name in names.split()}
