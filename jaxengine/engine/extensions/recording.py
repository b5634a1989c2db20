"""Recorded steps: writes each step to the folder of the option record_steps once its tokens have been collected."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.config.base.errors import ConfigError
from jaxengine.engine.extension import NO_EVENTS, Events, Loop, LoopExtension
from jaxengine.engine.in_flight import InFlight
from jaxengine.engine.output import EngineOutput
from jaxengine.records.folder import StepFolder
from jaxengine.records.step_file import RecordError
from jaxengine.runner.recorded_engine import about_engine
from jaxengine.runner.weights.weight_update import checksums
from jaxengine.scheduler.batches.batch import StepResult

logger = logging.getLogger(__name__)


class Recording(LoopExtension):
    """Loop extension that writes steps to disk. The first write error is logged and ends the recording; the engine
    serves on.
    """

    def __init__(self) -> None:
        """Begin without steps; `attach` opens the folder."""
        self._taken: dict[InFlight, tuple[Any, dict[str, np.ndarray], int]] = {}
        self._folder: StepFolder | None = None
        self._weights: tuple[int, ...] = ()
        self._number = 0
        self._stopped_by = ""
        self._has_warned = False

    def attach(self, loop: Loop) -> None:
        """Store the engine's parts, open the folder, and log a warning that steps are recorded. Raises ConfigError if
        the folder cannot be used.
        """
        super().attach(loop)
        config = loop.runner.config
        assert config.record_steps is not None
        path, limits = Path(config.record_steps).expanduser(), (config.record_steps_limit, config.record_steps_bytes)
        try:
            self._folder = StepFolder(path, about_engine(loop.runner), *limits)
        except (OSError, RecordError) as error:
            problem = f"record_steps {config.record_steps!r} cannot be used: {error}"
            raise ConfigError.because("record_steps", problem, "name another folder") from None
        logger.warning("record_steps: each step is written to %s, with what users sent; steps take longer", path)

    def after_forward(self, step: InFlight | None) -> Events:
        """Keep the arrays of the step just dispatched, with the index of its weights, until `collected`; a write error
        ends the recording. Returns no events.
        """
        if step is not None and self._folder is not None:
            newest = self.loop.runner.extension("recording").newest()
            if newest is not None:
                try:
                    self._taken[step] = *newest, self._weights_index()
                except OSError as error:
                    self._stop(error)
            self._warn_of_large()
        return NO_EVENTS

    def collected(self, step: InFlight, result: StepResult, output: EngineOutput) -> None:
        """Write a recorded step, with its sampler's results, to the folder; a write error ends the recording. A step
        that is too large is left out.
        """
        if (taken := self._taken.pop(step, None)) is None or self._folder is None:
            return
        bucket, arrays, weights = taken
        if not arrays:  # too large, as its sampler was dispatched
            self._warn_of_large()
            return
        sampled = step.pending.sampled._asdict()
        fetch = self.loop.runner.fetch
        arrays |= {f"sampled/{name}": fetch(array) for name, array in sampled.items() if array is not None}
        about = {
            "bucket": [bucket.num_tokens, bucket.num_seqs, bucket.width, list(bucket.sections)],
            "weights": weights,
            "time": time.time(),
        }
        try:
            self._folder.write(about, arrays)
            self._warn_of_large()
        except OSError as error:
            self._stop(error)

    def status(self) -> dict[str, Any]:
        """Return, under "recorded_steps", the "folder", the number of recorded "steps" and of "too_large" ones; after a
        write error only "stopped_by", the error's text.
        """
        folder = self._folder
        own = {"stopped_by": self._stopped_by} if self._stopped_by else {}
        if folder is not None:
            own |= {"folder": str(folder.path), "steps": folder.num_recorded, "too_large": self._num_too_large}
        return {"recorded_steps": own}

    def shutdown(self) -> None:
        """Close the folder."""
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    @property
    def _num_too_large(self) -> int:
        """Number of steps left out because they were larger than record_steps_bytes."""
        written = 0 if self._folder is None else self._folder.num_too_large
        return written + self.loop.runner.extension("recording").num_too_large

    def _warn_of_large(self) -> None:
        """Log a warning, once, if steps have been left out because they are too large."""
        if self._num_too_large and not self._has_warned:
            self._has_warned = True
            logger.warning("record_steps: a step is larger than record_steps_bytes, and such ones are left out")

    def _stop(self, error: OSError) -> None:
        """End the recording because of an error, here and in the runner: log it, close the folder, and drop steps not
        yet written.
        """
        logger.error("record_steps: NO MORE STEPS ARE RECORDED: %s; the engine serves on", error)
        self._stopped_by = str(error)
        self.shutdown()
        self._taken.clear()
        self.loop.runner.extension("recording").stop()

    def _weights_index(self) -> int:
        """Return the index, in the folder, of the weights that steps use now. Weights that are not in it are entered
        first, with their checksums.

        Raises OSError if the folder cannot be written, and the errors of `checksums`.
        """
        assert self._folder is not None
        # Replaced weights have other ids: they were made while the old arrays still existed.
        arrays = tuple(id(array) for stage in self.loop.runner.stages for array in stage.params)
        if arrays != self._weights:
            versions = [request.weight_versions for request in self.loop.scheduler.requests]
            version = next((own[-1][0] for own in versions if own), 0)
            self._number = self._folder.weights(version, checksums(self.loop.runner))
            self._weights = arrays
        return self._number
