"""Text to token ids and back, over the `tokenizers` library; chat messages to text.

Owns where a tokenizer comes from (GGUF metadata or a Hugging Face folder) and its special ids. Nothing is downloaded
and no code of a model folder is run. Knows nothing of requests, streaming or stop strings.
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

from jaxengine.tokens.chat_template import ROLE_TOKENS, render_chat
from jaxengine.tokens.gguf_tokenizer import build_tokenizer, chat_template_of, special_tokens
from jaxengine.tokens.hf_tokenizer import read_hf_tokenizer
from jaxengine.tokens.rust_errors import is_panic, rust_errors
from jaxengine.tokens.special_tokens import SpecialTokens
from jaxengine.tokens.template_renderer import TemplateRenderer
from scheduler.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def _byte_of_char() -> dict[str, int]:
    """Byte-level spelling: printable Latin-1 characters are themselves, the other bytes U+0100 and up, in order."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_of_char()
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """One vocabulary. Safe to use from several threads.

    Attributes:
      backend: the `tokenizers.Tokenizer` that does the work; not to be changed.
      bos_token_id, eos_token_id, unk_token_id, pad_token_id: int or None.
      eos_token_ids: every id that ends an answer, eos first.
      all_special_ids: ids of the tokens that `decode` leaves out.
      added_token_ids: ids of tokens that are found in text before it is split, the special ones among them.
      vocab_size: number of ids, added tokens included; also len().
      is_byte_level: every token is a run of bytes of the text, see `token_bytes`.
      chat_template: Jinja source, {name: source} where the model has several, or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special: SpecialTokens,
        chat_template: str | dict[str, str] | None = None,
        folder: Path | None = None,
    ):
        """folder: where it was read from, if from a Hugging Face folder."""
        # A tokenizer.json may carry the truncation and padding of its training.
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
        self.is_byte_level = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
        self._token_bytes: dict[int, bytes] = {}
        self._folder = folder
        self._renderer = TemplateRenderer()

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], *, path: str = "GGUF metadata") -> Tokenizer:
        """From the `tokenizer.*` keys of a GGUF file; `path` is for error messages. Raises ModelFileError."""
        with rust_errors(path):
            return cls(
                build_tokenizer(metadata, path), special_tokens(metadata, path), chat_template_of(metadata, path)
            )

    @classmethod
    def from_hf_folder(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """From tokenizer.json and the files beside it (see hf_tokenizer). Raises ModelFileError."""
        with rust_errors(path):
            return cls(*read_hf_tokenizer(Path(path)), Path(path))

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens written out in `text` become their ids. `add_special_tokens`: the model's BOS/EOS.

        Raises RequestError(param="prompt") for what is not valid Unicode text.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of many texts at once, in parallel."""
        for text in texts:
            if not isinstance(text, str):
                raise RequestError(f"a prompt must be a text, got {type(text).__name__}", param="prompt", value=text)
        try:
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except (UnicodeError, TypeError):
            # A lone surrogate, as in json.loads('"\\ud800"'), is no character and has no UTF-8 form.
            raise RequestError(
                "a prompt must be valid Unicode text; it holds a lone surrogate", param="prompt"
            ) from None
        except BaseException as error:
            if not is_panic(error):
                raise
            text = f"the model's tokenizer cannot encode the prompt: {str(error)[:300]}"
            raise RequestError(text, param="prompt") from None
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; bytes that are not UTF-8 become U+FFFD, ids outside the vocabulary nothing.

        So does all of it where the model's decoder fails at what the model has written: an answer is no place for one.
        """
        try:
            return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            if not is_panic(error):
                raise
            return "\ufffd"

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str | None]:
        """The vocabulary's entries as they are stored; None for ids outside."""
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
        **variables: Any,
    ) -> str:
        """Prompt text of a conversation, to be encoded with add_special_tokens=False; see chat_template.render_chat.

        Variables of the template are given by keyword or, where their names are not our own words, as
        `chat_template_kwargs`.
        """
        return render_chat(
            self._renderer,
            self.chat_template,
            self._role_tokens,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template=chat_template,
            variables={**(chat_template_kwargs or {}), **variables},
            placeholder=placeholder,
        )

    def describe(self) -> dict[str, Any]:
        """What a tokenizer_config.json says of such a tokenizer, as JSON values; tokens are their texts."""
        added = self.backend.get_added_tokens_decoder()
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{name: self._role_tokens.get(name) for name in ROLE_TOKENS},
            "added_tokens_decoder": {str(number): added[number].content for number in sorted(added)},
            "chat_template": self.chat_template,
        }

    def token_bytes(self, token_id: int) -> bytes:
        """What the id adds to the text, which need not be whole characters; only where `is_byte_level`.

        A byte-level vocabulary spells every byte as one printable character (Radford et al. 2019, GPT-2). Tokens that
        hold other characters stand for themselves; ids outside the vocabulary add nothing.
        """
        known = self._token_bytes.get(token_id)
        if known is None:
            token = self.backend.id_to_token(token_id) or ""
            try:
                known = bytes(BYTE_OF_CHAR[char] for char in token)
            except KeyError:
                known = token.encode()
            self._token_bytes[token_id] = known
        return known

    def text_bytes(self, token_id: int) -> bytes:
        """What the id adds in the middle of a text; of a vocabulary that is not byte-level, by SentencePiece's
        spelling: U+2581 is a space, <0x0A> a byte.
        """
        if self.is_byte_level:
            return self.token_bytes(token_id)
        token = self.backend.id_to_token(token_id) or ""
        if _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    @cached_property
    def hf(self) -> PreTrainedTokenizerFast:
        """The same tokenizer as transformers knows it, a copy; of a folder with all that its files say."""
        # Importing transformers takes longer than all else here, and nothing here needs it.
        from transformers import PreTrainedTokenizerFast

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
        ids = {name: getattr(self, f"{name}_id") for name in ROLE_TOKENS}
        tokens = {name: None if number is None else self.backend.id_to_token(number) for name, number in ids.items()}
        return {name: token for name, token in tokens.items() if token is not None}
