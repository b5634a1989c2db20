"""Small functions that vLLM's example scripts import."""

from __future__ import annotations

import gc
import socket
from collections.abc import Sequence
from typing import Any

import jax


def print_embeddings(embeds: Sequence[Any], prefix: str = "Embeddings") -> None:
    """Print `prefix`, the first four numbers of a vector, and its length."""
    first = ", ".join(map(str, embeds[:4])) + (", ..." if len(embeds) > 4 else "")
    print(f"{prefix}: [{first}] (size={len(embeds)})")


def get_open_port() -> int:
    """Return a TCP port of this host on which nobody listens at the moment. It is not reserved."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Run the garbage collector, which frees device memory of engines that are no longer referenced.

    shutdown_ray: ignored, since no engine starts Ray.
    """
    gc.collect()


class CurrentPlatform:
    """Description of the devices, read from jax on demand, in place of vLLM's current_platform."""

    @property
    def device_type(self) -> str:
        """Kind of the default devices: "cpu", "tpu", "cuda" or "rocm"."""
        name = jax.default_backend()
        if name != "gpu":
            return name
        return "rocm" if "rocm" in jax.devices()[0].client.platform_version.lower() else "cuda"

    def is_cpu(self) -> bool:
        """Return whether the devices are CPUs."""
        return self.device_type == "cpu"

    def is_tpu(self) -> bool:
        """Return whether the devices are TPUs."""
        return self.device_type == "tpu"

    def is_cuda(self) -> bool:
        """Return whether the devices are GPUs of NVIDIA."""
        return self.device_type == "cuda"

    def is_rocm(self) -> bool:
        """Return whether the devices are GPUs of AMD."""
        return self.device_type == "rocm"

    def is_cuda_alike(self) -> bool:
        """Return whether the devices are GPUs of NVIDIA or AMD."""
        return self.device_type in ("cuda", "rocm")

    def is_xpu(self) -> bool:
        """Return whether the devices are GPUs of Intel. Always False with the devices that jaxengine supports."""
        return self.device_type == "xpu"

    def device_count(self) -> int:
        """Return the number of devices that belong to this process."""
        return jax.local_device_count()

    def get_device_name(self, device_id: int = 0) -> str:
        """Return the name, such as "NVIDIA H100 80GB HBM3", of this process's device at index `device_id`. Raises
        IndexError if there is none.
        """
        return jax.local_devices()[device_id].device_kind

    def empty_cache(self) -> None:
        """Run the garbage collector, which frees arrays that are no longer referenced; jax caches no other memory."""
        gc.collect()


current_platform = CurrentPlatform()
