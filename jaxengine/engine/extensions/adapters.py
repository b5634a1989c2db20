"""LoRA adapters: finds the adapter of each request, and sends adapters of waiting requests to devices between steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxengine.engine.extension import NO_EVENTS, Events, LoopExtension, preempt_stale, reset_caches
from jaxengine.engine.in_flight import InFlight
from jaxengine.engine.stats.metric_types import Gauge
from jaxengine.engine.weight_types import KVMode
from jaxengine.runner.extensions.adapters.store import AdapterStore, GivenAdapter
from jaxengine.runner.model_runner import ModelRunner
from jaxengine.scheduler.base.media import EMBEDS
from jaxengine.scheduler.base.request import Adapter, Request
from jaxengine.scheduler.batches.batch import ScheduledStep

logger = logging.getLogger(__name__)


class Adapters(LoopExtension):
    """Loop extension for requests with LoRA adapters.

    Attributes:
      store: the adapters that requests may name.
    """

    def __init__(self, runner: ModelRunner, of_media: Path | None = None):
        """Create the store, with the adapter `of_media` if there is one and else empty, and log how the runner computes
        each kind of matrix, unless `disable_log_stats`.

        runner: of an engine with enable_lora; KeyError for any other. of_media: folder of the adapter of all requests
        with images or sounds, which gets no name; None for a model without one. Raises ModelFileError if it cannot be
        read.
        """
        self.store = AdapterStore(runner)
        self._of_media = None if of_media is None else self.store.add_unnamed(str(of_media))
        self._forms = runner.extension("adapters").forms
        if not runner.config.disable_log_stats:
            for row in self._forms:
                logger.info("adapters of %s: %s", row["modules"], row["forms"])

    def prepare(self, request: Request) -> None:
        """Set the request's adapter from the adapter name in it; without a name, to the model's own adapter for media
        if it has one and the prompt has an item that its towers encode, not only given embeddings. Raises
        UnknownAdapterError for a name that the store lacks.
        """
        self.store.find(request)
        items = () if request.media is None or request.lora is not None else request.media.items
        if self._of_media is not None and any(item.modality != EMBEDS for item in items):
            request.adapter = self._of_media

    def poll(self) -> Events:
        """Begin and finish loads of adapters that have pool slots, without waiting; return the requests whose adapter
        could not be loaded, as rejected.
        """
        failed = self.store.advance(self.loop.scheduler.extension("adapters").slots, self._in_use)
        return Events(rejected=failed) if failed else NO_EVENTS

    def before_forward(self, step: ScheduledStep) -> None:
        """Send the devices the adapter pool slots of the requests that took a batch slot in this step."""
        self.store.set_rows(step, self.loop.scheduler.config.max_num_seqs)

    def after_forward(self, step: InFlight | None) -> Events:
        """Call `poll` again and return its events: adapters that have just been given slots begin to load. step: not
        used.
        """
        return self.poll()

    def wait(self, seconds: float) -> bool:
        if not self.store.is_uploading:
            return False
        self.store.wait(seconds)
        return True

    def shutdown(self) -> None:
        self.store.shutdown()

    @property
    def utilities(self) -> dict[str, Callable[..., Any]]:
        return {
            "adapter_forms": lambda: self._forms,
            "load_adapter": self.store.begin_load,
            "adapter_is_loaded": lambda ticket: self.store.is_loaded(ticket, self._unload),
            "unload_adapter": self._unload,
            "adapters": self._names,
        }

    def metrics(self) -> Iterator[Gauge]:
        """Yield vLLM's gauge of LoRA requests. Its value is the time, in seconds since the epoch; its labels are
        running_lora_adapters and waiting_lora_adapters, the sorted names of the adapters of such requests joined by
        commas, and max_lora, the option max_loras.
        """
        running, waiting = set[str](), set[str]()
        for request in self.loop.scheduler.requests:
            if request.lora is not None:
                (running if request.slot >= 0 else waiting).add(request.lora)
        names = {"running_lora_adapters": running, "waiting_lora_adapters": waiting}
        labels = {label: ",".join(sorted(found)) for label, found in names.items()}
        labels["max_lora"] = str(self.loop.runner.config.max_loras)
        yield Gauge("vllm:lora_requests_info", time.time(), labels)

    def replace(self, given: GivenAdapter, kv: KVMode) -> None:
        """Replace the matrices of an adapter, or add an adapter under a new name. Must be called between two steps,
        with none in flight; unfinished requests of the adapter continue with the new matrices.

        given: the name, its number or None, and the matrices in host memory. kv: treatment of keys and values that the
        old matrices computed, as in `LLM.update_lora`: "keep" leaves them, except in a pooling model; "recompute" and
        "drop" preempt running requests of the adapter; "drop" also resets all prefix caches. In each case the
        `weights_replaced` of the scheduler's extensions is called. Raises RequestError, with nothing changed, for a
        number that differs from the name's, and for a new name that cannot be added.
        """
        scheduler = self.loop.scheduler
        old, new = self.store.replace(given, scheduler.extension("adapters").slots)
        if old is not None:
            preempt_stale(self.loop, kv, lambda request: request.adapter is old)
            for request in scheduler.requests:
                if request.adapter is old:
                    request.adapter = new
        for extension in scheduler.extensions:
            extension.weights_replaced()
        if kv == "drop":
            reset_caches(scheduler)

    def _unload(self, name: str) -> None:
        """Remove an adapter's name; unfinished requests keep the adapter to their end.

        Raises RequestError for an unknown name.
        """
        self.store.remove(name, self.loop.scheduler.extension("adapters").slots, self._in_use)

    def _names(self) -> list[dict[str, Any]]:
        """Return a dict of JSON values for each adapter that requests may name: "name", "path" ("" for none), "number"
        and "rank" (LoRA rank).
        """
        return [
            {"name": each.adapter.name, "path": each.path or "", "number": each.number, "rank": each.rank}
            for each in self.store.adapters
        ]

    def _in_use(self) -> set[Adapter]:
        """Return the adapters of unfinished requests, and the model's own adapter for media if it has one."""
        own = {each.adapter for each in self.loop.scheduler.requests if each.adapter is not None}
        return own if self._of_media is None else own | {self._of_media}
