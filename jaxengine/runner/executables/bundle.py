"""Bundles: a folder of compiled programs with a manifest, written on one machine and read on others.

The manifest says what the programs were compiled for (`facts`, `options`, `model`, `sources`), and has their names and
the SHA-256 of each file, which is also the file's name. Loading a program unpickles and runs it. So both are verified
before they are parsed: the manifest by its signature, or by who can have written it, and each file by its digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.base.files import named_path
from jaxengine.config.base.key_file import read_key
from jaxengine.runner.executables.executable_files import NotTrusted, ShippedFiles

MANIFEST = "manifest.json"
FORMAT = 1
# Suffixes of the names of facts that need not be equal: a number may be larger here, a list may be longer.
AT_LEAST, AMONG = " (or newer)", " (or more)"
_MAX_MANIFEST_BYTES = 64 << 20
_MAX_DIFFERENCES = 4  # in a message
# Types of the values of each dict in a manifest.
_PARTS = {"facts": object, "options": object, "model": str, "sources": str, "programs": list, "numbers": int}


class About(NamedTuple):
    """Description of what programs are compiled for.

    Attributes:
      facts: versions, devices and flags, JSON values by name (jaxengine.runner.start.bundles).
      options: the engine's options, JSON values by name.
      model: fields of the ModelConfig, as text.
    """

    facts: Mapping[str, Any]
    options: Mapping[str, Any]
    model: Mapping[str, str]


class Bundle:
    """A bundle that an engine reads its programs from.

    Attributes:
      path: path of the folder.
      cache_dir: the option compile_cache_dir, for everything that a bundle does not contain.
      about: what its programs were compiled for.
      num_pages: number of KV pages of a replica.
      jaxengine: version that built it.
    """

    def __init__(self, path: str, key_file: str | None, cache_dir: str | None = None):
        """Open a folder, and read and verify its manifest.

        key_file: file of the key that it must be signed with; None to trust the folder by its owner (ShippedFiles).
        cache_dir: only stored. Raises ConfigError for a folder that is not a bundle, is damaged, has another format, or
        is not trusted.
        """
        self.path, self.cache_dir = path, cache_dir
        key = None if key_file is None else read_key("bundle_key_file", key_file)
        try:
            self._files = ShippedFiles(named_path("bundle", path), by_owner=key is None)
            content = self._files.read(MANIFEST, _MAX_MANIFEST_BYTES)
        except NotTrusted as error:
            advice = "make it your own or root's, or sign it and give bundle_key_file"
            raise ConfigError.because("bundle", f"the bundle {path!r} cannot be trusted: {error}", advice) from None
        except OSError as error:
            problem = f"the bundle {path!r} cannot be read: {error.strerror or error}"
            raise ConfigError.because("bundle", problem, "name a folder that `jaxengine build` wrote") from None
        found = self._verified(content, key)
        self.about = About(found["facts"], found["options"], found["model"])
        self.num_pages: int = found["num_pages"]
        self.jaxengine: str = found["jaxengine"]
        self._sources, self._programs, self._numbers = found["sources"], found["programs"], found["numbers"]

    def check(self, here: About) -> None:
        """Raise ConfigError, which names the differences, if the programs were not built for `here`, the description of
        this engine.

        First options are compared: an error about `bundle` if one is known to one side only, about the option if its
        value differs. Then the model, and then the facts (`_fits`): an error about `bundle` with at most
        _MAX_DIFFERENCES of what differs.
        """
        theirs, ours = self.about.options, here.options
        if only := sorted(theirs.keys() ^ ours.keys()):
            raise self.refused(f"jaxengine {self.jaxengine}, which built it, has other options: {only[0]}")
        for name, built in theirs.items():
            if not _same(built, own := ours[name]):
                problem = f"{name} is {own!r}, and the bundle {self.path!r} was built with {built!r}"
                raise ConfigError.because(name, problem, "give the same, or build a bundle with yours")
        for part, owner in (("model", "the model's "), ("facts", "")):
            built, own = getattr(self.about, part), getattr(here, part)
            names = [name for name in {**built, **own} if not _fits(name, built.get(name), own.get(name))]
            if names:
                found = [f"{owner}{name}: {_difference(name, built, own)}" for name in names]
                rest = f", and {len(found) - _MAX_DIFFERENCES} more" if len(found) > _MAX_DIFFERENCES else ""
                raise self.refused("; ".join(found[:_MAX_DIFFERENCES]) + rest)

    def check_sources(self, name: str, digest: str) -> None:
        """Raise ConfigError if the programs were traced from other sources than those with this digest, or there are
        none for `name`.

        name: name of the model's class, or "programs" for programs without a model.
        """
        if (built := self._sources.get(name)) != digest:
            problem = f"the sources of {name} are not those of jaxengine {self.jaxengine}, which built it"
            raise self.refused(f"it has no {name}" if built is None else problem)

    def program(self, name: str, key: str) -> bytes:
        """Return a program's bytes, after verifying their digest. name: the program's name, for messages.

        Raises ConfigError if it is missing or damaged.
        """
        if (entry := self._programs.get(key)) is None:
            raise self.refused(f"it has no program {name!r} of the shapes that this engine needs")
        _, digest, size = entry
        try:
            content = self._files.read(f"{digest}.xla", size)
        except (OSError, NotTrusted) as error:
            raise self.refused(f"its program {name!r} cannot be read: {error}") from None
        if hashlib.sha256(content).hexdigest() != digest:
            raise self.refused(f"its program {name!r} is damaged: {digest}.xla has another digest")
        return content

    def program_bytes(self, key: str) -> int:
        """Return the size of a program in bytes, 0 if the bundle lacks it."""
        return self._programs[key][2] if key in self._programs else 0

    def add_program(self, name: str, key: str, content: bytes) -> None:
        """Raise AssertionError: nothing is added to a bundle that is read."""
        raise AssertionError("a bundle that is read has every program, or `program` raises")

    def number(self, name: str, key: str) -> int:
        """Return a number that was computed when a program was compiled. name: the number's name, for messages.

        Raises ConfigError if it is missing.
        """
        if (found := self._numbers.get(key)) is None:
            raise self.refused(f"it lacks the number {name!r} of a program that this engine needs")
        return found

    def add_number(self, key: str, number: int) -> None:
        """Raise AssertionError: nothing is added to a bundle that is read."""
        raise AssertionError("a bundle that is read has every number, or `number` raises")

    def refused(self, why: str) -> ConfigError:
        """Return a ConfigError, which the caller raises, that this bundle cannot be used. why: the reason."""
        advice = "build one for this engine (`jaxengine build`), or leave bundle out"
        return ConfigError.because("bundle", f"the bundle {self.path!r} cannot be used: {why}", advice)

    def _verified(self, content: bytes, key: bytes | None) -> dict[str, Any]:
        """Return the fields of a manifest after verifying its digest, its signature, its format and their types.

        content: content of the file. key: key of the signature; None to skip it. Raises ConfigError if anything is
        wrong.
        """
        body, _, end = content.partition(b"\n")  # a line of JSON, and a line with its digest and signature
        try:
            seal = json.loads(end)
            digest, code = seal["sha256"], seal["hmac_sha256"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise self.refused(f"its {MANIFEST} is not a bundle's, or is damaged") from None
        if digest != hashlib.sha256(body).hexdigest():
            raise self.refused(f"its {MANIFEST} is damaged: its sha256 does not match")
        if key is not None and not (isinstance(code, str) and hmac.compare_digest(code.encode(), _code(key, body))):
            raise self.refused(f"hmac_sha256 of its {MANIFEST} was not made with the key in bundle_key_file")
        try:
            found = json.loads(body)
            format = found["format"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise self.refused(f"its {MANIFEST} has no format") from None
        if format != FORMAT:
            raise self.refused(f"its format is {format!r}, and this jaxengine reads {FORMAT}")
        for part, kind in _PARTS.items():
            values = found.get(part)
            if not isinstance(values, dict) or not all(isinstance(each, kind) for each in values.values()):
                raise self.refused(f"{part} of its {MANIFEST} is invalid")
        for name, wanted in (("num_pages", int), ("jaxengine", str)):
            if type(found.get(name)) is not wanted or found[name] in (0, ""):
                raise self.refused(f"{name} of its {MANIFEST} is invalid")
        for entry in found["programs"].values():
            if list(map(type, entry)) != [str, str, int] or not _is_digest(entry[1]) or not 0 < entry[2] < 2**40:
                raise self.refused(f"programs of its {MANIFEST} is invalid")
        return found


class NewBundle:
    """A bundle that is being written. It has the methods of Bundle that ExecutableCache calls.

    Programs are added as they are compiled. The manifest is written last; without it the folder is not a bundle.

    Attributes:
      path: its folder.
      cache_dir: the option compile_cache_dir, for everything that a bundle does not contain.
    """

    def __init__(self, path: str, key_file: str | None, cache_dir: str | None = None):
        """Create the folder, or delete the manifest and programs of an earlier bundle in it.

        key_file: file of the key to sign with; None to leave the bundle unsigned. cache_dir: only stored. Raises
        ConfigError for a folder that cannot be written, or has files and is not a bundle.
        """
        self.path, self.cache_dir = named_path("out", path), cache_dir
        self._key = None if key_file is None else read_key("bundle_key_file", key_file)
        self._sources: dict[str, str] = {}
        self._programs: dict[str, list[Any]] = {}
        self._numbers: dict[str, int] = {}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            files = list(self.path.iterdir())
            if files and not (self.path / MANIFEST).is_file():
                raise ConfigError("out", path, "a new folder, an empty one, or a bundle, which is replaced")
            (self.path / MANIFEST).unlink(missing_ok=True)  # a half-replaced bundle must not be used
            for file in files:
                if file.suffix == ".xla" and _is_digest(file.stem):
                    file.unlink()
        except OSError as error:
            raise ConfigError.because("out", f"{path!r} cannot be written: {error.strerror}", "name another") from None

    @property
    def num_programs(self) -> int:
        """Number of programs added so far."""
        return len(self._programs)

    @property
    def num_bytes(self) -> int:
        """Total bytes of the files of programs; equal programs share a file."""
        return sum({digest: size for _, digest, size in self._programs.values()}.values())

    def check_sources(self, name: str, digest: str) -> None:
        """Record the digest of the sources from which programs are traced. name: name of the model's class."""
        self._sources[name] = digest

    def program(self, name: str, key: str) -> None:
        """Return None: every program is compiled."""

    def program_bytes(self, key: str) -> int:
        """Return the size of an added program in bytes, 0 if there is none."""
        return self._programs[key][2] if key in self._programs else 0

    def add_program(self, name: str, key: str, content: bytes) -> None:
        """Write a program to a file named by its digest, and record it under `key`. Raises OSError if it cannot be
        written.
        """
        digest = hashlib.sha256(content).hexdigest()
        self._programs[key] = [name, digest, len(content)]
        with _replacing(self.path, f"{digest}.xla") as file:
            file.write(content)

    def number(self, name: str, key: str) -> int | None:
        """Return the number added under `key`, None if there is none. name: ignored."""
        return self._numbers.get(key)

    def add_number(self, key: str, number: int) -> None:
        """Record a number that was computed when a program was compiled."""
        self._numbers[key] = number

    def finish(self, about: About, num_pages: int, jaxengine: str) -> None:
        """Write the manifest. num_pages: number of KV pages of a replica. jaxengine: its version. Raises OSError."""
        parts = {"sources": self._sources, "programs": self._programs, "numbers": self._numbers}
        found = {"format": FORMAT, "jaxengine": jaxengine, "num_pages": num_pages, **about._asdict(), **parts}
        write_manifest(self.path, found, self._key)


def write_manifest(folder: Path, found: Mapping[str, Any], key: bytes | None) -> None:
    """Write a manifest with the fields `found`, their digest and, given a key, their signature, in place of an earlier
    one. Raises OSError if it cannot be written.
    """
    body = json.dumps(found, sort_keys=True).encode()
    code = None if key is None else _code(key, body).decode()
    seal = json.dumps({"sha256": hashlib.sha256(body).hexdigest(), "hmac_sha256": code}).encode()
    with _replacing(folder, MANIFEST) as file:
        file.write(body + b"\n" + seal + b"\n")


@contextlib.contextmanager
def _replacing(folder: Path, name: str) -> Iterator[Any]:
    """Yield a new binary file, readable by all users, that is renamed to `name` in the folder at the end of the block;
    an error in the block deletes it instead.
    """
    descriptor, temporary = tempfile.mkstemp(prefix="tmp-", dir=folder)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o644)
            yield file
        os.replace(temporary, folder / name)
    except BaseException:
        os.unlink(temporary)
        raise


def _code(key: bytes, body: bytes) -> bytes:
    """Return the signature of a manifest: the HMAC-SHA256, in hexadecimal, of "jaxengine bundle", a zero byte and
    `body`, the manifest's first line.
    """
    return hmac.digest(key, b"jaxengine bundle\0" + body, "sha256").hex().encode()


def _is_digest(text: str) -> bool:
    """Whether a text is a SHA-256 in hexadecimal, and so safe as a file name."""
    return len(text) == 64 and all(letter in "0123456789abcdef" for letter in text)


def _same(built: Any, own: Any) -> bool:
    """Whether two values are equal as JSON."""
    return json.dumps(built, sort_keys=True) == json.dumps(own, sort_keys=True)


def _fits(name: str, built: Any, own: Any) -> bool:
    """Whether programs built on one machine can run on another, as far as one fact about the machines tells.

    name: the fact's name. built, own: the fact's value where the programs were built, and where they are to run. If the
    name ends with AT_LEAST, `own` may be a larger finite number; if it ends with AMONG, `own` may be a list that holds
    all elements of `built`. Otherwise the two must be equal as JSON.
    """
    if name.endswith(AT_LEAST) and all(isinstance(each, int | float) for each in (built, own)):
        return built <= own < math.inf
    if name.endswith(AMONG) and all(isinstance(each, list) for each in (built, own)):
        return not _lacking(built, own)
    return _same(built, own)


def _lacking(built: list[Any], own: list[Any]) -> list[Any]:
    """Return the elements of `built` that `own` lacks."""
    return [each for each in built if each not in own]


def _difference(name: str, built: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Return a text about a fact that differs: its values here (`own`) and in the bundle (`built`), or the elements
    that are missing here.
    """
    there, here = (repr(each[name]) if name in each else "not known" for each in (built, own))
    if name.endswith(AMONG) and name in own:
        there, here = "more", f"without {', '.join(map(str, _lacking(built.get(name, []), own[name])))}"
    return f"here {here}, there {there}"
