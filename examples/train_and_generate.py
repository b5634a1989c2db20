"""Some training steps, then generation, on one mesh whose axes are the trainer's.

    python examples/train_and_generate.py FOLDER

FOLDER is a Hugging Face Llama checkpoint with tied embeddings. Steps of plain SGD teach the model one sequence; then
an engine on the same mesh, told by `mesh_axes` what fsdp and tp mean, continues the sequence's first tokens. To see the
arrays split, play four devices: XLA_FLAGS=--xla_force_host_platform_device_count=4.
"""

import json
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from jaxengine import LLM, SamplingParams

RATE, STEPS = 0.1, 80
SEQUENCE = [5, 17, 9, 40, 3, 28, 11, 60, 33, 8, 21, 4]
FILE = "model.safetensors"

folder = Path(sys.argv[1])
config = json.loads((folder / "config.json").read_text())
devices = np.array(jax.devices())
mesh = Mesh(devices.reshape(-1, 2 if len(devices) % 2 == 0 else 1), ("fsdp", "tp"))


def norm(x, weight):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weight


def rope(x):
    """Rotates queries or keys [T, N, H] by their positions."""
    half = x.shape[-1] // 2
    theta = config.get("rope_parameters", config)["rope_theta"]
    angles = jnp.arange(len(x))[:, None] * theta ** (-jnp.arange(half) / half)
    cos, sin, (a, b) = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None], jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(x, weights):
    heads, size = config["num_attention_heads"], weights["q_proj"].shape[0] // config["num_attention_heads"]
    q, k, v = ((x @ weights[f"{name}_proj"].T).reshape(len(x), -1, size) for name in "qkv")
    k, v = (jnp.repeat(each, heads // each.shape[1], 1) for each in (rope(k), v))
    scores = jnp.einsum("tnh,snh->nts", rope(q), k) * size**-0.5
    scores = jax.nn.softmax(jnp.where(jnp.tri(len(x), dtype=bool), scores, -jnp.inf))
    return jnp.einsum("nts,snh->tnh", scores, v).reshape(len(x), -1) @ weights["o_proj"].T


def loss(params, tokens):
    """Mean cross-entropy of each token after the ones before it."""
    x = params["model.embed_tokens.weight"][tokens[:-1]]
    for layer in range(config["num_hidden_layers"]):
        own = {name.split(".")[-2]: value for name, value in params.items() if f".layers.{layer}." in name}
        x += attention(norm(x, own["input_layernorm"]), own)
        y = norm(x, own["post_attention_layernorm"])
        x += (jax.nn.silu(y @ own["gate_proj"].T) * (y @ own["up_proj"].T)) @ own["down_proj"].T
    logits = norm(x, params["model.norm.weight"]) @ params["model.embed_tokens.weight"].T
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[1:, None], 1).mean()


@partial(jax.jit, donate_argnums=0)
def step(params, tokens):
    value, grads = jax.value_and_grad(loss)(params, tokens)
    scale = RATE / jnp.maximum(1.0, jnp.sqrt(sum((grad * grad).sum() for grad in grads.values())))
    return jax.tree.map(lambda weight, grad: weight - scale * grad, params, grads), value


def placed(weight):
    """A matrix split over both axes, anything else on every device."""
    spec = PartitionSpec("tp", "fsdp") if weight.ndim == 2 else PartitionSpec()
    return jax.device_put(weight, NamedSharding(mesh, spec))


params, tokens = jax.tree.map(placed, load_file(folder / FILE)), jnp.array(SEQUENCE)
for number in range(STEPS):
    params, value = step(params, tokens)
    if number % 20 == 0 or number == STEPS - 1:
        print(f"step {number}: loss {value:.3f}")

with tempfile.TemporaryDirectory() as target:
    shutil.copy(folder / "config.json", target)
    save_file(jax.tree.map(np.asarray, params), Path(target) / FILE)
    options = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 8}
    options |= {"skip_tokenizer_init": True, "enforce_eager": True, "disable_log_stats": True}
    llm = LLM(target, mesh=mesh, mesh_axes={"fsdp": "data", "tp": "tensor"}, num_gpu_blocks_override=16, **options)
    greedy = SamplingParams(temperature=0.0, max_tokens=len(SEQUENCE) - 4, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": SEQUENCE[:4]}], greedy, use_tqdm=False)
print(f"after {SEQUENCE[:4]}: {output.outputs[0].token_ids}")
