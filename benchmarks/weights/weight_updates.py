"""Whether weights that are replaced again and again are the right ones, and leave nothing behind, on the default model.

Streams run all the time, every eighth with an adapter, and each one that ends is followed by another. Updates bring, in
turn, all weights, one third of the layers, all with other numbers, and the adapter's matrices, with keys and values
recomputed, dropped or kept in turn.

A row is some updates: programs compiled, bytes of the arrays on the devices, resident anonymous memory, and the medians
of what an update of weights took while steps went on, and between two steps, in milliseconds. `versions wrong` counts
requests that ended with other weight_versions than the switches say. A run is the tokens of a request between two
updates, after a switch with recompute or drop. Of the runs checked an engine that is started with their weights gives
others for those that differ. `kept` says that nothing compiled, nothing grew and nothing differs.

`--layers 3 --tokens 16 --steps 2` makes the updates of a model of 13 million weights, at a fraction of the cost.
A long run is cut by --budget-s, and --resume goes on after the rows of the file that --save names.
"""

from __future__ import annotations

import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.drafts.first_layers import write_first
from benchmarks.engines import engine_options
from benchmarks.harness import Option, shared
from benchmarks.processes import memory
from benchmarks.recorder import Recorder
from benchmarks.weights.fresh_engine import Asked, differences
from jaxengine import LLM, EngineConfig, SamplingParams
from jaxengine.checkpoint.model_source import open_model
from jaxengine.engine.weight_types import KVMode, WeightUpdate
from jaxengine.requests.output.outputs import RequestOutput, WeightSpan
from jaxengine.requests.params.options import RequestOptions

RANK = 8
OPTIONS = {
    "updates": Option(1000),
    "streams": Option(256, "requests that run meanwhile"),
    "tokens": Option(200, "of a request"),
    "steps": Option(4, "between two updates"),
    "row": Option(100, "updates of a row"),
    "checks": Option(64, "runs of tokens that are checked for a row"),
    "layers": Option(None, "that the model has, the first ones of the default model, which otherwise is it", kind=int),
    "vocabulary": Option(4096, "tokens that a model of fewer layers has, the first ones"),
    "resume": Option(False, "go on after the rows of the file"),
    **shared(budget_s=1e9),
}
ENGINE = engine_options(dtype="float32", max_model_len=256, max_num_batched_tokens=256)
ENGINE |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": RANK}
ADAPTER = {"r": RANK, "lora_alpha": 16, "peft_type": "LORA", "target_modules": ["o_proj"]}
KINDS = ("all", "third", "all again", "adapter")
MOST_KEPT = 500  # runs of a state
KV: tuple[KVMode, ...] = ("recompute", "drop", "keep")


class State(NamedTuple):
    """Versions of the weights in the engine: of every third layer and of all others, numbers of `moved`, and of the
    adapter, a seed.
    """

    third: int
    others: int
    adapter: int


class Run(NamedTuple):
    """Tokens of a request from one update to the next.

    Attributes:
      version: weight_version of the engine.
      start: output tokens before the first of the run.
      state: the weights that computed the tokens and all of their keys and values; None if others computed some.
    """

    version: int | str
    start: int
    state: State | None


@dataclass
class Known:
    """Progress of a running request.

    Attributes:
      prompt: its token ids.
      has_adapter: whether it uses the adapter.
      runs: runs of its tokens so far, in order.
    """

    prompt: list[int]
    has_adapter: bool
    runs: list[Run] = field(default_factory=list)


def stored(model: EngineConfig | None = None) -> dict[str, np.ndarray]:
    """Return a model's tensors by name, read from its checkpoint. model: options that name it; None for the default
    model.
    """
    source = open_model(model or EngineConfig()).weights
    assert source is not None and not isinstance(source, Path)
    tensors = {name: source.read(name) for name in source.names()}
    source.close()
    return tensors


def milliseconds(seconds: list[float]) -> float | None:
    """Return the median of times in seconds, in milliseconds to one decimal; None if there are none."""
    return round(median(seconds) * 1e3, 1) if seconds else None


def moved(array: np.ndarray, number: int) -> np.ndarray:
    """Return a copy of an array whose rows number - 1, number + 2, ... are multiplied by 1.1; the array itself for
    number 0.
    """
    if number == 0:
        return array
    array = array.copy()
    array[number - 1 :: 3] *= 1.1
    return array


def is_third(name: str) -> bool:
    """Return whether a tensor belongs to a layer whose index is a multiple of three."""
    return ".layers." in name and int(name.split(".layers.")[1].split(".")[0]) % 3 == 0


def adapter(tensors: Mapping[str, np.ndarray], number: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, random LoRA matrix f32) for both matrices of every attention output projection; `number` is the
    seed.
    """
    rng = np.random.default_rng(number)
    for name, array in tensors.items():
        if name.endswith("o_proj.weight"):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            for end, shape in (("A", (RANK, array.shape[1])), ("B", (array.shape[0], RANK))):
                yield f"{stem}.lora_{end}.weight", 0.1 * rng.standard_normal(shape, np.float32)


def state_after(number: int) -> State:
    """Return the state after update `number`; for -1 the state before the first update. Updates cycle through KINDS. In
    cycle t (from 0; versions modulo 3) "all" loads version t, "third" version t + 1 into the third layers, "all again"
    version t + 2 into all; the adapter's seed is t modulo 2 until "adapter" makes it t + 1 modulo 2.
    """
    turn, kind = divmod(number, len(KINDS))
    first, third, again = turn % 3, (turn + 1) % 3, (turn + 2) % 3
    own = {0: (first, first), 1: (third, first), 2: (again, again), 3: (again, again)}[kind]
    return State(*((0, 0) if number < 0 else own), (turn + (kind == 3)) % 2)


class Streams:
    """Requests that are replaced by new ones as they end, with the weights that computed their tokens.

    Attributes:
      num_wrong: number of requests that ended with other weight_versions than the updates imply.
      checkable: runs of ended requests, by the state that computed them.
    """

    def __init__(self, llm: LLM, count: int, tokens: int, state: State):
        """Begin without requests. count: that run at once. tokens: of each. state: of the engine's present weights."""
        self._llm, self._count, self._tokens, self._num = llm, count, tokens, 0
        self._state, self._known = state, dict[str, Known]()
        self.num_wrong, self.checkable = 0, dict[State, list[Asked]]()
        self._drawn, self._taken = np.random.default_rng(0), Counter[State]()

    def step(self) -> None:
        """Add requests up to the number that runs at once, every eighth with the adapter, run an engine step, and check
        the requests that ended in it.
        """
        core = self._llm.core
        while len(core.engine.scheduler.requests) < self._count:
            self._num += 1
            # The first ones have different lengths, so that not all end at once.
            count = self._tokens if self._num > self._count else 1 + self._num * self._tokens // self._count
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            has_adapter, prompt = self._num % 8 == 0, [100 + self._num % 1000, 7]
            options = RequestOptions(lora="policy" if has_adapter else None)
            core.add(core.inputs.prepare(prompt, params, request_id=str(self._num), options=options))
            run = Run(self._llm.weight_version, 0, self._state)
            self._known[str(self._num)] = Known(prompt, has_adapter, [run])
        for output in core.step():
            known = self._known.pop(output.request_id, None) if output.finished else None
            if known is not None and isinstance(output, RequestOutput):
                self._ended(list(output.outputs[0].token_ids), output.outputs[0].weight_versions, known)

    def switched(self, state: State, kv: KVMode, of_adapter: bool) -> None:
        """Begin a new run of tokens in every running request, after an update of weights or, if `of_adapter`, of the
        adapter.

        state: of the weights from now on. kv: how keys and values were treated; with "keep" the new runs of requests
        that have tokens have no state. Requests without the adapter keep their state after an adapter's update.
        """
        version, scheduler = self._llm.weight_version, self._llm.core.engine.scheduler
        running = {each.request_id: len(scheduler.output_token_ids(each)) for each in scheduler.requests}
        # Requests that ended in the step that the update waited for are not checked.
        self._known = {name: each for name, each in self._known.items() if name in running}
        for name, each in self._known.items():
            if of_adapter and not each.has_adapter:
                each.runs.append(each.runs[-1]._replace(start=running[name], state=_with(each.runs[-1].state, state)))
            else:
                each.runs.append(Run(version, running[name], None if kv == "keep" and running[name] else state))
        self._state = state

    def take_checks(self, most: int) -> tuple[State, list[Asked]] | None:
        """Remove one state's runs from `checkable`; return (state, up to `most` of the runs, evenly spread), None if
        there are none.

        Chooses the state that was returned least often, and among equal ones the one with the most runs.
        """
        if not self.checkable:
            return None
        state = max(self.checkable, key=lambda each: (-self._taken[each], len(self.checkable[each])))
        self._taken[state] += 1
        runs = self.checkable.pop(state)
        return state, runs[:: max(1, -(-len(runs) // most))]

    def _ended(self, tokens: list[int], spans: list[WeightSpan] | None, known: Known) -> None:
        """Compare the weight_versions (`spans`) of an ended request with its runs, count a difference, and keep the
        runs.

        tokens: its output. spans: None if all tokens have version 0.
        """
        bounds = [*known.runs, Run(0, len(tokens), None)]
        wanted = [run.version for run, after in pairwise(bounds) for _ in range(run.start, after.start)]
        spans = spans or [WeightSpan(0, 0, len(tokens))]
        self.num_wrong += wanted != [version for version, start, end in spans for _ in range(start, end)]
        for run, after in pairwise(bounds):
            if run.state is not None and run.start < after.start:
                before = [*known.prompt, *tokens[: run.start]]
                self._keep(run.state, Asked(before, tokens[run.start : after.start], known.has_adapter))

    def _keep(self, state: State, run: Asked) -> None:
        """Add a run to `checkable`. If its state has MOST_KEPT runs, it replaces a random one, so that memory does not
        grow.
        """
        runs = self.checkable.setdefault(state, [])
        if len(runs) < MOST_KEPT:
            runs.append(run)
        else:
            runs[self._drawn.integers(MOST_KEPT)] = run


def _with(state: State | None, newest: State) -> State | None:
    """Return `state` with the adapter of `newest`; None for None.

    A new adapter leaves the keys and values of requests without an adapter valid.
    """
    return None if state is None else state._replace(adapter=newest.adapter)


class Updates:
    """Updates of one engine while requests run.

    Attributes:
      number: index of the next update.
      streams: the requests.
    """

    def __init__(self, args: Namespace, first: int, model: dict[str, Any]):
        """Start the engine with the weights and adapter that the updates before `first` would have left.

        first: index of the first update. model: options that name the model.
        """
        self._llm, self._model = LLM(**ENGINE, **model, max_num_seqs=args.streams), EngineConfig(**model)
        self._tensors, self._args = stored(self._model), args
        self.number, state = first, state_after(first - 1)
        matrices = adapter(self._tensors, state.adapter)
        self._llm.update_lora("policy", matrices, config=ADAPTER, lora_int_id=1)
        if first:
            self._llm.update_weights(self._weights(state))
        self.streams = Streams(self._llm, args.streams, args.tokens, state)

    def once(self) -> WeightUpdate | None:
        """Run `args.steps` steps and make the next update, with the members of KINDS and KV that are next in turn;
        return its times, None for an update of the adapter. Prints its number.
        """
        for _ in range(self._args.steps):
            self.streams.step()
        kind, kv, state = KINDS[self.number % 4], KV[self.number % 3], state_after(self.number)
        found = None
        if kind == "adapter":
            self._llm.update_lora("policy", adapter(self._tensors, state.adapter), kv=kv)
        elif kind == "third":
            third = {name: moved(each, state.third) for name, each in self._tensors.items() if is_third(name)}
            found = self._llm.update_weights(third, strict=False, kv=kv)
        else:
            found = self._llm.update_weights(self._weights(state), kv=kv)
        self.streams.switched(state, kv, kind == "adapter")
        self.number += 1
        print(f"update {self.number} of {self._args.updates}", end="\r", file=sys.stderr, flush=True)
        return found

    def row(self, done: list[WeightUpdate]) -> dict[str, Any]:
        """Return the row after some updates. done: times of the updates of weights among them.

        Also starts another engine to check runs of tokens. Numbers are rounded.
        """
        return {
            "updates": self.number,
            "compilations": self._llm.core.runner.compiles.count,
            "MiB of arrays": round(sum(each.nbytes for each in jax.live_arrays()) / 2**20, 1),
            "MiB resident": memory(kind="RssAnon") >> 20,
            "load ms": milliseconds([each.load_seconds for each in done]),
            "switch ms": milliseconds([each.switch_seconds for each in done]),
            "versions wrong": self.streams.num_wrong,
            **self._checked(),
        }

    def _checked(self) -> dict[str, Any]:
        """Compare some runs of one state with an engine started with that state's weights; return the row's columns."""
        found = self.streams.take_checks(self._args.checks)
        if found is None:
            return {"state": "none", "runs checked": 0, "tokens checked": 0, "runs differ": 0}
        state, runs = found
        weights, matrices = dict(self._weights(state)), dict(adapter(self._tensors, state.adapter))
        return {
            "state": " ".join(map(str, state)),
            "runs checked": len(runs),
            "tokens checked": sum(len(each.tokens) for each in runs),
            "runs differ": differences(self._model, weights, matrices, ADAPTER, runs),
        }

    def _weights(self, state: State) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (name, array) of all weights in a state."""
        for name, array in self._tensors.items():
            yield name, moved(array, state.third if is_third(name) else state.others)

    def shutdown(self) -> None:
        """Stop the engine."""
        self._llm.core.shutdown()


def run(args: Namespace, recorder: Recorder) -> None:
    if args.resume:
        recorder.resume()
    with tempfile.TemporaryDirectory() as folder:
        if args.layers:
            write_first(Path(folder), args.layers, args.vocabulary)
        _run(args, recorder, {"model": folder, "skip_tokenizer_init": True} if args.layers else {})


def _run(args: Namespace, recorder: Recorder, model: dict[str, Any]) -> None:
    """Make the updates after those of the recorder's last row, up to `args.updates` or the deadline, and add a row
    after every `args.row`. "kept" is whether nothing was compiled, no versions were wrong, no checked run differs, and
    arrays take no more than in the first row. model: options that name the model.
    """
    before = recorder.rows[-1] if recorder.rows else Counter[str]()
    updates = Updates(args, before["updates"], model)
    updates.streams.num_wrong = before["versions wrong"]
    while updates.number < args.updates and time.monotonic() < recorder.deadline:
        done: list[WeightUpdate] = []
        for _ in range(min(args.row, args.updates - updates.number)):
            if time.monotonic() > recorder.deadline and done:
                break
            if (found := updates.once()) is not None:
                done.append(found)
        row = updates.row(done)
        size = (recorder.rows or [row])[0]["MiB of arrays"]
        wrong = row["compilations"] or row["versions wrong"] or row["runs differ"] or row["MiB of arrays"] > size
        recorder.add(row | {"kept": not wrong})
    updates.shutdown()
