"""Pictures and videos in chat messages: where they stand, in which of the ways that APIs write them, how many.

Takes them out of the messages and leaves {"type": "image"} and {"type": "video"} in their places, which is what chat
templates look for. Fetches and decodes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxengine.config.multimodal import IMAGE, MODALITIES, VIDEO, MediaOptions
from jaxengine.media.embeds import EMBEDS, GivenEmbeds, given_embeds
from jaxengine.media.errors import MediaError
from jaxengine.media.fetch import check_source
from scheduler.errors import RequestError, show_value

# Roles whose messages may hold pictures: an answer of the model's is text.
ROLES = ("user", "system", "developer", "tool")
_DETAILS = ("auto", "low", "high", "original")
_TEXTS = ("text", "refusal")


class MediaModel(Protocol):
    """What is known of a model that takes pictures or videos."""

    @property
    def modalities(self) -> Collection[str]:
        """Those of MODALITIES that it takes."""
        ...

    def placeholder(self, modality: str) -> str:
        """The text that stands for one in a prompt whose template takes texts only."""
        ...


@dataclass(frozen=True, eq=False)
class MediaPart:
    """A picture or a video, as it came.

    Attributes:
      modality: one of MODALITIES.
      source: an address (data:, https:, file:), or what read_image and read_video take.
      where: what it is called in errors, "messages[1].content[2].image_url".
      param: the field of the request that it is in.
    """

    modality: str
    source: Any
    where: str
    param: str = "messages"

    def refusal(self, error: MediaError) -> RequestError:
        """What is wrong with it, by its name."""
        return RequestError(f"{self.where} {error}", param=self.param)


class PlacedPart(dict[str, Any]):
    """A part of a message made from another API's. where: what it is called there, with its field in front."""

    def __init__(self, part: Mapping[str, Any], where: str):
        super().__init__(part)
        self.where = where


def collect_media(messages: Any, model: MediaModel | None, options: MediaOptions) -> tuple[Any, list[MediaPart]]:
    """The messages for a chat template, and the pictures and videos that were in them, in order.

    Args:
      messages: of a request, checked by nobody so far. What is no message or no part of these kinds is left as it is.
      model: what takes them; None for one that takes none.
      options: how many there may be, and from where.

    A part is one of
      {"type": "image_url", "image_url": {"url": ..., "detail": ...} or the address},
      {"type": "input_image", "image_url": the address, "detail": ...},
      {"type": "image", "source": {"type": "base64", "media_type": ..., "data": ...} or {"type": "url", "url": ...}},
      {"type": "image", "image": or "url": ...}, {"type": "image_pil", "image_pil": ...},
      {"type": "image_embeds", "image_embeds": base64 or {"image_embeds": base64, "image_grid_thw": [t, h, w]}},
      {"type": "video_url", "video_url": {"url": ...} or the address}, {"type": "video", "video": or "url": ...}.
    What is no address is what read_image and read_video take, and can only come from Python.

    Raises RequestError for a part that cannot be used, before anything is fetched.
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
    """The content for a template; what is in it is added to `parts`."""
    _check_types(content, where)
    kept: list[Any] = []
    for number, part in enumerate(content):
        place = part.where if isinstance(part, PlacedPart) else f"{where}[{number}]"
        reader = _reader_of(part)
        if reader is None:
            kept.append(part)
            continue
        param = place.partition("[")[0].partition(".")[0]
        if message.get("role") not in ROLES:
            allowed = f"messages of {', '.join(ROLES)}"
            raise RequestError(f"{place} is a picture or video; allowed are they in {allowed}", param=param)
        if part.get("uuid") is not None:
            text = f"{place}.uuid is given; nothing is kept under names, pictures are known by what they show"
            raise RequestError(text, param=param)
        modality, key, source = reader(part, place, param)
        parts.append(MediaPart(modality, source, f"{place}.{key}", param))
        kept.append({"type": modality})
    return kept


def _check_types(content: Sequence[Any], where: str) -> None:
    """Raises RequestError for a part of a type that no model here takes, such as sound."""
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind not in (*_TEXTS, *_READERS):
            text = f"{where}[{number}].type is {show_value(kind)}; allowed: {', '.join((*_TEXTS, *_READERS))}"
            raise RequestError(text, param="messages")


def check_parts(parts: Sequence[MediaPart], model: MediaModel | None, options: MediaOptions) -> None:
    """Raises RequestError for a part that the model does not take, and for more of a modality than there may be."""
    taken = () if model is None else model.modalities
    for part in parts:
        if part.modality not in taken:
            kinds = " and ".join(f"{name}s" for name in MODALITIES if name in taken) or "text"
            instead = ", so give frames that matter as images" if part.modality == VIDEO and IMAGE in taken else ""
            problem = f"this model takes no {part.modality}: {part.where}; it takes {kinds}{instead}"
            raise RequestError(problem, param=part.param)
        if isinstance(part.source, GivenEmbeds) and not options.enable_mm_embeds:
            text = f"{part.where} is given as embeddings, which are only allowed with enable_mm_embeds"
            raise RequestError(text, param=part.param)
    for modality in MODALITIES:
        found = [part for part in parts if part.modality == modality]
        if len(found) > (most := options.mm_limit(modality)):
            param, noun = found[-1].param, modality if len(found) == 1 else f"{modality}s"
            allowed = f"at most {most}, by limit_mm_per_prompt"
            raise RequestError(f"{param} has {len(found)} {noun}; allowed: {allowed}", param=param)


_Read = tuple[str, str, Any]  # modality, key and source


def _reader_of(part: Any) -> Callable[[Mapping[str, Any], str, str], _Read] | None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return _READERS.get(kind) if isinstance(kind, str) else None


def _image_url(part: Mapping[str, Any], where: str, param: str) -> _Read:
    _check_detail(part, where, param)
    return IMAGE, "image_url", _address(part, "image_url", where, param)


def _input_image(part: Mapping[str, Any], where: str, param: str) -> _Read:
    if part.get("file_id") is not None:
        text = f"{where}.file_id is given, but this server keeps no files; give the picture as image_url"
        raise RequestError(text, param=param)
    return _image_url(part, where, param)


def _video_url(part: Mapping[str, Any], where: str, param: str) -> _Read:
    return VIDEO, "video_url", _address(part, "video_url", where, param)


def _image(part: Mapping[str, Any], where: str, param: str) -> _Read:
    if part.get("source") is not None:
        return IMAGE, "source", _anthropic(part["source"], f"{where}.source", param)
    return IMAGE, *_object(part, ("image", "url"), where, param)


def _image_pil(part: Mapping[str, Any], where: str, param: str) -> _Read:
    return IMAGE, *_object(part, ("image_pil",), where, param)


def _image_embeds(part: Mapping[str, Any], where: str, param: str) -> _Read:
    value = part.get(EMBEDS)
    if value is None:
        raise RequestError(f"{where} of type '{EMBEDS}' must have {EMBEDS}", param=param)
    return IMAGE, EMBEDS, given_embeds(value) or GivenEmbeds(value)


def _video(part: Mapping[str, Any], where: str, param: str) -> _Read:
    return VIDEO, *_object(part, ("video", "url"), where, param)


_READERS = {
    "image_url": _image_url,
    "input_image": _input_image,
    "image": _image,
    "image_pil": _image_pil,
    "image_embeds": _image_embeds,
    "video_url": _video_url,
    "video": _video,
}


def _address(part: Mapping[str, Any], key: str, where: str, param: str) -> str:
    """The address of an OpenAI part, in an object or as a text."""
    value = part.get(key)
    if isinstance(value, Mapping):
        _check_detail(value, f"{where}.{key}", param)
        value = value.get("url")
    if not isinstance(value, str) or not value:
        text = f'{where}.{key} must be {{"url": ...}} or an address, got {show_value(part.get(key))}'
        raise RequestError(text, param=param)
    return value


def _check_detail(holder: Mapping[str, Any], where: str, param: str) -> None:
    """A hint that no model here takes; what is none is refused all the same."""
    if (detail := holder.get("detail")) is not None and detail not in _DETAILS:
        text = f"{where}.detail is {show_value(detail)}; allowed: {', '.join(_DETAILS)}"
        raise RequestError(text, param=param)


def _anthropic(source: Any, where: str, param: str) -> str:
    """The address of an Anthropic source; data in base64 as a data URL."""
    kind = source.get("type") if isinstance(source, Mapping) else None
    if kind == "url" and isinstance(source.get("url"), str):
        return source["url"]
    if kind == "base64" and isinstance(source.get("data"), str):
        return f"data:;base64,{source['data']}"
    shown = show_value(kind) if isinstance(source, Mapping) else show_value(source)
    text = f'{where} is of type {shown}; allowed: {{"type": "base64", "data": ...}} and {{"type": "url", "url": ...}}'
    raise RequestError(text, param=param)


def _object(part: Mapping[str, Any], keys: Sequence[str], where: str, param: str) -> tuple[str, Any]:
    """(key, value) of the one key that is given."""
    given = [key for key in keys if part.get(key) is not None]
    if len(given) != 1:
        text = f"{where} of type {show_value(part['type'])} must have {' or '.join(keys)}"
        raise RequestError(text, param=param)
    return given[0], part[given[0]]
