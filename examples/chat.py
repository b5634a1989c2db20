"""A conversation of several turns through the model's chat template, with prefix caching.

    python examples/chat.py [MODEL]

Each turn sends the whole conversation so far.
"""

import sys

from jaxengine import LLM, SamplingParams

llm = LLM(*sys.argv[1:])
params = SamplingParams(temperature=0.0, max_tokens=32)

messages = [{"role": "system", "content": "You are a teacher. Answer every question in one short sentence."}]
for question in ("What is the capital of France?", "And of Italy?", "Which of them is larger?"):
    messages.append({"role": "user", "content": question})
    (answer,) = llm.chat(messages, params, use_tqdm=False)
    text = answer.outputs[0].text.strip()
    messages.append({"role": "assistant", "content": text})
    # The prefix cache has the pages of the earlier turns.
    print(f"> {question}\n{text}")
    print(f"  [{answer.num_cached_tokens} of {len(answer.prompt_token_ids)} prompt tokens cached]")
