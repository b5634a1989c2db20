"""What drafts bring on the default model: tokens a step and tokens a second, beside the same engine without.

    python -m benchmarks.drafts [--max-tokens 96] [--temperature 0] [--drafts 7] [--num-seqs 1] [--draft MODEL]
                                [--method draft_model] [--always] [--only NAME ...] [--json FILE]

Without --draft they are looked up (n-grams), or with --method grammar there are none but tokens that a grammar leaves
no choice; `python -m benchmarks.first_layers` makes a model for it, and `benchmarks.train_head` an EAGLE-3 head, which
--method eagle3 says it is.

Prompts run one at a time, and all at once where --num-seqs has room, by both engines in turn; tokens must be equal. The
answers to `json` and `json edit` are under grammars, which decide the names of properties; the latter repeats values of
its prompt. --always drafts in every step, whether it pays or not, to see how many drafts are right.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from typing import Any

from jaxengine import LLM, SamplingParams
from jaxengine.bench.report import table, write_json

TEXT = (
    "The quarterly report shows that the northern region sold 1,204 units, the southern region sold 980 units and the "
    "western region sold 1,455 units. Returns were 3 percent in the north, 4 percent in the south and 2 percent in the "
    "west. The board will meet on 14 March to discuss the western region and the plan for next year."
)
CODE = (
    "def area(width, height):\n    result = width * height\n    print('area', result)\n    return result\n\n"
    "def volume(width, height, depth):\n    result = width * height * depth\n    print('volume', result)\n"
    "    return result\n"
)
ADDRESS = {
    "name": "Margaret Hamilton",
    "company": "Northern Lighthouse Engineering Limited",
    "street": "17 Harbour Road, Building C, Second Floor",
    "city": "London",
    "instructions": "Leave the parcel with the porter at the side entrance and ring the bell twice",
}
PROMPTS = {
    "edit": f"Copy the following text, but replace 'region' by 'area':\n\n{TEXT}",
    "summarise": f"Summarise in three bullet points, quoting the figures:\n\n{TEXT}",
    "code": f"Rename the variable result to value in this code and print the whole code:\n\n{CODE}",
    "chat": "Tell me a short story about a lighthouse keeper.",
    "json": "Write the order of a customer as JSON.",
    "json edit": f"Change the city to Paris in this JSON, and print the whole JSON:\n\n{json.dumps(ADDRESS)}",
}
PROPERTIES = {
    name: {"type": kind}
    for name, kind in (
        ("customer_number", "integer"),
        ("is_paid_already", "boolean"),
        ("number_of_articles", "integer"),
        ("is_to_be_delivered", "boolean"),
        ("price_in_euros", "integer"),
        ("has_been_returned", "boolean"),
    )
}
ORDER = {"type": "object", "properties": PROPERTIES, "required": [*PROPERTIES]}
TEXTS = {"type": "object", "properties": dict.fromkeys(ADDRESS, {"type": "string"}), "required": [*ADDRESS]}
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 1 << 29,
    "compilation_config": {"cudagraph_capture_sizes": [], "prefill_sizes": []},
    "disable_log_stats": True,
}


def run(llm: LLM, names: list[str], params: list[SamplingParams]) -> tuple[list[list[int]], float, int]:
    """Tokens of each prompt, seconds, and steps."""
    steps, start = llm.core.engine.stats.num_steps, time.perf_counter()
    outputs = llm.chat([[{"role": "user", "content": PROMPTS[name]}] for name in names], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return [list(each.outputs[0].token_ids) for each in outputs], seconds, llm.core.engine.stats.num_steps - steps


def main() -> None:
    logging.getLogger("jaxengine").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--drafts", type=int, default=7)
    parser.add_argument("--num-seqs", type=int, default=1)
    parser.add_argument("--draft", help="the draft model, or the head")
    parser.add_argument("--method", choices=["draft_model", "eagle3", "grammar"], help="what --draft is, or grammar")
    parser.add_argument("--always", action="store_true")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PROMPTS, default=list(PROMPTS), metavar="NAME")
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.method and (args.method == "grammar") == bool(args.draft):
        parser.error("--method says what --draft is, or without it grammar")
    args.method = args.method or ("draft_model" if args.draft else "ngram")
    options = OPTIONS | {"max_num_seqs": args.num_seqs}
    plain = LLM(**options)
    method = {"method": args.method} | ({"model": args.draft} if args.draft else {})
    drafting = LLM(**options, speculative_config=method | {"num_speculative_tokens": args.drafts})
    if args.always:
        widest = max(drafting.core.config.widths)
        drafting.core.engine.scheduler.extension("drafts").width.choose = lambda num_rows, runs: widest
    grammars = {"json": {"json": ORDER, "disable_any_whitespace": True}, "json edit": {"json": TEXTS}}
    common = {"temperature": args.temperature, "seed": 1, "max_tokens": args.max_tokens, "ignore_eos": True}
    rows = []
    cases = [(name, [name]) for name in args.only]
    for name, names in [*cases, ("all at once", args.only)] if args.num_seqs > 1 else cases:
        params = [SamplingParams(**common, structured_outputs=grammars.get(each)) for each in names]
        run(plain, names, params), run(drafting, names, params)  # prefixes cached, widths measured
        best, steps, equal = [float("inf")] * 2, [0, 0], True
        for _ in range(args.repeat):
            found = [run(llm, names, params) for llm in (plain, drafting)]
            best = [min(before, seconds) for before, (_, seconds, _) in zip(best, found, strict=True)]
            steps = [each[2] for each in found]
            equal &= found[0][0] == found[1][0]
        num_tokens = sum(map(len, found[0][0]))
        rows.append(
            {
                "prompt": name,
                "tokens equal": equal,
                "steps without": steps[0],
                "steps with": steps[1],
                "fewer steps": round(steps[0] / steps[1], 2),
                "tokens/s without": round(num_tokens / best[0], 1),
                "tokens/s with": round(num_tokens / best[1], 1),
                "ratio": round(best[0] / best[1], 2),
            }
        )
        print(rows[-1], flush=True)
    drafts = drafting.core.engine.extensions.by_name["drafts"].stats
    print(table(rows))
    print(f"drafts {drafts.num_tokens}, accepted {drafts.accepted.tolist()} by place")
    if args.json:
        write_json(
            args.json, {"options": {name: value for name, value in vars(args).items() if name != "json"}, "rows": rows}
        )


if __name__ == "__main__":
    main()
