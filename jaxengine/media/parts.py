"""Images, videos and sounds in chat messages, in the forms of several APIs.

They are taken out of the messages and replaced by {"type": "image"}, {"type": "video"} and {"type": "audio"}, which
chat templates expect. Nothing is fetched or decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from jaxengine.config.inputs.multimodal import AUDIO, IMAGE, VIDEO, MediaOptions
from jaxengine.media.base.errors import MediaError
from jaxengine.media.embeds import EMBEDS, GivenEmbeds, given_embeds
from jaxengine.media.fetching.fetch import check_source
from jaxengine.scheduler.base.errors import RequestError, show_value

# Roles whose messages may contain media: the model's own answers are text.
ROLES = ("user", "system", "developer", "tool")
_DETAILS = ("auto", "low", "high", "original")
_TEXTS = ("text", "refusal", "input_text", "output_text", "thinking", "language")
# Allowed values of a sound's `format`, which is otherwise ignored: the file's first bytes determine its type.
_FORMATS = ("wav", "mp3", "flac", "ogg", "opus", "mp4", "m4a", "aac", "webm")


class MediaModel(Protocol):
    """Protocol of the media capabilities of a model."""

    @property
    def modalities(self) -> Collection[str]:
        """Modalities that the model takes, of "image", "video" and "audio"."""
        ...

    def placeholder(self, modality: str) -> str:
        """Return the text that stands for an item of the modality in a prompt whose template takes only text."""
        ...


@dataclass(frozen=True, eq=False)
class MediaPart:
    """Image, video or sound as received.

    Attributes:
      modality: "image", "video" or "audio".
      source: an address (data:, https:, file:), embeds.GivenEmbeds, or a value for read_image, read_video or
        read_sound.
      where: its path for errors, "messages[1].content[2].image_url".
      param: the field of the request that contains it.
    """

    modality: str
    source: Any
    where: str
    param: str = "messages"

    def refusal(self, error: MediaError) -> RequestError:
        """Return the RequestError, with the part's path, for a MediaError of this part."""
        return RequestError(f"{self.where} {error}", param=self.param)


class PlacedPart(dict[str, Any]):
    """Content part converted from another API. where: its path there, beginning with the request's field."""

    def __init__(self, part: Mapping[str, Any], where: str):
        super().__init__(part)
        self.where = where


def collect_media(messages: Any, model: MediaModel | None, options: MediaOptions) -> tuple[Any, list[MediaPart]]:
    """Take media out of chat messages; return (messages for a chat template, media in order).

    Args:
      messages: the request's, unchecked. Text parts, and anything that is not a message, are returned unchanged.
      model: the model's media capabilities; None for a text-only model.
      options: limits of the number and the sources of media.

    A part is one of
      {"type": "image_url", "image_url": {"url": ..., "detail": ...} or the address},
      {"type": "input_image", "image_url": the address, "detail": ...},
      {"type": "image", "source": {"type": "base64", "media_type": ..., "data": ...} or {"type": "url", "url": ...}},
      {"type": "image", "image": or "url": ...}, {"type": "image_pil", "image_pil": ...},
      {"type": "image_embeds", "image_embeds": base64 or {"image_embeds": base64, "image_grid_thw": [t, h, w]}},
      {"type": "video_url", "video_url": {"url": ...} or the address}, {"type": "video", "video": or "url": ...},
      {"type": "input_audio", "input_audio": {"data": base64, "format": a name of _FORMATS}},
      {"type": "audio_url", "audio_url": {"url": ...} or the address}, {"type": "audio", "audio": or "url": ...}.
    A value that is not an address can only come from Python, and is one for read_image, read_video or read_sound.

    Raises RequestError, before anything is fetched, for a part that cannot be used, and for a part of an unknown type,
    such as a file; the latter is not checked in messages without media to a text-only model.
    """
    parts: list[MediaPart] = []
    if not isinstance(messages, (list, tuple)):
        return messages, parts
    written: list[Any] = []
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        where = f"messages[{number}].content"
        if not isinstance(content, (list, tuple)) or not any(map(_reader_of, content)):
            if model is not None and isinstance(content, (list, tuple)):
                _check_types(content, where)
            written.append(message)
            continue
        written.append({**message, "content": _collect(message, content, where, parts)})
    check_parts(parts, model, options)
    for part in parts:
        if isinstance(part.source, str):
            try:
                check_source(part.source, options)
            except MediaError as error:
                raise part.refusal(error) from None
    return written, parts


def _collect(message: Mapping[str, Any], content: Sequence[Any], where: str, parts: list[MediaPart]) -> list[Any]:
    """Return a message's content for a template, with media as {"type": modality}, and append its media to `parts`.

    where: path of the content for errors; a PlacedPart has its own path. Raises RequestError for media in a role that
    may have none, and for a part of an unknown type or form. A part's `uuid` is ignored: content identifies media.
    """
    _check_types(content, where)
    kept: list[Any] = []
    for number, part in enumerate(content):
        reader = _reader_of(part)
        if reader is None:
            kept.append(part)
            continue
        place, param = _place(part, where, number)
        if (role := message.get("role")) not in ROLES:
            problem = f"{place} is an image, video or sound in a message of role {show_value(role)}"
            raise RequestError(f"{problem}; allowed: one of role {', '.join(ROLES)}", param=param)
        modality, key, source = reader(part, place, param)
        parts.append(MediaPart(modality, source, f"{place}.{key}", param))
        kept.append({"type": modality})
    return kept


def _check_types(content: Sequence[Any], where: str) -> None:
    """Raise RequestError for a part of a message's content whose type no model here takes, such as a file.

    where: path of the content in the request, for the error; a PlacedPart has a path of its own. Parts that are not
    mappings, or whose type is not text, are not checked.
    """
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind not in (*_TEXTS, *_READERS):
            place, param = _place(part, where, number)
            text = f"{place}.type is {show_value(kind)}; allowed: {', '.join((*_TEXTS, *_READERS))}"
            raise RequestError(text, param=param)


def _place(part: Any, where: str, number: int) -> tuple[str, str]:
    """Return the path of a content part, its own if it is a PlacedPart, and the field of the request that has it.

    where: path of the content; number: index of the part.
    """
    place = part.where if isinstance(part, PlacedPart) else f"{where}[{number}]"
    return place, place.partition("[")[0].partition(".")[0]


def check_parts(parts: Sequence[MediaPart], model: MediaModel | None, options: MediaOptions) -> None:
    """Raise RequestError for a part of a modality that the model does not take, for embeddings unless
    options.enable_mm_embeds, and for more parts of a modality than limit_mm_per_prompt.

    model: None for a text-only model, which takes no media.
    """
    taken = () if model is None else model.modalities
    for part in parts:
        if part.modality not in taken:
            kinds = " and ".join(noun for name, noun in _NOUNS.items() if name in taken) or "text"
            instead = ", so give frames that matter as images" if part.modality == VIDEO and IMAGE in taken else ""
            problem = f"this model takes no {part.modality}: {part.where}; it takes {kinds}{instead}"
            raise RequestError(problem, param=part.param)
        if isinstance(part.source, GivenEmbeds) and not options.enable_mm_embeds:
            text = f"{part.where} is given as embeddings, which are only allowed with enable_mm_embeds"
            raise RequestError(text, param=part.param)
    for modality in _NOUNS:
        found = [part for part in parts if part.modality == modality]
        if len(found) > (most := options.mm_limit(modality)):
            param, noun = found[-1].param, modality if len(found) == 1 else f"{modality}s"
            allowed = f"at most {most}, by limit_mm_per_prompt"
            raise RequestError(f"{param} has {len(found)} {noun}; allowed: {allowed}", param=param)


_NOUNS = {IMAGE: "images", VIDEO: "videos", AUDIO: "sounds"}
_Read = tuple[str, str, Any]  # modality, key and source


def _reader_of(part: Any) -> Callable[[Mapping[str, Any], str, str], _Read] | None:
    """Return the reader of a content part's type; None for text and unknown types."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return _READERS.get(kind) if isinstance(kind, str) else None


def _by_address(part: Mapping[str, Any], where: str, param: str, *, modality: str) -> _Read:
    """Return (modality, key, source) of an item given by its address: "image_url", "video_url" or "audio_url".

    where: path of the part, param: field of the request, both for errors. Raises RequestError for another form or an
    invalid detail.
    """
    key = f"{modality}_url"
    if modality == IMAGE:
        _check_detail(part, where, param)
    return modality, key, _address(part, key, where, param)


def _input_image(part: Mapping[str, Any], where: str, param: str) -> _Read:
    """Return (modality, key, source) of an image of the Responses API, given by its address, "image_url".

    where: path of the part, param: field of the request, both for errors. Raises RequestError for another form, an
    invalid detail, and if file_id is given.
    """
    if part.get("file_id") is not None:
        text = f"{where}.file_id is given, but this server keeps no files; give the image as image_url"
        raise RequestError(text, param=param)
    return _by_address(part, where, param, modality=IMAGE)


def _image(part: Mapping[str, Any], where: str, param: str) -> _Read:
    """Return (modality, key, source) of an image given by "source" (Anthropic's form), "image" or "url".

    where: path of the part, param: field of the request, both for errors. Raises RequestError for another form of
    "source", and without it unless exactly one of the others is given.
    """
    if part.get("source") is not None:
        return IMAGE, "source", _anthropic(part["source"], f"{where}.source", param)
    return _by_value(part, where, param, modality=IMAGE, keys=("image", "url"))


def _by_value(part: Mapping[str, Any], where: str, param: str, *, modality: str, keys: Sequence[str]) -> _Read:
    """Return (modality, key, source) of an item given by the one key of `keys` that the part has.

    where: path of the part, param: field of the request, both for errors. Raises RequestError for none or several keys.
    """
    given = [key for key in keys if part.get(key) is not None]
    if len(given) != 1:
        text = f"{where} of type {show_value(part['type'])} must have {' or '.join(keys)}"
        raise RequestError(text, param=param)
    return modality, given[0], part[given[0]]


def _image_embeds(part: Mapping[str, Any], where: str, param: str) -> _Read:
    """Return (modality, key, GivenEmbeds) of an image given as "image_embeds", unchecked.

    where: path of the part, param: field of the request, both for errors. Raises RequestError if they are missing.
    """
    value = part.get(EMBEDS)
    if value is None:
        raise RequestError(f"{where} of type '{EMBEDS}' must have {EMBEDS}", param=param)
    return IMAGE, EMBEDS, given_embeds(value) or GivenEmbeds(value)


def _input_audio(part: Mapping[str, Any], where: str, param: str) -> _Read:
    """Return (modality, key, source) of a sound given in base64, whose source becomes a data URL.

    where: path of the part, param: field of the request, both for errors. Raises RequestError for another form, and for
    a format that is not in _FORMATS.
    """
    given = part.get("input_audio")
    data = given.get("data") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(data, str) or not data:
        text = f'{where}.input_audio must be {{"data": base64, "format": ...}}, got {show_value(given)}'
        raise RequestError(text, param=param)
    if (name := given.get("format")) not in _FORMATS:
        text = f"{where}.input_audio.format is {show_value(name)}; allowed: {', '.join(_FORMATS)}"
        raise RequestError(text, param=param)
    return AUDIO, "input_audio", f"data:;base64,{data}"


_READERS: dict[str, Callable[[Mapping[str, Any], str, str], _Read]] = {
    "image_url": partial(_by_address, modality=IMAGE),
    "input_image": _input_image,
    "image": _image,
    "image_pil": partial(_by_value, modality=IMAGE, keys=("image_pil",)),
    "image_embeds": _image_embeds,
    "video_url": partial(_by_address, modality=VIDEO),
    "video": partial(_by_value, modality=VIDEO, keys=("video", "url")),
    "audio_url": partial(_by_address, modality=AUDIO),
    "input_audio": _input_audio,
    "audio": partial(_by_value, modality=AUDIO, keys=("audio", "url")),
}


def _address(part: Mapping[str, Any], key: str, where: str, param: str) -> str:
    """Return the address in an OpenAI part, given as text or in an object's "url".

    part: part of a message. key: the part's field with the address. where: path of the part for errors. param: field of
    the request. Raises RequestError for another form, and for an invalid detail in the object.
    """
    value = part.get(key)
    if isinstance(value, Mapping):
        _check_detail(value, f"{where}.{key}", param)
        value = value.get("url")
    if not isinstance(value, str) or not value:
        text = f'{where}.{key} must be {{"url": ...}} or an address, got {show_value(part.get(key))}'
        raise RequestError(text, param=param)
    return value


def _check_detail(holder: Mapping[str, Any], where: str, param: str) -> None:
    """Raise RequestError for an invalid `detail` in `holder`. Valid ones are ignored.

    where: path of `holder` in the request, param: the request's field, both for the error.
    """
    if (detail := holder.get("detail")) is not None and detail not in _DETAILS:
        text = f"{where}.detail is {show_value(detail)}; allowed: {', '.join(_DETAILS)}"
        raise RequestError(text, param=param)


def _anthropic(source: Any, where: str, param: str) -> str:
    """Return the address in an Anthropic source; base64 data becomes a data URL without a media type.

    where: path of the source for errors. param: field of the request. Raises RequestError for any other source.
    """
    kind = source.get("type") if isinstance(source, Mapping) else None
    if kind == "url" and isinstance(source.get("url"), str):
        return source["url"]
    if kind == "base64" and isinstance(source.get("data"), str):
        return f"data:;base64,{source['data']}"
    shown = show_value(kind) if isinstance(source, Mapping) else show_value(source)
    text = f'{where} is of type {shown}; allowed: {{"type": "base64", "data": ...}} and {{"type": "url", "url": ...}}'
    raise RequestError(text, param=param)
