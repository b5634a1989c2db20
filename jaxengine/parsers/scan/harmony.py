"""Readers of messages in OpenAI's harmony format, which gpt-oss and Beam write, in Muse's, and in Inkling's.

In harmony a message has a channel and optionally a recipient:

  <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
  <|message|>{...}<|call|>

See https://cookbook.openai.com/articles/openai-harmony. Muse's messages have a recipient only, and other words end
them:

  to=self<|message|>...<|eom|><|start|>assistant to=user<|message|>...<|eot|>

Inkling's have a word of their kind, which only before a call follows a name, as parser/inkling.py of vLLM reads them:

  <|content_thinking|>...<|end_message|><|message_model|>f<|content_invoke_tool_json|>{...}<|end_message|>

This file splits the output into messages; tools.harmony, tools.messages and reasoning.harmony interpret them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import ClassVar

from jaxengine.parsers.scan.markers import Marker, Opening

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
# Words that end an answer. Without them some models would continue with an imagined result.
STOP_WORDS = (CALL, RETURN)
_MAX_HEADER = 512
_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."
_XML = f"{CONSTRAIN}xml"
# Tools of gpt-oss's own, which it addresses without the prefix of functions.
_OWN_TOOLS = ("python", "browser", "container")
_TO, SELF = "to=", "self"
_NAME_END = re.compile(r"$|[^A-Za-z0-9_.-]")


@dataclass(frozen=True, slots=True)
class Header:
    """Beginning of a message. text: the header as written, including <|message|>."""

    text: str

    @property
    def channel(self) -> str:
        """Name of the message's channel; "" for none."""
        found = _CHANNEL_NAME.search(self.text)
        return "" if found is None else found.group(1)

    @property
    def recipient(self) -> str:
        """Recipient of the message, which follows "to="; "" for none."""
        found = _RECIPIENT.search(self.text)
        return "" if found is None else found.group(1)

    @property
    def is_said(self) -> bool:
        """Whether the message is addressed to the user: its channel is not "analysis" and it has no recipient."""
        return self.channel != "analysis" and not self.recipient


class GlimmerHeader(Header):
    """Beginning of a message of Muse Glimmer, which has no channel.

    Attributes:
      readers: recipients of messages to the user, "" for none.
      thoughts: recipients of reasoning. Others are tools.
    """

    __slots__ = ()
    readers: ClassVar[tuple[str, ...]] = ("", "user")
    thoughts: ClassVar[tuple[str, ...]] = (SELF,)

    @property
    def is_said(self) -> bool:
        """Whether the message is addressed to the user: its recipient is in `readers`."""
        return self.recipient in self.readers

    @property
    def tool(self) -> str | None:
        """The tool that the message is addressed to; None for other messages."""
        return None if self.is_said or self.recipient in self.thoughts else self.recipient


class SparkHeader(GlimmerHeader):
    """Beginning of a message of Muse Spark, which speaks to the user in between, and to nobody in its reasoning."""

    __slots__ = ()
    readers = ("user", "commentary")
    thoughts = ("", SELF, "developer")


@dataclass(frozen=True)
class HarmonyWords:
    """Words of a format of messages.

    Attributes:
      begins: words that begin a message.
      ends: words that end one.
      header: class of the beginnings of messages.
      bare: whether a recipient before <|message|> begins a message inside another one, whose end is missing.
      joint: text between messages of one kind.
    """

    begins: tuple[str, ...] = (START, CHANNEL)
    ends: tuple[str, ...] = (END, CALL, RETURN)
    header: Callable[[str], Header] = Header
    bare: bool = False
    joint: str = "\n"


HARMONY = HarmonyWords()
EOM, EOT = "<|eom|>", "<|eot|>"
MUSE_GLIMMER = HarmonyWords((START,), (EOM, EOT), GlimmerHeader, bare=True, joint="")
MUSE = HarmonyWords((START,), (EOM, EOT), SparkHeader, bare=True, joint="")
MODEL, END_MESSAGE, END_SAMPLING = "<|message_model|>", "<|end_message|>", "<|content_model_end_sampling|>"
THINKING, TEXT, INVOKE = "<|content_thinking|>", "<|content_text|>", "<|content_invoke_tool_json|>"
_KINDS = (THINKING, TEXT, INVOKE, "<|content_invoke_tool_text|>", "<|content_tool_error|>")
_MAY_BE_NAME = re.compile(r"\s*[A-Za-z0-9_.-]*")


class InklingHeader(Header):
    """Beginning of a message of Inkling, which ends with the word of its kind; "" without one."""

    __slots__ = ()

    @property
    def is_said(self) -> bool:
        """Whether the message is addressed to the user: neither reasoning nor a call of a function."""
        return not self.text.endswith((THINKING, INVOKE))


# (header, names of the request's functions) -> name of the function that the message calls; None for other messages.
CalledFunction = Callable[[Header, Collection[str]], str | None]


def json_function(header: Header, functions: Collection[str]) -> str | None:
    """Return the name of the function that a message of gpt-oss calls, by its recipient; None for other messages.

    A recipient "functions.NAME" calls NAME, even if the request has no such function, unless NAME is empty or not
    printable. One without the prefix must be in `functions`, the names of the request's functions, and not be a
    built-in tool of gpt-oss.
    """
    recipient = header.recipient
    if recipient.startswith(_FUNCTIONS):
        name = recipient.removeprefix(_FUNCTIONS)
        return name if name and name.isprintable() else None
    return recipient if recipient in functions and recipient.partition(".")[0] not in _OWN_TOOLS else None


def xml_function(header: Header, functions: Collection[str]) -> str | None:
    """Return the name of the function that a message of Beam calls; None for other messages. Where the body is to be
    XML, the name is the recipient as it is, unless it is not printable; other messages are read as gpt-oss's.
    """
    if _XML not in header.text:
        return json_function(header, functions)
    return header.recipient if header.recipient and header.recipient.isprintable() else None


def recipient_function(header: Header, functions: Collection[str]) -> str | None:
    """Return the tool that a message of Muse is addressed to, whose functions its body names; None for other messages.
    functions: not used.
    """
    return header.tool if isinstance(header, GlimmerHeader) else None


def invoked_function(header: Header, functions: Collection[str]) -> str | None:
    """Return the header of a message of Inkling that calls a function, which its body names; None for other messages.
    functions: not used.
    """
    return header.text if header.text.endswith(INVOKE) else None


@dataclass(frozen=True, slots=True)
class Body:
    """Piece `text` of the current message's body."""

    text: str


@dataclass(frozen=True, slots=True)
class End:
    """End of the current message. word: the marker that ended it; "" if the next message or the end of the
    output did.
    """

    word: str = ""


@dataclass(frozen=True, slots=True)
class Outside:
    """Piece `text` outside of any message."""

    text: str


Part = Header | Body | End | Outside


class HarmonyReader:
    """Splitter of one output, fed in pieces of any size, into parts; adjacent parts of one kind are not merged. words:
    the format's. joint: see there.
    """

    def __init__(self, words: HarmonyWords = HARMONY) -> None:
        self._words, self.joint = words, words.joint
        self._parts: list[Part] = []
        self._opening = self._new_opening()
        self._begin = Marker(*words.begins)
        self._message = Marker(MESSAGE, *words.ends)
        self._end = Marker(*words.ends, *words.begins, *((_TO,) if words.bare else ()))
        self._mark = ""  # beginning of <|message|> after a recipient in a body
        self._header: list[str] = []
        self._room = 0
        self._state = self._first

    def feed(self, text: str) -> list[Part]:
        """Read a piece of the output; return the parts that are certain, once."""
        at = 0
        while at < len(text):
            at = self._state(text, at)
        return self._take()

    def finish(self) -> list[Part]:
        """End the output; return the parts of text that was held back. An incomplete header becomes Outside. An open
        body gets its held text and an End.
        """
        if self._state == self._first:
            self._outside(self._opening.held)
        elif self._state == self._between:
            self._outside(self._begin.take())
        elif self._state == self._in_header:
            self._outside("".join(self._header) + self._message.take())
        else:
            is_bare = self._state == self._in_recipient
            self._body("".join([_TO, *self._header, self._mark]) if is_bare else self._end.take())
            self._parts.append(End())
        return self._take()

    def _take(self) -> list[Part]:
        """Return the parts since the last call of this method, and forget them."""
        parts, self._parts = self._parts, []
        return parts

    def _new_opening(self) -> Opening:
        """Return a search for the words with which an output may begin if the prompt already ends in
        <|start|>assistant: those that begin a message, <|message|>, "to=" and, if messages have channels,
        <|constrain|>.
        """
        constrain = (CONSTRAIN,) if CHANNEL in self._words.begins else ()
        return Opening(*self._words.begins, *constrain, MESSAGE, _TO)

    def _first(self, text: str, at: int) -> int:
        """Process text at the output's start or after a message, where a message may begin without <|start|>; the state
        may change.

        Reads `text` from `at`; returns the index after what it read.
        """
        at, found = self._opening.read(text, at)
        if found is None:
            return at
        held, self._opening = self._opening.held, self._new_opening()
        if found:
            self._open(held)
        else:
            self._state = self._between
            # The held text may begin a message in another way.
            self._between(held, 0)
        return at

    def _between(self, text: str, at: int) -> int:
        """Process text between messages: text up to the next message becomes Outside, and the word opens a header.
        Reads `text` from `at`; returns the index after what it read.
        """
        plain, at, word = self._begin.read(text, at)
        self._outside(plain)
        if word:
            self._open(word)
        return at

    def _open(self, word: str) -> None:
        """Enter a header that begins with `word`. A word that ends in <|message|> is a complete header, and its body
        begins.
        """
        self._header, self._room, self._state = [word], _MAX_HEADER, self._in_header
        if word.endswith(MESSAGE):
            self._close_header()

    def _close_header(self) -> None:
        """Append a Header of the text read, and enter the body."""
        self._parts.append(self._words.header("".join(self._header)))
        self._state = self._in_body

    def _in_header(self, text: str, at: int) -> int:
        """Process text of a header, up to <|message|>. A header that another marker ends, or that exceeds _MAX_HEADER
        characters, becomes Outside. Reads `text` from `at`; returns the index after what it read.
        """
        plain, read, word = self._message.read(text[at : at + self._room], 0)
        self._header += [plain, word]
        self._room -= read
        if word == MESSAGE:
            self._close_header()
        elif word or not self._room:
            self._outside("".join(self._header))
            self._state = self._first if word else self._between
            if not word:  # the held text may begin another one
                self._between(self._message.take(), 0)
        return at + read

    def _in_body(self, text: str, at: int) -> int:
        """Process text of a body, up to a word that ends the message (an End with the word), begins the next one (an
        End without), or is "to=", which `_in_recipient` judges. Reads `text` from `at`; returns the index after what it
        read.
        """
        plain, at, word = self._end.read(text, at)
        self._body(plain)
        if word in self._words.begins:
            self._parts.append(End())
            self._open(word)
        elif word == _TO:
            self._header, self._room, self._mark, self._state = [], _MAX_HEADER, "", self._in_recipient
        elif word:
            self._parts.append(End(word))
            self._state = self._first
        return at

    def _in_recipient(self, text: str, at: int) -> int:
        """Process text of a body after "to=", which begins the next message if a name and <|message|> follow, and is
        part of the body otherwise. Reads `text` from `at`; returns the index after what it read.
        """
        if not self._mark:
            end = _NAME_END.search(text, at, at + self._room)
            assert end is not None  # $ is always found
            name = text[at : end.start()]
            self._header.append(name)
            self._room -= len(name)
            at += len(name)
        name = "".join(self._header)
        while at < len(text) and name and self._room and MESSAGE.startswith(self._mark + text[at]):
            self._mark += text[at]
            at += 1
            if self._mark == MESSAGE:
                self._parts.append(End())
                self._open(f"{_TO}{name}{MESSAGE}")
                return at
        if at < len(text):
            self._state = self._in_body
            self._body(_TO)
            self._in_body(name + self._mark, 0)  # has no whole word
        return at

    def _body(self, text: str) -> None:
        """Add a piece of the body, unless it is empty."""
        if text:
            self._parts.append(Body(text))

    def _outside(self, text: str) -> None:
        """Add text outside of messages, unless it is empty."""
        if text:
            self._parts.append(Outside(text))


class InklingReader:
    """Splitter of one output of Inkling, fed in pieces of any size, into parts, as HarmonyReader; no text is Outside.

    The prompt ends in <|message_model|>, so the output begins inside a header. Text that is no function's name before a
    call is a message to the user without a word of its kind, which the model may leave out if it does not reason.
    """

    joint = ""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._word = Marker(MODEL, *_KINDS, END_MESSAGE, END_SAMPLING)
        # A header so far: MODEL, or "" at the output's start, and text that may be a name; whether a body is open.
        self._begin, self._name, self._is_open = "", "", False

    def feed(self, text: str) -> list[Part]:
        """Read a piece of the output; return the parts that are certain, once."""
        at = 0
        while at < len(text):
            plain, at, word = self._word.read(text, at)
            self._add(plain)
            if word in _KINDS:
                if self._is_open:
                    self._end("")
                self._parts.append(InklingHeader(f"{self._begin}{self._name}{word}"))
                self._is_open = True
            elif word:
                self._end("" if word == MODEL else word)
        return self._take()

    def finish(self) -> list[Part]:
        """End the output; return the parts of text that was held back, with an End."""
        self._add(self._word.take())
        self._end("")
        return self._take()

    def _take(self) -> list[Part]:
        """Return the parts since the last call of this method, and forget them."""
        parts, self._parts = self._parts, []
        return parts

    def _add(self, text: str, *, is_name: bool = True) -> None:
        """Add a piece of a body, or of a header, where it is held back as long as it may be a name, if `is_name`."""
        if not self._is_open:
            text = self._name = self._name + text
            if not text or is_name and len(text) <= _MAX_HEADER and _MAY_BE_NAME.fullmatch(text):
                return
            self._parts.append(InklingHeader(""))
            self._is_open = True
        self._parts += [Body(text)] if text else []

    def _end(self, word: str) -> None:
        """End the current message, if any of it has come, and enter the next header. word: see End."""
        self._add("", is_name=False)
        if self._is_open:
            self._parts.append(End(word))
        # Even if the model leaves MODEL out: content before a call is no part of the name.
        self._begin, self._name, self._is_open = MODEL, "", False


MessageReader = HarmonyReader | InklingReader
