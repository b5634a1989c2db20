"""Bundles: built in one place, started in another without a compilation, and refused by name where anything differs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxengine import LLM
from jaxengine.commands.cli import main
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.models.families.llama import LlamaForCausalLM
from jaxengine.plan.build import build
from jaxengine.plan.chips import read_chips
from jaxengine.runner.executables.bundle import AMONG, AT_LEAST, MANIFEST, Bundle, NewBundle, write_manifest
from jaxengine.runner.executables.cache import ExecutableCache
from jaxengine.runner.start import bundles
from jaxengine.runner.start.open import open_resolved
from tests.conftest import TINY_CHECKPOINT, TINY_OPTIONS, WITHOUT_LLVMLITE

ROOT = Path(__file__).resolve().parents[4]
SIZES = {"cudagraph_capture_sizes": [1], "prefill_sizes": [4]}
OPTIONS = TINY_OPTIONS | {
    "model": str(TINY_CHECKPOINT),
    "max_model_len": 32,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 4,
    "compilation_config": SIZES,
    "compile_cache_dir": "",
}
KEY = b"0123456789abcdef"
START = """
import json, sys
import jaxengine
from jaxengine import LLM, SamplingParams
llm = LLM(**json.loads(sys.argv[1]))
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
(out,) = llm.generate([{"prompt_token_ids": [3, 4, 5, 6, 7, 8]}], params, use_tqdm=False)
runner = llm.core.runner
counts = [runner.num_compiled, runner.num_loaded, runner.compiles.count, runner.plan.num_pages]
print(json.dumps([jaxengine.__file__, out.outputs[0].token_ids, *counts]))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A signed bundle, and its key file."""
    folder = tmp_path_factory.mktemp("built")
    key = folder / "key"
    key.write_bytes(KEY)
    key.chmod(0o600)
    found = build(EngineConfig(**OPTIONS), read_chips("cpu"), jax.devices()[:1], str(folder / "bundle"), str(key))
    files = list((folder / "bundle").iterdir())
    assert found["programs"] > 10 and len(files) - 1 <= found["programs"]
    assert found["bytes"] == sum(file.stat().st_size for file in files if file.name != MANIFEST)
    return folder / "bundle", key


@pytest.fixture
def copied(built, tmp_path):
    """A copy of the bundle to spoil, not signed, and a function that rewrites its manifest."""
    folder = shutil.copytree(built[0], tmp_path / "copied")

    def rewrite(change, key=None):
        found = json.loads((built[0] / MANIFEST).read_text().partition("\n")[0])
        change(found)
        write_manifest(folder, found, key)
        return str(folder)

    return folder, rewrite


def settled(**options):
    """The config of an engine that would now read its weights."""
    opened = open_resolved(EngineConfig(**{**OPTIONS, **options}))
    opened.source.close()
    return opened.config


def refused(**options) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        settled(**options)
    return error.value


def test_it_starts_elsewhere_and_compiles_nothing(built, tmp_path):
    """Another home, another path of the sources, of the model and of the bundle."""
    shutil.copytree(ROOT / "jaxengine", tmp_path / "code" / "jaxengine", ignore=shutil.ignore_patterns("__pycache__"))
    model = shutil.copytree(TINY_CHECKPOINT, tmp_path / "model")
    bundle = shutil.copytree(built[0], tmp_path / "image" / "bundle")
    options = OPTIONS | {"model": str(model), "bundle": str(bundle), "bundle_key_file": str(built[1])}
    variables = os.environ | {
        "HOME": str(tmp_path),
        "PYTHONPATH": f"{tmp_path / 'code'}:{WITHOUT_LLVMLITE}",
        "JAX_PLATFORMS": "cpu",
    }
    line = [sys.executable, "-c", START, json.dumps(options)]
    done = subprocess.run(line, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    file, tokens, compiled, loaded, later, num_pages = json.loads(done.stdout.splitlines()[-1])
    assert file.startswith(str(tmp_path)) and (compiled, later) == (0, 0)
    assert loaded == len(json.loads((bundle / MANIFEST).read_text().partition("\n")[0])["programs"])
    llm = LLM(**OPTIONS | {"bundle": str(built[0])})  # the folder is this user's own: no key is needed
    assert llm.core.runner.num_compiled == 0 and llm.core.runner.plan.num_pages == num_pages
    params = llm.get_default_sampling_params()
    params.temperature, params.max_tokens, params.ignore_eos = 0, 8, True
    (out,) = llm.generate([{"prompt_token_ids": [3, 4, 5, 6, 7, 8]}], params, use_tqdm=False)
    assert out.outputs[0].token_ids == tokens
    llm.shutdown()


def test_whatever_differs_is_named(copied):
    """Every field of the manifest, one after another."""
    folder, rewrite = copied
    config = settled(bundle=rewrite(lambda found: None))
    assert config.num_gpu_blocks_override == Bundle(str(folder), None).num_pages
    opened = open_resolved(EngineConfig(**OPTIONS))
    here = bundles.about(opened.source, opened.config, jax.devices()[:1], built=False)
    opened.source.close()
    about = Bundle(str(folder), None).about
    assert about == here
    for name, own in about.options.items():
        rewrite(lambda found, name=name, own=own: found["options"].update({name: [own, "other"]}))
        with pytest.raises(ConfigError, match=f"{name} is .* was built with") as error:
            Bundle(str(folder), None).check(here)
        assert error.value.param == name
    for part in ("facts", "model"):
        for name, own in getattr(about, part).items():
            other = [*own, "avx1024"] if name.endswith(AMONG) else f"other than {own}"
            rewrite(lambda found, part=part, name=name, other=other: found[part].update({name: other}))
            with pytest.raises(ConfigError) as error:
                Bundle(str(folder), None).check(here)
            assert name.removesuffix(AMONG) in str(error.value) and error.value.param == "bundle"
            rewrite(lambda found, part=part, name=name: found[part].pop(name))
            with pytest.raises(ConfigError) as error:
                Bundle(str(folder), None).check(here)
            assert name.removesuffix(AMONG) in str(error.value)
    assert "avx1024" in str(refused(bundle=rewrite(lambda found: found["facts"].update(
        {f"processor's instructions{AMONG}": ["sse", "avx1024"]}))))  # fmt: skip
    rewrite(lambda found: found["facts"].update({f"processor's instructions{AMONG}": []}))
    Bundle(str(folder), None).check(here)  # more than it was built for will do
    rewrite(lambda found: found["options"].update({"unheard_of": 1}))
    with pytest.raises(ConfigError, match="unheard_of"):
        Bundle(str(folder), None).check(here)
    for change, said in (
        ({"sources": {"LlamaForCausalLM": "0"}}, "the sources of LlamaForCausalLM"),
        ({"sources": {}}, "it has no LlamaForCausalLM"),
        ({"programs": {}}, "it has no program"),
        ({"format": 2}, "its format is 2"),
        ({"jaxengine": ""}, "jaxengine of its"),
        ({"num_pages": 0}, "num_pages of its"),
        *(({part: []}, f"{part} of its") for part in ("facts", "options", "model", "sources", "programs", "numbers")),
        ({"programs": {"a": ["a", "../../etc/passwd", 3]}}, "programs of its"),
        ({"programs": {"a": ["a", "0" * 64, True]}}, "programs of its"),
    ):
        rewrite(lambda found, change=change: found.update(change))
        with pytest.raises(ConfigError, match=said) as error:
            LLM(**OPTIONS | {"bundle": str(folder)})
        assert error.value.param == "bundle"


def test_nothing_of_a_damaged_or_foreign_bundle_is_unpickled(copied, built, monkeypatch, tmp_path):
    """By who wrote it, by its signature, and by the digest of each file."""
    monkeypatch.setattr("jaxengine.runner.executables.cache.load", lambda *_: pytest.fail("it was loaded"))
    folder, rewrite = copied
    rewrite(lambda found: None)
    name = next(file for file in folder.iterdir() if file.suffix == ".xla").name
    content = (folder / name).read_bytes()
    named = {"bundle": str(folder)}
    programs = Bundle(str(folder), None)._programs
    (key,) = [key for key, entry in programs.items() if f"{entry[1]}.xla" == name][:1]
    for damage, said in ((content[:-1], "is damaged"), (content + b"x", "were expected"), (b"", "is damaged")):
        (folder / name).write_bytes(damage)
        with pytest.raises(ConfigError, match=said):
            Bundle(str(folder), None).program(programs[key][0], key)
    (folder / name).unlink()
    (folder / name).symlink_to("/etc/passwd")
    with pytest.raises(ConfigError, match="cannot be read"):
        Bundle(str(folder), None).program(programs[key][0], key)
    signed = named | {"bundle_key_file": str(built[1])}
    assert "hmac_sha256" in str(refused(**signed))
    rewrite(lambda found: None, key=b"another key of 16")
    assert "hmac_sha256" in str(refused(**signed))
    rewrite(lambda found: None, key=KEY)
    settled(**signed)
    whole, deep = (folder / MANIFEST).read_bytes(), b"[" * 100_000
    for damage in (b"", b"{}", whole.replace(b"cpu", b"gpu", 1), deep, deep + b"\n" + deep):
        (folder / MANIFEST).write_bytes(damage)
        assert "manifest" in str(refused(**named))
    (folder / MANIFEST).write_bytes(whole)
    folder.chmod(0o777)
    assert "cannot be trusted" in str(refused(**named))
    settled(**signed)  # the key vouches for it
    folder.chmod(0o755)
    (folder / MANIFEST).chmod(0o666)
    assert "cannot be trusted" in str(refused(**named))
    for none in (str(tmp_path / "none"), str(folder / MANIFEST), str(tmp_path)):
        assert "cannot be read" in str(refused(bundle=none))
    assert not (tmp_path / "none").exists()


def test_options_that_contradict_it(built, tmp_path, capsys):
    for options in (
        {"enforce_eager": True},
        {"fit": True},
        {"max_model_len": "auto"},
        {"record_steps": str(tmp_path)},
        {"nnodes": 2},
    ):
        with pytest.raises(ConfigError) as error:
            EngineConfig(**{**OPTIONS, "bundle": str(built[0]), **options})
        assert error.value.param == next(iter(options))
    assert refused(bundle=str(built[0]), kv_cache_dtype="int8").param == "kv_cache_scales"
    assert refused(bundle=str(built[0]), max_num_seqs=2).param == "max_num_seqs"
    with pytest.raises(ConfigError, match="no bundle"):
        EngineConfig(bundle_key_file="key")
    (tmp_path / "file").write_text("mine")
    words = ["build", str(TINY_CHECKPOINT), "--out", str(tmp_path)]
    for more, said in (
        ((), "out is"),
        (("--chips", "t4"), "chips is 't4:1'"),
        (("--chips", "cpu:2", "-tp", "3"), "tensor_parallel_size is 3"),
        (("--bundle", "x"), "--out names"),
        (("--enforce-eager",), "enforce_eager"),
        (("--max-model-len", "auto"), "max_model_len is 'auto'"),
        (("--nnodes", "2"), "nnodes is 2"),
        (("--attention-backend", "xla"), "attention_backend is 'XLA'"),
    ):
        assert main([*words, *more]) != 0
        assert said in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"
    devices = [SimpleNamespace(process_index=number) for number in (0, 1)]
    with pytest.raises(ConfigError, match="chips of one host"):
        build(EngineConfig(**OPTIONS), read_chips("v6e:16"), devices, str(tmp_path / "new"), None)


def test_numbers_at_least(copied):
    """The driver of CUDA may be newer than the compiler was."""
    folder, rewrite = copied
    about, name = Bundle(rewrite(lambda found: None), None).about, f"CUDA that the driver supports{AT_LEAST}"
    rewrite(lambda found: found["facts"].update({name: 13}))
    for own, said in ((12, "here 12, there 13"), (0, "here 0"), (13, ""), (14, "")):
        here = replace_facts(about, {name: own})
        if not said:
            Bundle(str(folder), None).check(here)
            continue
        with pytest.raises(ConfigError, match=said):
            Bundle(str(folder), None).check(here)


def replace_facts(about, more):
    return about._replace(facts={**about.facts, **more})


def test_a_kernel_that_failed_its_proof_is_named(built):
    """Programs of the bundle use it."""
    cache = ExecutableCache(Bundle(str(built[0]), None), jax.devices()[:1], family=LlamaForCausalLM)
    cache.unused = frozenset({("matmul", "cuda")})
    with pytest.raises(ConfigError, match=r"failed their proof here: matmul \(cuda\)"):
        cache.get("any", lambda: 0, (), (), donate=())


def test_a_folder_that_is_replaced_has_no_manifest_meanwhile(copied):
    folder, rewrite = copied
    rewrite(lambda found: None)
    bundle = NewBundle(str(folder), None)
    assert not list(folder.iterdir())
    bundle.add_program("a", "a" * 64, b"x")
    assert refused(bundle=str(folder)).param == "bundle"


DRAFT = {"method": "draft_model", "model": str(TINY_CHECKPOINT), "num_speculative_tokens": 2}
CASES = {
    "tp 2": (2, {"tensor_parallel_size": 2}),
    "pp 2": (2, {"pipeline_parallel_size": 2}),
    "dp 2": (2, {"data_parallel_size": 2}),
    "draft model": (1, {"speculative_config": DRAFT}),
    "ngram": (1, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}),
    "adapters": (1, {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}),
    "pages in memory": (1, {"kv_offloading_size": 0.01}),
    "codes": (1, {"kv_cache_dtype": "int8", "kv_cache_scales": "unit"}),
    "int8 weights": (1, {"quantization": "int8"}),
}


@pytest.mark.thorough("a minute of compiling each")
@pytest.mark.parametrize("case", CASES)
def test_every_capability_starts_from_its_bundle(case, tmp_path):
    count, more = CASES[case]
    options = OPTIONS | more
    out = str(tmp_path / "bundle")
    given = {name: value for name, value in options.items() if name not in ("compile_cache_dir", "model")}
    (tmp_path / "options.yaml").write_text(json.dumps(given))  # JSON is YAML
    words = ["build", str(TINY_CHECKPOINT), "--chips", f"cpu:{count}", "--out", out]
    words += ["--config", str(tmp_path / "options.yaml"), "--compile-cache-dir="]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    variables = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    for line in (["-m", "jaxengine", *words], ["-c", START, json.dumps(options | {"bundle": out})]):
        done = subprocess.run(
            [sys.executable, *line], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, done.stderr[-3000:]
    _, tokens, compiled, loaded, later, _ = json.loads(done.stdout.splitlines()[-1])
    assert (compiled, later) == (0, 0) and loaded > 10 and len(tokens) == 8
