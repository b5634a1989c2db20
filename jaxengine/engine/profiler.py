"""Profiles of a running engine by jax.profiler, started and stopped between two steps."""

from __future__ import annotations

import jax

from jaxengine.scheduler.base.errors import RequestError


class Profiler:
    """Switch of the process's jax profiler, which can take one profile at a time."""

    def __init__(self, folder: str | None):
        """Store the folder, with no profile running. folder: where profiles are written; None if profiling is not
        enabled.
        """
        self._folder = folder
        self._is_running = False

    def start(self) -> bool:
        """Start a profile that is written to the folder; return True.

        Raises RequestError if profiling is not enabled, a profile is running, or jax cannot start one.
        """
        if self._folder is None:
            raise RequestError(
                'profiling is not enabled; start the engine with profiler_config={"profiler_dir": FOLDER}',
                param="profiler_config",
            )
        if self._is_running:
            raise RequestError("a profile is being taken; stop it first", param="profiler_config")
        try:
            jax.profiler.start_trace(self._folder)
        except (RuntimeError, OSError) as error:  # another profile in this process, or an unusable folder
            raise RequestError(f"the profile cannot be started: {error}", param="profiler_config") from None
        self._is_running = True
        return True

    def stop(self) -> str:
        """End and write the running profile; return the folder of all profiles. Raises RequestError if none is running,
        or it cannot be written; none is running afterwards.
        """
        if self._folder is None or not self._is_running:
            raise RequestError("no profile is being taken", param="profiler_config")
        self._is_running = False
        try:
            jax.profiler.stop_trace()
        except (RuntimeError, OSError) as error:
            raise RequestError(f"the profile cannot be written: {error}", param="profiler_config") from None
        return self._folder

    def close(self) -> None:
        """End and write the profile that is running, if any. Raises RequestError if it cannot be written."""
        if self._is_running:
            self.stop()
