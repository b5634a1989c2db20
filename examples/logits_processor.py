"""A logits processor of your own: a parameter of requests, and a function that reads it inside the sampler.

    python examples/logits_processor.py FOLDER

FOLDER is a Hugging Face checkpoint. The processor limits how often a token may occur in an output. It is compiled into
the engine's sampler when the engine starts; a request uses it by naming its parameter in extra_args (over HTTP in
vllm_xargs), and steps without such a request skip it.
"""

import sys

import jax.numpy as jnp

from jaxengine import LLM, Column, LogitsProcessor, SamplingParams


class MaxRepeats(LogitsProcessor):
    """Logits processor that forbids tokens which the output already has max_repeats times."""

    columns = {"max_repeats": Column(0, "times that a token may occur in the output; 0 for no limit", low=0, high=1000)}
    uses_counts = True

    @staticmethod
    def process(logits, columns, vocab):
        """Return logits f32[S, C] with -inf for forbidden tokens."""
        limit = columns["max_repeats"]
        return jnp.where((limit > 0) & (vocab.output_counts >= limit), -jnp.inf, logits)


llm = LLM(
    sys.argv[1],
    logits_processors=[MaxRepeats],
    max_model_len=64,
    max_num_seqs=2,
    max_num_batched_tokens=8,
    num_gpu_blocks_override=8,
    skip_tokenizer_init=True,
    enforce_eager=True,
    disable_log_stats=True,
)
for extra_args in (None, {"max_repeats": 1}):
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, extra_args=extra_args)
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7, 8]}], params, use_tqdm=False)
    print(f"{extra_args}: {output.outputs[0].token_ids}")
