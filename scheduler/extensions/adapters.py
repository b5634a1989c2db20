"""Assignment of adapter slots on the devices to LoRA adapters, and admission of requests whose adapter has one.

Slots are pooled like pages: running requests hold their adapter's slot, and a slot that no request holds is reused, the
least recently used first. A request whose adapter has no slot waits outside the queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxengine.models.adapters import are_few
from jaxengine.scheduler.base.request import Adapter, Request, RequestStatus
from jaxengine.scheduler.base.token_params import ADAPTER, FEW_ADAPTERS
from jaxengine.scheduler.batches.batch import ScheduledStep
from jaxengine.scheduler.extension import RankExtension
from jaxengine.scheduler.pages.snapshots import Hits
from jaxengine.scheduler.rank import Rank
from jaxengine.scheduler.scheduler_extension import SchedulerExtension


@dataclass(frozen=True)
class AdapterOptions:
    """Options of LoRA adapters in the scheduler. num_slots: most adapters that may run at once."""

    num_slots: int

    def extension(self) -> Adapters:
        """Return a new scheduler extension with this many adapter slots."""
        return Adapters(self.num_slots)


@dataclass(eq=False)
class _Slot:
    """One adapter slot of the devices' pools.

    Attributes:
      owner: the adapter that it is assigned to; None for none.
      ready: whether the devices hold the owner's matrices in it.
      used: sequence number of its last assignment or use; larger is later.
      promised: the request that it was assigned for, until that request runs.
      claim: the first request waiting to take this slot from its present owner. Later requests for the owner must then
        wait, too.
    """

    owner: Adapter | None = None
    ready: bool = False
    used: int = 0
    promised: Request | None = None
    claim: Request | None = None


class AdapterSlots:
    """Adapter slots of the devices' pools, and the requests that wait for one.

    No request waits for ever: one that finds no unused slot claims one, and requests that come after it do not prolong
    that slot's use.

    Attributes:
      loads: (slot, adapter) to be uploaded to the devices, in order; the code that uploads them empties the list.
    """

    def __init__(self, num_slots: int):
        """Create `num_slots` empty slots, with no request waiting."""
        self._slots = [_Slot() for _ in range(num_slots)]
        self._waiting: dict[Request, None] = {}
        self._clock = 0
        self.loads: list[tuple[int, Adapter]] = []

    def __len__(self) -> int:
        """Return the number of slots."""
        return len(self._slots)

    @property
    def owners(self) -> list[Adapter | None]:
        """For each slot, the adapter that is on the devices or being uploaded to them; None for an empty slot."""
        return [slot.owner for slot in self._slots]

    @property
    def waiting(self) -> list[Request]:
        """Requests that wait for their adapters, in the order in which they came here. Finished ones are removed
        first.
        """
        for request in [each for each in self._waiting if each.status is RequestStatus.FINISHED]:
            del self._waiting[request]
        return list(self._waiting)

    def admits(self, request: Request) -> bool:
        """Return whether the first request in the queue may run as far as its adapter is concerned; if so, set its
        `adapter_slot`, and count this as a use of the slot.

        A request that may not run gives up a slot that was promised to it and is recorded as waiting; the caller keeps
        it outside the queue until `assign` returns it.
        """
        index = self._find(request.adapter)
        if index is not None:
            slot, self._clock = self._slots[index], self._clock + 1
            if slot.ready and not self._is_claimed(slot, request):
                slot.used = self._clock
                request.adapter_slot = index
                return True
            if slot.promised is request:
                slot.promised = None
        self._waiting[request] = None
        return False

    def assign(self, is_running: np.ndarray) -> list[Request]:
        """Assign slots to the adapters of waiting requests, in order of priority and arrival, and add the uploads to
        `loads`. A request that finds no idle slot may claim one, which is then kept for its adapter.

        Returns the requests whose adapters are now on the devices; they no longer wait here. is_running: bool [slots],
        slots whose adapters running requests use.
        """
        ready = []
        for slot in self._slots:
            claim, promised = slot.claim, slot.promised
            if claim is not None and (claim not in self._waiting or self._find(claim.adapter) is not None):
                slot.claim = None
            if promised is not None and promised.status is RequestStatus.FINISHED:
                slot.promised = None
        for request in sorted(self.waiting, key=_order):
            index = self._find(request.adapter)
            slot = None if index is None else self._slots[index]
            if slot is not None and not self._is_claimed(slot, request):
                if slot.ready:
                    slot.promised = slot.promised or request
                    ready.append(request)
            elif slot is None:
                self._get(request, is_running)
        for request in ready:
            del self._waiting[request]
        return ready

    def loaded(self, index: int, adapter: Adapter) -> None:
        """Mark an adapter of `loads` as present in slot `index`. Does nothing if the slot has another owner by now."""
        if self._slots[index].owner is adapter:
            self._slots[index].ready = True

    def drop(self, adapter: Adapter) -> list[Request]:
        """Free an adapter's slot, if it has one, for the request that claims it, if any, and remove its uploads from
        `loads`. No running request may use the adapter. Return the requests that wait for it, which remain waiting.
        """
        index = self._find(adapter)
        if index is not None:
            self._slots[index] = _Slot(claim=self._slots[index].claim)
        self.loads = [each for each in self.loads if each[1] is not adapter]
        return [each for each in self.waiting if each.adapter is adapter]

    def replace(self, old: Adapter, new: Adapter) -> int | None:
        """Make `new` the owner of the slot of `old`, which it replaces.

        Returns the slot if the devices hold the old matrices in it: the caller must overwrite them, or call `reload`.
        Returns None if the upload of the old adapter is not complete, in which case the new one is added to `loads`;
        also if the old adapter has no slot, in which case nothing changes.
        """
        index = self._find(old)
        if index is None:
            return None
        slot = self._slots[index]
        slot.owner = new
        if slot.ready:
            return index
        self.loads.append((index, new))
        return None

    def reload(self, index: int) -> None:
        """Add the owner of slot `index`, which must have one, to `loads`, so that its matrices are uploaded again. No
        request is admitted with the slot until `loaded` is called.
        """
        slot = self._slots[index]
        assert slot.owner is not None
        slot.ready = False
        self.loads.append((index, slot.owner))

    def retire(self, adapter: Adapter) -> None:
        """Make an adapter's slot, if it has one, the next to be reused. Called when no new request will use the
        adapter.
        """
        index = self._find(adapter)
        if index is not None:
            self._slots[index].used = -1

    def _find(self, adapter: Adapter | None) -> int | None:
        """Return the index of the slot that an adapter owns; None if it owns none."""
        return next((index for index, slot in enumerate(self._slots) if slot.owner is adapter), None)

    def _is_claimed(self, slot: _Slot, request: Request) -> bool:
        """Return whether an earlier request (by `_order`) than this one has a claim on the slot."""
        claim = slot.claim
        return claim is not None and _order(claim) < _order(request)

    def _get(self, request: Request, is_running: np.ndarray) -> None:
        """Assign an idle slot to the request's adapter, which has none: the one that a request for the same adapter
        claims, else the least recently used one without a claim.

        If no such slot is idle, the request claims the least recently used slot without a claim, unless a request for
        the same adapter already has a claim, or no slot is left. is_running: bool [slots], slots whose adapters running
        requests use.
        """
        adapter = request.adapter
        assert adapter is not None
        claimed = next((slot for slot in self._slots if slot.claim and slot.claim.adapter is adapter), None)
        if claimed is not None and self._is_idle(claimed, request, is_running):
            self._give(claimed, request)
            return
        idle = [slot for slot in self._slots if slot.claim is None and self._is_idle(slot, request, is_running)]
        if idle:
            if claimed is not None:
                claimed.claim = None
            self._give(min(idle, key=lambda slot: slot.used), request)
        elif claimed is None:
            free = [slot for slot in self._slots if slot.claim is None]
            if free:
                min(free, key=lambda slot: slot.used).claim = request

    def _is_idle(self, slot: _Slot, request: Request, is_running: np.ndarray) -> bool:
        """Return whether a slot may be taken for the request: it has no owner, or its owner is on the devices, no
        running request uses it, and it is not promised to a waiting request of the same or earlier order: a later one
        may wait for this one's claim.

        is_running: bool [slots], slots whose adapters running requests use.
        """
        promised = slot.promised
        if slot.owner is None:
            return True
        kept = (
            promised is not None
            and promised.status is not RequestStatus.RUNNING
            and _order(promised) <= _order(request)
        )
        return slot.ready and not kept and not is_running[self._slots.index(slot)]

    def _give(self, slot: _Slot, request: Request) -> None:
        """Make the request's adapter the owner of a slot, promise the slot to the request, and add the upload to
        `loads`. The slot is then not ready, has no claim, and counts as the most recently used.
        """
        assert request.adapter is not None
        self._clock += 1
        slot.owner, slot.ready, slot.used = request.adapter, False, self._clock
        slot.promised, slot.claim = request, None
        self.loads.append((self._slots.index(slot), request.adapter))


def _order(request: Request) -> tuple[int, int]:
    """Return the sort key of a request, (priority, arrival index): smaller comes first."""
    return request.priority, request.arrival_index


def few_run(num_slots: int, columns: Iterable[np.ndarray]) -> bool:
    """Return whether running requests use so few of the `num_slots` adapter slots that
    jaxengine.models.adapters.are_few holds. columns: for each replica, the adapter slot of each of its slots, -1 for
    none.
    """
    return are_few(int(running_adapters(num_slots, columns).sum()), num_slots)


def running_adapters(num_slots: int, columns: Iterable[np.ndarray]) -> np.ndarray:
    """Return bool [num_slots], whether running requests use each adapter slot. columns: adapter slots of the slots of
    each replica, -1 for a slot without an adapter.
    """
    running = np.zeros(num_slots + 1, np.bool_)
    for column in columns:
        running[column] = True
    return running[:-1]


class Adapters(SchedulerExtension):
    """Scheduler extension that admits requests only once their adapters are on the devices.

    Attributes:
      slots: the adapter slots of the devices' pools.
    """

    name: ClassVar[str] = "adapters"
    ranks: Sequence[RankAdapters]

    def __init__(self, num_slots: int):
        """Create `num_slots` empty adapter slots."""
        self.slots = AdapterSlots(num_slots)

    def start(self, ranks: Sequence[Rank]) -> None:
        self.ranks = [RankAdapters(rank.config.max_num_seqs) for rank in ranks]

    def admits(self, request: Request) -> bool:
        """Return whether the request has no adapter, or one on the devices that it may use now, whose slot is then set
        as `adapter_slot`. Any other request is recorded as waiting (AdapterSlots.admits).
        """
        return request.adapter is None or self.slots.admits(request)

    def ready(self) -> Iterable[Request]:
        """Assign slots to the adapters of waiting requests. Return the requests whose adapters are on the devices,
        which no longer wait.
        """
        if not self.slots.waiting:
            return ()
        return self.slots.assign(running_adapters(len(self.slots), [rank.column for rank in self.ranks]))

    def complete(self, step: ScheduledStep) -> None:
        """Set FEW_ADAPTERS in the features of a step that has adapters and whose rows use few of the slots
        (`few_run`).
        """
        if step.features & ADAPTER:
            columns = [rank.column[batch.slots] for rank, batch in zip(self.ranks, step.batches, strict=True)]
            if few_run(len(self.slots), columns):
                step.features |= FEW_ADAPTERS


class RankAdapters(RankExtension):
    """Adapters of one replica: the adapter slot of each of its slots.

    Attributes:
      column: i32 [max_num_seqs], adapter slots; -1 for none.
    """

    def __init__(self, max_num_seqs: int):
        """Create `column` for `max_num_seqs` slots without adapters."""
        self.column = np.full(max_num_seqs, -1, np.int32)

    def admit(self, request: Request, num_known: int, hits: Hits) -> None:
        """Set the slot's entry of `column` to the request's adapter slot, -1 without an adapter."""
        self.column[request.slot] = -1 if request.adapter is None else request.adapter_slot

    def release(self, slot: int) -> None:
        """Set the slot's entry of `column` to -1."""
        self.column[slot] = -1
