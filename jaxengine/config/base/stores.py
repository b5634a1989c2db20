"""Object stores and web servers that options name by URL, through fsspec's file systems."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from errno import errorcode
from typing import Any

from jaxengine.config.base.errors import ConfigError

# Scheme -> the package that its file system needs in addition to fsspec, and what installs it.
SCHEMES = {
    "s3": ("s3fs", "jaxengine[s3]"),
    "gs": ("gcsfs", "jaxengine[gcs]"),
    "https": ("aiohttp", "aiohttp"),
    "http": ("aiohttp", "aiohttp"),
    "memory": ("fsspec", "fsspec"),
    "file": ("fsspec", "fsspec"),
}
# Options of file systems. The AWS client's own retries are switched off, because s3fs and readers retry as well: a
# store that is gone is then an error after seconds.
_OPTIONS = {"s3": {"config_kwargs": {"retries": {"max_attempts": 0}}}}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


class RangeError(OSError):
    """Error of a range that could not be fetched; its text has nothing from the store."""


def is_url(name: str | None) -> bool:
    """Return whether the value of an option is a URL."""
    return name is not None and _URL.fullmatch(name) is not None


def open_store(option: str, url: str, schemes: Sequence[str] = tuple(SCHEMES)) -> tuple[Any, str]:
    """Return (fsspec's file system of a URL's scheme, the folder's path in it). No file is read.

    Credentials are those that the scheme's package finds, such as AWS_ACCESS_KEY_ID. option: name of the option that
    has the URL, scheme://address of the folder. schemes: those that are allowed, of SCHEMES. Raises ConfigError for a
    URL of another scheme, without an address, with credentials, a query or a fragment (names of models are shown, so
    they must be free of secrets), if a package is not installed, and if the file system cannot be made.
    """
    found = _URL.fullmatch(url)
    scheme, rest = (found[1].lower(), found[2]) if found else ("", url)
    if scheme not in schemes:
        raise ConfigError(option, f"{scheme}://...", f"{', '.join(f'{each}://' for each in schemes)}, or a folder")
    if "@" in rest.partition("/")[0] or re.search(r"[?#\s\x00-\x1f]", rest):
        problem = f"{option} is a URL of {scheme} with credentials, a query or a fragment"
        advice = "give the address of the folder alone; credentials are read from the environment of the store"
        raise ConfigError.because(option, problem, advice)
    if not rest.strip("/"):
        raise ConfigError(option, url, f"the address of a folder, as {scheme}://BUCKET/FOLDER")
    package, install = SCHEMES[scheme]
    if importlib.util.find_spec("fsspec") is None or importlib.util.find_spec(package) is None:
        problem = f"{option} {url!r} needs the package {package}, which is not installed"
        raise ConfigError.because(option, problem, f"pip install '{install}'")
    import fsspec

    try:
        fs: Any = fsspec.filesystem(scheme, **_OPTIONS.get(scheme, {}))
    except Exception as error:  # each file system has errors of its own
        raise unreadable(option, url, error) from None
    fs.invalidate_cache()  # the process shares it, and it may have old listings
    return fs, str(fs._strip_protocol(url.rstrip("/"))).rstrip("/")


def unreadable(option: str, url: str, error: Exception, name: str = "") -> ConfigError:
    """Return the error of a folder at a URL that cannot be read. error: what the store says. name: the file that was to
    be read, "" for the folder.
    """
    place = f"{name} of " if name else ""
    problem = f"{place}{option} {url!r} cannot be read ({brief(error)})"
    return ConfigError.because(option, problem, "check the address, and the credentials of the store")


def brief(error: Exception) -> str:
    """Return the kind of an error and the system's text for its errno.

    The error's own text is left out, unless it is a RangeError's, because a store's texts may repeat requests and keys.
    """
    number: Any = getattr(error, "errno", None)
    said = error.strerror if isinstance(error, RangeError) else os.strerror(number) if number in errorcode else None
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
