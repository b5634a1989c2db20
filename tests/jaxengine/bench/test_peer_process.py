"""The line protocol between `bench peers` and a peer, with a peer written here."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxengine.bench import peer_process
from jaxengine.bench.peer_process import OURS, PEERS, SCRIPTS, Peer, PeerError, PeerProcess, install

ECHO = """
import sys
sys.path.insert(0, {scripts!r})
from peer import serve

def load(job):
    print("noise on standard output")
    if job["variant"] == "broken":
        raise SystemExit("cannot load this")

    def run(workload):
        print("more noise")
        if not workload["prompts"]:
            raise ValueError("no prompts")
        tokens = len(workload["prompts"]) * workload["max_tokens"]
        return {{"seconds": 2.0, "output_tokens": tokens, "first_token_seconds": None}}

    return "1.2 " + job["variant"], run

serve(load)
"""


@pytest.fixture
def echo(tmp_path, monkeypatch):
    (tmp_path / "echo.py").write_text(ECHO.format(scripts=str(SCRIPTS)))
    monkeypatch.setattr(peer_process, "SCRIPTS", tmp_path)
    return Peer("echo", "echo.py", (), ("float32",))


def start(peer: Peer, variant: str, folder: Path) -> PeerProcess:
    return PeerProcess(peer, variant, Path(sys.executable), {"threads": 1}, folder / "log")


def test_a_peer_answers_each_workload_whatever_it_prints(echo, tmp_path):
    with start(echo, "float32", tmp_path) as process:
        assert process.version == "1.2 float32" and process.load_seconds >= 0
        for count in (1, 3):
            done = process.run({"prompts": [[1]] * count, "max_tokens": 5})
            assert 2**20 < done.pop("peak_rss") < 2**30
            assert done == {"seconds": 2.0, "output_tokens": 5 * count, "first_token_seconds": None}
    assert "more noise" in (tmp_path / "log").read_text()
    assert process._process.returncode is not None


def test_a_peer_that_cannot_load_says_why(echo, tmp_path):
    with pytest.raises(PeerError, match="echo broken ended: cannot load this"):
        start(echo, "broken", tmp_path)


def test_a_peer_that_fails_in_a_run_says_why_and_stays_failed(echo, tmp_path):
    with start(echo, "float32", tmp_path) as process:
        for _ in range(2):
            with pytest.raises(PeerError, match="ValueError: no prompts"):
                process.run({"prompts": [], "max_tokens": 5})
            process._process.wait()  # nobody reads what it is sent next


@pytest.mark.parametrize("last", [{"usage": {"completion_tokens": 5}}, {"error": "no slot"}, {}], ids=repr)
def test_a_completion_of_llama_cpp_that_fails_fails_the_run(last, monkeypatch, tmp_path):
    class Server:
        def __init__(self, params): ...

        def handle_completions(self, request, on_chunk):
            on_chunk({"choices": []})
            on_chunk(last if request["prompt"] == [2] else {"usage": {"completion_tokens": 5}})

    loaded: list = []
    names = SimpleNamespace(F32=0, BF16=1)
    options = SimpleNamespace(**{name: SimpleNamespace() for name in ("model", "cpuparams", "cpuparams_batch")})
    fakes = {
        "gguf": {"GGMLQuantizationType": names},
        "xllamacpp": {"CommonParams": lambda: options, "Server": Server, "__version__": "1"},
        "peer": {"Measured": dict, "Workload": dict, "serve": loaded.append},
    }
    for name, content in fakes.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))
    runpy.run_path(str(SCRIPTS / "run_llamacpp.py"))
    version, run = loaded[0]({"gguf": "a.gguf", "variant": "q4_1", "threads": 1})
    workload = {"prompts": [[1], [2]], "max_tokens": 5, "prefix": 0, "share_prefix": False}
    if "usage" in last:
        done = run(workload)
        assert version == "1" and done["output_tokens"] == 10 and 0 <= done["first_token_seconds"] <= done["seconds"]
    else:
        with pytest.raises(RuntimeError, match="llama.cpp: (no slot|the answer has no usage)"):
            run(workload)


def test_an_environment_that_cannot_be_installed_is_a_peer_error(tmp_path, monkeypatch):
    commands = []

    def call(peer, command):
        commands.append(command)
        if "install" in command:
            raise PeerError("no such package")

    monkeypatch.setattr(peer_process, "_call", call)
    peer = Peer("x", "x.py", (("no-such-package",),), ("float32",))
    for _ in range(2):
        with pytest.raises(PeerError, match="no such package"):
            install(peer, tmp_path)
    assert len(commands) == 4, "a failed installation must be tried again"


def test_our_own_engine_runs_in_this_interpreter(tmp_path):
    assert install(OURS, tmp_path) == Path(sys.executable)


def test_every_script_is_there():
    for peer in (OURS, *PEERS.values()):
        assert (SCRIPTS / peer.script).exists() and peer.variants
