"""GRPO by Tunix's own learner: jaxengine generates, and Tunix trains the modules that it serves.

    python examples/grpo_tunix.py [STEPS]

The task is that of examples/grpo.py: answers with many digits. Needs Tunix: pip install 'jaxengine[tunix]', then pip
install --no-deps google-tunix==0.1.7.
"""

import sys
from functools import partial

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

import jaxengine
from jaxengine import LLM
from jaxengine.rl.tunix import JaxengineRollout, TunixModel

PROMPTS = ["The weather today is", "The town was founded"]
RATE, LAYERS, GROUP, MAX_TOKENS = 4e-4, 4, 8, 12
OPTIONS = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 16, "max_num_batched_tokens": 32}


class Reward:
    """Reward function of Tunix: share of digits among the characters of an answer, 0 for an empty one.

    A call returns the rewards of all completions and prints their mean. Tunix logs `__name__`.
    """

    __name__ = "digits"

    def __init__(self):
        self.num_steps = 0

    def __call__(self, prompts, completions, **_):
        rewards = [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]
        print(f"step {self.num_steps}: reward {np.mean(rewards):.4f}, {completions[0]!r}", flush=True)
        self.num_steps += 1
        return rewards


def learner(llm, model, tokenizer, reward, steps, seed=0):
    """Return Tunix's GRPO learner over an engine `llm`, which is the rollout engine.

    model: its last LAYERS layers are trained. tokenizer: transformers' object. reward: function. steps: of training.
    seed: of the rollouts.
    """
    first = model.config.num_layers - LAYERS
    actor = TunixModel(model.module, is_trained=lambda path: path[0] == "layers" and path[1] >= first)
    mesh = Mesh(np.array(jax.devices()[:1]), ("fsdp",))
    training = RLTrainingConfig(
        actor_optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(RATE)),
        eval_every_n_steps=10 * steps,
        max_steps=steps,
        mini_batch_size=len(PROMPTS),
        train_micro_batch_size=len(PROMPTS),
    )
    rollout = RolloutConfig(max_tokens_to_generate=MAX_TOKENS, temperature=1.0, max_prompt_length=8, seed=seed)
    cluster = ClusterConfig(
        role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
        rollout_engine=partial(JaxengineRollout, llm=llm),
        training_config=training,
        rollout_config=rollout,
    )
    rl = RLCluster(actor=actor, tokenizer=tokenizer, cluster_config=cluster)
    return GRPOLearner(rl_cluster=rl, algo_config=GRPOConfig(num_generations=GROUP, beta=0.0), reward_fns=reward)


def main():
    """Train the embedded model for the steps of the command line, 24 by default."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 24
    llm, model = LLM(**OPTIONS, enforce_eager=True), jaxengine.open_model()
    learner(llm, model, llm.get_tokenizer(), Reward(), steps).train([{"prompts": np.array(PROMPTS)}] * steps)


if __name__ == "__main__":
    main()
