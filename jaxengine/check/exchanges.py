"""What devices tell each other in a compiled step, and whether the model accounts for all of it.

Exchanges are written down in the layers (sharding.collectives) under named scopes, and XLA keeps the scope with the
instruction. So each one found is a layer's, or one of the few around the layers, or the compiler's own, which is a
finding. Reads HLO; knows of models what their meshes make them exchange.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flax import nnx

from jaxengine.check.hlo import Instruction, Module, arrays_of, bytes_of
from jaxengine.sampling.logprobs import PROMPT_BLOCK_ROWS
from models.config.experts import ExpertsConfig
from models.layers.mamba2 import GroupsRMSNorm
from models.layers.norm import HeadsRMSNorm
from models.quantization.quantized import QuantizedWeight
from scheduler.buckets import Bucket
from sharding.layout import MeshLayout

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all", "ragged-all-to-all")
# A layer may exchange this much more than its activations: sizes that are rounded up to tiles.
SLACK = 1.05
# Scope outside the layers -> the most exchanges it may have. Those of the sampler are branches and loops that few steps
# run: each part of it finds maxima, sums or counts over the split vocabulary.
AROUND_LAYERS = {"embed": 3, "logits": 2, "sample": 32, "prompt_logprobs": 12, "results": 9}
# Scopes of a program that encodes pictures, each with what Expected says.
ENCODING = ("tower", "gather")

_WRITTEN = {
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
_SCATTER = "reduce-scatter"
_RAGGED = "ragged_all_to_all"  # a scope of its own where XLA has no such instruction
_SCOPE = re.compile(r'op_name="([^"]*)"')
_LAYER = re.compile(r"layer_(\d+)$")
_GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\])")
_CHAIN = re.compile(r'chain_id="(\d+)"')


@dataclass(frozen=True)
class Exchange:
    """One instruction that exchanges data with other devices; an asynchronous pair is one.

    Attributes:
      kind: of KINDS, as it was written: XLA:TPU makes small all-gathers and reduce-scatters all-reduces, and
        on the CPU an all-to-all plays a ragged-all-to-all.
      opcode: of KINDS, as it was compiled.
      place: "layer 3", a scope of AROUND_LAYERS, or "" where nobody wrote it.
      count: exchanges that the compiler combined in it; 0 for one that completes another.
      elements: of its largest operand or result.
      num_bytes: of its operands or of its results, whichever are more.
      text: for messages.
      beside: it is in a branch of a conditional, another of which exchanges as much or more and is counted.
    """

    kind: str
    opcode: str
    place: str
    count: int
    elements: int
    num_bytes: int
    text: str
    beside: bool = False


def exchanges(module: Module) -> list[Exchange]:
    """Every exchange of a compiled module."""
    found, chains, offloaded, scatters = defaultdict(list), set(), _offloaded_scopes(module), _scatters(module)
    for name, body in module.computations.items():
        if name in scatters:
            continue
        by_name = {
            each.name: replace(each, opcode=_SCATTER) if module.fused_in(each) in scatters else each for each in body
        }
        for instruction in by_name.values():
            if instruction.opcode.removesuffix("-start") not in KINDS:
                continue
            scope, count = offloaded.get(name, _scope(instruction)), max(1, len(instruction.operands))
            if instruction.opcode == _SCATTER:
                count = 1  # of what a fusion takes besides, nothing is sent
            if not scope and (sources := _scoped_sources(instruction, by_name)):
                # XLA:TPU's form of a small reduce-scatter and what XLA:GPU combines have no scope, their operands do.
                scattered = instruction.opcode == "all-reduce" and _is_only_sliced(instruction, body, module)
                completes = _sends_on_parts(instruction, by_name)
                scope = f"{sources[0].rpartition('/')[0]}/{'reduce_scatter' if scattered or completes else ''}"
                count = 0 if completes else count if instruction.opcode == _SCATTER else len(sources)
            # XLA:TPU runs some beside other work as a chain of fusions, each of which repeats the instruction.
            chain = _CHAIN.search(instruction.rest)
            link = chain and (chain[1], scope)
            if link is None or link not in chains:
                found[name].append(_exchange(instruction, by_name, scope, count))
            chains.add(link)
    beside = _beside(module, {name: sum(each.num_bytes for each in own) for name, own in found.items()})
    return [replace(each, beside=name in beside) for name, own in found.items() for each in own]


def _beside(module: Module, sizes: Mapping[str, int]) -> set[str]:
    """The computations that run in place of dearer ones, by the bytes that computations exchange: of a conditional's
    branches all but the dearest."""

    def size(name: str) -> int:
        total = sizes.get(name, 0)
        for instruction in module.computations.get(name, []):
            called = [size(each) for each in instruction.called]
            total += max(called, default=0) if instruction.opcode == "conditional" else sum(called)
        return total

    def reached(name: str) -> set[str]:
        called = [each for instruction in module.computations.get(name, []) for each in instruction.called]
        return {name}.union(*map(reached, called))

    beside = set()
    for body in module.computations.values():
        for branches in (each.called for each in body if each.opcode == "conditional"):
            dearest = max(branches, key=size, default="")
            beside |= set().union(*map(reached, branches)) - reached(dearest)
    return beside


def _scatters(module: Module) -> set[str]:
    """Computations of fusions that are XLA:TPU's form of a large reduce-scatter: a sum of which each device keeps its
    part."""
    return {name for name in module.fused if _keeps_a_part(module.computations[name])}


def _keeps_a_part(body: Sequence[Instruction]) -> bool:
    by_name = {each.name: each for each in body}
    kept = next((each for each in body if each.root and each.opcode == "dynamic-slice"), None)
    summed = by_name.get(kept.operands[0]) if kept is not None else None
    groups = _GROUPS.search(summed.rest) if summed is not None and summed.opcode == "all-reduce" else None
    if kept is None or summed is None or groups is None:
        return False
    devices = int(groups[2]) if groups[2] else groups[1].count(",") + 1
    return kept.elements * devices == summed.elements


def _sends_on_parts(instruction: Instruction, by_name: Mapping[str, Instruction]) -> bool:
    """Whether it completes such a reduce-scatter, which gives devices parts of a size that suits its rings: rows behind
    a device's own are its neighbour's."""
    source = instruction if instruction.opcode.startswith("collective-permute") else None
    while source is not None and source.opcode != _SCATTER:
        own = source is instruction or source.opcode == "slice"
        source = by_name.get(source.operands[0]) if own and source.operands else None
    return source is not None


def _offloaded_scopes(module: Module) -> dict[str, str]:
    """Computation that another core runs -> the scope of what waits for it.

    XLA:TPU writes the exchanges that SparseCores make for it once and clones that, scope and all.
    """
    scopes: dict[str, str] = {}
    for body in module.computations.values():
        by_name = {instruction.name: instruction for instruction in body}
        for done in body:
            start = done if done.opcode == "async-done" else None
            while start is not None and start.opcode != "async-start":
                start = by_name.get(start.operands[0]) if start.operands else None
            if start is not None and _scope(done):
                scopes |= dict.fromkeys(module.offloaded.intersection(start.called), _scope(done))
    for name in list(scopes):
        for instruction in module.computations[name]:
            for called in module.offloaded.intersection(instruction.called):
                scopes.setdefault(called, scopes[name])
    return scopes


def _scope(instruction: Instruction) -> str:
    match = _SCOPE.search(instruction.rest)
    return match[1] if match else ""


def _scoped_sources(instruction: Instruction, by_name: Mapping[str, Instruction]) -> list[str]:
    """The scopes of what an instruction is made of, past instructions without one; none if these are of two places."""
    pending, seen, sources = list(instruction.operands), set(), []
    while pending:
        source = by_name.get(pending.pop())
        if source is None or source.name in seen:
            continue
        seen.add(source.name)
        if _scope(source):
            sources.append(_scope(source))
        else:
            pending.extend(source.operands)
    return sources if len({_place(scope) for scope in sources}) == 1 else []


def _is_only_sliced(instruction: Instruction, body: Sequence[Instruction], module: Module) -> bool:
    users = [user for user in body if instruction.name in user.operands]
    return bool(users) and all(
        any(inner.opcode == "dynamic-slice" for inner in (user, *module.inside(user))) for user in users
    )


def _exchange(instruction: Instruction, by_name: Mapping[str, Instruction], scope: str, count: int) -> Exchange:
    opcode, place = instruction.opcode.removesuffix("-start"), _place(scope)
    written = "ragged-all-to-all" if _RAGGED in scope.split("/") else _WRITTEN.get(scope.rpartition("/")[2], opcode)
    kind = written if place else opcode
    operands = [by_name[name] for name in instruction.operands if name in by_name]
    results = arrays_of(instruction.type_text)
    # An asynchronous start lists its operands beside its results; XLA:CPU and GPU cut an all-to-all into pieces.
    whole = sum(results) if opcode == "all-to-all" and instruction.opcode == opcode else max(results, default=0)
    elements = max([whole, *(operand.elements for operand in operands)])
    count = 1 if opcode.endswith("all-to-all") else count
    text = f"{instruction.opcode} {instruction.name} {instruction.type_text} in {scope or 'no scope'}"
    sizes = [sum(bytes_of(operand.type_text, on_chip=True)) for operand in operands]
    came_out = bytes_of(instruction.type_text, on_chip=True)
    if instruction.opcode.endswith("-start"):  # its operands are repeated in front
        came_out = came_out[len(operands) :]
    return Exchange(kind, opcode, place, count, elements, max(sum(sizes), sum(came_out)), text[:300])


def _place(scope: str) -> str:
    for part in scope.split("/"):
        if match := _LAYER.match(part):
            return f"layer {match[1]}"
        if part in AROUND_LAYERS or part in ENCODING:
            return part
    return ""


def counts(found: Sequence[Exchange]) -> dict[str, int]:
    """Instructions of each opcode."""
    return dict(Counter(exchange.opcode for exchange in found))


def by_place(found: Sequence[Exchange]) -> dict[str, dict[str, int]]:
    """Exchanges of each place by kind, of branches the dearest one's."""
    places: dict[str, Counter[str]] = {}
    for exchange in (each for each in found if not each.beside):
        places.setdefault(exchange.place, Counter())[exchange.kind] += exchange.count
    return {place: dict(kinds) for place, kinds in places.items()}


def exchanged_bytes(found: Sequence[Exchange], place: str | None = None) -> int:
    """Bytes that a place exchanges, or all do, of branches the dearest."""
    return sum(each.num_bytes for each in found if not each.beside and place in (None, each.place))


@dataclass(frozen=True)
class Expected:
    """What a step of a model may exchange.

    Attributes:
      layers: of each layer, by kind, exactly.
      most_elements: of any operand or result: the activations of all ranks, once for each expert of a token where
        devices send rows to experts, or a device's part of their logits.
      exchange_bytes: the most that an exchange of a layer is on average: the activations in the model's dtype.
      encoding: of each scope of ENCODING, by kind, exactly.
    """

    layers: tuple[Mapping[str, int], ...]
    most_elements: int
    exchange_bytes: int
    encoding: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def expected(model: Any, bucket: Bucket, itemsize: int) -> Expected:
    """Of the model's mesh and stage; itemsize: bytes of an activation's element while it is exchanged."""
    config, mesh = model.config, model.mesh
    dense = () if config.experts is None else config.experts.dense_layers
    layers = tuple(
        layer_exchanges(
            mesh,
            experts=None if number in dense else config.experts,
            summed=norms(layer, mesh) + scales(layer) + config.attention[number].beside_state,
            ordered=len(gathered_inputs(layer)),
        )
        for number, layer in zip(model.stage.layers, model.layers, strict=True)
    )
    routed = 1 if config.experts is None else config.experts.num_per_token
    widest = max([config.hidden_size, *(size for layer in model.layers for size in gathered_inputs(layer, routed))])
    rows = max(bucket.num_seqs * bucket.width, min(PROMPT_BLOCK_ROWS, bucket.num_tokens))
    logits = rows * mesh.padded_vocab_size(config.vocab_size) // mesh.num_shards("sampled_vocab")
    activations = mesh.num_ranks * bucket.num_tokens
    if config.experts is not None and mesh.sends_rows:
        activations = mesh.size * -(-bucket.num_tokens // mesh.model) * config.experts.num_per_token
    most = activations * widest
    return Expected(layers, max(most, logits), most * itemsize)


def norms(layer: nnx.Module, mesh: MeshLayout) -> int:
    """Norms of a layer that are over heads of several devices at once."""
    nodes = [node for _, node in nnx.iter_graph(layer)]
    grouped = sum(isinstance(node, GroupsRMSNorm) and node.num_groups < mesh.num_shards("heads") for node in nodes)
    return grouped + sum(isinstance(node, HeadsRMSNorm) for node in nodes)


def scales(layer: nnx.Module) -> int:
    """Products of a layer whose rows are rounded by a scale that the devices which split them must agree on."""
    return sum(weight.agrees_on_scales for weight in _quantized(layer))


def gathered_inputs(layer: nnx.Module, num_per_token: int = 1) -> list[int]:
    """What a layer gathers of a token for products whose codes lie in an order of their own, each in elements.

    num_per_token: rows of a token in a product of experts.
    """
    weights = [weight for weight in _quantized(layer) if weight.gathered_inputs]
    return [weight.gathered_inputs * (num_per_token if weight.codes.ndim == 3 else 1) for weight in weights]


def _quantized(layer: nnx.Module) -> list[QuantizedWeight]:
    return [node for _, node in nnx.iter_graph(layer) if isinstance(node, QuantizedWeight)]


def layer_exchanges(
    mesh: MeshLayout, *, experts: ExpertsConfig | None, summed: int = 0, ordered: int = 0
) -> dict[str, int]:
    """Of one layer by kind: attention adds up its output over the heads' devices, the feed-forward part gathers the
    tokens of all ranks that share its weights, adds up over all devices that do and leaves each rank its tokens. With
    experts the routing, weights and ids, is gathered too. Where devices send rows to experts they gather how many rows,
    and the devices of a rank gather what became of each one's share of the tokens; a shared MLP beside them exchanges
    what a dense one does. Beside experts to which all tokens are gathered it at most leaves each rank its tokens, where
    these experts are on devices of more ranks than it. summed: norms over heads of several devices, which add up
    squares, scales of rows, of which devices take the largest, and a state beside attention. ordered: products that
    gather their rows to put them in order.
    """
    found = Counter({"all-reduce": (1 + summed) * (mesh.model > 1), "all-gather": ordered})
    if experts is None:
        found += _of_mlp(mesh, "ffn", gathered=1)
    elif mesh.sends_rows:
        found += Counter({"all-gather": 1 + (mesh.model > 1), "ragged-all-to-all": 2})
        found += _of_mlp(mesh, "ffn", gathered=1) if experts.shared_intermediate_size else Counter()
    else:
        found += _of_mlp(mesh, "experts" if mesh.expert_parallel else "ffn", gathered=3)
        apart = mesh.expert_parallel and mesh.data > 1 and mesh.attn > 1
        found["reduce-scatter"] += bool(apart and experts.shared_intermediate_size)
    return {kind: count for kind, count in found.items() if count}


def _of_mlp(mesh: MeshLayout, axis: str, *, gathered: int) -> Counter[str]:
    """Of a feed-forward part split over a logical axis that gathers so many arrays of the tokens."""
    several = mesh.ranks_sharing(axis) > 1
    return Counter(
        {"all-reduce": int(mesh.model > 1), "all-gather": gathered * several, "reduce-scatter": int(several)}
    )


def wrong(found: Sequence[Exchange], wanted: Expected) -> list[str]:
    """What the model does not account for, as short texts."""
    places = by_place(found)
    texts = [f"nobody wrote {exchange.text}" for exchange in found if not exchange.place]
    texts += [
        f"more than {wanted.most_elements:,} elements in {exchange.text}"
        for exchange in found
        if exchange.elements > wanted.most_elements
    ]
    for index, layer in enumerate(wanted.layers):
        own = places.get(f"layer {index}", {})
        if own != layer:
            texts.append(f"layer {index} has {_told(own)} instead of {_told(layer)}")
        most = int(sum(layer.values()) * wanted.exchange_bytes * SLACK)
        if (found_bytes := exchanged_bytes(found, f"layer {index}")) > most:
            texts.append(f"layer {index} exchanges {found_bytes:,} bytes and not at most {most:,}")
    for place in ENCODING:
        if (own := places.get(place, {})) != (planned := wanted.encoding.get(place, {})):
            texts.append(f"{place} has {_told(own)} instead of {_told(planned)}")
    for place, limit in AROUND_LAYERS.items():
        if (number := sum(places.get(place, {}).values())) > limit:
            texts.append(f"{place} has {_told(places[place])}, {number} and not at most {limit}")
    return texts


def _told(kinds: Mapping[str, int]) -> str:
    return " and ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "nothing"
