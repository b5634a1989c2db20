"""Version of an engine's weights: the values that it may have."""

from __future__ import annotations

from typing import Any

from jaxengine.scheduler.base.errors import RequestError, show_value

# Limits of integer versions: answers of both protocols and messages between processes have 64 bits for them.
MIN_VERSION, MAX_VERSION = -(2**63), 2**63 - 1
MAX_VERSION_LENGTH = 256  # of text versions, which every answer may repeat


def check_version(version: Any) -> None:
    """Raise RequestError unless `version` may be a version of weights: a signed 64-bit integer (not a bool), a text of
    at most MAX_VERSION_LENGTH characters without lone surrogates, or None, which means the last number plus one.
    """
    if isinstance(version, str):
        if len(version) > MAX_VERSION_LENGTH:
            allowed = f"a text of at most {MAX_VERSION_LENGTH} characters; it has {len(version)}"
        else:
            try:
                version.encode()
                return
            except UnicodeEncodeError:
                allowed = "a text of Unicode characters; it has half of a surrogate pair"
    elif version is None or (not isinstance(version, bool) and isinstance(version, int)):
        if version is None or MIN_VERSION <= version <= MAX_VERSION:
            return
        allowed = f"integers from {MIN_VERSION} to {MAX_VERSION}, and texts"
    else:
        allowed = "an integer or a text"
    raise RequestError(f"version is {show_value(version)}; allowed: {allowed}", param="version", value=version)
