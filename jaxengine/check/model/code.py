"""How much code a forward pass has: compilers let equal layers share theirs once there are many."""

from __future__ import annotations

# On CPUs the engine compiles equal layers once (jaxengine.runner.executables.layer_chain). libtpu compiles equal layers
# separately while there are few, and once for all of them in longer models. A step of 512 tokens for v6e has, of
# Llama 3.1 8B, 57 MiB of code with 12 layers and 10 with all 32; of SmolLM2 135M it has 37 with 24 and 14 with all 30
# (libtpu 0.0.52; `jaxengine check --targets v6e --model llama-3.1-8b:12 --max-num-seqs 8 --max-num-batched-tokens 512
# --num-gpu-blocks-override 1000`). It compiles the layers of encoder towers separately, the 32 of Qwen2.5-VL too
# (benchmarks/results/check_qwen2.5-vl-72b_tower_data.json).
_MOST_ON_CPU = 6
_MOST_ON_TPU = 24
_SHARED_ON_TPU = 2


def layers_with_code(backend: str, layers: int, *, of_tower: bool = False) -> int:
    """Return the number of layers whose code a program holds; the others share it: on CPUs at most _MOST_ON_CPU, on
    TPUs _SHARED_ON_TPU of a model of more than _MOST_ON_TPU layers, else all.

    backend: as `jax.default_backend` names it. layers: number of layers of the model, or with of_tower of an encoder
    tower.
    """
    if backend == "cpu":
        return min(layers, _MOST_ON_CPU)
    if backend == "tpu" and not of_tower and layers > _MOST_ON_TPU:
        return _SHARED_ON_TPU
    return layers
