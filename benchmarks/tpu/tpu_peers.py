"""Our TPU attention beside tpu-inference's ragged paged attention v3, in bundles for a block; needs libtpu, not a TPU.

tpu-inference is installed from its wheel, without what it needs to serve, into an environment of its own that has this
process's jax and libtpu: one compiler for both. Each kernel is compiled as it serves, with the block sizes that it
chooses for a step of 64 decodes or of 2,048 tokens, tables of 8,192 keys, pages of 128. The loop over blocks of keys is
read from the compiled program (tpu_bundles): "arithmetic" is the bundles that multiply, with softmax, for 1,024 keys
and one token (decode) or 128 (prefill), with all heads; "loop" is the whole pass, which also starts and awaits copies.
The block is full and neither first nor last: ours masks no key of it then, theirs always does. Bundles are of one core.
The grid of ours has a parallel dimension, which a device of two cores (v5p) divides between them; that of theirs has
none, so that one core runs it: "device_ratio" is the loop's ratio with what each core does at once. `kept` compares the
ratios of one core, ours to theirs, with LIMITS. "peak" is the least cycles that a core's matrix units take for the same
products: fewer bundles than that only mean that the core waits for them. Where a kernel is refused, its block is the
reason; where theirs asks for more VMEM than tpu7x has, it gets its blocks for v6e. A file's rows that are not measured
are kept.
"""

from __future__ import annotations

from argparse import Namespace
from importlib.metadata import version
from typing import Any, NamedTuple

from benchmarks.harness import CACHE, shared
from benchmarks.recorder import Recorder
from benchmarks.tpu.tpu_bundles import Program
from benchmarks.tpu.tpu_cycles import CASES, PAGE_SIZE
from benchmarks.tpu.tpu_profile import ProfileError, profile
from jaxengine.bench.peer_process import Peer, install
from jaxengine.check.targets import CLOCKS, TARGETS
from jaxengine.results import machine

VERSION = "0.32.0"
THEIR_CASE = "benchmarks.tpu.tpu_peer_cases:ragged_paged_attention"
HEADS = ((32, 8), (8, 1), (16, 16))
HEAD_DIMS = (128, 64)
TOKENS = {"decode": 64, "prefill": 2048}
MAX_PAGES = 64
NORMAL_KEYS, NORMAL_TOKENS = 1024, 128
COMPILE_S = 1800.0  # most seconds of compiling one kernel
CORES = {"v5p": 2}  # cores that are one device, if more than one
UNIT_WIDTH = {"v5e": 128, "v5p": 128, "v6e": 256, "tpu7x": 256}  # rows and columns of a matrix unit
LIMITS = {"decode": 0.8, "prefill": 0.65, "loop": 0.85}  # of the arithmetic's ratio by step, and of the loop's


class Cost(NamedTuple):
    """Bundles of one kernel for NORMAL_KEYS keys and one token (decode) or NORMAL_TOKENS (prefill), and its block
    size.
    """

    arithmetic: int | None
    loop: int | None
    block: str  # tokens x keys, or why there are no bundles


def cost(target: str, build: str, step: str, **arguments: Any) -> Cost:
    """Return the cost of the kernel that `build` ("module:function") makes for a step, a key of TOKENS, rounded.

    If it does not compile, or has no loop over blocks, the bundles are None and `block` is the reason, cut to 160
    characters. target: TPU.
    arguments: of the function and of `profile`.
    """
    sizes = {"decode": step == "decode", "page_size": PAGE_SIZE, "max_pages": MAX_PAGES, "num_tokens": TOKENS[step]}
    try:
        compiled = profile(build, TARGETS[target].topology, timeout=COMPILE_S, timed=False, **sizes, **arguments)
    except ProfileError as error:
        return Cost(None, None, str(error).rpartition("Error: ")[2][:160])
    facts, program = compiled.facts, Program(compiled.dump)
    loops = program.block_loops()
    if not loops:
        return Cost(None, None, "its program has no loop that fetches and multiplies")
    found = program.measure(loops[0 if step == "decode" else -1], facts.get("trips", 1))
    block_q, block_kv = facts["block_q"], facts["block_kv"]
    part = NORMAL_KEYS / block_kv * (1 if step == "decode" else NORMAL_TOKENS / block_q)
    return Cost(round(found.arithmetic * part), round(found.whole * part), f"{block_q} x {block_kv}")


def peak_cycles(target: str, step: str, heads: tuple[int, int], head_dim: int) -> int:
    """Return the least cycles in which the matrix units of one core multiply the queries and weights of one token
    (decode) or NORMAL_TOKENS (prefill) with NORMAL_KEYS keys and values.

    A product takes as long as one whose heads fill the unit: a narrower head leaves rows of it idle, of keys, or
    columns, of values. step: key of TOKENS. heads: query heads and KV heads. The result is rounded.
    """
    rows, width = heads[0] * (1 if step == "decode" else NORMAL_TOKENS), UNIT_WIDTH[target]
    filled = -(-head_dim // width) * width
    return round(2 * rows * NORMAL_KEYS * 2 * filled / TARGETS[target].flops * CLOCKS[target])


def measure(target: str, step: str, heads: tuple[int, int], head_dim: int, python: str) -> dict[str, Any]:
    """Return a row that compares both kernels; ratios are None where a kernel has no bundles. "kept" is whether they
    keep LIMITS, None without ratios. If tpu-inference's kernel for heads of 128 fails for tpu7x, that with the block
    sizes of v6e is compared, and "their_block" says so.

    step: key of TOKENS. heads: query heads and KV heads. python: interpreter with tpu-inference. Ratios are rounded.
    """
    shape = {"heads": heads, "head_dim": head_dim}
    ours = cost(target, f"{CASES}:ours", step, in_keys=None, part="walk", trips=1, **shape)
    theirs = cost(target, THEIR_CASE, step, python=python, **shape)
    if theirs.loop is None and target == "tpu7x" and head_dim == 128:
        smaller = cost(target, THEIR_CASE, step, python=python, blocks_of=6, **shape)
        theirs = smaller._replace(block=f"{smaller.block} (v6e's; its own: {theirs.block})")

    def ratio(mine: int | None, other: int | None) -> float | None:
        return None if mine is None or other is None else round(mine / other, 3)

    arithmetic, loop = ratio(ours.arithmetic, theirs.arithmetic), ratio(ours.loop, theirs.loop)
    kept = (arithmetic or 0) <= LIMITS[step] and (loop or 0) <= LIMITS["loop"] if arithmetic else None
    return {
        "target": target,
        "step": step,
        "heads": f"{heads[0]}/{heads[1]} of {head_dim}",
        "our_block": ours.block,
        "their_block": theirs.block,
        "our_arithmetic": ours.arithmetic,
        "their_arithmetic": theirs.arithmetic,
        "arithmetic_ratio": arithmetic,
        "our_loop": ours.loop,
        "their_loop": theirs.loop,
        "loop_ratio": loop,
        "device_ratio": None if loop is None else round(loop / CORES.get(target, 1), 3),
        "peak": peak_cycles(target, step, heads, head_dim),
        "kept": kept,
    }


OPTIONS = shared(targets=("v5e", "v5p", "v6e", "tpu7x"), only="", venv_dir=CACHE / "peers")


def run(args: Namespace, recorder: Recorder) -> None:
    """Install tpu-inference, compile both kernels for each target, step and size of heads whose name has args.only, and
    add a row for each to those of the file, or replace it there.
    """
    versions = {name: version(name) for name in ("jax", "jaxlib", "libtpu")}
    recorder.describe = lambda: {**machine(), "libtpu": versions["libtpu"], "tpu-inference": VERSION}
    same = (*(f"{name}=={found}" for name, found in versions.items()), "absl-py")
    peer = Peer("tpu-inference", "", (same, ("--no-deps", f"tpu-inference=={VERSION}")), ())
    args.venv_dir.mkdir(parents=True, exist_ok=True)
    python = str(install(peer, args.venv_dir))
    recorder.take_over()
    for target in args.targets:
        for step in TOKENS:
            for heads in HEADS:
                for head_dim in HEAD_DIMS:
                    if args.only in f"{step} {heads[0]}/{heads[1]} of {head_dim}":
                        row = measure(target, step, heads, head_dim, python)
                        recorder.add(row, ("target", "step", "heads"))
