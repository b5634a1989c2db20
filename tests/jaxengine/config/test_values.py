"""Values as programs and shells write them become the one form that options are kept in."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.config.base.files import writable_folder
from jaxengine.config.base.values import read_size
from jaxengine.config.engine_config import CompilationConfig, ConfigError, EngineConfig
from tests.tables import each_row


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096),
        ("4k", 4000),
        ("4K", 4096),
        ("25.6k", 25_600),
        ("1.5g", 1_500_000_000),
        ("4G", 1 << 32),
        ("4GiB", 1 << 32),
        ("4GB", 4 * 10**9),
        ("2t", 2 * 10**12),
        ("0.1m", 100_000),
    ],
)
def test_sizes(text, number):
    assert read_size(text) == number


@pytest.mark.parametrize("text", ["", "k", "4x", "-1", "1.5G", "1.5", "4 k", "0x10", "1e3", "4iB", "\u0664"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="is not a whole number"):
        read_size(text)


@each_row(
    ("name", "given", "kept"),
    [
        ("model", Path("a") / "b", "a/b"),
        ("max_num_seqs", np.int64(4), 4),
        ("max_num_seqs", np.array(4), 4),
        ("seed", jnp.int32(7), 7),
        ("gpu_memory_utilization", np.float32(0.5), 0.5),
        ("enforce_eager", np.True_, True),
        ("enable_prefix_caching", None, True),
        ("dtype", jnp.bfloat16, "bfloat16"),
        ("dtype", np.dtype("float32"), "float32"),
        ("dtype", "float", "float32"),
        ("kv_cache_dtype", jnp.bfloat16, "bfloat16"),
        ("kv_cache_memory_bytes", "4G", 1 << 32),
        ("max_model_len", "4k", 4000),
        ("compilation_config", 3, CompilationConfig(mode=3)),
        ("compilation_config", np.int64(3), CompilationConfig(mode=3)),
        ("compilation_config", {"prefill_sizes": [np.int32(8)]}, CompilationConfig(prefill_sizes=(8,))),
    ],
)
def test_an_option_is_kept_in_one_form(name, given, kept):
    value = getattr(EngineConfig.from_options(**{name: given}), name)
    assert (value, type(value)) == (kept, type(kept))


class OfTorch:
    """What torch.float16 looks like from outside."""

    def __str__(self):
        return "torch.float16"


@pytest.mark.parametrize("dtype", ["half", "float16", np.float16, jnp.float16, OfTorch()], ids=str)
def test_float16_is_run_in_bfloat16_and_says_so(dtype, caplog):
    assert EngineConfig(dtype=dtype).dtype == "bfloat16"
    assert "dtype: float16 is run in bfloat16" in caplog.text


def test_capture_sizes_may_stand_beside_the_other_options():
    config = EngineConfig.from_options(cudagraph_capture_sizes=[1, 2], compilation_config={"prefill_sizes": [8]})
    assert config.compilation_config == CompilationConfig(cudagraph_capture_sizes=(1, 2), prefill_sizes=(8,))
    config = EngineConfig.from_options(max_cudagraph_capture_size=4, max_num_seqs=9)
    assert config.compilation_config == CompilationConfig(max_cudagraph_capture_size=4)
    assert config.compilation_config.divided(2) == CompilationConfig(max_cudagraph_capture_size=2)
    for name, value in (("cudagraph_capture_sizes", [1]), ("max_cudagraph_capture_size", 4)):
        with pytest.raises(ConfigError, match=f"both {name} and compilation_config.{name} are given; give one of them"):
            EngineConfig.from_options(**{name: value, "compilation_config": {name: value}})


def test_what_torch_compiles_changes_nothing_here(caplog):
    caplog.set_level("INFO")
    given = {"cudagraph_mode": "FULL_DECODE_ONLY", "pass_config": {"fuse_norm_quant": True}, "prefill_sizes": [8]}
    given["fast_moe_cold_start"] = True
    assert EngineConfig(compilation_config=given).compilation_config == CompilationConfig(prefill_sizes=(8,))
    assert (
        "compilation_config.cudagraph_mode='FULL_DECODE_ONLY', compilation_config.fast_moe_cold_start=True"
        in caplog.text
    )


def test_a_token_is_shown_to_nobody():
    assert "secret" not in repr(EngineConfig(hf_token="secret"))


def test_an_error_says_what_is_wrong_and_what_to_do():
    with pytest.raises(ConfigError, match="^there is no option 'foo_bar'; docs/options.md has all of them$") as error:
        EngineConfig.from_options(foo_bar=1)
    assert error.value.param == "foo_bar"
    with pytest.raises(ConfigError, match="no 'pass_configs' here.*; it has cudagraph_capture_sizes"):
        EngineConfig.from_options(compilation_config={"pass_configs": {}})


def test_a_folder_to_be_made_is_no_link_that_leads_nowhere(tmp_path):
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "dangling").symlink_to("none")
    (tmp_path / "file").write_text("")
    for name in ("circle", "dangling", "dangling/new", "file", "file/new"):
        with pytest.raises(ConfigError, match="record_steps is .*; allowed: a folder that can be written"):
            writable_folder("record_steps", tmp_path / name)
    (tmp_path / "link").symlink_to(tmp_path)
    for name in (".", "new", "new/er", "link", "link/new"):
        assert writable_folder("record_steps", tmp_path / name) == tmp_path / name
    assert not (tmp_path / "new").exists()
