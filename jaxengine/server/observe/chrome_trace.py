"""Conversion of an engine's timeline to Chrome Trace Event JSON, which ui.perfetto.dev and chrome://tracing open.

Tracks: the scheduler and the transfers to the device, on the engine's host thread; the device, as the host observes it;
detokenization, in the API process; and one for each request, with arrows to the steps that computed its prompt and its
last token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Event = dict[str, Any]

ENGINE, REQUESTS, TEXT = 1, 2, 3
SCHEDULER, TRANSFER, DEVICE = 1, 2, 3
_NAMES = {
    (ENGINE, SCHEDULER): "scheduler",
    (ENGINE, TRANSFER): "host to device",
    (ENGINE, DEVICE): "device",
    (TEXT, 1): "detokeniser",
}


def chrome_trace(timeline: Mapping[str, Any], text: Sequence[tuple[float, float, int]], model: str) -> dict[str, Any]:
    """Return the trace for the result of `Timeline.last`, a dict to be written as JSON. Times are in microseconds since
    its first event.

    text: (start, end, number of outputs) of detokenization periods, in seconds of the timeline's clock. model: name to
    show.
    """
    steps = timeline["steps"]
    spans = _device_spans(steps)
    events = [_named("process_name", number, 0, name) for number, name in _processes(model)]
    events += [_named("thread_name", *track, name) for track, name in _NAMES.items()]
    for step, span in zip(steps, spans, strict=True):
        events += _step_events(step, span)
    for start, end, count in text:
        events.append(_slice(TEXT, 1, "text", start, end, {"outputs": count}))
    taken = _by_request(steps, spans)
    for track, life in enumerate(sorted(timeline["requests"], key=lambda life: life["arrival"]), 1):
        events += _request_events(track, life, taken.get(life["id"], []), timeline["now"])
    # Relative times: microseconds since boot have a resolution of only a few nanoseconds in a double.
    first = min((event["ts"] for event in events if "ts" in event), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - first, 3)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "model": model,
            "seconds": timeline["now"] - timeline["since"],
            "device": "from dispatch, or the end of the step before, to when the host knew that the step was done",
            "sampler": "part of the compiled step: not distinguishable from the model",
        },
    }


def _processes(model: str) -> Iterable[tuple[int, str]]:
    """Return (number, name) of each process of the trace."""
    return (ENGINE, f"engine: {model}"), (REQUESTS, "requests"), (TEXT, "API process")


def _device_spans(steps: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return (start, end) of the device's work on each step, in seconds. It starts at the step's dispatch, or at the
    end of the step before if that is later, and ends at the arrival of its tokens, or when the host knew that the
    device was idle if that is earlier.
    """
    spans, before = [], 0.0
    for index, step in enumerate(steps):
        following = steps[index + 1]["idle_since"] if index + 1 < len(steps) else None
        end = step["arrived"] if following is None else min(step["arrived"], following)
        start = min(max(step["dispatched"], before), end)
        spans.append((start, end))
        before = end
    return spans


def _step_events(step: Mapping[str, Any], span: tuple[float, float]) -> Iterable[Event]:
    """Yield the events of a step: slices of the host's work, a slice of the device's work with the times of `span`, in
    seconds, and counters of tokens, pages and requests at the beginning of `span`. step: one of the "steps" of
    `Timeline.last`.
    """
    names = ["number", "bucket", "num_tokens", "num_padded", "num_rows", "num_new_tokens"]
    if step["num_drafts"]:
        names += ["num_drafts", "num_accepted"]
    about = {name: step[name] for name in names}
    number = {"step": step["number"]}
    yield _slice(ENGINE, SCHEDULER, "schedule", step["start"], step["scheduled"], number)
    yield _slice(ENGINE, TRANSFER, "rows and message", step["scheduled"], step["prepared"], number)
    dispatch = {**number, "bytes": step["num_bytes"]}
    yield _slice(ENGINE, TRANSFER, "dispatch", step["prepared"], step["dispatched"], dispatch)
    yield _slice(ENGINE, SCHEDULER, "wait for tokens", step["waiting"], step["arrived"], number)
    yield _slice(ENGINE, SCHEDULER, "update", step["arrived"], step["updated"], number)
    idle = 0.0 if step["idle_since"] is None else step["dispatched"] - step["idle_since"]
    yield _slice(ENGINE, DEVICE, step["bucket"], *span, {**about, "idle_before_us": _us(idle)})
    for name, series, value in (
        ("batch_real", "tokens", step["num_tokens"]),
        ("batch_padded", "tokens", step["num_padded"]),
        ("kv_used", "pages", step["pages_used"]),
        ("tokens", "new", step["num_new_tokens"]),
        ("running", "requests", step["num_running"]),
        ("waiting", "requests", step["num_waiting"]),
    ):
        yield {"ph": "C", "name": name, "pid": ENGINE, "tid": 0, "ts": _us(span[0]), "args": {series: value}}


def _by_request(
    steps: Sequence[Mapping[str, Any]], spans: Sequence[tuple[float, float]]
) -> dict[str, list[tuple[str, float, float, int]]]:
    """Return, by request id, (name, start, end, number of the step) of each event of the request in the steps, in
    order; times in seconds.

    spans: the result of `_device_spans`, from which chunks and last tokens get their times. Both times of "preempted"
    and "admitted" are the start of the step.
    """
    taken: dict[str, list[tuple[str, float, float, int]]] = {}
    for step, (start, end) in zip(steps, spans, strict=True):
        number = step["number"]
        for request_id in step["preempted"]:
            taken.setdefault(request_id, []).append(("preempted", step["start"], step["start"], number))
        for request_id in step["admitted"]:
            taken.setdefault(request_id, []).append(("admitted", step["start"], step["start"], number))
        for request_id, count in step["chunks"]:
            taken.setdefault(request_id, []).append((f"{count} tokens", start, end, number))
        for request_id in step["finished"]:
            taken.setdefault(request_id, []).append(("last token", start, end, number))
    return taken


def _request_events(
    track: int, life: Mapping[str, Any], taken: Sequence[tuple[str, float, float, int]], now: float
) -> Iterable[Event]:
    """Yield the events of a request's track: preprocessing, queued, prefill and decode, within these its chunks and
    preemptions with arrows to their steps, and its end.

    Args:
      track: number of the track.
      life: the request in the "requests" of `Timeline.last`, times in seconds.
      taken: (name, start, end, number of the step) of its events in steps, in seconds.
      now: end, in seconds, of a request that is still running.
    """
    end = now if life["finished"] is None else life["finished"]
    began = end if life["first_scheduled"] is None else life["first_scheduled"]
    first = end if life["first_token"] is None else life["first_token"]
    about = {name: life[name] for name in ("num_prompt", "num_cached", "num_preemptions", "reason")}
    yield _named("thread_name", REQUESTS, track, f"request {life['id']}")
    ends = {"preprocessing": life["queued"], "queued": began, "prefill": first, "decode": end}
    for (name, stop), start in zip(ends.items(), (life["arrival"], *ends.values()), strict=False):
        if stop > start:
            yield _slice(REQUESTS, track, name, start, stop, about)
    for index, (name, start, stop, step) in enumerate(_inside(taken, life["arrival"], end)):
        yield _slice(REQUESTS, track, name, start, stop, {"step": step})
        if name != "preempted":
            flow = {"cat": "step", "name": "step", "id": track << 20 | index, "ts": _us(start)}
            yield {"ph": "s", "pid": REQUESTS, "tid": track, **flow}
            yield {"ph": "f", "bp": "e", "pid": ENGINE, "tid": DEVICE, **flow}
    if life["finished"] is not None:
        name = f"ended: {life['reason']}"
        yield {"ph": "i", "s": "t", "name": name, "pid": REQUESTS, "tid": track, "ts": _us(life["finished"])}


def _inside(
    taken: Sequence[tuple[str, float, float, int]], first: float, last: float
) -> Iterable[tuple[str, float, float, int]]:
    """Yield the events of a request (`taken`, a value of `_by_request`'s result), cut so that they lie between `first`
    and `last`, its begin and end in seconds, and do not overlap. Events of which nothing is left are dropped, and so
    are admissions. A preemption lasts until the next admission.
    """
    end_before = first
    for index, (name, start, stop, step) in enumerate(taken):
        if name == "preempted":
            stop = next((each[1] for each in taken[index + 1 :] if each[0] == "admitted"), last)
        start, stop = max(start, end_before), min(stop, last)
        if name != "admitted" and stop > start:
            yield name, start, stop, step
            end_before = stop


def _slice(process: int, track: int, name: str, start: float, end: float, arguments: Mapping[str, Any]) -> Event:
    """Return a complete event ("X") from `start` to `end`, in seconds, on a track of a process. arguments: details that
    a viewer shows.
    """
    begin = _us(start)
    duration = round(_us(end) - begin, 3)
    return {"ph": "X", "name": name, "pid": process, "tid": track, "ts": begin, "dur": duration, "args": arguments}


def _named(what: str, process: int, track: int, name: str) -> Event:
    """Return the metadata event that names a process or a track. what: "process_name" or "thread_name". name: the name
    to show.
    """
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}


def _us(seconds: float) -> float:
    """Return seconds as microseconds, rounded to nanoseconds."""
    return round(seconds * 1e6, 3)
