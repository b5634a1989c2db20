"""The attention cases every implementation must pass. Cases of one shape and spec share one executable.

The kernel notes' conformance list, and where each of its points is:

 1 first token                    "first token"
 2 page edges                     "page edges", and every page size
 3 block edges                    "block edges", "skewed lengths"; accelerators run with small blocks
 4 prefill                        "prefill", "prefill longer than a tile"
 5 chunked prefill                "chunk over long context", "chunk starts and ends inside a page"
 6 mixed                          "mixed", "single tokens behind runs"
 7 decode, prefill, nothing       "decode bucket", "prefill only", "no sequences"
 8 zero-length sequences          "empty sequences"
 9 no new token                   "nothing scheduled"
10 token padding                  every case; the write: checks.SLOTS
11 garbage past num_seqs          every case
12 page table past the end        -1 in every case; "page table past the end is huge", "... is another's page"
13 NaN and inf in unseen slots    NaN in every case; "infinite unseen slots"
14 shared prefix                  "shared prefix"
15 stale slots                    "stale unseen slots"
16 groups of heads                HEADS, PRODUCTION
17 head dims, Hv != H             DIMS, PRODUCTION
18 page sizes                     PAGES, PRODUCTION
19 windows                        WINDOWS: what is left of every window is NaN; blocks inside a window: WIDE_WINDOWS;
   that restart                   CHUNKS
20 soft cap                       "soft cap 30", "soft cap 50"
21 sinks                          "... sinks", "sinks and window"; counted once when keys are split: checks.splits
22 scales of the logits           "scale"
23 magnitudes                     "large logits", "equal logits", "large values", "tiny values"
24 fp8, traced scales             QUANTIZED; saturation: checks.update; no recompile: checks.one_program_per_bucket
25 int8                           QUANTIZED, scales per head; the pool has no scales per token and head
26 verify, trees                  "verify tails", "tree chain", "tree branches"
27 long contexts                  LONG
28 skew                           "one long among many short"
29 split invariance               checks.splits, checks.many_parts (implementations that split)
30 permutation invariance         checks.page_ids, checks.order, checks.neighbours
31 determinism                    checks.determinism
32 update then attend             checks.update_then_attend
33 donation                       test_invariants.py, kv/test_pages.py (CPU); jaxengine check reads the other targets
34 no recompile                   checks.one_program_per_bucket
35 bidirectional                  "bidirectional", "window on both sides"; inside of pictures: PICTURES
36 lse                            every case; checks.halves
37 fewer heads per device         checks.local_heads; shard_map over devices: tests/sharding
38 MLA                            LATENT, PRODUCTION
39 layers that do not write       an attention call without an update: every case
40 exchange of pages              checks.exchange
41 block sizes                    test_invariants.py (CPU); the accelerators' small blocks, and those of production
42, 43 grouped and quantised      not operations yet
   matmul
"""

from __future__ import annotations

from tests.pallas_kernels.problems import Case

MIXED_Q, MIXED_KV = (1, 1, 1, 5, 40, 1), (100, 17, 129, 300, 140, 33)
# Block edges, and blocks of 64 and of 128 keys of which few slots are unseen.
DECODES = (1, 15, 57, 17, 128, 129, 317, 63)

BATCHES = [
    Case("first token", (1,), (1,)),
    Case("page edges", (1, 1, 1, 1), (15, 16, 17, 32)),
    Case("block edges", (1, 1, 1, 1, 1, 1), (127, 128, 129, 255, 256, 257)),
    Case("prefill", (1, 2, 15, 16, 17, 32), (1, 2, 15, 16, 17, 32)),
    Case("prefill longer than a tile", (70,), (70,)),
    Case("chunk over long context", (5, 3), (300, 128)),
    Case("chunk starts and ends inside a page", (20, 7), (50, 23)),
    Case("q tile straddles a kv block", (40, 9, 2), (140, 133, 129)),
    Case("mixed", MIXED_Q, MIXED_KV),
    Case("single tokens behind runs", (12, 1, 9, 1, 1), (12, 200, 140, 1, 128)),
    Case("prefill only", (30, 30, 30), (30, 160, 30)),
    Case("long runs", (30, 30, 30), (384, 313, 383)),
    Case("no sequences", (), ()),
    Case("empty sequences", (0, 3, 0, 1, 0), (0, 3, 0, 20, 0)),
    Case("nothing scheduled", (0, 4, 0, 1), (50, 30, 16, 9)),
    Case("all tokens used", (90, 6), (90, 12)),
    Case("page table past the end is huge", MIXED_Q, MIXED_KV, past_end=2**31 - 1),
    Case("page table past the end is another's page", MIXED_Q, MIXED_KV, past_end=3),
    Case("infinite unseen slots", MIXED_Q, MIXED_KV, unseen=float("inf")),
    Case("stale unseen slots", MIXED_Q, MIXED_KV, unseen=1000.0),
    Case("shared prefix", (1, 1, 8, 1), (90, 83, 88, 130), shared_pages=5),
    Case("verify tails", (2, 3, 4, 5, 6, 7, 8), (130, 3, 68, 129, 16, 257, 40)),
    Case("skewed lengths", (1, 1, 1, 1, 1, 1, 1, 1), (384, 2, 1, 3, 1, 2, 5, 1)),
    Case("large logits", (1, 20, 1), (130, 150, 16), query_scale=3e3),
    Case("equal logits", (1, 20, 1), (130, 150, 16), query_scale=0.0),
    Case("large values", (1, 20, 1), (130, 150, 16), value_scale=1e4),
    Case("tiny values", (1, 20, 1), (130, 150, 16), value_scale=1e-30),
]

# T <= S: the program without runs, which must still serve any batch.
ROWS_ONLY = [
    Case("decode bucket", (1,) * 8, DECODES, num_tokens=8),
    Case("padded decode bucket", (1, 1, 1), (129, 1, 256), num_tokens=8),
    Case("runs in a decode bucket", (3, 0, 1, 4), (130, 0, 20, 4), num_tokens=8),
    Case("one sequence, one token", (1,), (200,), num_tokens=1, max_seqs=1),
    Case("one sequence, no token", (), (), num_tokens=1, max_seqs=1),
    Case("drafts of one sequence", (2,), (40,), num_tokens=2, max_seqs=1),
    Case("ten rows", (1,) * 10, tuple(range(120, 130)), num_tokens=10, max_seqs=10),
    Case("skewed decodes", (1,) * 8, (384, 2, 1, 3, 1, 2, 5, 300), num_tokens=8),
    Case("split decodes", (1, 1), (384, 300), num_tokens=8),
    Case("decode window and sinks", (1,) * 8, DECODES, num_tokens=8, window=20, sinks="mixed", heads=(4, 4)),
]

# Where only a size changes, the dtypes are crossed with some of the sizes: each pair is one more program to compile.
ONE, BF16, BOTH = ("float32",), ("bfloat16",), ("float32", "bfloat16")
SMALL = {"num_tokens": 24, "max_seqs": 4}
SMALL_Q, SMALL_KV = (1, 9, 1, 6), (70, 19, 130, 6)

HEADS = [
    Case(f"heads {heads}", SMALL_Q, SMALL_KV, heads=heads, dtypes=BOTH if heads in ((8, 8), (28, 4)) else ONE, **SMALL)
    for heads in ((1, 1), (8, 8), (32, 8), (28, 4), (16, 1), (12, 3), (5, 1), (64, 8))
]
DIMS = [
    Case(f"dims {dims}", SMALL_Q, SMALL_KV, dims=dims, dtypes=BOTH if dims in ((80, 80), (192, 128)) else ONE, **SMALL)
    for dims in ((64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 192), (256, 256), (192, 128))
]
PAGES = [
    Case(
        f"page size {size}",
        SMALL_Q,
        (70, 50, 300, 6),
        page_size=size,
        max_pages=-(-384 // size),
        dtypes=BOTH if size == 64 else ONE,
        **SMALL,
    )
    for size in (8, 32, 48, 64, 128, 256)
]
WINDOWS = [
    Case(
        f"window {window}",
        (1, 40, 3, 1, 12),
        (200, 150, 131, 16, 300),
        window=window,
        dtypes=BOTH if window == 16 else ONE,
    )
    for window in (1, 15, 16, 17, 100, 400)
]
LOGITS = [
    Case("soft cap 30", MIXED_Q, MIXED_KV, soft_cap=30.0, query_scale=40.0),
    Case("soft cap 50", MIXED_Q, MIXED_KV, soft_cap=50.0, query_scale=100.0),
    Case("scale", MIXED_Q, MIXED_KV, sm_scale=0.7),
    *(Case(f"{sinks} sinks", MIXED_Q, MIXED_KV, sinks=sinks) for sinks in ("zero", "large", "absent", "mixed")),
    Case("sinks and window", (1, 40, 3, 1, 12), (200, 150, 131, 16, 300), sinks="mixed", window=16),
    Case("slopes", MIXED_Q, MIXED_KV, slopes=True),
    Case("slopes of decodes", (1,) * 8, DECODES, num_tokens=8, slopes=True, heads=(6, 2)),
    Case("biases", MIXED_Q, MIXED_KV, biases=21),
    Case("biases of decodes", (1,) * 8, DECODES, num_tokens=8, biases=300, heads=(6, 2)),
    Case("biases and window", (1, 40, 3, 1, 12), (200, 150, 131, 16, 300), biases=16, window=16),
    Case(
        "slopes, window, sinks and soft cap",
        *(SMALL_Q, SMALL_KV),
        **{"window": 16, "sinks": "mixed", "soft_cap": 30.0, "query_scale": 20.0, "slopes": True, **SMALL},
    ),
    Case(
        "window, sinks and soft cap",
        (1, 40, 3, 1, 12),
        (200, 150, 131, 16, 300),
        window=16,
        sinks="mixed",
        soft_cap=30.0,
        query_scale=20.0,
        dtypes=BOTH,
    ),
]
MASKS = [
    Case("bidirectional", (5, 40, 1), (30, 140, 17), causal=False),
    Case("window on both sides", (60, 17, 1, 12), (160, 17, 33, 30), causal=False, window=16),
    Case("bidirectional past a block", (2, 20), (130, 257), causal=False),
    Case("tree chain", (8, 1, 5, 33), (140, 20, 133, 60), tree="chain"),
    Case("tree branches", (8, 1, 5, 33), (140, 20, 133, 60), tree="branches"),
]
_CODES = {"kv_dtype": "float8_e4m3fn", **SMALL}
QUANTIZED = [
    Case("fp8 e4m3 keys and values", SMALL_Q, (70, 61, 127, 6), heads=(4, 4), **_CODES),
    Case("fp8 e5m2 keys and values", SMALL_Q, SMALL_KV, **_CODES | {"kv_dtype": "float8_e5m2"}),
    Case("int8 keys and values", SMALL_Q, SMALL_KV, **_CODES | {"kv_dtype": "int8", "unseen": 1e30}),
    Case("tiny key, large value scales", SMALL_Q, SMALL_KV, scales=(1e-4, 1e3), **_CODES),
    Case("large key, tiny value scales", SMALL_Q, SMALL_KV, scales=(1e3, 1e-4), **_CODES),
    Case("codes of decodes", (1,) * 8, DECODES, heads=(4, 4), num_tokens=8, kv_dtype="float8_e4m3fn"),
    Case("codes with window and sinks", SMALL_Q, SMALL_KV, window=16, sinks="mixed", **_CODES),
]
# A scale for each token and kv head; tokens that nobody sees have one that is not a number.
_OF_TOKENS = {"kv_dtype": "int8_per_token_head", **SMALL}
PER_TOKEN = [
    Case("int8 of each token", SMALL_Q, SMALL_KV, **_OF_TOKENS),
    Case("fp8 of each token", SMALL_Q, SMALL_KV, **_OF_TOKENS | {"kv_dtype": "fp8_per_token_head"}),
    Case("tokens' tiny keys, large values", SMALL_Q, SMALL_KV, scales=(1e-4, 1e3), **_OF_TOKENS),
    Case("tokens' scales, window and sinks", SMALL_Q, SMALL_KV, window=16, sinks="mixed", soft_cap=30.0, **_OF_TOKENS),
    Case(
        "decodes of tokens' scales",
        (1,) * 8,
        DECODES,
        num_tokens=8,
        kv_dtype="int8_per_token_head",
    ),
]
# Keys that begin with their values. What follows in a key is what tells it from others, in the needle family.
_LATENT = {"heads": (16, 1), "values_in_keys": True}
LATENT = [
    Case("latent mixed", MIXED_Q, MIXED_KV, **_LATENT),
    Case("latent page edges", (1, 1, 1, 1), (15, 16, 17, 32), **_LATENT | {"heads": (8, 1)}),
    Case("latent prefill", (1, 2, 15, 16, 17, 32), (1, 2, 15, 16, 17, 32), **_LATENT),
    Case("latent verify tails", (2, 3, 4, 5, 6, 7, 8), (130, 3, 68, 129, 16, 257, 40), **_LATENT),
    Case("latent shared prefix", (1, 1, 8, 1), (90, 83, 88, 130), shared_pages=5, **_LATENT),
    Case("latent, infinite unseen slots", MIXED_Q, MIXED_KV, unseen=float("inf"), **_LATENT),
    # In an order in which three workers share the keys of one sequence.
    Case("latent decodes", (1,) * 8, (317, 1, 15, 16, 57, 128, 129, 63), num_tokens=8, **_LATENT),
    Case(
        "latent of many heads",
        (1, 2),
        (70, 61),
        **_LATENT | {"heads": (208, 1), "num_tokens": 4, "max_seqs": 2},
        dtypes=BF16,
    ),
    Case("latent codes", SMALL_Q, SMALL_KV, **_CODES | _LATENT | {"heads": (8, 1)}, dtypes=BF16),
    Case("latent codes of each token", SMALL_Q, SMALL_KV, **_OF_TOKENS | _LATENT | {"heads": (8, 1)}),
    Case("latent window, sinks", (1, 40, 3, 1, 12), (200, 150, 131, 16, 300), window=16, sinks="mixed", **_LATENT),
    Case("latent of two kv heads", SMALL_Q, SMALL_KV, **SMALL | _LATENT | {"heads": (6, 2)}, dtypes=BF16),
]
_LONG = {"heads": (2, 1), "num_tokens": 6, "max_seqs": 2, "page_size": 128, "max_pages": 514, "pool_pages": 520}
LONG = [
    *(
        Case(f"long {length}", (1, 3), (length, 2), heads=(2, 1), num_tokens=6, max_seqs=2, max_pages=530, page_size=8)
        for length in (4095, 4096, 4097)
    ),
    # Positions that do not fit 15 or 16 bits.
    *(Case(f"long {length}", (1, 3), (length, 2), **_LONG) for length in (32767, 32768, 32769, 65537)),
    Case(
        "one long among many short",
        (1,) * 256,
        (131072,) + (1,) * 255,
        heads=(2, 1),
        num_tokens=256,
        max_seqs=256,
        page_size=128,
        max_pages=1024,
        pool_pages=1024 + 255 + 8,
        dtypes=BOTH,
    ),
]

# Whole blocks of keys inside a window: the longest block is 128 keys on GPU, and on TPU where blocks are small.
_WIDE = {"page_size": 64, "max_pages": 16, "num_tokens": 64, "max_seqs": 4}
WIDE_WINDOWS = [
    Case("window 400 of 900", (1, 40, 3), (900, 860, 700), window=400, dtypes=BOTH, **_WIDE),
    Case("window 400 of 900, decodes", (1, 1, 1, 1), (900, 401, 399, 64), window=400, **_WIDE | {"num_tokens": 4}),
]

# Borders inside tiles and pages, at their edges, one or several in a tile.
CHUNKS = [
    Case("chunks of 16", (1, 40, 3, 1, 12), (200, 150, 131, 16, 300), chunk=16, dtypes=BOTH),
    Case("chunks of 45", (1, 40, 3, 1, 12), (180, 150, 137, 16, 300), chunk=45),
    Case("chunks of 24 and one before", (1, 40, 3, 1, 12), (200, 150, 131, 16, 300), chunk=24, lookback=1),
    Case("chunks of 400", (1, 40, 3), (900, 815, 700), chunk=400, **_WIDE),
]

# Tokens that see those of their picture which follow: inside a tile and over several, over borders of pages and blocks,
# a picture that began before the step, one of a single token, two in a sequence.
_PICTURES = ((0, 20, 60), (1, 100, 131), (2, 12, 15), (4, 290, 295), (4, 297, 300))
PICTURES = [
    Case("pictures", (60, 11, 3, 1, 12), (60, 136, 16, 16, 300), pictures=_PICTURES),
    Case("pictures and window", (60, 11, 3, 1, 12), (60, 136, 16, 16, 300), pictures=_PICTURES, window=16),
    Case("pictures in a decode bucket", (1, 5, 2), (30, 133, 20), num_tokens=8, pictures=((1, 129, 132), (2, 18, 20))),
    # Pictures of a sequence see each other, and no text between them that follows.
    Case(
        "mutual pictures",
        (60, 11, 3, 1, 12),
        (60, 136, 16, 16, 300),
        pictures=(*_PICTURES, (0, 2, 3), (0, 16, 18)),
        mutual=True,
        dtypes=("float32",),
    ),
    Case(
        "mutual pictures in a decode bucket",
        (1, 6, 1),
        (30, 133, 20),
        num_tokens=8,
        pictures=((1, 128, 129), (1, 131, 132), (2, 19, 20)),
        mutual=True,
        dtypes=("float32",),
    ),
]

# What models run: query heads in groups, head dims and pages together, in the dtype they are served in. Heads are those
# of one device of several, or fewer of the same group.
PRODUCTION_Q, PRODUCTION_KV = (1, 9, 1, 5), (300, 140, 65, 5)


def _production(
    heads: tuple[int, int], head_dim: int, page_size: int, q=PRODUCTION_Q, kv=PRODUCTION_KV, **changes
) -> Case:
    codes = f", {changes['kv_dtype']}" if "kv_dtype" in changes else ""
    return Case(
        f"production {heads[0]}/{heads[1]} heads of {head_dim}, pages of {page_size}{codes}",
        q,
        kv,
        heads=heads,
        page_size=page_size,
        max_pages=-(-384 // page_size),
        **{"dims": (head_dim, head_dim), "num_tokens": 20, "max_seqs": 4, "dtypes": BF16} | changes,
    )


PRODUCTION = [
    _production((8, 1), 128, 16),  # Llama 3 70B on 8 devices
    _production((14, 2), 64, 64),  # Qwen2 0.5B
    _production((2, 2), 96, 32),  # Phi-3
    _production((4, 2), 256, 256),  # Gemma 2
    _production((8, 1), 192, 128),
    _production((16, 1), 128, 8),  # one kv head for all, as in Gemma 1 and StarCoder
    # DeepSeek V2 Lite; V3 on 8 devices. Few tokens: interpreted each is half a second.
    _production(
        (16, 1), 576, 64, q=(1, 3, 1), kv=(300, 140, 65), dims=(576, 512), values_in_keys=True, num_tokens=6, max_seqs=3
    ),
]
PER_TOKEN += [
    _production((8, 1), 128, 16, kv_dtype="int8_per_token_head"),  # Llama 3 70B on 8 devices, blocks of a CPU
    _production((14, 2), 64, 64, kv_dtype="fp8_per_token_head"),  # Qwen2 0.5B, pages of a GPU
]
# Blocks of production on TPU: 8 kv heads at a time over 1,024 keys, 3 blocks in VMEM.
PRODUCTION_BLOCKS = [
    Case(
        "production blocks",
        (1, 1, 40),
        (2300, 1000, 1100),
        heads=(16, 8),
        dims=(128, 128),
        page_size=128,
        max_pages=18,
        num_tokens=48,
        max_seqs=3,
        dtypes=BF16,
    )
]
# Every head dim with every page size, on accelerators: XLA does not tell them apart.
CROSSED = [
    _production((8, 1), head_dim, page_size)
    for head_dim in (64, 96, 128, 192, 256)
    for page_size in (8, 16, 32, 64, 128, 256)
]
CROSSED += [_production(heads, dim, 64) for heads in ((2, 2), (16, 1), (14, 2), (9, 3)) for dim in (64, 128)]
CROSSED += [
    _production((8, 1), dim, 64, kv_dtype=codes) for dim in (96, 128, 192) for codes in ("int8", "float8_e4m3fn")
]
CROSSED += [_production((8, 1), 256, 64, kv_dtype="float8_e4m3fn")]  # more than shared memory holds
CROSSED = [case for case in CROSSED if case not in PRODUCTION]

ATTENTION = PRODUCTION + PRODUCTION_BLOCKS + BATCHES + ROWS_ONLY + HEADS + DIMS + PAGES
ATTENTION += WINDOWS + WIDE_WINDOWS + CHUNKS + PICTURES + LOGITS + MASKS + QUANTIZED + PER_TOKEN + LATENT + LONG
BY_NAME = {case.name: case for case in ATTENTION + CROSSED}

# What the mutation gate runs and an interpreter has time for in CI: every border and feature once.
QUICK_BATCHES = (
    "mixed",
    "q tile straddles a kv block",
    "block edges",
    "long runs",
    "single tokens behind runs",
    "empty sequences",
    "nothing scheduled",
    "no sequences",
    "all tokens used",
    "infinite unseen slots",
    "shared prefix",
)
QUICK_FEATURES = (
    "decode bucket",
    "runs in a decode bucket",
    "skewed decodes",
    "verify tails",
    "window 400 of 900",
    "chunks of 16",
    "chunks of 400",
    "window, sinks and soft cap",
    "pictures and window",
    "tree branches",
    "fp8 e4m3 keys and values",
    "codes of decodes",
    "dims (128, 128)",
    "latent mixed",
    "latent decodes",
)
QUICK = [BY_NAME[name] for name in QUICK_BATCHES + QUICK_FEATURES]
