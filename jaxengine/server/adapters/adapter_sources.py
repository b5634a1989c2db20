"""Sources of adapters that requests may name before they are loaded: local folders, and owners on the hub."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from pathlib import Path

from jaxengine.api.adapters import load_adapter
from jaxengine.api.engine_client import EngineClient
from jaxengine.checkpoint.hub import download
from jaxengine.config.base.errors import ConfigError
from jaxengine.config.base.files import named_path
from jaxengine.models.params.files import ADAPTER_CONFIG, ADAPTER_FILES
from jaxengine.scheduler.base.errors import OverloadedError
from jaxengine.server.base.options import ServerConfig

logger = logging.getLogger(__name__)

# Name of a folder in lora_dirs, or of a repository; it cannot lead out of the folder.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,95}){0,3}")
# Seconds for which a name that was not found is not searched for again, largest number of such names that are
# remembered, and largest number of simultaneous searches.
_MISSING_SECONDS, _MOST_MISSING, _MOST_SEARCHES = 60.0, 4096, 8


class AdapterSources:
    """Finder of adapters, by the options lora_dirs and lora_hub_owners, for use on one event loop.

    Raises ConfigError for a folder that is missing, and for a text that is not an owner's name.
    """

    def __init__(self, config: ServerConfig):
        self._folders: list[Path] = []
        for each in config.lora_dirs:
            folder = named_path("lora_dirs", each)
            if not os.path.isdir(folder):
                raise ConfigError("lora_dirs", each, "a folder, in which each adapter has a folder")
            self._folders.append(folder.resolve())
        for owner in config.lora_hub_owners:
            if "/" in owner or not _NAME.fullmatch(owner):
                raise ConfigError("lora_hub_owners", owner, "the name of an owner on the hub, such as my-org")
        self._owners = frozenset(config.lora_hub_owners)
        self._searches: dict[str, asyncio.Task[bool]] = {}
        self._missing: dict[str, float] = {}

    async def find(self, engine: EngineClient, name: str) -> bool:
        """Find the adapter of a name, in a local folder or on the hub, load it into the engine, and return True. Return
        False if there is none.

        A name has one to four words with "/" between them, each of at most 96 of A-Z, a-z, 0-9, ".", "_" and "-", the
        first of them a letter, a digit or "_". Returns False at once for any other text and, if there are hub owners,
        for a name that was not found in the last minute, of which _MOST_MISSING are remembered, and for a download
        that failed, which is logged. Whether the name is loaded already is left to the engine, which refuses it then.

        Concurrent calls for the same name share one search and its error, which goes on if a caller is cancelled; the
        first caller's engine is used. Raises RequestError for an adapter that the engine refuses, OverloadedError for
        another name while _MOST_SEARCHES are being searched for, and EngineDeadError.
        """
        if not _NAME.fullmatch(name) or time.monotonic() < self._missing.get(name, 0.0):
            return False
        search = self._searches.get(name)
        if search is None:
            if len(self._searches) >= _MOST_SEARCHES:
                raise OverloadedError(f"{_MOST_SEARCHES} adapters are being looked for; try again later")
            search = self._searches[name] = asyncio.create_task(self._search(engine, name))
            search.add_done_callback(lambda ended: self._end(name, ended))
        return await asyncio.shield(search)

    def _end(self, name: str, search: asyncio.Task[bool]) -> None:
        """Remove a search that has ended, and log its error, which would be lost if all its callers were cancelled."""
        self._searches.pop(name, None)
        if not search.cancelled() and (error := search.exception()) is not None:
            logger.debug("adapter %s: %s", name, error)

    async def _search(self, engine: EngineClient, name: str) -> bool:
        """Load the adapter of a name and return True, or return False if there is none. If there are hub owners, a name
        without an adapter is remembered as missing for a minute, or until _MOST_MISSING others were missed after it.

        Raises the errors of `load_adapter`.
        """
        path = await asyncio.to_thread(self._path_of, name)
        if path is not None:
            await load_adapter(engine.utility, name, str(path))
        elif self._owners:
            while len(self._missing) >= _MOST_MISSING:
                self._missing.pop(next(iter(self._missing)))
            self._missing[name] = time.monotonic() + _MISSING_SECONDS
        return path is not None

    def _path_of(self, name: str) -> Path | None:
        """Return the folder of an adapter: that in the first of lora_dirs that has one with the adapter's configuration
        file, or else a downloaded one if the name is OWNER/REPOSITORY of a configured owner. Return None if there is
        none, or if the download fails, which is logged. Blocks during the download.
        """
        for folder in self._folders:
            found = Path(os.path.realpath(folder / name))  # no error for circular links
            if found.is_relative_to(folder) and os.path.isfile(found / ADAPTER_CONFIG):
                return found
        owner, _, repository = name.partition("/")
        if owner in self._owners and repository and "/" not in repository:
            try:
                return download("model", name, ADAPTER_FILES)
            except ConfigError as error:
                logger.warning("no adapter: %s", error)
        return None
