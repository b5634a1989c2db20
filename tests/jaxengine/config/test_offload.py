"""Options of pages outside of the devices: vLLM's two forms mean the same, and what is not done is refused by name."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import EngineConfig
from jaxengine.config.kv.offload import KVTransferConfig
from jaxengine.models.registry import read_folder
from tests.conftest import TINY_CHECKPOINT
from tests.tables import each_row

GIB = 1 << 30
FILE = str(TINY_CHECKPOINT / "config.json")


# A record as another process gets it.
RECORD = dataclasses.asdict(KVTransferConfig(GIB, root_dir="/tmp"))


def transfer(**extra) -> dict:
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def test_both_forms_of_vllm():
    short = EngineConfig.from_options(
        kv_offloading_size=2, kv_offloading_backend="native", kv_offloading_path="/tmp", kv_offloading_disk_size=8
    )
    tiers = [{"type": "fs", "root_dir": "/tmp"}]
    long = transfer(spec_name="TieringOffloadingSpec", cpu_bytes_to_use=2 * GIB, secondary_tiers=tiers)
    for given in (long, json.dumps(long)):
        config = EngineConfig.from_options(kv_transfer_config=given)
        assert config.kv_offloading_bytes == short.kv_offloading_bytes == 2 * GIB
        assert config.kv_offloading_folder == short.kv_offloading_folder == Path("/tmp")
        again = EngineConfig.from_options(kv_transfer_config=dataclasses.asdict(config)["kv_transfer_config"])
        assert again.kv_transfer_config == config.kv_transfer_config
    more = transfer(cpu_bytes_to_use=1.0 * GIB, eviction_policy="arc", store_threshold=2)
    found = EngineConfig.from_options(kv_transfer_config=more).kv_transfer_config
    assert found is not None
    assert (found.cpu_bytes_to_use, found.eviction_policy, found.store_threshold, found.root_dir) == (
        GIB,
        "arc",
        2,
        None,
    )
    nothing = EngineConfig.from_options(kv_offloading_size=None, kv_transfer_config=None)
    assert nothing.kv_offloading_bytes == 0 and nothing.kv_offloading_folder is None


@each_row(
    "options, message",
    (
        ({"kv_offloading_size": -1}, "kv_offloading_size is -1"),
        ({"kv_offloading_size": 1e-12}, "kv_offloading_size is 1e-12; allowed: more than 0 .one byte"),
        ({"kv_offloading_size": float("nan")}, "kv_offloading_size is nan"),
        (
            {"kv_offloading_size": 1, "kv_offloading_path": "~no-such-user/x", "kv_offloading_disk_size": 1},
            "kv_offloading_path '~no-such-user/x' cannot be the name of a file",
        ),
        ({"kv_offloading_size": 1, "kv_offloading_backend": "lmcache"}, "kv_offloading_backend is 'lmcache'"),
        ({"kv_offloading_path": "/tmp"}, "kv_offloading_path needs host memory"),
        ({"kv_offloading_size": 1, "kv_offloading_path": ""}, "the name of a folder"),
        ({"kv_offloading_size": 1, "kv_offloading_disk_size": 1}, "kv_offloading_disk_size needs a folder"),
        ({"kv_offloading_size": 1, "nnodes": 2}, "kv_offloading_size is given, but nnodes is 2"),
        ({"kv_transfer_config": RECORD, "nnodes": 2}, "kv_transfer_config is given, but nnodes is 2"),
        (
            {"kv_transfer_config": RECORD | {"root_dir": None}, "kv_offloading_disk_size": 1},
            "kv_offloading_disk_size needs a folder; give kv_transfer_config secondary_tiers of type fs",
        ),
        ({"preemption_mode": "swap"}, "give kv_offloading_size"),
        ({"preemption_mode": "never"}, "auto, recompute, swap"),
        ({"kv_offloading_size": 1, "kv_transfer_config": transfer(cpu_bytes_to_use=GIB)}, "say the same"),
        ({"kv_transfer_config": "{"}, "kv_transfer_config is not JSON"),
        ({"kv_transfer_config": "[" * 100_000}, "kv_transfer_config is not JSON"),
        ({"kv_transfer_config": [1]}, "kv_transfer_config is"),
        ({"kv_transfer_config": {"kv_connector": "P2pNcclConnector"}}, "kv_connector is 'P2pNcclConnector'"),
        ({"kv_transfer_config": transfer() | {"kv_role": "kv_producer"}}, "kv_role is 'kv_producer'"),
        ({"kv_transfer_config": transfer() | {"kv_buffer_device": "cpu"}}, "has kv_buffer_device"),
        ({"kv_transfer_config": transfer()}, "cpu_bytes_to_use is None"),
        ({"kv_transfer_config": RECORD | {"cpu_bytes_to_use": "8"}}, "cpu_bytes_to_use is '8'"),
        ({"kv_transfer_config": RECORD | {"root_dir": 1}}, "root_dir is 1"),
        ({"kv_transfer_config": RECORD | {"handover": {"kv_port": 1}}}, "kv_transfer_config.handover is"),
        ({"kv_transfer_config": transfer(cpu_bytes_to_use="8")}, "cpu_bytes_to_use is '8'"),
        ({"kv_transfer_config": transfer(cpu_bytes_to_use=1, block_size=64)}, "kv_connector_extra_config.block_size"),
        ({"kv_transfer_config": transfer(cpu_bytes_to_use=1, spec_name="My")}, "spec_name is 'My'"),
        ({"kv_transfer_config": transfer(cpu_bytes_to_use=1, eviction_policy="fifo")}, "eviction_policy is 'fifo'"),
        ({"kv_transfer_config": transfer(cpu_bytes_to_use=1, store_threshold=-1)}, "store_threshold is -1"),
        (
            {"kv_transfer_config": transfer(cpu_bytes_to_use=1, secondary_tiers=[{"type": "fs", "root_dir": "/tmp"}])},
            "none with CPUOffloadingSpec",
        ),
        (
            {
                "kv_transfer_config": transfer(
                    cpu_bytes_to_use=1, spec_name="TieringOffloadingSpec", secondary_tiers=[{"type": "p2p"}]
                )
            },
            "secondary_tiers.type is 'p2p'",
        ),
    ),
)
def test_refused_options(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options(**options)


@each_row(
    "options, message",
    (
        ({"enable_prefix_caching": False}, "enable_prefix_caching is off"),
        ({"enable_return_routed_experts": True}, "experts"),
        ({"kv_offloading_path": FILE}, "kv_offloading_path is .*; allowed: a folder that can be written"),
        (
            {"kv_offloading_size": None, "kv_transfer_config": RECORD | {"root_dir": FILE}},
            "kv_transfer_config.secondary_tiers.root_dir is .*; allowed: a folder that can be written",
        ),
    ),
)
def test_refused_combinations(options, message):
    given = {"kv_offloading_size": 1, **options}
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options(**given).resolved(read_folder(TINY_CHECKPOINT), PLATFORMS["cpu"])


def nixl(extra: dict | None = None, **top) -> dict:
    given = {"kv_connector": "NixlConnector", "kv_role": "kv_both", **top}
    return {"kv_transfer_config": given | {"kv_connector_extra_config": extra}, "cluster_key_file": "/key"}


def test_pages_for_other_engines():
    given = nixl({"kv_lease_duration": 5, "transport": "tcp"}, kv_port=7, kv_ip="::1", kv_buffer_size=5e8)
    config = EngineConfig.from_options(**given, kv_offloading_path=None)
    found = config.kv_transfer_config
    assert found is not None and found.handover is not None and config.hands_over_kv
    assert config.kv_offloading_bytes == 5 * 10**8 and config.kv_offloading_folder is None
    assert (found.handover.kv_port, found.handover.kv_ip, found.handover.kv_lease_duration) == (7, "::1", 5)
    assert found.handover.produces and found.handover.kv_load_failure_policy == "recompute"
    again = EngineConfig.from_options(**given | {"kv_transfer_config": dataclasses.asdict(found)})
    assert again.kv_transfer_config == found  # as another process gets it
    folder = EngineConfig.from_options(**nixl({"transport": "folder", "shared_storage_path": "/tmp"}))
    assert folder.kv_transfer_config is not None and folder.kv_transfer_config.handover != found.handover


@each_row(
    "options, message",
    (
        (nixl(kv_role="kv_all"), "kv_role is 'kv_all'"),
        (nixl(kv_role=None), "kv_role is None"),
        (nixl(kv_port=65536), "kv_port is 65536"),
        (nixl(kv_port=True), "kv_port is True"),
        (nixl(kv_ip="0.0.0.0"), "kv_ip is '0.0.0.0'"),
        (nixl(kv_ip="ipc:///tmp/x"), "kv_ip is 'ipc:///tmp/x'"),
        (nixl(kv_load_failure_policy="retry"), "recompute, fail"),
        (nixl(engine_id="a b"), "engine_id is 'a b'"),
        (nixl(kv_buffer_size=0), "kv_buffer_size is 0"),
        (nixl(kv_buffer_size=float("nan")), "kv_buffer_size is nan"),
        (nixl(kv_rank=0), "has kv_rank"),
        (nixl({"backends": ["UCX"]}), "kv_connector_extra_config.backends"),
        (nixl({"transport": "nixl"}), "tcp, jax, folder"),
        (nixl({"kv_lease_duration": float("nan")}), "kv_lease_duration is nan"),
        (nixl({"transport": "folder"}), "shared_storage_path is None"),
        (nixl({"shared_storage_path": "/tmp"}), "shared_storage_path is '/tmp'"),
        (nixl() | {"cluster_key_file": None}, "connects engines by a key"),
        (nixl({"transport": "jax"}, kv_ip="::1") | {"cluster_key_file": None}, "connects engines by a key"),
        (nixl({"transport": "jax"}), "kv_ip is None; allowed: the name or address of this host"),
        (nixl() | {"kv_offloading_size": 1}, "say the same"),
    ),
)
def test_refused_hand_overs(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        EngineConfig.from_options(**options)
