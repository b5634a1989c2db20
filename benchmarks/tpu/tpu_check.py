"""The checks of `scripts/tpu_check`, in ten minutes: predictions beside what is measured, conformance of the kernels on
the device, the engine. As gpu_check in everything else: sections, hangs, and how a later run goes on.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

from benchmarks.harness import shared
from benchmarks.kernels import device_check
from benchmarks.recorder import Recorder

SECTIONS = {name: device_check.BOTH[name] for name in ("predictions", "conformance", "engine")}
OPTIONS = {
    **device_check.OPTIONS,
    "only": replace(device_check.OPTIONS["only"], choices=tuple(SECTIONS)),
    **shared(budget_s=600.0),
}


def run(args: Namespace, recorder: Recorder) -> None:
    device_check.run_check("tpu_check", SECTIONS, args, recorder)
