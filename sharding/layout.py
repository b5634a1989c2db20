"""Sizes of a mesh, and the table from logical axes of arrays to axes of the mesh. Free of jax, so that options can read
it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

# data: replicas, each with a share of the scheduler's sequences. attn: devices that split the sequences further, and
# between which dense weights are split. model: tensor parallelism over heads.
MESH_AXES = ("data", "attn", "model")

# Attention: sequences over data x attn, heads over model. All other dense layers: over attn x model.
RULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "batch": ("data", "attn"),
        "pages": ("data", "attn"),
        "pictures": ("data", "attn", "model"),
        "heads": ("model",),
        "kv_heads": ("model",),
        "ffn": ("attn", "model"),
        # In this order the parts that the devices of one `model` index hold are neighbours in the vocabulary.
        "vocab": ("model", "attn"),
        "sampled_vocab": ("model",),
        "experts": ("data", "attn", "model"),
        "embed": (),
        "latent": (),
        "labels": (),
    }
)

# Exchanges of tokens between devices that hold different experts; names of vLLM and of XLA.
GATHER, RAGGED = "allgather_reducescatter", "ragged_all_to_all"

# Number of vocabulary tokens whose probabilities the sampler sums on one device before devices exchange sums.
VOCAB_BLOCK = 128


@dataclass(frozen=True)
class MeshLayout:
    """Sizes of a mesh's axes, which a model needs when it is built. The default is one device.

    A rank is a replica with its own sequences, pages and slots; the devices of a rank split its heads.

    Attributes:
      data, attn, model: see MESH_AXES.
      expert_parallel: each device has some experts in full, instead of a slice of every expert.
      all2all_backend: GATHER or RAGGED, the exchange of tokens between such devices.

    Raises ValueError for a size that is not an integer >= 1, and for any other all2all_backend.
    """

    data: int = 1
    attn: int = 1
    model: int = 1
    expert_parallel: bool = False
    all2all_backend: str = GATHER

    def __post_init__(self):
        """Raise ValueError for a size that is not an integer >= 1 (nor a bool), and for an unknown all2all_backend."""
        for name in MESH_AXES:
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"mesh axis {name} must be an integer >= 1, got {size!r}")
        if self.all2all_backend not in (GATHER, RAGGED):
            raise ValueError(f"all2all_backend must be {GATHER} or {RAGGED}, got {self.all2all_backend!r}")

    @classmethod
    def for_heads(
        cls,
        num_kv_heads: int,
        *,
        tensor: int,
        data: int = 1,
        replicate: bool = False,
        expert_parallel: bool = False,
        all2all_backend: str = GATHER,
    ) -> MeshLayout:
        """Return the layout of `tensor`-way tensor parallelism in each of `data` replicas of the batch.

        Heads are split over as many devices as divide both the kv heads and `tensor`; the rest of `tensor` splits the
        sequences (axis attn), so that no key or value is stored twice. replicate: split heads over all of `tensor` and
        store kv heads more than once instead. num_kv_heads: number of KV heads of the model. expert_parallel,
        all2all_backend: see MeshLayout. Raises ValueError for sizes or a backend that MeshLayout refuses.
        """
        model = tensor if replicate else math.gcd(num_kv_heads, tensor)
        return cls(data, tensor // model, model, expert_parallel, all2all_backend)

    @property
    def sends_rows(self) -> bool:
        """Whether devices with different experts send each other the rows of single experts (all2all_backend RAGGED)
        instead of gathering all tokens.
        """
        return self.expert_parallel and self.all2all_backend == RAGGED and self.size > 1

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.data * self.attn * self.model

    @property
    def num_ranks(self) -> int:
        """Number of replicas."""
        return self.data * self.attn

    def num_shards(self, axis: str | None) -> int:
        """Return the number of parts into which an array's logical axis is split; 1 for None. Raises KeyError for an
        axis that RULES lacks.
        """
        return 1 if axis is None else math.prod(getattr(self, name) for name in RULES[axis])

    def part_of(self, shape: Sequence[int], axes: Sequence[str | None]) -> list[int]:
        """Return the shape of a device's part of an array with these logical axes, one for each axis; sizes are rounded
        down. Raises ValueError for another number of axes, KeyError for an axis that RULES lacks.
        """
        return [size // self.num_shards(axis) for size, axis in zip(shape, axes, strict=True)]

    def ranks_sharing(self, axis: str) -> int:
        """Return the number of replicas whose tokens are processed together by the devices that hold the parts of a
        logical axis. Raises KeyError for an axis that RULES lacks.
        """
        return math.prod(getattr(self, name) for name in RULES[axis] if name in RULES["batch"])

    def padded_vocab_size(self, vocab_size: int) -> int:
        """Return the number of rows of the token table: `vocab_size`, rounded up so that each device has whole blocks
        of VOCAB_BLOCK rows if several devices split it.
        """
        shards = self.num_shards("vocab")
        return vocab_size if shards == 1 else -(-vocab_size // (VOCAB_BLOCK * shards)) * VOCAB_BLOCK * shards

    def padded_experts(self, num_experts: int) -> int:
        """Return the number of matrices of a stack of experts: `num_experts`, rounded up to a multiple of the devices
        that have different ones.
        """
        shards = self.num_shards("experts") if self.expert_parallel else 1
        return -(-num_experts // shards) * shards


ONE_DEVICE = MeshLayout()
