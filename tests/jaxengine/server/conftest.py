"""Fixtures of the server's tests: a model of random weights that speaks SmolLM2's tokenizer and chat template."""

from __future__ import annotations

import contextlib
import itertools
import json

import pytest

from tests.fast_compile import fast_compile
from tests.jaxengine.server.server_process import ServerProcess, start_server
from tests.kept import Kept

# Compiles in seconds. The pool is small enough for preemption when several long requests meet.
CHAT_OPTIONS = {
    "dtype": "float32",
    "load_format": "dummy",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "block_size": 8,
    "num_gpu_blocks_override": 160,
    "compilation_config": {"cudagraph_capture_sizes": [1, 8], "prefill_sizes": [64]},
    "disable_log_stats": True,
}


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory) -> str:
    """A folder: two layers, vocabulary 49,152, the real tokenizer and chat template, no weights."""
    from jaxengine.checkpoint.default_model import default_model_path
    from jaxengine.models.weights.gguf.file import GGUFFile
    from jaxengine.tokens.tokenizer import Tokenizer

    folder = tmp_path_factory.mktemp("chat_model")
    with GGUFFile(default_model_path()) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(tokenizer.chat_template)
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    tokens = {name: getattr(tokenizer, f"{name}_id") for name in names}
    written = {name: tokenizer.backend.id_to_token(number) for name, number in tokens.items() if number is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(written))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="session")
def chat_options(chat_model, executables_dir) -> dict:
    return {**CHAT_OPTIONS, "model": chat_model, "compile_cache_dir": executables_dir}


def compiling(config: pytest.Config) -> contextlib.AbstractContextManager[None]:
    """How engines of a session compile, which are there before `compile_mode` of a file: their servers do likewise."""
    return contextlib.nullcontext() if config.getoption("--optimised") else fast_compile()


@pytest.fixture(scope="session")
def chat_engine(chat_options, pytestconfig):
    """An engine in this process, for tests of what stands in front of one."""
    from jaxengine import AsyncLLM

    with compiling(pytestconfig):
        engine = AsyncLLM(**chat_options)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="session")
def make_server(chat_options):
    """`jaxengine serve` processes by options of EngineConfig and ServerConfig, ended when no file uses them.

    The same options give the same server, unless it has ended. `fresh=True` gives one that nobody else has.
    """
    made = Kept(ServerProcess.remove, lambda server: server.process.poll() is None)
    numbers = itertools.count()

    def make(*, fresh: bool = False, **changes):
        key = next(numbers) if fresh else repr(sorted(changes.items()))
        return made.get(key, lambda: start_server({**chat_options, "grpc_port": 0, "metrics_port": 0}, **changes))

    yield make
    made.end_all()


@pytest.fixture(scope="module")  # a file's own request for it: one that no file uses has ended
def server(make_server):
    """A server with one API process, HTTP and gRPC: base_url, grpc_address, pid, engine_pid, api_pids."""
    return make_server()
