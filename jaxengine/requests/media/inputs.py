"""Preprocessing of a prompt's images and videos for the model's tower, and their positions in the prompt.

Results are cached by digest.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from jaxengine.config.engine_config import ResolvedConfig
from jaxengine.config.inputs.multimodal import AUDIO, MediaOptions
from jaxengine.media.base.processor import Expanded, MediaProcessor, Processed, check_room
from jaxengine.media.base.samples import RATE
from jaxengine.media.embeds import Embeds
from jaxengine.media.load import read_multi_modal_data
from jaxengine.media.messages import MediaReader
from jaxengine.media.parts import check_parts
from jaxengine.media.processors.log_mel import HOP
from jaxengine.models.config.tower import TowerConfig
from jaxengine.requests.media.cache import MediaCache, ProcessorCache
from jaxengine.scheduler.base.errors import RequestError, invalid, show_value
from jaxengine.scheduler.base.media import EMBEDS, Media, MediaItem

DATA, OPTIONS = "multi_modal_data", "mm_processor_kwargs"
# Key of a prompt's embeddings, in place of tokens.
PROMPT_EMBEDS = "prompt_embeds"
# Key of a prompt's Media after preprocessing.
READY = "media"
# vLLM's form of prompts of models with cross-attention.
ENCODER, DECODER = "encoder_prompt", "decoder_prompt"
UNCUT = "prompts with media are not cut"
_MAX_OPTIONS_CHARS = 16_384


def has_media(prompt: Any) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a prompt has media that are not preprocessed yet, processor options, or vLLM's encoder prompt."""
    if not isinstance(prompt, Mapping):
        return False
    return ENCODER in prompt or any(is_given(prompt.get(name)) for name in (DATA, OPTIONS))


def is_given(value: Any) -> bool:
    """Return whether the value of a key of a prompt is neither None nor empty. An array is given, whatever it holds."""
    return value is not None and not (isinstance(value, (Mapping, Sequence)) and not value)


def verify_whole(count: int, keep: int | None, value: int | None, prefix: str = "") -> None:
    """Raise RequestError if a prompt with media, of `count` tokens, would be changed: cut to the `keep` tokens that
    truncate_prompt_tokens, given as `value`, keeps, or preceded by `prefix`, the pooling model's prompt. keep: None for
    all.
    """
    if prefix:
        text = f"prompt_name gives {show_value(prefix)}; allowed: '' with media: write the model's prompt in the text"
        raise RequestError(text, param="prompt_name")
    if keep is not None and count > keep:
        text = f"truncate_prompt_tokens is {value}; allowed: {count} or more: {UNCUT}"
        raise RequestError(text, param="truncate_prompt_tokens", value=value)


def one_prompt(prompt: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a prompt with its media next to its text. vLLM's form {"encoder_prompt": {"multi_modal_data": ...},
    "decoder_prompt": a prompt} is converted; other prompts are returned unchanged.

    Raises RequestError for an encoder prompt with text, without a decoder prompt, or with other keys.
    """
    if ENCODER not in prompt:
        return prompt
    encoder, decoder = prompt[ENCODER], prompt.get(DECODER)
    if prompt.keys() != {ENCODER, DECODER} or not isinstance(encoder, Mapping):
        problem = f"a prompt with {ENCODER} must have it, a dict with {DATA}, and {DECODER} alone"
        raise RequestError(problem, param=ENCODER)
    media = {name: encoder[name] for name in (DATA, OPTIONS) if name in encoder}
    if text := next((name for name in encoder if name not in media and encoder[name]), None):
        problem = f"{ENCODER} has {show_value(text)}; the encoder reads a sound alone, under {DATA}"
        raise RequestError(problem, param=ENCODER)
    if isinstance(decoder, Mapping):
        return {**decoder, **media}
    return {("prompt" if isinstance(decoder, str) else "prompt_token_ids"): decoder, **media}


class _Found(NamedTuple):
    """A preprocessed item of a prompt.

    Attributes:
      digest: the item's. made: the result of preprocessing.
      cached: whether it came from the cache; None without a cache.
      make: function that preprocesses it again.
      is_embedded: the request gave embeddings instead of an image.
    """

    digest: bytes
    made: Processed
    cached: bool | None
    make: Callable[[], Processed]
    is_embedded: bool


class MediaInputs:
    """Preprocessing of the media of one model's prompts.

    Attributes:
      processor: the model's media processor.
      cache: cache of its results; None with mm_processor_cache_gb 0. If the engine is another process, the link to it
        sets its own cache here.
      adapter: folder of the adapter with which prompts with items run; None for a model without one.
      reader: reader of conversations and files.
    """

    def __init__(
        self, processor: MediaProcessor, towers: Sequence[TowerConfig], config: ResolvedConfig, hidden_size: int = 0
    ):
        """Store the parts. towers: the model's encoders, one or more. hidden_size: the model's, for embeddings that are
        given instead of images; 0 refuses those.
        """
        self.processor = processor
        size = config.mm_processor_cache_bytes
        self.adapter: Path | None = None
        self.cache: MediaCache | None = ProcessorCache(size) if size else None
        rate = next((tower.rate for tower in towers if tower.hears), RATE)
        self.reader = MediaReader(processor, _heard(config, processor, towers), rate)
        self._towers, self._num_parts = towers, max(tower.num_parts for tower in towers)
        self._row_size = self._num_parts * hidden_size
        self._config = config

    def stand_alone(self, prompt: Mapping[str, Any]) -> bool:
        """Return whether a prompt is an item without a text, of a model that embeds items by themselves (CLIP)."""
        ids = prompt.get("prompt_token_ids")  # of any form, such as an array, whose truth is not its length
        has_text = bool(prompt.get("prompt")) or (ids is not None and np.size(ids) > 0)
        return getattr(self.processor, "stand_alone", False) and not has_text

    def made_ready(self, prompt: Mapping[str, Any], text: str | None, token_ids: Sequence[int]) -> dict[str, Any]:
        """Return a prompt with "prompt" (the text or None), "prompt_token_ids" and, under READY, the Media (None
        without items) in place of multi_modal_data and mm_processor_kwargs; its other keys stay.

        Blocks until they are loaded and preprocessed. text: None if the prompt has token ids alone; a processor with
        `encode` tokenizes it again. Raises RequestError for items that cannot be used; too many of them are refused
        before anything is loaded.
        """
        parts = read_multi_modal_data(prompt[DATA] if is_given(prompt.get(DATA)) else {}, param=DATA)
        check_parts(parts, self.processor, self._config)
        values = self.reader.loader.load_now(parts) if parts else {}
        encode = getattr(self.processor, "encode", None)
        # Not without items: a placeholder that nothing replaces may be a token that the model does not have.
        kinds = getattr(self.processor, "in_texts", tuple(values))
        if text is not None and encode is not None and any(values.get(kind) for kind in kinds):
            token_ids = encode(text, token_ids)
        token_ids, media = self.read(token_ids, values, prompt.get(OPTIONS))
        kept = {name: value for name, value in prompt.items() if name not in (DATA, OPTIONS)}
        return {**kept, "prompt": text, "prompt_token_ids": token_ids, READY: media}

    def read(
        self, token_ids: Sequence[int], values: Mapping[str, Sequence[Any]], options: Any
    ) -> tuple[list[int], Media | None]:
        """Preprocess loaded items, or take them from the cache. Return the prompt's token ids with a placeholder for
        every embedding, and its Media (None without items).

        token_ids: token ids of the prompt, with one placeholder for each item. values: loaded items by modality.
        options: mm_processor_kwargs or None. Raises RequestError for items or options that cannot be used, and for more
        embeddings than max_model_len has room for.
        """
        options = self._options(options)
        if not any(values.values()):
            return list(token_ids), None
        if (among := getattr(self.processor, "among", None)) is not None:  # of families that cut few images finer
            options = among(options, {modality: len(loaded) for modality, loaded in values.items()})
        if self._towers[0].by_place:  # `room` hardly limits images of one embedding, each of which has all patches
            self._check_rows(sum(map(len, values.values())))
        # One cache for the entire prompt: self.cache may be replaced in the meantime.
        cache, found, seen = self.cache, {}, dict[bytes, _Found]()
        room = self._config.max_model_len - 1
        for modality, loaded in values.items():
            digests = [digest_of(modality, value, options, self.processor.settings) for value in loaded]
            for digest, value in zip(digests, loaded, strict=True):
                if digest not in seen:
                    seen[digest] = self._find(cache, digest, modality, value, options)
                # Checked before the next item is preprocessed: items may need 1,000 times the memory of their files.
                room -= seen[digest].made.num_rows
                if room < 0:
                    most = self._config.max_model_len - 1
                    problem = f"{DATA} makes more embeddings than max_model_len has room for; allowed: {most}"
                    raise RequestError(problem, param=DATA)
            found[modality] = [seen[digest] for digest in digests]
        made = {modality: [each.made for each in own] for modality, own in found.items()}
        expanded = self.processor.expand(token_ids, made)
        items, num_tokens = [], Counter[str]()
        for positions, (modality, number) in zip(expanded.positions, expanded.order, strict=True):
            each = found[modality][number]
            arrays = each.made.patches, each.made.columns, each.made.rows
            kind = EMBEDS if each.is_embedded else modality
            item = MediaItem(kind, each.digest, positions, *arrays, each.cached)
            items.append(item if cache is None else cache.item(item, each.made, each.make))
            num_tokens[modality] += len(positions)
        joint, rope = self._joint(expanded, items), (expanded.rope_positions, expanded.rope_delta)
        return expanded.token_ids, Media(tuple(items), *rope, *joint, num_tokens=num_tokens)

    def _joint(self, expanded: Expanded, items: Sequence[MediaItem]) -> tuple[np.ndarray | None, bytes]:
        """Return joint and joint_digest of a prompt's Media: the whole prompt for a model whose prompt tokens attend to
        each other, those that `expanded` names for TowerConfig.attends_across; the first token, with a digest of the
        images alone, for one whose first tokens depend on all images (TowerConfig.by_place), else (None, b"").

        Raises RequestError for tokens, or images, that do not fit into one step, and for a prompt longer than a window.
        """
        config, tower, token_ids, joint = self._config, self._towers[0], expanded.token_ids, expanded.joint
        if tower.by_place:
            joint = np.zeros(1, np.int32)
        elif tower.whole_prompt:
            joint = np.arange(len(token_ids), dtype=np.int32)
        if joint is None:
            return None, b""
        first, count = int(joint[0]), int(joint[-1] + 1 - joint[0])
        step = config.max_num_batched_tokens - config.max_num_seqs
        most, advice = min(
            (step, "raise max_num_batched_tokens"),
            (config.long_prefill_token_threshold or step + 1, "raise long_prefill_token_threshold"),
            (tower.whole_prompt or step + 1, "it has windows"),
        )
        if count > most and not tower.by_place:
            what = (
                "all from the first image of a prompt to the last" if tower.attends_across else "a prompt with images"
            )
            problem = f"this model computes {what} at once: it must have at most {most} tokens, got {count}"
            raise RequestError(f"{problem} ({advice})", param="prompt", value=count)
        patches = sum({item.digest: item.num_patches for item in items}.values())
        if patches > config.max_encoder_patches:
            problem = f"this model encodes all images of a prompt at once: {patches} patches, where at most "
            problem += f"{config.max_encoder_patches} are possible: give fewer, or raise max_num_batched_encoder_tokens"
            raise RequestError(problem, param=DATA, value=patches)
        digest = hashlib.sha256()
        if not tower.by_place:
            self._check_rows(sum({item.digest: item.num_rows for item in items}.values()))
            digest.update(np.asarray([count, *token_ids[first : first + count], *(joint - first)], np.int32).tobytes())
        for item in items:
            digest.update(item.digest)
        return joint, digest.digest()

    def _check_rows(self, rows: int) -> None:
        """Raise RequestError for a prompt whose images have more embeddings in all, `rows`, than are kept at once. An
        image that comes twice counts twice if layers attend to it: slots have columns for each.
        """
        if rows > self._config.num_encoder_rows:
            problem = f"this model needs all images of a prompt at once: {rows} embeddings, where at most "
            problem += f"{self._config.num_encoder_rows} are kept: give fewer, or raise encoder_cache_size"
            raise RequestError(problem, param=DATA, value=rows)

    def _options(self, options: Any) -> dict[str, Any]:
        """Return a request's mm_processor_kwargs, which may be None, merged over the engine's. Raises RequestError for
        values other than a dict, and for more than 16,384 characters of JSON.
        """
        if options is not None and not isinstance(options, Mapping):
            raise invalid(OPTIONS, options, "a dict of the processor's arguments")
        chosen = {**(self._config.mm_processor_kwargs or {}), **(options or {})}
        # Part of each item's digest.
        if len(json.dumps(chosen, default=str)) > _MAX_OPTIONS_CHARS:
            problem = f"{OPTIONS} is longer than the {_MAX_OPTIONS_CHARS} characters of JSON that are allowed"
            raise RequestError(problem, param=OPTIONS)
        return chosen

    def _find(
        self, cache: MediaCache | None, digest: bytes, modality: str, value: Any, options: Mapping[str, Any]
    ) -> _Found:
        """Return an item from the cache, or preprocess it and store it there. cache: None for no cache. digest:
        digest_of `value`, a loaded item or Embeds.

        Raises RequestError for an item that the processor cannot use, and for more patches or embeddings than the
        encoder has room for.
        """
        kept = None if cache is None else cache.get(digest)
        cached = None if cache is None else kept is not None

        def make() -> Processed:
            if isinstance(value, Embeds):
                return self._embedded(value)
            # A sound is encoded window by window, so all that a prompt has room for.
            tower = self._tower(modality)
            most = (self._config.max_model_len - 1) * tower.merge if tower.hears else self._config.max_encoder_patches
            return _filled_up(self.processor.process(modality, value, options, most), tower)

        made = make() if kept is None else kept
        if cache is not None and kept is None:
            cache.put(digest, made)
        self._check(modality, made, is_embedded=isinstance(value, Embeds))
        return _Found(digest, made, cached, make, isinstance(value, Embeds))

    def _embedded(self, given: Embeds) -> Processed:
        """Return a Processed item whose patches are the embeddings `given`, f32[n, size], of a request.

        Raises RequestError for a size other than the tower's and for a grid that does not fit n.
        """
        count, size = given.values.shape
        if size != self._row_size:
            parts = f", {self._num_parts} parts of the hidden size" if self._num_parts > 1 else ""
            problem = f"{DATA}: embeddings of an image have {size} numbers each; allowed: {self._row_size}{parts}"
            raise RequestError(problem, param=DATA, value=size)
        grid = self.processor.grid_of(count, given.grid)
        rows, no_columns = np.arange(count, dtype=np.int32), np.zeros((0, count), np.int32)
        return Processed(given.values, no_columns, rows, count, grid)

    def _tower(self, modality: str) -> TowerConfig:
        """Return the tower that encodes a modality: the first that encodes sounds for audio, else the first that does
        not; the model's first if there is no such tower.
        """
        return next((tower for tower in self._towers if tower.hears == (modality == AUDIO)), self._towers[0])

    def _check(self, modality: str, found: Processed, *, is_embedded: bool) -> None:
        """Raise RequestError for an image or video (`found`, of this modality) with more patches or embeddings than the
        encoder has room for. Sounds, and the patches of given embeddings (is_embedded), are not checked.
        """
        config = self._config
        if self._tower(modality).hears:  # the processor checks sounds
            return
        if not is_embedded:
            check_room(modality, len(found.patches), config.max_encoder_patches)
        if found.num_rows > config.num_encoder_rows:
            problem = (
                f"{DATA}: an item of {modality} makes {found.num_rows} embeddings; at most {config.num_encoder_rows} "
                "are possible: give a smaller one, or raise encoder_cache_size"
            )
            raise RequestError(problem, param=DATA, value=found.num_rows)


def _filled_up(item: Processed, tower: TowerConfig) -> Processed:
    """Return an item padded at its end to a multiple of the tower's unit of patches: patches with 0, columns and rows
    with -1.
    """
    missing = -len(item.patches) % tower.unit
    return item._replace(
        patches=np.pad(item.patches, ((0, missing), (0, 0))),
        columns=np.pad(item.columns, ((0, 0), (0, missing)), constant_values=-1),
        rows=np.pad(item.rows, (0, missing // tower.merge), constant_values=-1),
    )


def _heard(config: ResolvedConfig, processor: MediaProcessor, towers: Sequence[TowerConfig]) -> MediaOptions:
    """Return the engine's media options with max_audio_seconds lowered to the length that a prompt has room for, but
    not below 1.

    config: the engine's, returned unchanged if no tower encodes sounds. processor: the model's.
    """
    tower = next((tower for tower in towers if tower.hears), None)
    if tower is None:
        return config
    windows = -(-(config.max_model_len - 1) // processor.largest(AUDIO).num_rows)
    most = windows * tower.window * tower.frames * HOP // tower.rate
    return replace(config, max_audio_seconds=max(1, min(config.max_audio_seconds, most)))


def digest_of(modality: str, value: Any, options: Mapping[str, Any], settings: str) -> bytes:
    """Return the SHA-256 of a decoded image, video or sound and of everything that affects its preprocessing.

    value: an array, or a NamedTuple or dataclass of arrays and plain values. options: mm_processor_kwargs. settings:
    settings of the processor, as text.
    """
    digest = hashlib.sha256(json.dumps([modality, settings, options], sort_keys=True, default=str).encode())
    parts: Sequence[Any] = [value]
    if not isinstance(value, np.ndarray):
        parts = list(value) if isinstance(value, tuple) else list(vars(value).values())
    for part in parts:
        if isinstance(part, np.ndarray):
            digest.update(f"{part.dtype}{part.shape}".encode())
            digest.update(np.ascontiguousarray(part).data)
        else:
            digest.update(f"{part!r}\0".encode())  # 1.0 and 23 are not 1.02 and 3
    return digest.digest()
