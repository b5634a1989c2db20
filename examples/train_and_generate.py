"""Some training steps, then generation, on one mesh, with one model definition.

    python examples/train_and_generate.py FOLDER

FOLDER is a Hugging Face checkpoint of a supported architecture. Steps of plain SGD, through the modules that the engine
serves, teach the model one sequence; then the engine takes the weights and continues the sequence's first tokens. To
see the arrays split, play four devices: XLA_FLAGS=--xla_force_host_platform_device_count=4.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxengine
from jaxengine import LLM, SamplingParams
from jaxengine.rl import forward

RATE, STEPS = 0.1, 80
SEQUENCE = [5, 17, 9, 40, 3, 28, 11, 60, 33, 8, 21, 4]

model = jaxengine.open_model(sys.argv[1])
mesh = Mesh(np.array(jax.devices()), ("fsdp",))


def loss(params, tokens):
    """Return the mean cross-entropy of tokens[1:], each given the tokens before it. tokens: i32[T]."""
    logits = forward(model.module, params, tokens[None, :-1])[0]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[1:, None], 1).mean()


@partial(jax.jit, donate_argnums=0)
def step(params, tokens):
    """Return (parameters after a step of SGD with clipped gradients, loss before the step). `params` are donated."""
    value, grads = jax.value_and_grad(loss)(params, tokens)
    scale = RATE / jnp.maximum(1.0, jnp.sqrt(sum((grad * grad).sum() for grad in jax.tree.leaves(grads))))
    return jax.tree.map(lambda weight, grad: weight - scale * grad, params, grads), value


def placed(weight):
    """Return a weight on the mesh, split by its first axis if the number of devices divides it, else whole on every
    device.
    """
    spec = PartitionSpec("fsdp") if weight.shape[0] % mesh.size == 0 else PartitionSpec()
    return jax.device_put(weight, NamedSharding(mesh, spec))


params, tokens = jax.tree.map(placed, model.params), jnp.array(SEQUENCE)
for number in range(STEPS):
    params, value = step(params, tokens)
    if number % 20 == 0 or number == STEPS - 1:
        print(f"step {number}: loss {value:.3f}")

options = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 8}
options |= {"skip_tokenizer_init": True, "enforce_eager": True, "disable_log_stats": True}
llm = LLM(sys.argv[1], mesh=mesh, mesh_axes={"fsdp": "data"}, num_gpu_blocks_override=16, **options)
llm.update_weights(params)
greedy = SamplingParams(temperature=0.0, max_tokens=len(SEQUENCE) - 4, ignore_eos=True)
(output,) = llm.generate([{"prompt_token_ids": SEQUENCE[:4]}], greedy, use_tqdm=False)
print(f"after {SEQUENCE[:4]}: {output.outputs[0].token_ids}")
