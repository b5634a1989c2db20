"""Tokenizer over the `tokenizers` library: text to token ids and back, and chat messages to text.

It is read from GGUF metadata or a Hugging Face folder. Nothing is downloaded and no code of a model folder is run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
import tokenizers.decoders

from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.files import AUTO, MISTRAL
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.tokens.chat_template import ROLE_TOKENS, USUAL, Dialect, render_chat
from jaxengine.tokens.gguf_tokenizer import build_tokenizer, chat_template_of, special_tokens
from jaxengine.tokens.hf_tokenizer import TOKENIZER, own_template, read_hf_tokenizer, turn_ends
from jaxengine.tokens.mistral.dialect import MistralDialect, leave_out_guards
from jaxengine.tokens.mistral.files import mistral_file, read_mistral_file
from jaxengine.tokens.rust_errors import is_panic, rust_errors
from jaxengine.tokens.special_tokens import SpecialTokens
from jaxengine.tokens.template_end import template_end
from jaxengine.tokens.template_renderer import TemplateRenderer
from jaxengine.tokens.vocabularies.byte_pairs import CHAR_OF_BYTE

if TYPE_CHECKING:
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast


_BYTE_OF_CHAR = {char: byte for byte, char in CHAR_OF_BYTE.items()}
_SURROGATE = re.compile("[\ud800-\udfff]")
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """Tokenizer with its vocabulary, special tokens and chat template. Thread-safe.

    Attributes:
      backend: the underlying `tokenizers.Tokenizer`; must not be changed.
      bos_token_id, eos_token_id, unk_token_id, pad_token_id: ids of special tokens; None for one that does not exist.
      eos_token_ids: all ids that end an answer, eos_token_id first.
      all_special_ids: ids of the tokens that `decode` leaves out.
      added_token_ids: ids of tokens that are matched in text before it is split, including the special ones.
      added_words: texts of these tokens.
      vocab_size: number of ids, including added tokens; also len().
      lowers: whether texts are lower-cased before they are tokenized.
      is_byte_level: whether every token is a run of bytes of the text, see `token_bytes`.
      chat_template: Jinja source, {name: source} for a model with several, or None.
      content_format: what the template gets as contents, see content_format.with_contents; "auto" unless it is set.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special: SpecialTokens,
        chat_template: str | dict[str, str] | None = None,
        folder: Path | None = None,
        lowers: bool = False,
        dialect: Dialect = USUAL,
    ):
        """Create a tokenizer on `backend`, whose truncation and padding are switched off.

        special: ids of special tokens. chat_template: source, sources by name, or None for a model without one. folder:
        the Hugging Face folder whose tokenizer.json was read, or None. lowers: whether texts are lower-cased before
        tokenization. dialect: what is done to messages before the template writes them.
        """
        # A tokenizer.json may contain truncation and padding settings of the training.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.bos_token_id, self.eos_token_id = special.bos, special.eos
        self.unk_token_id, self.pad_token_id = special.unk, special.pad
        first = () if special.eos is None else (special.eos,)
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(first + special.turn_ends))
        self.chat_template = chat_template
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.all_special_ids: frozenset[int] = frozenset(number for number, token in added.items() if token.special)
        self.added_token_ids: frozenset[int] = frozenset(added)
        self.added_words: tuple[str, ...] = tuple(token.content for token in added.values())
        self.is_byte_level = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
        self._token_bytes: dict[int, bytes] = {}
        self._folder, self.lowers = folder, lowers
        self.dialect = dialect
        self.content_format = "auto"
        self._renderer = TemplateRenderer()

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], *, path: str = "GGUF metadata") -> Tokenizer:
        """Return the tokenizer that a GGUF file's `tokenizer.*` metadata describes. path: name of the file in errors.
        Raises ModelFileError for invalid metadata.

        Such files seldom name every token that ends an answer, so the one that the chat template writes, found by
        rendering it, is added to eos_token_ids.
        """
        with rust_errors(path):
            tokenizer = cls(
                build_tokenizer(metadata, path), special_tokens(metadata, path), chat_template_of(metadata, path)
            )
        if (end := template_end(tokenizer)) is not None and end not in tokenizer.eos_token_ids:
            tokenizer.eos_token_ids += (end,)
        return tokenizer

    @classmethod
    def from_hf_folder(cls, path: str | os.PathLike[str], *, lowers: bool = False, mode: str = AUTO) -> Tokenizer:
        """Return the tokenizer in the folder `path`: its tokenizer.json, or a vocabulary alone, and related files (see
        hf_tokenizer), or Mistral AI's own file.

        lowers: whether texts are lower-cased before tokenization. mode: a value of tokenizer_mode; with AUTO, Mistral
        AI's file is used without a tokenizer.json, and for the chat template if no other file has one. Raises
        ModelFileError for missing or invalid files.
        """
        folder = Path(path)
        with rust_errors(path):
            has_file = (folder / TOKENIZER).is_file()
            own = mistral_file(folder) if mode in (AUTO, MISTRAL) else None
            if mode == MISTRAL and own is None:
                raise ModelFileError(
                    folder, "has no tekken.json or tokenizer.model.v3: tokenizer_mode mistral reads one"
                )
            if own is not None and (mode == MISTRAL or not has_file):
                backend, ids, form = read_mistral_file(folder, own)
                special = SpecialTokens(**ids, turn_ends=turn_ends(backend, folder))
                dialect = MistralDialect(backend, form)
                return cls(backend, special, own_template(folder) or form.template(), None, lowers, dialect)
            backend, special, template = read_hf_tokenizer(folder)
            dialect: Dialect = USUAL
            if template is None and own is not None:
                form = read_mistral_file(folder, own).form
                leave_out_guards(backend)
                template, dialect = form.template(), MistralDialect(backend, form)
            return cls(backend, special, template, folder if has_file else None, lowers, dialect)

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Special tokens written in the text become their ids. add_special_tokens:
        whether to add BOS and EOS as the model defines.

        Raises RequestError(param="prompt") for a value that is not a text, for invalid Unicode, and if the tokenizer
        fails.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of several texts, encoded in parallel. Special tokens in a text become their ids.
        add_special_tokens: whether to add BOS and EOS. Raises RequestError(param="prompt") for a value that is not a
        text, for invalid Unicode, and if the tokenizer fails.
        """
        return [encoding.ids for encoding in self._encodings(texts, add_special_tokens)]

    def encode_pair(self, text: str, other: str, type_step: int) -> list[int]:
        """Return the token ids of two texts as one prompt, joined by the special tokens that the tokenizer has for a
        pair. The type n that the tokenizer gives to each token is added to its id as n * type_step. Raises
        RequestError(param="prompt") under the same conditions as `encode`.
        """
        (encoding,) = self._encodings([(text, other)], True)
        return [token + kind * type_step for token, kind in zip(encoding.ids, encoding.type_ids, strict=True)]

    def places(self, text: str, add_special_tokens: bool = True) -> tuple[list[int], list[tuple[int, int]] | None]:
        """Return the token ids of `encode` and for each token the numbers of its first character in the text and of the
        one after it, (0, 0) for a special token that was added; None instead of these if lower-casing (`lowers`)
        changes the number of characters. Raises RequestError(param="prompt") under the same conditions as `encode`.
        """
        (encoding,) = self._encodings([text], add_special_tokens, offsets=True)
        moved = self.lowers and len(text.lower()) != len(text)
        return encoding.ids, None if moved else encoding.offsets

    def beginning(self, text: str, count: int) -> str:
        """Return a beginning of `text` that has at most `count` tokens without special ones, cut before the character
        that the next token is of; all of the text if it has no more. Lower-cased if `lowers`. count: at least 1. Raises
        RequestError (param="prompt") under the same conditions as `encode`.
        """
        if self.lowers:  # offsets are those of the lower-cased text, which may have more characters
            text = text.lower()
        while True:
            (encoding,) = self._encodings([text], False, offsets=True)
            if len(encoding) <= count:
                return text
            # Single tokens' places: a list of all of them would take a second for a long text.
            (_, end), (begin, _) = (encoding.token_to_chars(at) or (0, 0) for at in (count - 1, count))
            # Shorter each time, whatever the tokenizer says.
            text = text[: min(end, begin, len(text) - 1)]

    def _encodings(
        self, inputs: Sequence[str | tuple[str, str]], special: bool, *, offsets: bool = False
    ) -> list[tokenizers.Encoding]:
        """Return the encodings of texts, or of pairs of texts, computed in parallel and lower-cased first if `lowers`.
        special: whether to add special tokens. offsets: whether encodings have their tokens' places in the text.

        Raises RequestError(param="prompt") for a value that is not a text, for invalid Unicode, and if the tokenizer's
        code panics; its other errors propagate.
        """
        texts = [text for each in inputs for text in (each if isinstance(each, tuple) else (each,))]
        for text in texts:
            if not isinstance(text, str):
                raise RequestError(f"a prompt must be a text, got {type(text).__name__}", param="prompt", value=text)
        if self.lowers:
            inputs = [
                (each[0].lower(), each[1].lower()) if isinstance(each, tuple) else each.lower() for each in inputs
            ]
        try:
            encode = self.backend.encode_batch if offsets else self.backend.encode_batch_fast
            return encode(list(inputs), add_special_tokens=special)
        except (UnicodeError, TypeError):
            # A lone surrogate, as in json.loads('"\\ud800"'), is not a character and has no UTF-8 encoding. The library
            # reports it as a TypeError, like arguments of another type.
            if not any(_SURROGATE.search(text) for text in texts):
                raise
            raise RequestError(
                "a prompt must be valid Unicode text; it holds a lone surrogate", param="prompt"
            ) from None
        except BaseException as error:
            if not is_panic(error):
                raise
            text = f"the model's tokenizer cannot encode the prompt: {str(error)[:300]}"
            raise RequestError(text, param="prompt") from None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Bytes that are not UTF-8 become U+FFFD, and ids outside the vocabulary are left
        out. skip_special_tokens: leave out ids in all_special_ids too.

        If the decoder fails, the result is one U+FFFD, because a request must not fail on the model's output.
        """
        try:
            return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            if not is_panic(error):
                raise
            return "\ufffd"

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str | None]:
        """Return the vocabulary's entries for these ids, as stored; None for ids outside of it."""
        return [self.backend.id_to_token(number) for number in token_ids]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        placeholder: Callable[[str], str] | None = None,
        content_format: str | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt text of a conversation, to be encoded with add_special_tokens=False.

        Arguments are those of chat_template.render_chat; `variables` and chat_template_kwargs are variables of the
        template, of which the latter may have names of arguments. content_format: None for that of this tokenizer.

        Special tokens written in messages, tools and variables become their ids, except in Mistral AI's own formats,
        where the text has the character mistral.dialect.GUARD in them, which is not encoded.

        Raises RequestError, whose param is the argument at fault; OverloadedError if too many templates are being
        rendered.
        """
        given = {} if chat_template_kwargs is None else chat_template_kwargs
        if not isinstance(given, Mapping):
            problem = f"chat_template_kwargs must be a dict, got {type(given).__name__}"
            raise RequestError(problem, param="chat_template_kwargs", value=given)
        return render_chat(
            self._renderer,
            self.chat_template,
            self._role_tokens,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template=chat_template,
            variables={**given, **variables},
            placeholder=placeholder,
            content_format=self.content_format if content_format is None else content_format,
            dialect=self.dialect,
        )

    def describe(self) -> dict[str, Any]:
        """Return a dict of JSON values with the content of a tokenizer_config.json for this tokenizer: tokenizer_class,
        the names of ROLE_TOKENS, added_tokens_decoder and chat_template. Tokens are given as text. Missing special
        tokens and a missing chat template are None.
        """
        added = self.backend.get_added_tokens_decoder()
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{name: self._role_tokens.get(name) for name in ROLE_TOKENS},
            "added_tokens_decoder": {str(number): added[number].content for number in sorted(added)},
            "chat_template": self.chat_template,
        }

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that an id adds to the text, which need not be complete characters. Valid only if
        `is_byte_level`.

        A byte-level vocabulary represents every byte by one printable character (Radford et al. 2019, GPT-2). Tokens
        with other characters are taken literally as UTF-8; ids outside the vocabulary return b"". Results are cached.
        """
        known = self._token_bytes.get(token_id)
        if known is None:
            token = self.backend.id_to_token(token_id) or ""
            try:
                known = bytes(_BYTE_OF_CHAR[char] for char in token)
            except KeyError:
                known = token.encode()
            self._token_bytes[token_id] = known
        return known

    def text_bytes(self, token_id: int) -> bytes:
        """Return the bytes that an id adds within a text. For vocabularies that are not byte-level, tokens are
        interpreted as SentencePiece's: U+2581 is a space, <0x0A> a byte. Returns b"" for ids outside the vocabulary.
        """
        if self.is_byte_level:
            return self.token_bytes(token_id)
        token = self.backend.id_to_token(token_id) or ""
        if _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    @cached_property
    def hf(self) -> PreTrainedTokenizerFast:
        """Copy of the tokenizer as a transformers object, created on first use. If a tokenizer.json was read from a
        folder, it has all settings of the folder's files. Raises ImportError if transformers is not installed.
        """
        # Imported here, because importing transformers takes a long time and nothing else needs it; from its module,
        # because pyright reads every model of transformers for a name of the package.
        from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

        if self._folder is not None:
            return PreTrainedTokenizerFast.from_pretrained(self._folder, local_files_only=True)
        return PreTrainedTokenizerFast(
            tokenizer_object=self.backend,
            chat_template=self.chat_template,
            clean_up_tokenization_spaces=False,
            **self._role_tokens,
        )

    @cached_property
    def _role_tokens(self) -> dict[str, str]:
        """Texts of the special tokens by their names in ROLE_TOKENS. Names without a token are left out."""
        ids = {name: getattr(self, f"{name}_id") for name in ROLE_TOKENS}
        tokens = {name: None if number is None else self.backend.id_to_token(number) for name, number in ids.items()}
        return {name: token for name, token in tokens.items() if token is not None}
