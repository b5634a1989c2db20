"""Runs a benchmark: `python -m benchmarks NAME [options]`. Without a name it lists them.

This module has the table of benchmarks and the options that several of them share. A benchmark is a module with
`OPTIONS`, a table of its options, and `run(args, recorder)`, which adds rows to the recorder. The harness reads the
command line and chooses the platform. Its exit status is 1 if a row says that a limit was not kept.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.recorder import Recorder

RESULTS = Path(__file__).parent / "results"
# Name -> (module, what it measures).
BENCHMARKS = {
    "attention": ("kernels.attention", "paged attention beside what the device can do and beside other attentions"),
    "expert_tiles": ("kernels.expert_tiles", "rows that the kernels of experts multiply for each row of a token"),
    "proof_start": ("kernels.proof_start", "how much the proof of kernels delays a start (stand-ins on a CPU)"),
    "few_rows": ("kernels.few_rows", "products of 1 to 32 rows on this CPU: machine code beside plain XLA"),
    "gpu_launches": ("kernels.gpu_launches", "launches of attention on cards without a kernel for it (jax's compiler)"),
    "sparse_attention": (
        "kernels.sparse_attention",
        "bytes, launches and registers of sparse attention on CUDA cards beside plain XLA (jax's compiler)",
    ),
    "triton_attention": (
        "kernels.triton_attention",
        "launches, registers and spills of Triton attention (jax's compiler)",
    ),
    "triton_products": (
        "kernels.triton_products",
        "quantised products on Ampere, Ada and RTX Blackwell beside plain XLA (jax's compiler)",
    ),
    "gpu_check": ("kernels.device_check", "all that a machine with a CUDA device can say, within a budget of seconds"),
    "tpu_check": ("tpu.tpu_check", "the same of a machine with TPUs, in ten minutes"),
    "tpu_copies": ("tpu.tpu_copies", "instructions of TPU attention for copying a block of pages (libtpu)"),
    "tpu_cycles": ("tpu.tpu_cycles", "cycles of TPU attention beside jax's own kernel and a roofline (libtpu)"),
    "tpu_kv_cycles": ("tpu.tpu_kv_cycles", "cycles of TPU attention over a cache of one byte a number (libtpu)"),
    "tpu_peers": ("tpu.tpu_peers", "bundles of TPU attention beside tpu-inference's kernels (libtpu)"),
    "tpu_products": ("tpu.tpu_products", "cycles of TPU products with quantised matrices (libtpu)"),
    "adapter_swap": ("weights.adapter_swap", "loading an adapter, and how long running streams stand still for it"),
    "drafts": ("drafts.drafts", "tokens a step and a second with drafts, beside none"),
    "drafts_peer": ("drafts.drafts_peer", "drafts that are looked up, beside vLLM's CPU build"),
    "embeddings": ("engine.embeddings", "texts embedded a second, beside sentence-transformers"),
    "endurance": ("engine.endurance", "whether memory grows with the requests served"),
    "engine_gpu": ("engine.engine_gpu", "an 8B-shaped model end to end, and how long the device idles"),
    "first_layers": ("drafts.first_layers", "writes a draft model: the default model's first layers"),
    "kv_attacks": ("pages.kv_attacks", "tokens of engines that are killed, on a folder of pages that are damaged"),
    "kv_codes": ("pages.kv_codes", "exactness and memory of each kv_cache_dtype"),
    "kv_gaps": ("pages.kv_gaps", "gaps of streams while pages of others leave the devices and come back"),
    "kv_swaps": ("pages.kv_swaps", "tokens while pages leave the devices and come back, beside pages that stay"),
    "kv_tiers": ("pages.kv_tiers", "conversations in a KV pool a tenth of their size, with tiers for what leaves it"),
    "largest_request": ("pages.largest_request", "what the largest value of a request's field costs other requests"),
    "memory": ("pages.memory", "what an engine on a CPU holds beside its memory plan"),
    "padding": ("pages.padding", "padding of bucket grids against the time to compile them"),
    "picture_caches": ("engine.picture_caches", "bytes and memory of each cache of processed images"),
    "pictures": ("engine.pictures", "images through a server: compilations, hostile files, caches, waits"),
    "predictions": ("engine.predictions", "what `jaxengine plan` and the roofline say, beside what an engine takes"),
    "recompute": ("pages.recompute", "tokens computed again when the KV pool is too small"),
    "router_cost": ("engine.router_cost", "a router's choice of a replica, by the number of replicas"),
    "simulator": ("engine.simulator", "`jaxengine simulate` beside the engine, and the shapes that it chooses"),
    "sleep_cycles": (
        "weights.sleep_cycles",
        "an engine that sleeps and wakes: bytes alive, tokens, the first token after",
    ),
    "rl_agreement": ("weights.rl_agreement", "log-probabilities of an engine and of a trainer, bit by bit"),
    "train_head": ("drafts.train_head", "trains an EAGLE-3 head for the default model"),
    "steering": ("weights.steering", "steps whose requests add vectors of their own, beside steps without any"),
    "weight_updates": (
        "weights.weight_updates",
        "weights replaced under running requests: compilations, memory, times",
    ),
    "window_pages": ("pages.window_pages", "tokens that a pool holds where layers have windows"),
    "attack": ("server.attack", "a server under the largest bodies, idle connections and killed processes"),
    "clients": ("server.clients", "other people's clients against a server: who can do what"),
    "json_bodies": ("server.json_bodies", "reading the largest JSON bodies, beside Python's own parser"),
    "reliability": ("server.reliability", "a server whose engine is killed, that is ended, overloaded, sent grammars"),
    "serve_peers": ("server.serve_peers", "`jaxengine serve` beside llama.cpp's server"),
    "server_host": ("server.server_host", "what serving costs the engine's process beside offline"),
}


@dataclass(frozen=True)
class Option:
    """A command-line option of a benchmark. A benchmark's table has its options by name, with underscores.

    Attributes:
      default: the value if the option is not given; its type determines how a value is read, that of its first item for
        a tuple, which lets the option take several values; text for None and (). False makes the option a flag.
      help, choices, metavar: as argparse's.
      kind: function that reads one value, if the default does not determine how.
      positional: the option is a positional argument, which must be given.
    """

    default: Any = None
    help: str | None = None
    choices: Sequence[Any] | None = None
    kind: Callable[[str], Any] | None = None
    metavar: str | None = None
    positional: bool = False

    def add_to(self, parser: argparse.ArgumentParser, name: str) -> None:
        """Add the option to `parser`: positional if it is, else as --NAME with dashes. Its help shows a default that is
        not empty.
        """
        flag = name if self.positional else f"--{name.replace('_', '-')}"
        if isinstance(self.default, bool):
            parser.add_argument(flag, action="store_true", help=self.help)
            return
        several = isinstance(self.default, tuple)
        first = next(iter(self.default), None) if several else self.default
        kind = self.kind or (str if first is None else type(first))
        shown = "" if not self.default or self.positional else f"default: {_shown(self.default)}"
        text = f"{self.help} ({shown})" if self.help and shown else self.help or shown
        parser.add_argument(
            flag,
            type=kind,
            nargs="+" if several else None,
            help=text.replace("%", "%%"),
            metavar=self.metavar,
            choices=self.choices,
            **({} if self.positional else {"default": self.default}),
        )


def _shown(default: Any) -> str:
    """Return a default as text, the items of a tuple separated by spaces."""
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


CACHE = Path.home() / ".cache" / "jaxengine"
SHARED = {
    "rounds": Option(3, "how often each measurement is repeated"),
    "only": Option("", "rows whose name contains this"),
    "targets": Option(("v6e",), "chips to compile for"),
    "budget_s": Option(1e9, "begin no row after this many seconds"),
    "tiny": Option(False, "sizes for a test of this program"),
    "venv_dir": Option(CACHE / "peers", "environments of other programs, kept for later runs", kind=Path),
}


class OptionError(ValueError):
    """Error of options that contradict each other, or of a benchmark that this machine cannot run."""


def shared(**defaults: Any) -> dict[str, Option]:
    """Return the options of SHARED that are named here, by name, with the given defaults."""
    return {name: replace(SHARED[name], default=value) for name, value in defaults.items()}


def load(name: str) -> ModuleType:
    """Import and return the module of the benchmark called `name`. Raises KeyError for an unknown name."""
    return importlib.import_module(f"benchmarks.{BENCHMARKS[name][0]}")


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the parser of a benchmark's command line: its own OPTIONS, --save and --platform. Imports the
    benchmark.
    """
    module = load(name)
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for option, about in module.OPTIONS.items():
        about.add_to(parser, option)
    text = "write the rows to benchmarks/results/NAME.json, to NAME_WORD.json, or to a file that ends in .json"
    parser.add_argument("--save", nargs="?", const="", metavar="WORD", help=text)
    parser.add_argument("--platform", help="a jax platform, such as cpu; the default device otherwise")
    return parser


def file_of(name: str, save: str | None) -> Path | None:
    """Return the path that `--save` means: `save` itself if it ends in .json, else NAME_WORD.json in RESULTS, or
    NAME.json for "".

    Returns None if `save` is None. name: of the benchmark.
    """
    if save is None or save.endswith(".json"):
        return None if save is None else Path(save)
    return RESULTS / f"{name}{'_' * bool(save)}{save}.json"


def listing() -> str:
    """Return the text that lists all benchmarks by folder, with a line for each."""
    lines, room = ["python -m benchmarks NAME [options]; NAME --help says which", ""], ""
    for name, (module, about) in BENCHMARKS.items():
        if (here := module.partition(".")[0]) != room:
            room = here
            lines.append(f"{room}:")
        lines.append(f"  {name.ljust(16)} {about}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark named by the first argument, or list all; return the exit status.

    argv: arguments; None for those of the process. The status is 1 if a row says that a limit was not kept and 2 for an
    unknown name. Exits with argparse's message for invalid options.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(listing())
        return 0
    name, rest = argv[0], argv[1:]
    if name not in BENCHMARKS:
        print(f"no benchmark is called {name!r}\n\n{listing()}", file=sys.stderr)
        return 2
    parser = parser_of(name)
    args = parser.parse_args(rest)
    if args.platform:
        _use(args.platform)
    command = f"python -m benchmarks {shlex.join(argv)}"
    budget_s = getattr(args, "budget_s", float("inf"))
    module = load(name)
    recorder = Recorder(name, file_of(name, args.save), command, budget_s)
    try:
        module.run(args, recorder)
    except OptionError as error:
        parser.error(str(error))
    recorder.finish()
    return int(recorder.failed)


def _use(platform: str) -> None:
    """Make jax run on a platform, in this process, where it may be imported already, and in processes that it
    starts.
    """
    os.environ["JAX_PLATFORMS"] = platform
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_platforms", platform)
