"""Store of the LoRA adapters that requests may name: reads them, keeps them in host memory, and uploads them to the
pools.

Files are read, and matrices sent, on a thread; between two steps one program writes them into the pools. The scheduler
decides which adapter has which pool slot (jaxengine.scheduler.extensions.adapters).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxengine.checkpoint.remote import local_adapter
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.source import WeightSource
from jaxengine.models.weights.adapters.config import AdapterConfig
from jaxengine.models.weights.adapters.folder import AdapterWeights, adapter_of, read_adapter
from jaxengine.scheduler.base.adapter_names import alike, seen_as
from jaxengine.scheduler.base.errors import RequestError, UnknownAdapterError, show_value
from jaxengine.scheduler.base.request import Adapter, Request
from jaxengine.scheduler.batches.batch import ScheduledStep
from jaxengine.scheduler.extensions.adapters import AdapterSlots

MAX_ADAPTERS, MAX_NAME = 65536, 256  # loaded adapters, and characters of a name
_MAX_LOADS = 64  # adapters that are being read


@dataclass(frozen=True, eq=False)
class AdapterRecord:
    """Loaded adapter.

    Attributes:
      adapter: its identity for the scheduler.
      path: where its files are; None for one that was only given from memory.
      number: lora_int_id, its caller's number for it in addition to its name.
      content: digest of its matrices. rank, config: see AdapterWeights.
      given: matrices that were given from memory and are in no file; None for an adapter that can be read again.
    """

    adapter: Adapter
    path: str | None
    number: int
    content: bytes
    rank: int
    config: AdapterConfig
    given: AdapterWeights | None = None


class GivenAdapter(NamedTuple):
    """Adapter of arrays in memory, checked.

    Attributes:
      name: name in requests.
      number: its lora_int_id; None for that of its name, or a free one.
      weights: its matrices in host memory.
    """

    name: str
    number: int | None
    weights: AdapterWeights


class Replaced(NamedTuple):
    """Result of AdapterStore.replace.

    Attributes:
      old: adapter that had the name; None for a new name.
      new: adapter that has it now.
    """

    old: Adapter | None
    new: Adapter


@dataclass(frozen=True, eq=False)
class _Upload:
    """Adapter that is being read and copied to the devices for a pool slot.

    Attributes:
      slot: slot of the pool.
      adapter: adapter that gets it.
      job: its matrices in host memory, and on the devices.
    """

    slot: int
    adapter: Adapter
    job: Future[tuple[AdapterWeights, Any]]


@dataclass(frozen=True, eq=False)
class _Load:
    """Adapter that is being read.

    Attributes:
      name: its name in requests.
      path: folder or URL.
      number: its lora_int_id; None for any free one, for which the name must be new.
      in_place: whether an adapter that has the name gives it up.
      job: gets its matrices in host memory, or the error.
    """

    name: str
    path: str
    number: int | None
    in_place: bool
    job: Future[AdapterWeights]


class AdapterStore:
    """Store of adapters. Only the engine's thread may use it, except for `read` and `read_given`, which are
    thread-safe.
    """

    def __init__(self, runner: Any):
        """Create an empty store, with a thread for reading that `shutdown` ends.

        runner: the ModelRunner of an engine with enable_lora; KeyError for any other.
        """
        config = runner.config
        self._pools = runner.extension("adapters")
        self._targets = self._pools.targets
        self._max_rank, self._dtype, self._most_kept = config.max_lora_rank, config.dtype, config.num_cpu_loras
        self._named: dict[str, AdapterRecord] = {}
        self._records: dict[Adapter, AdapterRecord] = {}
        self._host: OrderedDict[Adapter, AdapterWeights] = OrderedDict()
        self._wanted: deque[tuple[int, Adapter]] = deque()
        self._upload: _Upload | None = None
        self._loads: dict[int, _Load] = {}
        self._num_loads = self._num_replaced = 0
        self._thread = ThreadPoolExecutor(1, "adapters")

    @property
    def adapters(self) -> list[AdapterRecord]:
        """Records of the adapters that requests may name."""
        return list(self._named.values())

    @property
    def num_kept(self) -> int:
        """Number of adapters in host memory."""
        return len(self._host)

    @property
    def is_uploading(self) -> bool:
        """Whether an adapter is being read or copied to the devices, for a request that waits for it."""
        return self._upload is not None

    def read(self, path: str) -> AdapterWeights:
        """Read an adapter's folder, local or at a URL, and check it against this model; return its matrices in host
        memory. Raises ModelFileError if it cannot be read or does not suit the model.
        """
        try:
            folder = Path(local_adapter(path)).expanduser()
        except RuntimeError as error:  # "~NAME" of an unknown user
            raise ModelFileError(path, f"cannot be resolved: {error}") from None
        return read_adapter(folder, self._targets, self._max_rank, self._dtype)

    def known(self, name: str, path: str, number: int, in_place: bool = False) -> bool:
        """Whether an adapter with this name, path and number is loaded. The path of an adapter given from memory is not
        compared. in_place: the adapter with this name and number is to be replaced, so that the result for it is False,
        whatever its path.

        Raises RequestError if the name or number is not allowed, if another adapter has one of them or a name that
        looks alike, or if MAX_ADAPTERS are loaded.
        """
        _check_name(name)
        if type(number) is not int or number < 1:
            text = f"lora_int_id must be a whole number of at least 1, got {show_value(number)}"
            raise RequestError(text, param="lora_int_id", value=number)
        for record in self._named.values():
            same = record.adapter.name == name, record.number == number
            if all(same) and (in_place or record.path in (None, path)):
                return not in_place
            if any(same):
                held = f"{record.adapter.name!r}, number {record.number}, of {record.path}"
                text = f"lora_name {show_value(name)} or lora_int_id {number} is taken by the adapter {held}"
                raise RequestError(text, param="lora_name", value=name)
        if (other := alike(name, self._named)) is not None:
            text = f"lora_name {show_value(name)} looks like the adapter {other!r}; allowed: names that differ"
            raise RequestError(f"{text} in more than case and white space", param="lora_name", value=name)
        if len(self._named) >= MAX_ADAPTERS:
            raise RequestError(f"{MAX_ADAPTERS} adapters are loaded; unload one", param="lora_name", value=name)
        return False

    def free_number(self) -> int:
        """Return a lora_int_id that no named adapter has: the largest one plus 1."""
        return max((record.number for record in self._named.values()), default=0) + 1

    def add(self, name: str, path: str, number: int, weights: AdapterWeights) -> None:
        """Register an adapter that was read from `path` and store its matrices in host memory. weights: the result of
        `read`.

        Raises RequestError if the adapter is loaded already, or for a name or number that `known` refuses.
        """
        if self.known(name, path, number):
            raise RequestError(f"the adapter {name!r} has already been loaded", param="lora_name", value=name)
        adapter = self._adapter(name, weights)
        record = AdapterRecord(adapter, path, number, weights.digest, weights.rank, weights.config)
        self._named[name] = self._records[adapter] = record
        self._keep(adapter, weights)

    def add_unnamed(self, path: str) -> Adapter:
        """Read an adapter's folder and register it without a name; return its identity. It is dropped unless the
        callers' `in_use` includes it. Raises the errors of `read`.
        """
        weights = self.read(path)
        adapter = self._adapter("", weights)
        self._records[adapter] = AdapterRecord(adapter, path, 0, weights.digest, weights.rank, weights.config)
        self._keep(adapter, weights)
        return adapter

    def read_given(
        self, name: str, source: WeightSource, config: Mapping[str, Any] | None, number: int | None
    ) -> GivenAdapter:
        """Check an adapter's tensors, under PEFT's names, and return them for `replace`. Thread-safe. Changes nothing.

        config: content of adapter_config.json; None for that of the adapter which has the name. number: its
        lora_int_id, not checked here; None for that of its name, or for a free one. Raises ModelFileError for a
        configuration or tensors that do not suit the model (its `others` are all further faulty tensors), and
        RequestError if config is None and no adapter has the name.
        """
        if config is not None:
            raw = {field: sorted(value) if isinstance(value, set) else value for field, value in config.items()}
            settings = AdapterConfig(Path("config"), raw)
            settings.check_saved(self._targets)
        elif name in self._named:
            settings = self._named[name].config
        else:
            text = f"there is no adapter {show_value(name)} whose configuration it could have: give config"
            raise RequestError(text, param="config")
        return GivenAdapter(name, number, adapter_of(settings, source, self._targets, self._max_rank, self._dtype))

    def replace(self, given: GivenAdapter, slots: AdapterSlots) -> Replaced:
        """Replace the matrices of the adapter with the given name from the next step on, or add an adapter under a new
        name. Return the identities of the old adapter (None for a new name) and of the new one.

        given: result of `read_given`. slots: the scheduler's adapter slots; the adapter keeps its pool slot if it has
        one. If the pools are not on the devices (a sleeping engine), that slot is marked for reloading. Raises
        RequestError, with nothing changed, for a new name or number that `known` refuses, and for a number other than
        the adapter's.
        """
        name, number, weights = given
        old = self._named.get(name)
        if old is None:
            number = self.free_number() if number is None else number
            self.known(name, "", number)
        elif number not in (None, old.number):
            text = f"lora_int_id of the adapter {name!r} is {old.number}, got {show_value(number)}"
            raise RequestError(text, param="lora_int_id", value=number)
        else:
            number = old.number
        self._num_replaced += 1
        adapter = self._adapter(name, weights)
        path = None if old is None else old.path
        record = AdapterRecord(adapter, path, number, weights.digest, weights.rank, weights.config, weights)
        slot = None if old is None else slots.replace(old.adapter, adapter)
        self._named[name] = self._records[adapter] = record
        if slot is not None and self._pools.are_present:
            self._pools.write(slot, self._pools.put(weights.matrices))
        elif slot is not None:
            slots.reload(slot)
        return Replaced(None if old is None else old.adapter, adapter)

    def _adapter(self, name: str, weights: AdapterWeights) -> Adapter:
        """Return a new identity of an adapter: its name, and a digest of name and matrices that distinguishes cached
        pages. After any replacement from memory, the digest also includes the number of replacements, and so differs
        from that of the adapter's file.
        """
        replaced = str(self._num_replaced).encode() if self._num_replaced else b""
        digest = hashlib.sha256(f"{len(name)} {name}".encode() + weights.digest + replaced).digest()
        return Adapter(name, digest)

    def remove(self, name: str, slots: AdapterSlots, in_use: Callable[[], set[Adapter]]) -> None:
        """Remove a name; running requests use it until they end.

        slots: the scheduler's adapter slots, of which the adapter's becomes the next to be reused. in_use: returns the
        adapters of unfinished requests; the adapter is dropped at once if it is not among them. Raises
        UnknownAdapterError for an unknown name.
        """
        if name not in self._named:
            text = f"the adapter {show_value(name)} does not exist"
            raise UnknownAdapterError(text, param="lora_name", value=name)
        record = self._named.pop(name)
        slots.retire(record.adapter)
        self._forget(in_use)

    def begin_load(self, name: str, path: str, number: int | None = None, in_place: bool = False) -> int:
        """Start to read an adapter on the store's thread; return the ticket for `is_loaded`, 0 if it is loaded already.

        number, in_place: see jaxengine.api.adapters.load_adapter. Raises RequestError for a name or number that `known`
        refuses, and if _MAX_LOADS adapters are being read; then, loads that are done are dropped first.
        """
        if in_place and name in self._named:
            number = self._named[name].number if number is None else number
        if self._is_there(name, path, number, in_place):
            return 0
        if len(self._loads) >= _MAX_LOADS:
            # Callers of those that are done may never ask for them.
            self._loads = {ticket: load for ticket, load in self._loads.items() if not load.job.done()}
        if len(self._loads) >= _MAX_LOADS:
            raise RequestError(f"{_MAX_LOADS} adapters are being loaded; try again later", param="lora_path")
        self._num_loads += 1
        self._loads[self._num_loads] = _Load(name, path, number, in_place, self._thread.submit(self.read, path))
        return self._num_loads

    def is_loaded(self, ticket: int, unload: Callable[[str], None]) -> bool:
        """Return whether the load of a ticket is done. If so, register the adapter and forget the ticket.

        unload: removes a name; a load in place calls it for the adapter that has the name, and takes over its number.
        Raises RequestError if the load has failed, for a ticket that is unknown or was reported, and if another adapter
        has taken the name or number in the meantime.
        """
        load = self._loads.get(ticket)
        if load is None:
            raise RequestError(f"there is no load {show_value(ticket)}", param="ticket", value=ticket)
        if not load.job.done():
            return False
        del self._loads[ticket]
        number = load.number
        try:
            weights = load.job.result()
            if load.in_place and load.name in self._named:
                number = self._named[load.name].number
                unload(load.name)
            if not self._is_there(load.name, load.path, number):
                self.add(load.name, load.path, number or self.free_number(), weights)
        except ModelFileError as error:
            raise RequestError(str(error), param="lora_path", value=load.path) from None
        return True

    def _is_there(self, name: str, path: str, number: int | None, in_place: bool = False) -> bool:
        """Whether the adapter of a load is loaded already. Raises RequestError for a name or number that `known`
        refuses, and, with number None, if the name is loaded.
        """
        if number is not None:
            return self.known(name, path, number, in_place)
        if name in self._named:
            raise RequestError(f"the adapter {name!r} has already been loaded", param="lora_name", value=name)
        return self.known(name, path, self.free_number())

    def find(self, request: Request) -> None:
        """Set `request.adapter` from the name `request.lora`, None without a name. Raises UnknownAdapterError if no
        adapter has that name.
        """
        if request.lora is not None and request.lora not in self._named:
            text = f"the adapter {show_value(request.lora)} does not exist"
            raise UnknownAdapterError(text, param="model", value=request.lora)
        request.adapter = None if request.lora is None else self._named[request.lora].adapter

    def set_rows(self, step: ScheduledStep, max_num_seqs: int) -> None:
        """Set on the devices, for each request that was admitted to a slot in this step, the pool slot of its adapter;
        -1 for none.
        """
        admitted = [request for batch in step.batches for request in batch.admitted]
        if admitted:
            slots = [request.rank * max_num_seqs + request.slot for request in admitted]
            self._pools.set_rows(slots, [-1 if each.adapter is None else each.adapter_slot for each in admitted])

    def advance(self, slots: AdapterSlots, in_use: Callable[[], set[Adapter]]) -> list[tuple[Request, RequestError]]:
        """Complete a finished upload, unless the engine sleeps, and start the next of those that the scheduler requests
        (slots.loads, which is emptied); does not wait. Drops adapters without a name that no unfinished request uses.

        Uploads run one at a time, because running requests wait while one is written, and one in transit takes memory
        besides the pools. in_use: returns the adapters of unfinished requests. Returns the requests whose adapter could
        not be read, each with its error.
        """
        failed: list[tuple[Request, RequestError]] = []
        self._wanted += slots.loads
        slots.loads.clear()
        if self._upload is not None and self._upload.job.done() and self._pools.are_present:
            upload, self._upload = self._upload, None
            failed = self._complete(upload, slots)
        while self._wanted and self._upload is None:
            slot, adapter = self._wanted.popleft()
            if slots.owners[slot] is adapter:
                self._upload = _Upload(slot, adapter, self._thread.submit(self._put, adapter))
        self._forget(in_use)
        return failed

    def _complete(self, upload: _Upload, slots: AdapterSlots) -> list[tuple[Request, RequestError]]:
        """Write an uploaded adapter into its pool slot, mark the slot as loaded, and keep the matrices in host memory
        (`_keep`). Do nothing if the slot has another owner now. The upload must be done.

        Returns the requests whose adapter could not be read, each with its error; they are removed from the slots'
        waiting requests.
        """
        if slots.owners[upload.slot] is not upload.adapter:
            return []
        try:
            weights, values = upload.job.result()
        except Exception as error:  # any error of reading ends this adapter's requests and no others
            text = f"the adapter {upload.adapter.name!r} cannot be used: {error}"
            return [(each, RequestError(text, param="lora_name")) for each in slots.drop(upload.adapter)]
        self._keep(upload.adapter, weights)
        self._pools.write(upload.slot, values)
        slots.loaded(upload.slot, upload.adapter)
        return []

    def wait(self, seconds: float) -> None:
        """Wait until the current upload is done, at most `seconds`; return at once if there is none."""
        wait([] if self._upload is None else [self._upload.job], seconds)

    def shutdown(self) -> None:
        """End the store's thread without waiting, and cancel reads that have not begun."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _forget(self, in_use: Callable[[], set[Adapter]]) -> None:
        """Drop records and matrices of adapters that have no name and that no unfinished request uses. in_use: returns
        the adapters of unfinished requests.
        """
        if len(self._records) > len(self._named):
            kept = {record.adapter for record in self._named.values()} | in_use()
            for adapter in [each for each in self._records if each not in kept]:
                del self._records[adapter]
                self._host.pop(adapter, None)

    @jax.transfer_guard("allow")
    def _put(self, adapter: Adapter) -> tuple[AdapterWeights, Any]:
        """Return an adapter's matrices in host memory and on the devices; its files are read again if they are not in
        host memory.

        Runs on the store's thread. Raises ModelFileError for files that cannot be read, or have changed.
        """
        record, weights = self._records[adapter], self._host.get(adapter)
        weights = record.given if weights is None else weights
        if weights is None:
            assert record.path is not None
            weights = self.read(record.path)
            if weights.digest != record.content:
                raise ModelFileError(record.path, "is not what it was when the adapter was loaded: load it again")
        return weights, self._pools.put(weights.matrices)

    def _keep(self, adapter: Adapter, weights: AdapterWeights) -> None:
        """Store an adapter's matrices in host memory as the latest used, and drop those least recently used beyond
        num_cpu_loras.
        """
        self._host[adapter] = weights
        self._host.move_to_end(adapter)
        while len(self._host) > self._most_kept:
            self._host.popitem(last=False)


def _check_name(name: str) -> None:
    """Raise RequestError unless the name is 1 to MAX_NAME printable characters without white space at its ends, and not
    empty in the form that `seen_as` compares.
    """
    right = isinstance(name, str) and 1 <= len(name) <= MAX_NAME and name.isprintable() and name == name.strip()
    if not right or not seen_as(name):
        allowed = f"a text of 1 to {MAX_NAME} printable characters, without white space at its ends"
        text = f"lora_name is {show_value(name)}; allowed: {allowed}"
        raise RequestError(text, param="lora_name", value=name)
