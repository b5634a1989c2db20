"""Reads the tokenizer files of a Hugging Face folder: tokenizer.json, or a vocabulary alone, and related files.

Vocabularies that are read without a tokenizer.json are BERT's vocab.txt, GPT-2's vocab.json with merges.txt,
SentencePiece's tokenizer.model, also as XLM-RoBERTa has it, tiktoken's ranks, and ESM's vocab.txt. All files are
treated as data: code that they name (auto_map) is not run, and tokenizer_class only decides how a vocabulary is read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import RobertaProcessing

from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.files import MAX_JSON_BYTES, read_bytes, read_object, read_text
from jaxengine.tokens.rust_errors import rust_errors
from jaxengine.tokens.special_tokens import SpecialTokens
from jaxengine.tokens.vocabularies import amino_acids
from jaxengine.tokens.vocabularies.byte_level import MERGES, kind_of, read_byte_level
from jaxengine.tokens.vocabularies.byte_level import VOCAB as BYTES_VOCAB
from jaxengine.tokens.vocabularies.ends import with_ends
from jaxengine.tokens.vocabularies.pieces import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    add_marked_tokens,
    byte_pair_pieces,
    unigram_pieces,
)
from jaxengine.tokens.vocabularies.sentencepiece import read_sentencepiece, with_fairseq_ids
from jaxengine.tokens.vocabularies.tiktoken import GLM4, KIMI, LLAMA3, QWEN, Ranks, is_tiktoken, read_tiktoken
from jaxengine.tokens.word_pieces import CLASSES, MODEL_TYPES, TOKENS, VOCAB, build_word_pieces

MAX_TOKENIZER_BYTES = 1 << 28
MAX_VOCABULARY_BYTES = 1 << 25  # largest size of a vocabulary file; known ones have some MiB
MAX_TURN_ENDS = 1024
TOKENIZER, CONFIG, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
PIECES, XLM_PIECES = "tokenizer.model", "sentencepiece.bpe.model"
XLM_CLASSES = ("XLMRobertaTokenizer", "XLMRobertaTokenizerFast")
# Tokenizer classes that split texts as SentencePiece does and number tokens as the file does. None: no class is named.
PIECES_CLASSES = (
    None,
    *(f"{kind}Tokenizer{fast}" for kind in ("Llama", "CodeLlama", "Gemma", "InternLM2") for fast in ("", "Fast")),
    *("InternLM3Tokenizer", "InternLMTokenizer", "BaichuanTokenizer", "YiTokenizer", "PreTrainedTokenizerFast"),
)
RANKS = {"TikTokenTokenizer": KIMI, "QWenTokenizer": QWEN, "ChatGLM4Tokenizer": GLM4}
GENERATION, TEMPLATE = "generation_config.json", "chat_template.jinja"
ADDED = "added_tokens.json"  # tokens in addition to a vocabulary; a tokenizer.json already contains them
ADDED_TOKENS = "added_tokens_decoder"  # tokens by id, in tokenizer_config.json
# Lists of further special tokens in tokenizer_config.json and special_tokens_map.json, as transformers 4 and 5 name
# them.
_FURTHER = ("additional_special_tokens", "extra_special_tokens")
_TOKEN_ID = re.compile("[0-9]{1,10}")
ADDED_TOKEN_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")


class _Files:
    """Files that describe a folder's tokenizer, each read once, when it is first used; {} for a missing one. Raises
    ModelFileError, then, for an invalid file.

    Attributes:
      folder: the folder.
      config: content of tokenizer_config.json.
      special: content of special_tokens_map.json.
      model: content of config.json.
    """

    def __init__(self, folder: Path):
        self.folder, self.config = folder, read_object(folder, CONFIG) or {}

    @cached_property
    def special(self) -> dict[str, Any]:
        return read_object(self.folder, SPECIAL) or {}

    @cached_property
    def model(self) -> dict[str, Any]:
        return read_object(self.folder, "config.json") or {}


def read_hf_tokenizer(folder: Path) -> tuple[Tokenizer, SpecialTokens, str | dict[str, str] | None]:
    """Return a folder's tokenizer, the ids of its special tokens, and its chat template, or templates by name.

    The template is chat_template.jinja if present, else the one in tokenizer_config.json, else None. Further ids that
    end an answer are read from generation_config.json. Raises ModelFileError for files that are missing, invalid or
    contradict each other.
    """
    files = _Files(folder)
    config, source = files.config, read_text(folder, TOKENIZER, MAX_TOKENIZER_BYTES)
    if source is None:
        ways = (_of_ranks, _of_pieces, _of_byte_level, _of_fairseq, _of_amino_acids)
        found = next((one for read in ways if (one := read(files)) is not None), None)
        tokenizer, config = found or _of_word_pieces(files)
    else:
        with rust_errors(folder / TOKENIZER):
            tokenizer = Tokenizer.from_str(source)
    with rust_errors(folder / CONFIG):
        _add_missing_tokens(tokenizer, config, folder / CONFIG)
    return tokenizer, _special_tokens(tokenizer, config, files), _chat_template(config, folder)


def _of_ranks(files: _Files) -> tuple[Tokenizer, dict[str, Any]] | None:
    """Return the tokenizer of a file of tiktoken's ranks, that of the tokenizer_class or else Llama 3's, and a copy of
    `config` with the special tokens that the model family's code names where config names none. Returns None if the
    folder has no such file.

    Raises ModelFileError for invalid files.
    """
    folder, config = files.folder, files.config
    row: Ranks | None = RANKS.get(str(config.get("tokenizer_class")))
    source = None if row is None else read_bytes(folder, row.file, MAX_VOCABULARY_BYTES)
    if row is None or source is None:
        row, source = LLAMA3, read_bytes(folder, LLAMA3.file, MAX_VOCABULARY_BYTES)
        if source is None or not is_tiktoken(source):
            return None
    entries = config.get(ADDED_TOKENS, {})
    _check_ids(entries, folder / CONFIG)
    named = {int(number): _content(entry, folder / CONFIG, ADDED_TOKENS) for number, entry in entries.items()}
    config = {**row.tokens, **config}
    bos = config.get("bos_token")
    begin = None if bos is None else _content(bos, folder / CONFIG, "bos_token")
    with rust_errors(folder / row.file):
        return read_tiktoken(source, row, named, begin, folder / row.file), config


def _of_pieces(files: _Files) -> tuple[Tokenizer, dict[str, Any]] | None:
    """Return the tokenizer of SentencePiece's tokenizer.model, and a copy of `config` with the file's special tokens
    where config names none. Returns None if the folder lacks the file, or if the tokenizer_class uses it in another
    way.

    The tokenizer adds the begin token unless add_bos_token is false, and the end token only if add_eos_token is true. A
    given add_prefix_space takes precedence over the file's, and with legacy false only the first word gets that space.
    Raises ModelFileError for invalid files.
    """
    folder, config = files.folder, files.config
    source = read_bytes(folder, PIECES, MAX_VOCABULARY_BYTES)
    if source is None or config.get("tokenizer_class") not in PIECES_CLASSES:
        return None
    pieces, is_unigram, tokens = read_sentencepiece(source, folder / PIECES)
    flags = {name: config.get(name) for name in ("add_bos_token", "add_eos_token", "add_prefix_space", "legacy")}
    for name, flag in flags.items():
        if flag is not None and type(flag) is not bool:
            raise ModelFileError(folder / CONFIG, f"must be true or false, got {str(flag)[:100]}", name)
    if flags["add_prefix_space"] is not None:
        pieces = pieces._replace(adds_space=flags["add_prefix_space"])
    names, marked = _renamed(pieces.names, config, folder / CONFIG)
    pieces = pieces._replace(names=names, only_first=flags["legacy"] is False)
    roles = {**tokens, **{role: config[role] for role in tokens if config.get(role) is not None}}
    ends: list[tuple[str, int] | None] = []
    with rust_errors(folder / PIECES):
        tokenizer = (unigram_pieces if is_unigram else byte_pair_pieces)(pieces)
        add_marked_tokens(tokenizer, names, [kind if kind in (CONTROL, UNKNOWN) else NORMAL for kind in pieces.types])
        tokenizer.add_tokens(marked)
        for role, default in (("bos", True), ("eos", False)):
            asked, entry = flags[f"add_{role}_token"], roles.get(f"{role}_token")
            text = None if entry is None else _content(entry, folder / CONFIG, f"{role}_token")
            at = None if text is None else tokenizer.token_to_id(text)
            wanted = default if asked is None else asked
            ends.append((text, at) if wanted and text is not None and at is not None else None)
        tokenizer.post_processor = with_ends(*ends)
    return tokenizer, config | roles


def _renamed(names: Sequence[str], config: dict[str, Any], path: Path) -> tuple[list[str], list[AddedToken]]:
    """Return the names of all pieces, by id, after the changes of tokenizer_config.json (`added_tokens_decoder`), and
    the list of the tokens that it describes.

    A name that another piece already has is not given again, and ids from len(names) on are ignored. names: names of
    the vocabulary's pieces, by id; not changed. config: content of tokenizer_config.json, whose path is `path`. Raises
    ModelFileError for an invalid entry.
    """
    entries = config.get(ADDED_TOKENS, {})
    _check_ids(entries, path)
    renamed, taken, marked = [*names], {*names}, []
    for number, entry in entries.items():
        content, at = _content(entry, path, ADDED_TOKENS), int(number)
        if at >= len(names):
            continue
        if content != names[at] and content not in taken:
            renamed[at] = content
            taken.add(content)
        marked.append(_added(entry, content))
    return renamed, marked


def _added(entry: Any, content: str) -> AddedToken:
    """Return the AddedToken that an entry of tokenizer_config.json describes. entry: a text, or an object with flags; a
    flag that is missing or not a bool gets AddedToken's default. content: the token's text.
    """
    given = entry if isinstance(entry, dict) else {}
    return AddedToken(content, **{name: given[name] for name in ADDED_TOKEN_FLAGS if type(given.get(name)) is bool})


def _of_word_pieces(files: _Files) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer of BERT's vocab.txt, and a copy of `config` with BERT's special tokens where config names
    none.

    Raises ModelFileError for invalid files, for a folder without vocab.txt, and for one whose tokenizer class reads
    that file in another way.
    """
    folder, config = files.folder, files.config
    named, model_type = _classes(files)
    is_bert = named in CLASSES if named is not None else (model_type or MODEL_TYPES[0]) in MODEL_TYPES
    source = read_text(folder, VOCAB, MAX_TOKENIZER_BYTES) if is_bert else None
    if source is None:
        raise ModelFileError(folder, f"has no tokenizer.json; {_without_tokenizer(folder)}")
    tokens = {role: token.content for role, token in _roles(files, TOKENS).items()}
    with rust_errors(folder / VOCAB):
        tokenizer = build_word_pieces(source, tokens, config, folder)
        _add_added(tokenizer, folder)
    return tokenizer, tokens | config


def _of_amino_acids(files: _Files) -> tuple[Tokenizer, dict[str, Any]] | None:
    """Return the tokenizer of ESM's vocab.txt, and a copy of `config` with its special tokens where config names none.
    Returns None for other classes and for a folder without the file. Raises ModelFileError for an invalid file.
    """
    folder, (named, model_type) = files.folder, _classes(files)
    if not (named in amino_acids.CLASSES if named is not None else model_type in amino_acids.MODEL_TYPES):
        return None
    if (source := read_text(folder, VOCAB, MAX_TOKENIZER_BYTES)) is None:
        return None
    roles = _roles(files, amino_acids.TOKENS)
    with rust_errors(folder / VOCAB):
        tokenizer = amino_acids.build_amino_acids(source, roles, folder)
        _add_added(tokenizer, folder)
    return tokenizer, {role: token.content for role, token in roles.items()} | files.config


def _of_byte_level(files: _Files) -> tuple[Tokenizer, dict[str, Any]] | None:
    """Return the tokenizer of GPT-2's vocab.json and merges.txt, and a copy of `config` with the special tokens of its
    class where config names none. Returns None if the folder lacks one of the files, and for other classes.

    The tokenizer adds begin and end tokens where add_bos_token and add_eos_token are true, or those of a class that
    encloses texts in any case. Raises ModelFileError for invalid files.
    """
    folder, config = files.folder, files.config
    if (kind := kind_of(*_classes(files))) is None:
        return None
    vocab, merges = read_object(folder, BYTES_VOCAB), read_text(folder, MERGES, MAX_VOCABULARY_BYTES)
    if vocab is None or merges is None:
        return None
    flags = {name: config.get(name) or False for name in ("add_prefix_space", "add_bos_token", "add_eos_token")}
    for name, flag in flags.items():
        if type(flag) is not bool:
            raise ModelFileError(folder / CONFIG, f"must be true or false, got {str(flag)[:100]}", name)
    roles = _roles(files, kind.tokens)
    texts = {role: token.content for role, token in roles.items()}
    lists = [found.get(name) for found in (config, files.special) for name in _FURTHER]
    further = [entry for each in lists if isinstance(each, list) for entry in each]
    special = {*texts.values(), *(_content(entry, folder / SPECIAL, _FURTHER[0]) for entry in further)}
    enclosing = (texts["cls_token"], texts["sep_token"]) if kind.encloses else None
    with rust_errors(folder / MERGES):
        adds_space = flags["add_prefix_space"]
        tokenizer = read_byte_level(vocab, merges, [*roles.values()], enclosing, folder, adds_space=adds_space)
        if not config.get(ADDED_TOKENS):  # which has them, too
            _add_added(tokenizer, folder, special)
        wanted = (texts[f"{role}_token"] if flags[f"add_{role}_token"] else None for role in ("bos", "eos"))
        begin, end = ((one, at) if one and (at := tokenizer.token_to_id(one)) is not None else None for one in wanted)
        if enclosing is None and (begin or end):  # classes that enclose texts do so whatever the flags say
            tokenizer.post_processor = with_ends(begin, end)
    return tokenizer, texts | config


def _of_fairseq(files: _Files) -> tuple[Tokenizer, dict[str, Any]] | None:
    """Return the tokenizer of XLM-RoBERTa's SentencePiece file, which numbers tokens as fairseq does, and a copy of
    `config`, to which special tokens that it lacks are added. Returns None if the folder lacks the file, and for other
    classes.

    Raises ModelFileError for invalid files.
    """
    folder, config = files.folder, files.config
    named, model_type = _classes(files)
    is_xlm = named in XLM_CLASSES if named is not None else model_type == "xlm-roberta"
    source = read_bytes(folder, XLM_PIECES, MAX_VOCABULARY_BYTES) if is_xlm else None
    if source is None:
        return None
    found, is_unigram, _ = read_sentencepiece(source, folder / XLM_PIECES)
    if not is_unigram or len(found.names) < 4:
        raise ModelFileError(folder / XLM_PIECES, "must be a unigram model of more than its special tokens")
    with rust_errors(folder / XLM_PIECES):
        tokenizer = unigram_pieces(pieces := with_fairseq_ids(found))
        add_marked_tokens(tokenizer, pieces.names, pieces.types)
        tokenizer.post_processor = RobertaProcessing(("</s>", 2), ("<s>", 0), True, False)
    named_tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return tokenizer, named_tokens | config


def _classes(files: _Files) -> tuple[Any, Any]:
    """Return (tokenizer class that tokenizer_config.json or else config.json names, model_type of config.json); None
    for what is missing. Raises ModelFileError for an invalid config.json.
    """
    return files.config.get("tokenizer_class") or files.model.get("tokenizer_class"), files.model.get("model_type")


def _roles(files: _Files, usual: Mapping[str, str]) -> dict[str, AddedToken]:
    """Return special tokens by role, for the roles in `usual`: those of tokenizer_config.json, else of
    special_tokens_map.json, else `usual`; without the unknown token if it is "". Raises ModelFileError for an invalid
    entry.
    """
    found: dict[str, AddedToken] = {}
    for role, token in usual.items():
        entry = files.config.get(role) or files.special.get(role) or token
        flags = entry if isinstance(entry, dict) else {}
        if role == "unk_token" and _is_empty(entry):
            continue
        content = _content(entry, files.folder / CONFIG, role)
        found[role] = _added({**flags, "special": True, "normalized": False}, content)
    return found


def _add_added(tokenizer: Tokenizer, folder: Path, special: Collection[str] = ()) -> None:
    """Add the tokens of added_tokens.json to `tokenizer`, in place; those in `special` as special tokens. Raises
    ModelFileError for an invalid file, and for an id that differs from the token's id in the tokenizer, or is not the
    next free one for a new token.
    """
    more = read_object(folder, ADDED) or {}
    if not all(type(number) is int for number in more.values()):
        raise ModelFileError(folder / ADDED, "must map tokens to ids")
    flags = {token: {"special": True, "normalized": False} if token in special else {} for token in more}
    entries = {str(number): {"content": token, **flags[token]} for token, number in more.items()}
    _add_missing_tokens(tokenizer, {ADDED_TOKENS: entries}, folder / ADDED)


def _without_tokenizer(folder: Path) -> str:
    """Return advice, for an error message, on what to do about a folder without tokenizer.json. The advice depends on
    the other tokenizer files in the folder.
    """
    ways = "name another with the option tokenizer, or give token ids with skip_tokenizer_init"
    others = [name for name in (PIECES, "tiktoken.model", "vocab.json", VOCAB) if (folder / name).is_file()]
    if others:
        convert = f"transformers.AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        return f"{others[0]} alone is not read for this tokenizer_class: {convert} writes one; or {ways}"
    return ways


def _add_missing_tokens(tokenizer: Tokenizer, config: dict[str, Any], path: Path) -> None:
    """Add tokens that are only in tokenizer_config.json (`added_tokens_decoder`: id -> description) to `tokenizer`, in
    place, in the order of their ids.

    config: content of that file, whose path is `path`. Raises ModelFileError for an invalid entry, and for an id that
    differs from the token's id in the tokenizer, or is not the next free one for a new token.
    """
    key = ADDED_TOKENS
    entries = config.get(key, {})
    _check_ids(entries, path)
    for number, entry in sorted(entries.items(), key=lambda item: int(item[0])):
        content = _content(entry, path, key)
        if tokenizer.token_to_id(content) is None:
            tokenizer.add_tokens([_added(entry, content)])
        if tokenizer.token_to_id(content) != int(number):
            known = tokenizer.token_to_id(content)
            raise ModelFileError(path, f"{content[:100]!r} has id {int(number)} here, but {known} in {TOKENIZER}", key)


def _check_ids(entries: Any, path: Path) -> None:
    """Raise ModelFileError unless `entries` is a dict whose keys are decimal token ids. path: path of the file, for the
    error.
    """
    if not isinstance(entries, dict) or not all(_TOKEN_ID.fullmatch(number) for number in entries):
        raise ModelFileError(path, "must map token ids to tokens", ADDED_TOKENS)


def _special_tokens(tokenizer: Tokenizer, config: dict[str, Any], files: _Files) -> SpecialTokens:
    """Return the ids of the special tokens that `config`, that of `files` with those of the tokenizer's class, or else
    special_tokens_map.json names, and the `turn_ends` of the folder. A pad or unk token that is not in the vocabulary,
    and an empty unk token, are None. Raises ModelFileError for a bos or eos token that is not in the vocabulary, and
    for invalid entries.
    """
    ids: dict[str, int | None] = {}
    folder, fallback = files.folder, files.special
    for role in ("bos", "eos", "unk", "pad"):
        key = f"{role}_token"
        entry = config.get(key) if config.get(key) is not None else fallback.get(key)
        if role == "unk" and _is_empty(entry):  # as in the first checkpoints of Whisper
            entry = None
        ids[role] = None if entry is None else tokenizer.token_to_id(_content(entry, folder / CONFIG, key))
        # Padding is not used, and tokenizer.json alone defines the unknown token: pad and unk may name missing tokens.
        if entry is not None and ids[role] is None and role in ("bos", "eos"):
            raise ModelFileError(folder / CONFIG, "names a token that the vocabulary does not have", key)
    return SpecialTokens(**ids, turn_ends=turn_ends(tokenizer, folder))  # type: ignore[arg-type]


def turn_ends(tokenizer: Tokenizer, folder: Path) -> tuple[int, ...]:
    """Return eos_token_id of the folder's generation_config.json as a tuple of ids, without those that the vocabulary
    lacks; () if it is absent. Raises ModelFileError for values that are not ids, and for more than MAX_TURN_ENDS.
    """
    value = (read_object(folder, GENERATION) or {}).get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if len(ids) > MAX_TURN_ENDS or not all(type(number) is int and number >= 0 for number in ids):
        text = f"must be token ids >= 0, at most {MAX_TURN_ENDS}, got {repr(value)[:100]}"
        raise ModelFileError(folder / GENERATION, text, "eos_token_id")
    return tuple(number for number in ids if number < tokenizer.get_vocab_size(with_added_tokens=True))


def own_template(folder: Path) -> str | None:
    """Return the content of the folder's chat_template.jinja; None without it. Raises ModelFileError if the file
    cannot be used.
    """
    return read_text(folder, TEMPLATE, MAX_JSON_BYTES)


def _chat_template(config: dict[str, Any], folder: Path) -> str | dict[str, str] | None:
    """Return the chat template, or a dict of templates by name, from chat_template.jinja or else from `config`; None
    without either. config: content of tokenizer_config.json. Raises ModelFileError for a value that is neither a text
    nor a list of named texts.
    """
    template = own_template(folder)
    if template is None:
        template = config.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    # Several templates: [{"name": ..., "template": ...}, ...]
    named: dict[str, str] = {}
    for entry in template if isinstance(template, list) else [None]:
        pair = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not all(isinstance(part, str) for part in pair):
            raise ModelFileError(folder / CONFIG, "must be a text or a list of named texts", "chat_template")
        named[str(pair[0])] = str(pair[1])
    return named


def _is_empty(entry: Any) -> bool:
    """Return whether an entry for a token, a text or an object with "content", has the text ""."""
    return (entry.get("content") if isinstance(entry, dict) else entry) == ""


def _content(entry: Any, path: Path, key: str) -> str:
    """Return the text of a token. entry: the text itself, or an object with "content". path, key: location of the
    entry, for errors. Raises ModelFileError for other values and for an empty text.
    """
    content = entry.get("content") if isinstance(entry, dict) else entry
    if not isinstance(content, str) or not content:
        raise ModelFileError(path, f"must be a token, got {repr(entry)[:100]}", key)
    return content
