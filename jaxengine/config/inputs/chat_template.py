"""Options of chat templates: a template, or the name of a file that holds one, and what contents it gets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.base.files import read_file

# As in tokens.content_format, which imports no options.
CONTENT_FORMATS = ("auto", "string", "openai")
_MAX_BYTES = 1 << 20
_ADVICE = "give a template with {{ }} or {% %} in it, or the name of a file that holds one"


@dataclass(frozen=True, kw_only=True)
class TemplateOptions:
    """The fields of EngineConfig about chat templates.

    Attributes:
      chat_template: Jinja template to use instead of the model's, or the name of a file that holds one.
      chat_template_content_format: what the template gets as a message's content: "string" for a text, with the texts
        of several parts joined by line breaks; "openai" for a list of parts, except in the formats of Mistral AI and
        DeepSeek, which have texts; "auto" for what the template takes.
    """

    chat_template: str | None = None
    chat_template_content_format: str = "auto"


def read_chat_template(value: Any) -> Any:
    """Return the template: `value` itself if it contains template braces, otherwise the content of the file of that
    name, with "~" expanded, without a byte order mark.

    An empty text, and a value that is not text, is returned unchanged. Raises ConfigError for a file that cannot be
    read as UTF-8, has more than 1 MiB or contains no template.
    """
    if not isinstance(value, str) or not value or _is_template(value):
        return value
    try:
        # A byte order mark would begin every prompt.
        text = read_file(Path(value).expanduser(), _MAX_BYTES)[0].decode("utf-8-sig")
    except (OSError, ValueError, RuntimeError) as error:  # includes invalid file names and a missing home folder
        why = getattr(error, "strerror", None) or error
        raise ConfigError.because(
            "chat_template", f"chat_template {value[:200]!r} cannot be read ({why})", _ADVICE
        ) from None
    if not _is_template(text):
        raise ConfigError.because(
            "chat_template", f"the file of chat_template {value[:200]!r} holds no template", _ADVICE
        )
    return text


def _is_template(text: str) -> bool:
    """Return whether a text contains "{{" or "{%"."""
    return "{{" in text or "{%" in text
