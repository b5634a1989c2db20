"""GRPO on the embedded model, on a CPU in minutes: rollouts, gradients and new weights, with one model definition.

    python examples/grpo.py [STEPS]

The reward is the share of digits among the characters of an answer. Each step, the engine answers each prompt several
times; a clipped policy gradient over the group's advantages trains the last layers, through the modules that the engine
serves; and the engine takes the new weights, without stopping. A seed gives one curve, whatever else the machine does.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxengine
from jaxengine import LLM, SamplingParams
from jaxengine.rl import forward

PROMPTS = ["The weather today is", "The town was founded"]
CLIP, RATE, LAYERS = 0.2, 4e-4, 4
OPTIONS = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 16, "max_num_batched_tokens": 32}


def reward(output):
    """Return the share of digits among the characters of an output; 0 for an empty one."""
    return sum(letter.isdigit() for letter in output.text) / max(len(output.text), 1)


def rows_of(outputs, width):
    """Return (tokens i32[B, width], is_answer f32[B, width - 1], log-probabilities f32[B, width - 1]) of prompts with
    answers.

    tokens has -1 after the end. The other two have, at the index of the previous token, 1 and the log-probability for
    each token of the answer, and 0 elsewhere. outputs: pairs of a prompt's token ids and a CompletionOutput with
    logprobs.
    """
    tokens = np.full((len(outputs), width), -1, np.int32)
    is_answer, likely = np.zeros((2, len(outputs), width - 1), np.float32)
    for row, (prompt, answer) in enumerate(outputs):
        start, end = len(prompt), len(prompt) + len(answer.token_ids)
        tokens[row, :end] = [*prompt, *answer.token_ids]
        is_answer[row, start - 1 : end - 1] = 1
        known = zip(answer.token_ids, answer.logprobs, strict=True)
        likely[row, start - 1 : end - 1] = [found[token].logprob for token, found in known]
    return tokens, is_answer, likely


def advantages(rewards):
    """Return the advantage of each reward f32[prompts, group]: its distance from the prompt's mean in standard
    deviations.
    """
    return (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-4)


def split(model, layers):
    """Return (weights of the last `layers` layers, by their index in the flattened tree; function that puts such
    weights back into the whole tree).
    """
    paths, tree = jax.tree_util.tree_flatten_with_path(model.params)
    names = [f"['layers'][{number}]" for number in range(model.config.num_layers)][-layers:]
    chosen = {place for place, (path, _) in enumerate(paths) if jax.tree_util.keystr(path).startswith(tuple(names))}
    kept = [leaf for _, leaf in paths]

    def whole(trained):
        return jax.tree.unflatten(tree, [trained.get(place, leaf) for place, leaf in enumerate(kept)])

    return {place: kept[place] for place in chosen}, whole


def train(llm, model, prompts, reward, *, steps, group=8, max_tokens=12, layers=LAYERS, rate=RATE, seed=0):
    """Train with GRPO; yield after each step its mean reward, one of its answers, and the largest difference between
    the trainer's and the engine's log-probabilities.

    reward: maps a CompletionOutput to a number. group: answers for each prompt. layers: how many of the last ones are
    trained. rate: learning rate. The engine `llm` gets the new weights after each step, with the step's number as
    version.
    """
    trained, whole = split(model, layers)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
    state = optimizer.init(trained)

    def loss(trained, tokens, is_answer, likely, advantage):
        segments = jnp.where(tokens < 0, -1, 0)
        logits = forward(model.module, whole(trained), jnp.maximum(tokens, 0), segments)[:, :-1]
        chosen = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[:, 1:, None], 2)[..., 0]
        now = chosen - jax.nn.logsumexp(logits, axis=-1)
        ratio = jnp.exp(now - likely)
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
        return -(gain * is_answer).sum() / is_answer.sum(), jnp.abs((now - likely) * is_answer).max()

    @partial(jax.jit, donate_argnums=1)
    def update(trained, state, *batch):
        (_, gap), gradients = jax.value_and_grad(loss, has_aux=True)(trained, *batch)
        changes, state = optimizer.update(gradients, state)
        return optax.apply_updates(trained, changes), state, gap

    width = None
    for step in range(steps):
        # The n answers of a prompt use consecutive seeds from its own on, so that no two answers of the run share one.
        first = seed + step * len(prompts) * group
        seeds = range(first, first + len(prompts) * group, group)
        sampling = [SamplingParams(n=group, max_tokens=max_tokens, logprobs=0, seed=each) for each in seeds]
        found = llm.generate(prompts, sampling, use_tqdm=False)
        width = width or max(len(each.prompt_token_ids) for each in found) + max_tokens
        outputs = [(each.prompt_token_ids, answer) for each in found for answer in each.outputs]
        rewards = np.array([reward(answer) for _, answer in outputs], np.float32)
        advantage = advantages(rewards.reshape(len(prompts), group)).reshape(-1, 1)
        trained, state, gap = update(trained, state, *rows_of(outputs, width), advantage)
        llm.update_weights(whole(trained), mode="keep", version=step + 1)
        yield float(rewards.mean()), outputs[0][1], float(gap)


def main():
    """Train the embedded model for the steps of the command line (24 without), and print the curve."""
    llm, model = LLM(**OPTIONS, enforce_eager=True), jaxengine.open_model()
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 24
    for step, (mean, answer, gap) in enumerate(train(llm, model, PROMPTS, reward, steps=steps)):
        print(f"step {step}: reward {mean:.4f}, engine and trainer differ by {gap:.1e}, {answer.text!r}", flush=True)


if __name__ == "__main__":
    main()
