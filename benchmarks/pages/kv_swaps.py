"""Tokens of requests whose pages leave the devices and come back all the time, beside an engine whose pages stay.

Requests begin with one of 48 documents, which take ten times the pages of the pool. Sixteen are there at once for each
replica, and four of them run, too many for the pool if their outputs are long: pages leave for host memory and come
back, and requests are preempted by swap. Free pages are filled with NaN, and so are allocated ones until they are
written, and the states of slots without a request. A row is a kind of page, of use, or of parallelism: `different`
requests had other tokens than the engine without tiers computed; `restored` ones got pages back from host memory, once
or several times; `hits` are their tokens; `loaded` pages were brought back, and `used` ones of them were still there
when the request that they were brought back for ran; `swapped` counts preemptions. Each block of requests is written to
the file of `--save`, and a run that was cut goes on after the last one. Rows of the file that have other settings
(`pages`, the pool's size, and `at once`) are measured anew; those of kinds that `--kinds` leaves out stay.
"""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.engines import engine_options
from benchmarks.harness import Option, OptionError, shared
from benchmarks.recorder import Recorder
from jaxengine import LLM, LoRARequest
from tests.fast_compile import fast_compile
from tests.fixtures import picture_checkpoints
from tests.fixtures.adapters import write_adapter
from tests.fixtures.drawn_weights import checkpoint
from tests.jaxengine.engine.draft_matrix import SETS
from tests.jaxengine.engine.offload_cases import Poisoned, params_of
from tests.jaxengine.engine.test_states import poison as poison_states

_SMALL, _PICTURES = {"num_gpu_blocks_override": 36}, "qwen3_vl_vision"
# Model and options of an engine that runs a kind of page or of use, or is spread over devices. A model with a head that
# drafts is named as in tests/jaxengine/engine/draft_matrix.py.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama", _SMALL),
    "window": ("gemma2", {"num_gpu_blocks_override": 44}),
    "latent": ("deepseek_v2", _SMALL),
    "state": ("qwen3_next", _SMALL | {"num_state_snapshots": 16}),
    "codes": ("llama", _SMALL | {"kv_cache_dtype": "int8"}),
    "drafts": ("llama", _SMALL | {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
    "draft model": (
        "llama",
        _SMALL | {"speculative_config": {"method": "draft_model", "model": "llama", "num_speculative_tokens": 3}},
    ),
    "eagle3": ("eagle3 llama", _SMALL),
    "mtp": ("mtp deepseek_v3", _SMALL),
    "adapters": ("llama", _SMALL | {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}),
    "pictures": (_PICTURES, _SMALL | {"max_model_len": 96, "skip_tokenizer_init": False}),
    "tp 2": ("llama", _SMALL | {"tensor_parallel_size": 2}),
    "dp 2": ("llama", _SMALL | {"data_parallel_size": 2}),
    "pp 2": ("llama", _SMALL | {"pipeline_parallel_size": 2}),
}
_OVER_DEVICES = ("tp 2", "dp 2", "pp 2")
OPTIONS = {
    "requests": Option(5000, "requests of each kind"),
    "block": Option(250, "requests between two writings of the file"),
    "kinds": Option(tuple(KINDS), "kinds of pages", choices=tuple(KINDS)),
    **shared(tiny=False),
}
_DOCUMENTS, _SLOTS, _AT_ONCE = 48, 4, 16


def prompts_of(block: int, count: int) -> list[list[int]]:
    """Return `count` prompts of a block: the beginning or all of a random document, then 1 to 7 random tokens.

    The same block number always gives the same prompts.
    """
    lengths = np.random.default_rng(0).integers(20, 37, _DOCUMENTS)
    documents = [np.random.default_rng(index).integers(3, 128, size) for index, size in enumerate(lengths)]
    rng = np.random.default_rng((1, block))
    prompts = []
    for index in rng.integers(_DOCUMENTS, size=count):
        document = documents[index][: rng.integers(16, 40)]
        prompts.append([*document.tolist(), *rng.integers(3, 128, rng.integers(1, 8)).tolist()])
    return prompts


def seen_of(block: int, count: int, write: str) -> list[dict[str, Any]]:
    """Return `count` prompts of a block, each with one of 48 images, the text of `prompts_of` for the block after it.

    write: text of an image's placeholder in a prompt.
    """
    prompts = []
    for ids in prompts_of(block, count):
        text = "".join(chr(32 + number % 90) for number in ids)
        picture = picture_checkpoints.picture(ids[0], 32, 16)
        prompts.append({"prompt": f"{write}{text}", "multi_modal_data": {"image": [picture]}})
    return prompts


def _options(kind: str, folder: Path) -> dict[str, Any]:
    """Return the options of an engine for a kind of KINDS, with its checkpoints, those of what drafts included. folder:
    empty, for checkpoints that have to be written.
    """
    model, own = KINDS[kind]
    drafts = own.get("speculative_config", {})
    if model in SETS:
        known, head = SETS[model](folder)
        own = own | known | {"speculative_config": head | {"num_speculative_tokens": 2}}
        own |= {} if "load_format" in known else {"load_format": "dummy"}
    else:
        is_whole = model == _PICTURES
        path = picture_checkpoints.whole_checkpoint(model, folder) if is_whole else checkpoint(model)
        own = {"model": str(path)} | own
    if "model" in drafts:
        own |= {"speculative_config": drafts | {"model": str(checkpoint(drafts["model"]))}}
    common = engine_options(
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=_SLOTS,
        max_num_batched_tokens=32,
        block_size=4,
    )
    return common | own


class _Pair:
    """An engine with tiers whose free pages are NaN, and one without tiers. kind: key of KINDS."""

    def __init__(self, kind: str, folder: Path):
        """Start both engines. For kind "adapters" write two random adapters, and load them into the one with tiers. For
        pages of states, the states of free slots become NaN before every step.

        folder: empty, for files that the kind needs.
        """
        self._kind = kind
        options = _options(kind, folder)
        plain: dict[str, Any] = options | {"num_gpu_blocks_override": 400, "max_num_seqs": _AT_ONCE}
        tiers: dict[str, Any] = options | {"kv_offloading_size": 0.05, "preemption_mode": "swap"}
        self.plain, self.tiers = LLM(**plain), LLM(**tiers)
        self._adapters: list[LoRARequest | None] = [None]
        if kind == "adapters":
            for seed in (1, 2):
                path = write_adapter(folder / str(seed), Path(options["model"]), seed=seed)
                self._adapters.append(LoRARequest(f"adapter {seed}", seed, str(path)))
            for each in self._adapters:  # which loads them
                self.tiers.generate([{"prompt_token_ids": [5]}], params_of(0, 1), use_tqdm=False, lora_request=each)
        self._poisoned = Poisoned(self.tiers)
        self._restored = set[str]()  # ids of a block's requests
        self._num_pages = {"loaded": 0, "used": 0}
        self._watch()
        if kind == "state":
            step = self.tiers.core.step

            def poisoned_step() -> Any:
                poison_states(self.tiers)
                return step()

            self.tiers.core.step = poisoned_step

    def _watch(self) -> None:
        """From now on, add the id of each request that is admitted with tokens from host memory to `_restored`, and
        count pages in `_num_pages`: those that come back, and those of them that a request with a load finds when it is
        admitted.
        """
        offload = self.tiers.core.engine.scheduler.extension("offload")
        admitted, counts = offload.admitted, self._num_pages

        def counted(request: Any, num_cached: int) -> None:
            before, room = offload.num_hits, offload.rooms[request.rank]
            if (load := room.loads.get(request)) is not None:
                counts["used"] += sum(room.rank.pool.find(key) is not None for key in load.keys)
            admitted(request, num_cached)
            if offload.num_hits > before:
                self._restored.add(request.request_id)

        def taken(take: Any, *arguments: Any) -> Any:
            entries = take(*arguments)
            counts["loaded"] += len(entries)
            return entries

        offload.admitted = counted
        for rank in offload.ranks:
            rank.take = partial(taken, rank.take)

    def run(self, block: int, count: int) -> dict[str, int]:
        """Run a block's requests on both engines; return how many got "different" tokens, and how many were "restored"
        from host memory at least once.
        """
        max_tokens = 10 + block % 4 * 7
        self._restored.clear()
        if self._kind == "pictures":
            media: Any = self.tiers.core.inputs.media
            prompts: list[Any] = seen_of(block, count, media.processor.placeholder("image"))
        else:
            prompts = [{"prompt_token_ids": each} for each in prompts_of(block, count)]
        loras = [self._adapters[index % len(self._adapters)] for index in range(count)]
        params = [params_of(index, max_tokens) for index in range(count)]
        has_adapters = len(self._adapters) > 1
        given = loras if has_adapters else None
        plain = self.plain.generate(prompts, params, use_tqdm=False, lora_request=given)
        names = [each and each.lora_name for each in loras] if has_adapters else ()
        num_ranks = len(self.tiers.core.engine.scheduler.ranks)
        found = self._poisoned.run(prompts, _AT_ONCE * num_ranks, max_tokens, names)
        different = sum(list(each.outputs[0].token_ids) != own for each, own in zip(plain, found, strict=True))
        return {"different": different, "restored": len(self._restored)}

    def counts(self) -> dict[str, int]:
        """Return the totals of the engine with tiers so far: prefix cache hits in tokens, pages loaded and used,
        swapped requests, and compilations.
        """
        core, offload = self.tiers.core, self.tiers.core.engine.scheduler.extension("offload")
        return self._num_pages | {
            "hits": offload.num_hits,
            "swapped": offload.num_by_mode["swap"],
            "compilations": core.runner.compiles.count,
        }


def run(args: Namespace, recorder: Recorder) -> None:
    """Compare each kind of page in blocks of requests; after each block update the kind's row with the totals. Raises
    OptionError for kinds that need two devices if this process's devices are in use already.
    """
    if args.tiny:
        args.requests, args.block, args.kinds = 40, 20, ("full",)
    if any(kind in _OVER_DEVICES for kind in args.kinds):
        try:
            jax.config.update("jax_num_cpu_devices", 2)
        except RuntimeError:  # devices are in use, as in a test of this program
            raise OptionError(f"--kinds {' '.join(_OVER_DEVICES)} need a process of their own") from None
    recorder.resume()
    with fast_compile():
        for kind in args.kinds:
            _measure(kind, args, recorder)


def _measure(kind: str, args: Namespace, recorder: Recorder) -> None:
    """Compare one kind of page in blocks of requests, after those that its row in `recorder` has; after each block
    update the row with the totals. "kept" is whether no request got other tokens, nothing was compiled, requests were
    swapped, and more than half of those after the first with each document were restored. Numbers are rounded.
    """
    same = {"kind": kind, "pages": KINDS[kind][1]["num_gpu_blocks_override"], "at once": _AT_ONCE}
    row: dict[str, Any] = next((each for each in recorder.rows if same.items() <= each.items()), same)
    if row.get("requests", 0) >= args.requests:
        return
    with tempfile.TemporaryDirectory() as folder:
        pair = _Pair(kind, Path(folder))
        while (done := row.get("requests", 0)) < args.requests:
            before, start = pair.counts(), time.monotonic()
            count = min(args.block, args.requests - done)
            new = pair.run(done // args.block, count)
            new |= {name: value - before[name] for name, value in pair.counts().items()}
            new |= {"requests": count, "seconds": time.monotonic() - start}
            row = same | {name: round(row.get(name, 0) + value, 1) for name, value in new.items()}
            row["loaded / used"] = round(row["loaded"] / max(1, row["used"]), 2)
            # The first requests with each document find nothing.
            is_crowded = 2 * row["restored"] > max(0, row["requests"] - _DOCUMENTS) and row["swapped"] > 0
            row["kept"] = not row["different"] and not row["compilations"] and is_crowded
            recorder.add(row, ("kind",))
        pair.plain.shutdown()
        pair.tiers.shutdown()
