"""A forward pass without the engine: logits, and the residual stream after each layer.

    python examples/forward_pass.py FOLDER [IDS]

FOLDER is a Hugging Face checkpoint of a supported architecture, IDS are comma-separated token ids.
A model is a function of a ragged batch and a KV pool; here the batch is one sequence, and the pool is its own.
A model of the first k layers is a pipeline stage, and returns the residual stream after them.
"""

import sys

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.cache import pool_spec
from jaxengine.models.config.hf import read_config_json
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.registry import build_model, read_hf
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from jaxengine.pallas_kernels.attention.op import RaggedBatch
from jaxengine.pallas_kernels.kv.pages import alloc
from jaxengine.sharding.stages import Stage

PAGE_SIZE = 16
token_ids = [int(word) for word in (sys.argv[2:] or ["5,6,7,8,9"])[0].split(",")]
NUM_PAGES = -(-len(token_ids) // PAGE_SIZE)


def one_sequence(token_ids: list[int]) -> ForwardBatch:
    """A batch of one sequence that starts at position 0 on the first pages."""
    count = len(token_ids)
    ragged = RaggedBatch(
        cu_q_lens=jnp.array([0, count], jnp.int32),
        kv_lens=jnp.array([count], jnp.int32),
        page_table=jnp.arange(NUM_PAGES, dtype=jnp.int32)[None],
        slot_mapping=jnp.arange(count, dtype=jnp.int32),
        num_seqs=jnp.int32(1),
        num_decode=jnp.int32(0),
    )
    positions = jnp.arange(count, dtype=jnp.int32)
    return ForwardBatch(jnp.array(token_ids, jnp.int32), positions, jnp.array([count - 1], jnp.int32), (ragged,))


config = read_hf(read_config_json(sys.argv[1]))
checkpoint = SafetensorsCheckpoint(sys.argv[1])
whole = build_model(config, Build(jnp.float32))  # shapes only; nothing is allocated before load_params
nnx.update(whole, load_params(whole, checkpoint))

batch = one_sequence(token_ids)
# hybrid=False: one cache group that frees no pages, so all layers share one page table.
pool = alloc(pool_spec(whole.cache_groups(PAGE_SIZE, "float32", hybrid=False), NUM_PAGES))
normed, _ = whole(batch, pool)  # [T, D] after the final norm
logits = whole.logits(normed)  # f32[T, V]
print(f"hidden {normed.shape}, logits {logits.shape}, best next token {int(jnp.argmax(logits[-1]))}")

for depth in range(1, config.num_layers):
    stage = build_model(config, Build(jnp.float32, stage=Stage(0, depth, is_last=False)))
    nnx.update(stage, load_params(stage, checkpoint))
    pool = alloc(pool_spec(stage.cache_groups(PAGE_SIZE, "float32", hybrid=False), NUM_PAGES))
    residual, _ = stage(batch, pool)
    norms = np.linalg.norm(np.asarray(residual), axis=1)
    print(f"after layer {depth}: |x| of each token {[round(float(norm), 2) for norm in norms]}")
checkpoint.close()
