"""Options of KV pages outside of the devices, in vLLM's short and long form, and of preemption."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxengine.config.base.errors import ConfigError, json_object
from jaxengine.config.base.files import named_path, writable_folder
from jaxengine.config.kv.kv_transfer import AT_TOP, FOLDER, IN_EXTRA, KVHandover, read_handover

if TYPE_CHECKING:
    from jaxengine.models.config.model_config import ModelConfig

PREEMPTION_MODES = ("auto", "recompute", "swap")
POLICIES = ("lru", "arc")
_GIB = 1 << 30
_MAX_GIB = 2.0**20
_NAME = "kv_transfer_config"
_SPECS = ("CPUOffloadingSpec", "TieringOffloadingSpec")
_OFFLOADING, _NIXL = _CONNECTORS = ("OffloadingConnector", "NixlConnector")
# vLLM's default of kv_buffer_size.
_BUFFER_BYTES = 1e9
_EXTRA = ("spec_name", "cpu_bytes_to_use", "eviction_policy", "store_threshold", "secondary_tiers")


@dataclass(frozen=True)
class KVTransferConfig:
    """Settings that vLLM's kv_transfer_config gives.

    Attributes:
      cpu_bytes_to_use: bytes of the host tier.
      eviction_policy: one of POLICIES.
      store_threshold: times that requests must have looked for a page before it is stored.
      root_dir: folder of the disk tier; None without a disk tier.
      handover: how pages are handed over between engines; None if they are not.
    """

    cpu_bytes_to_use: int
    eviction_policy: str = "lru"
    store_threshold: int = 0
    root_dir: str | None = None
    handover: KVHandover | None = None

    @staticmethod
    def read(value: Any) -> KVTransferConfig:
        """Return the config for vLLM's kv_transfer_config, a dict or its JSON text, or for a dict of this class's
        fields. A KVTransferConfig is returned unchanged.

        Raises ConfigError, which names the field, for connectors, fields and values that are not supported.
        """
        if isinstance(value, KVTransferConfig):
            return value
        value = json_object(_NAME, value)
        if set(value) == set(KVTransferConfig.__dataclass_fields__):  # this record as a dict, from another process
            found = KVTransferConfig.read(_as_vllm(value))
            if asdict(found) != dict(value):
                raise ConfigError(_NAME, value, f"{asdict(found)}, or vLLM's form")
            return found
        _check("kv_connector", value.get("kv_connector"), _CONNECTORS)
        extra = value.get("kv_connector_extra_config") or {}
        if not isinstance(extra, Mapping):
            raise ConfigError(f"{_NAME}.kv_connector_extra_config", extra, "a dict")
        shared = ("kv_connector", "kv_connector_extra_config")
        if value["kv_connector"] == _NIXL:
            _only(value, (*shared, *AT_TOP, "kv_buffer_size"), "")
            _only(extra, IN_EXTRA, "kv_connector_extra_config.")
            size = _number("kv_buffer_size", value.get("kv_buffer_size", _BUFFER_BYTES), 1, int(_MAX_GIB * _GIB))
            return KVTransferConfig(size, handover=read_handover(value, extra))
        _check("kv_role", value.get("kv_role", "kv_both"), ("kv_both",))
        _only(value, (*shared, "kv_role"), "")
        _only(extra, _EXTRA, "kv_connector_extra_config.")
        _check("spec_name", spec := extra.get("spec_name", _SPECS[0]), _SPECS)
        _check("eviction_policy", policy := extra.get("eviction_policy", "lru"), POLICIES)
        size = _number("cpu_bytes_to_use", extra.get("cpu_bytes_to_use"), 1, int(_MAX_GIB * _GIB))
        threshold = _number("store_threshold", extra.get("store_threshold", 0), 0, 10**6)
        tiers = extra.get("secondary_tiers") or ()
        if tiers and spec != _SPECS[1]:
            raise ConfigError(f"{_NAME}.secondary_tiers", tiers, f"none with {spec}; {_SPECS[1]} has them")
        return KVTransferConfig(size, policy, threshold, _root_dir(tiers))


def _as_vllm(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a KVTransferConfig, given by name, as a dict in the form of vLLM's kv_transfer_config.

    Raises ConfigError if `handover` is neither None nor a dict of KVHandover's fields.
    """
    size, handover = record["cpu_bytes_to_use"], record["handover"]
    if handover is None:
        extra = {name: record[name] for name in ("cpu_bytes_to_use", "eviction_policy", "store_threshold")}
        if (folder := record["root_dir"]) is not None:
            extra |= {"spec_name": _SPECS[1], "secondary_tiers": [{"type": "fs", "root_dir": folder}]}
        return {"kv_connector": _OFFLOADING, "kv_connector_extra_config": extra}
    if not isinstance(handover, Mapping) or set(handover) != {*AT_TOP, *IN_EXTRA}:
        raise ConfigError(f"{_NAME}.handover", handover, f"a dict of {', '.join((*AT_TOP, *IN_EXTRA))}, or None")
    top = {name: handover[name] for name in AT_TOP} | {"kv_buffer_size": size}
    extra = {name: handover[name] for name in IN_EXTRA}
    return {"kv_connector": _NIXL, **top, "kv_connector_extra_config": extra}


def _root_dir(tiers: Any) -> str | None:
    """Return the folder of the tier in secondary_tiers; None without tiers.

    Raises ConfigError for anything but a list or tuple, for more than one tier, and for a tier that is no mapping, has
    another type than "fs" or fields besides type and root_dir, or lacks a folder.
    """
    if not isinstance(tiers, list | tuple) or len(tiers) > 1:
        raise ConfigError(f"{_NAME}.secondary_tiers", tiers, "a list of one tier at most")
    for tier in tiers:
        if not isinstance(tier, Mapping):
            raise ConfigError(f"{_NAME}.secondary_tiers", tier, "dicts of type and root_dir")
        _only(tier, ("type", "root_dir"), "secondary_tiers.")
        _check("secondary_tiers.type", tier.get("type"), ("fs",))
        if not isinstance(folder := tier.get("root_dir"), str) or not folder:
            raise ConfigError(f"{_NAME}.secondary_tiers.root_dir", folder, "the name of a folder")
        return folder
    return None


def _only(value: Mapping[str, Any], known: tuple[str, ...], prefix: str) -> None:
    """Raise ConfigError for the first key of `value` that is not among `known`. prefix: text before the key in the
    message.
    """
    for name in value:
        if name not in known:
            problem = f"{_NAME} has {prefix}{name}, which is not supported"
            raise ConfigError.because(_NAME, problem, f"leave it out; supported: {', '.join(known)}")


def _check(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise ConfigError unless `value` of kv_transfer_config's field `name` is one of `allowed`."""
    if value not in allowed:
        raise ConfigError(f"{_NAME}.{name}", value, ", ".join(allowed))


def _number(name: str, value: Any, least: int, most: int) -> int:
    """Return the value of kv_transfer_config's field `name` as an int.

    Raises ConfigError unless it is a whole int or float from `least` to `most`, both included.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most or value != int(value):
        raise ConfigError(f"{_NAME}.{name}", value, f"an integer from {least} to {most}")
    return int(value)


@dataclass(frozen=True, kw_only=True)
class KVOffloadOptions:
    """The fields of EngineConfig about KV pages outside of the devices.

    Attributes:
      kv_offloading_size: GiB of host memory for pages that leave the devices and come back when a prefix needs them;
        None: none. See docs/kv_offload.md.
      kv_offloading_path: a folder for such pages as well, shared by later starts and by other engines of the same
        model; None: none. Whoever can read the folder can read what it keeps of prompts and outputs.
      kv_offloading_disk_size: GiB that the folder may take, with the pages of all models; None: no limit.
      kv_transfer_config: vLLM's long form of these options, a dict or JSON: its OffloadingConnector with
        CPUOffloadingSpec or TieringOffloadingSpec, cpu_bytes_to_use, eviction_policy ("lru" or "arc"), store_threshold,
        and secondary_tiers of type fs. Or its NixlConnector, whose kv_role, engine_id, kv_ip, kv_port, kv_buffer_size
        and kv_load_failure_policy hand pages over between engines, see docs/disaggregation.md.
      preemption_mode: how a request that lost its pages because memory was short gets them back: "recompute" computes
        them again, "swap" has them kept in host memory (needs kv_offloading_size) and copied back; "auto" swaps if that
        is faster, as measured.
    """

    kv_offloading_size: float | None = None
    kv_offloading_path: str | None = None
    kv_offloading_disk_size: float | None = None
    kv_transfer_config: KVTransferConfig | None = None
    preemption_mode: str = "auto"

    @property
    def kv_offloading_bytes(self) -> int:
        """Bytes of host memory for pages outside of the devices, from kv_transfer_config or else kv_offloading_size; 0
        for none.
        """
        if self.kv_transfer_config is not None:
            return self.kv_transfer_config.cpu_bytes_to_use
        return int((self.kv_offloading_size or 0) * _GIB)

    @property
    def hands_over_kv(self) -> bool:
        """Whether pages are sent to or received from other engines."""
        return self.kv_transfer_config is not None and self.kv_transfer_config.handover is not None

    @property
    def kv_offloading_folder(self) -> Path | None:
        """Folder of the disk tier, from kv_transfer_config or else kv_offloading_path, with "~" expanded; None for
        none. Raises ConfigError for a text that cannot be a path.
        """
        found = self.kv_transfer_config.root_dir if self.kv_transfer_config is not None else None
        found = found or self.kv_offloading_path
        return None if found is None else named_path(folder_option(self.kv_transfer_config), found)


def memory_option(transfer: KVTransferConfig | None) -> str:
    """Return the name of the option that gives the host memory for pages: kv_offloading_size if `transfer`, the value
    of kv_transfer_config, is None, else kv_transfer_config.
    """
    return "kv_offloading_size" if transfer is None else _NAME


def memory_field(transfer: KVTransferConfig | None) -> str:
    """Return the name of the option or field that gives the bytes of host memory for pages: kv_offloading_size if
    `transfer` is None, else kv_transfer_config's kv_buffer_size (with a handover) or cpu_bytes_to_use.
    """
    if transfer is None:
        return "kv_offloading_size"
    return f"{_NAME}.{'cpu_bytes_to_use' if transfer.handover is None else 'kv_buffer_size'}"


def folder_option(transfer: KVTransferConfig | None) -> str:
    """Return the name of the option or field that gives the folder for pages: root_dir of kv_transfer_config if
    `transfer`, its value, has one, else kv_offloading_path.
    """
    is_field = transfer is not None and transfer.root_dir is not None
    return f"{_NAME}.secondary_tiers.root_dir" if is_field else "kv_offloading_path"


def check_offload(options: KVOffloadOptions, nnodes: int, cluster_key_file: str | None) -> None:
    """Raise ConfigError for values that are not allowed, alone or together: sizes out of range, an empty
    kv_offloading_path, an unknown preemption_mode, kv_offloading_size or _path next to kv_transfer_config, a folder or
    "swap" without host memory, a disk size without a folder, a handover by network without a key file, and host memory
    with several processes.

    nnodes: processes of the engine. cluster_key_file: the engine's option.
    """
    for name in ("kv_offloading_size", "kv_offloading_disk_size"):
        value = getattr(options, name)
        if value is not None and not 1 / _GIB <= value <= _MAX_GIB:
            raise ConfigError(name, value, f"more than 0 (one byte or more), at most {_MAX_GIB:g} GiB, or None")
    if options.kv_offloading_path == "":
        raise ConfigError("kv_offloading_path", "", "the name of a folder, or None")
    transfer = options.kv_transfer_config
    if transfer is not None:
        handover = transfer.handover
        if handover is not None and handover.transport != FOLDER and cluster_key_file is None:
            problem = f"{_NAME} connects engines by a key that all of them share"
            raise ConfigError.because("cluster_key_file", problem, "give cluster_key_file, or transport 'folder'")
        for name in ("kv_offloading_size", "kv_offloading_path"):
            if getattr(options, name) is not None:
                raise ConfigError.because(name, f"{name} and {_NAME} say the same", "give one of them")
    if options.preemption_mode not in PREEMPTION_MODES:
        raise ConfigError("preemption_mode", options.preemption_mode, ", ".join(PREEMPTION_MODES))
    if not options.kv_offloading_bytes:
        if options.kv_offloading_path is not None:
            raise ConfigError.because(
                "kv_offloading_path", "kv_offloading_path needs host memory", "give kv_offloading_size"
            )
        if options.preemption_mode == "swap":
            raise ConfigError.because("preemption_mode", "preemption_mode is 'swap'", "give kv_offloading_size, too")
    if options.kv_offloading_disk_size is not None and options.kv_offloading_folder is None:
        advice = "give kv_offloading_path"
        if transfer is not None:  # with which that option is refused
            advice = "leave it out" if transfer.handover is not None else f"give {_NAME} secondary_tiers of type fs"
        raise ConfigError.because("kv_offloading_disk_size", "kv_offloading_disk_size needs a folder", advice)
    if options.kv_offloading_bytes and nnodes > 1:
        name = memory_option(transfer)
        problem = f"{name} is given, but nnodes is {nnodes}: an engine of several processes keeps its pages on devices"
        raise ConfigError.because(name, problem, "leave one out")


def settle_offload(options: Mapping[str, Any], model: ModelConfig) -> None:
    """Raise ConfigError for an engine whose pages cannot be kept outside of its devices (without prefix caching, with
    returned experts, a pooling model, one without keys and values), and for a folder that cannot be
    written.

    options: options of the engine, resolved, by name. Does nothing without kv_offloading_size and kv_transfer_config.
    """
    transfer = options[_NAME]
    if options["kv_offloading_size"] is None and transfer is None:
        return
    name = memory_option(transfer)
    for why, is_so in (
        ("enable_prefix_caching is off, which names pages", not options["enable_prefix_caching"]),
        ("enable_return_routed_experts keeps experts by page", options["enable_return_routed_experts"]),
        (f"{model.architecture} pools and generates nothing", model.pooler is not None),
        (f"{model.architecture} keeps no keys and values", not model.attending),
    ):
        if is_so:
            problem = f"{name} is given, but {why}, which is not supported together"
            raise ConfigError.because(name, problem, "leave one out")
    folder = (transfer.root_dir if transfer else None) or options["kv_offloading_path"]
    if folder is not None:
        writable_folder(folder_option(transfer), folder)
