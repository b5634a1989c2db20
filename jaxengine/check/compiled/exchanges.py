"""Lists the exchanges between devices in a compiled step and checks that the model accounts for all of them.

Layers write exchanges (jaxengine.sharding.collectives) under named scopes, and XLA keeps the scope of each instruction.
Exchanges outside of these scopes were added by the compiler, and are reported.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flax import nnx

from jaxengine.check.compiled.hlo import Instruction, Module, arrays_of, bytes_of
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.layers.base.norm import HeadsRMSNorm
from jaxengine.models.layers.states.mamba2 import GroupsRMSNorm
from jaxengine.models.layers.states.ngrams import NGramTables
from jaxengine.models.quantization.base.quantized import QuantizedWeight
from jaxengine.sampling.logprobs import PROMPT_BLOCK_ROWS
from jaxengine.scheduler.batches.buckets import Bucket
from jaxengine.sharding.layout import MeshLayout

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all", "ragged-all-to-all")
# Allowed excess of a layer's exchanges over its activations, for sizes rounded up to tiles.
SLACK = 1.05
# Scope outside the layers -> limit of its exchanges. Those of the sampler are in branches and loops that few steps run:
# each part of it finds maxima, sums or counts over the split vocabulary.
AROUND_LAYERS = {"embed": 3, "layer_inputs": 3, "logits": 2, "sample": 32, "prompt_logprobs": 12, "results": 9}
# Scopes of a program that encodes images; Expected.encoding gives the exchanges of each.
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
_RAGGED = "ragged_all_to_all"  # scope that stands for the instruction where XLA has none
_SCOPE = re.compile(r'op_name="([^"]*)"')
_LAYER = re.compile(r"layer_(\d+)$")
_GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\])")
_CHAIN = re.compile(r'chain_id="(\d+)"')


@dataclass(frozen=True)
class Exchange:
    """Instruction that exchanges data with other devices; an asynchronous pair counts as one.

    Attributes:
      kind: one of KINDS, as written in the model: XLA:TPU turns small all-gathers and reduce-scatters into all-reduces,
        and on CPU an all-to-all stands in for a ragged-all-to-all.
      opcode: one of KINDS, as compiled.
      place: "layer 3", a scope of AROUND_LAYERS or ENCODING, or "" if the compiler added it.
      count: number of exchanges that the compiler combined in it; 0 for one that completes another.
      elements: elements of its largest operand or result.
      num_bytes: bytes of its operands or of its results, whichever is larger.
      text: description for messages.
      beside: whether it is in a branch of a conditional of which another branch, which exchanges as much or more, is
        counted.
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
    """Return every exchange of a compiled module. One inside a loop is returned once.

    Its scope is that of the instruction, of the instruction that awaits it on another core, or of its operands. The
    links of one chain of fusions count as one exchange. XLA:TPU's fused reduce-scatters, and the instructions that
    complete them, are recognised.
    """
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
                count = 1  # the fusion's other operands are not sent
            if not scope and (sources := _scoped_sources(instruction, by_name)):
                # A small reduce-scatter of XLA:TPU and combined exchanges of XLA:GPU have no scope, their operands do.
                scattered = instruction.opcode == "all-reduce" and _is_only_sliced(instruction, body, module)
                completes = _sends_on_parts(instruction, by_name)
                scope = f"{sources[0].rpartition('/')[0]}/{'reduce_scatter' if scattered or completes else ''}"
                count = 0 if completes else count if instruction.opcode == _SCATTER else len(sources)
            # XLA:TPU runs some concurrently as a chain of fusions, each of which repeats the instruction.
            chain = _CHAIN.search(instruction.rest)
            link = chain and (chain[1], scope)
            if link is None or link not in chains:
                found[name].append(_exchange(instruction, by_name, scope, count))
            chains.add(link)
    beside = _beside(module, {name: sum(each.num_bytes for each in own) for name, own in found.items()})
    return [replace(each, beside=name in beside) for name, own in found.items() for each in own]


def _beside(module: Module, sizes: Mapping[str, int]) -> set[str]:
    """Return the names of the computations that run only in branches of conditionals that are not the most expensive,
    with their callees.

    The most expensive branch exchanges the most bytes; of several with equally many it is the first. sizes: bytes
    exchanged by computation.
    """

    def size(name: str) -> int:
        """Return the bytes exchanged by a computation and its callees; of a conditional's branches the most expensive
        counts.
        """
        total = sizes.get(name, 0)
        for instruction in module.computations.get(name, []):
            called = [size(each) for each in instruction.called]
            total += max(called, default=0) if instruction.opcode == "conditional" else sum(called)
        return total

    def reached(name: str) -> set[str]:
        """Return the names of a computation and of all that it calls, directly or not."""
        called = [each for instruction in module.computations.get(name, []) for each in instruction.called]
        return {name}.union(*map(reached, called))

    beside = set()
    for body in module.computations.values():
        for branches in (each.called for each in body if each.opcode == "conditional"):
            dearest = max(branches, key=size, default="")
            beside |= set().union(*map(reached, branches)) - reached(dearest)
    return beside


def _scatters(module: Module) -> set[str]:
    """Return the names of fused computations that are XLA:TPU's form of a large reduce-scatter.

    Such a fusion is an all-reduce of which each device keeps its part.
    """
    return {name for name in module.fused if _keeps_a_part(module.computations[name])}


def _keeps_a_part(body: Sequence[Instruction]) -> bool:
    """Return whether the result of a fusion is a slice of the all-reduce in it that has one device's share of the
    elements.
    """
    by_name = {each.name: each for each in body}
    kept = next((each for each in body if each.root and each.opcode == "dynamic-slice"), None)
    summed = by_name.get(kept.operands[0]) if kept is not None else None
    groups = _GROUPS.search(summed.rest) if summed is not None and summed.opcode == "all-reduce" else None
    if kept is None or summed is None or groups is None:
        return False
    devices = int(groups[2]) if groups[2] else groups[1].count(",") + 1
    return kept.elements * devices == summed.elements


def _sends_on_parts(instruction: Instruction, by_name: Mapping[str, Instruction]) -> bool:
    """Return whether an instruction completes a reduce-scatter that `_scatters` finds. by_name: instructions of its
    computation.

    The parts of such a reduce-scatter have sizes that suit the rings, so a device sends rows beyond its own part on to
    its neighbour by a collective-permute.
    """
    source = instruction if instruction.opcode.startswith("collective-permute") else None
    while source is not None and source.opcode != _SCATTER:
        own = source is instruction or source.opcode == "slice"
        source = by_name.get(source.operands[0]) if own and source.operands else None
    return source is not None


def _offloaded_scopes(module: Module) -> dict[str, str]:
    """Return the scope of the instruction that awaits it, for each computation that another core runs and that has one.

    XLA:TPU writes the exchanges that SparseCores run for it once and clones them, including the scope.
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
    """Return an instruction's named scope, from op_name in its metadata; "" if it has none."""
    match = _SCOPE.search(instruction.rest)
    return match[1] if match else ""


def _scoped_sources(instruction: Instruction, by_name: Mapping[str, Instruction]) -> list[str]:
    """Return the scopes of an instruction's operands, looking through operands without a scope.

    Returns [] if no operand has one, or if the scopes belong to different layers or places. by_name: instructions of
    its computation.
    """
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
    """Return whether an instruction has users and each takes a dynamic slice, itself or in its fusion. body: its
    computation.
    """
    users = [user for user in body if instruction.name in user.operands]
    return bool(users) and all(
        any(inner.opcode == "dynamic-slice" for inner in (user, *module.inside(user))) for user in users
    )


def _exchange(instruction: Instruction, by_name: Mapping[str, Instruction], scope: str, count: int) -> Exchange:
    """Return the Exchange of an instruction, not yet with `beside`.

    by_name: instructions of its computation. scope: named scope, "" for none. count: exchanges combined in it;
    an all-to-all counts as one. The text is cut to 300 characters.
    """
    opcode, place = instruction.opcode.removesuffix("-start"), _place(scope)
    written = "ragged-all-to-all" if _RAGGED in scope.split("/") else _WRITTEN.get(scope.rpartition("/")[2], opcode)
    kind = written if place else opcode
    operands = [by_name[name] for name in instruction.operands if name in by_name]
    results = arrays_of(instruction.type_text)
    # An asynchronous start lists its operands with its results; XLA:CPU and GPU split an all-to-all into pieces.
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
    """Return the place of a scope "a/b/c", as in Exchange.place: its first component that names one; "" if none
    does.
    """
    for part in scope.split("/"):
        if match := _LAYER.match(part):
            return f"layer {match[1]}"
        if part in AROUND_LAYERS or part in ENCODING:
            return part
    return ""


def counts(found: Sequence[Exchange]) -> dict[str, int]:
    """Return the number of exchange instructions by opcode, in all branches."""
    return dict(Counter(exchange.opcode for exchange in found))


def by_place(found: Sequence[Exchange]) -> dict[str, dict[str, int]]:
    """Return the number of exchanges by place (Exchange.place) and kind.

    Of a conditional's branches only the most expensive counts.
    """
    places: dict[str, Counter[str]] = {}
    for exchange in (each for each in found if not each.beside):
        places.setdefault(exchange.place, Counter())[exchange.kind] += exchange.count
    return {place: dict(kinds) for place, kinds in places.items()}


def exchanged_bytes(found: Sequence[Exchange], place: str | None = None) -> int:
    """Return the bytes exchanged in a place (see Exchange.place), None for all. Of a conditional's branches only the
    most expensive counts.
    """
    return sum(each.num_bytes for each in found if not each.beside and place in (None, each.place))


@dataclass(frozen=True)
class Expected:
    """Exchanges that a step of a model may have.

    Attributes:
      layers: exact number of exchanges by kind, for each layer.
      most_elements: limit of any operand or result: the activations of all replicas, times the experts per token if
        devices send rows to experts, what all layers receive in addition, or a device's part of the logits.
      exchange_bytes: limit of the average exchange of a layer: the activations in the model's dtype.
      encoding: exact number of exchanges by kind, for each scope of ENCODING.
    """

    layers: tuple[Mapping[str, int], ...]
    most_elements: int
    exchange_bytes: int
    encoding: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def _attends_beside_state(attention: LayerAttention) -> bool:
    """Return whether a layer has attention and a state with separate output products, whose results are both summed
    over devices.
    """
    return attention.beside_state and not attention.has_blocks


def expected(model: Any, bucket: Bucket, itemsize: int) -> Expected:
    """Return the exchanges that a forward pass of `bucket` should have on a model's mesh.

    model: pipeline stage with its config, mesh and layers. itemsize: bytes of an activation's element while exchanged.
    """
    config, mesh = model.config, model.mesh
    dense = () if config.experts is None else config.experts.dense_layers
    layers = tuple(
        layer_exchanges(
            mesh,
            experts=None if number in dense else config.experts,
            summed=norms(layer, mesh) + scales(layer) + _attends_beside_state(config.attention[number]),
            tables=tables(layer),
            ordered=len(gathered_inputs(layer)),
        )
        for number, layer in zip(model.stage.layers, model.layers, strict=True)
    )
    routed = 1 if config.experts is None else config.experts.num_per_token
    widest = max([config.stream_size, *(size for layer in model.layers for size in gathered_inputs(layer, routed))])
    rows = max(bucket.num_seqs * bucket.width, min(PROMPT_BLOCK_ROWS, bucket.num_tokens))
    logits = rows * mesh.padded_vocab_size(config.vocab_size) // mesh.num_shards("sampled_vocab")
    activations = mesh.num_ranks * bucket.num_tokens
    if config.experts is not None and mesh.sends_rows:
        activations = mesh.size * -(-bucket.num_tokens // mesh.model) * config.experts.num_per_token
    most = activations * widest
    beside = activations * config.num_layers * config.layer_input_size
    return Expected(layers, max(most, logits, beside), most * itemsize)


def norms(layer: nnx.Module, mesh: MeshLayout) -> int:
    """Return how many of a layer's norms sum over several devices.

    These are norms over all heads, and norms over groups if there are fewer groups than devices that split the heads.
    """
    nodes = [node for _, node in nnx.iter_graph(layer)]
    grouped = sum(isinstance(node, GroupsRMSNorm) and node.num_groups < mesh.num_shards("heads") for node in nodes)
    return grouped + sum(isinstance(node, HeadsRMSNorm) for node in nodes)


def tables(layer: nnx.Module) -> int:
    """Return how many modules of a layer look up rows that are split as those of the token table, those of n-grams."""
    return sum(isinstance(node, NGramTables) for _, node in nnx.iter_graph(layer))


def scales(layer: nnx.Module) -> int:
    """Return how many of a layer's products round rows by a scale on which all devices that split the rows must
    agree.
    """
    return sum(weight.agrees_on_scales for weight in _quantized(layer))


def gathered_inputs(layer: nnx.Module, num_per_token: int = 1) -> list[int]:
    """Return the elements per token that a layer gathers for each product whose codes are stored in a permuted order.

    num_per_token: rows per token in a product of experts. A product without such an order has no entry.
    """
    weights = [weight for weight in _quantized(layer) if weight.gathered_inputs]
    return [weight.gathered_inputs * (num_per_token if weight.codes.ndim == 3 else 1) for weight in weights]


def _quantized(layer: nnx.Module) -> list[QuantizedWeight]:
    """Return the quantized weights of a layer."""
    return [node for _, node in nnx.iter_graph(layer) if isinstance(node, QuantizedWeight)]


def layer_exchanges(
    mesh: MeshLayout, *, experts: ExpertsConfig | None, summed: int = 0, ordered: int = 0, tables: int = 0
) -> dict[str, int]:
    """Return the expected number of exchanges of one layer, by kind; kinds without any are left out.

    Attention sums its output over the devices of its heads. The feed-forward part gathers the tokens of all replicas
    that share its weights, sums over these devices and scatters each replica its tokens. With experts, routing weights
    and ids are gathered too. If devices send rows to experts, they gather row counts, and the devices of a replica
    gather the results of their shares of the tokens; a shared MLP then exchanges the same as a dense one. With experts
    to which all tokens are gathered, a shared MLP adds at most a reduce-scatter, if the experts span more replicas than
    it does.

    experts: None for a dense layer. summed: number of further all-reduces: of norms over heads of several devices
    (squares), of scales of rows (maxima), and of a state in addition to attention. ordered: number of products that
    gather rows to reorder them. tables: number of modules that look up rows that are split as those of the token table.
    """
    found = Counter({"all-reduce": (1 + summed) * (mesh.model > 1), "all-gather": ordered})
    found += Counter(dict.fromkeys(("all-gather", "reduce-scatter"), tables * (mesh.ranks_sharing("vocab") > 1)))
    found["all-reduce"] += tables * (mesh.model > 1)
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
    """Return the exchanges, by kind, of a feed-forward part that is split over the mesh's logical `axis`.

    gathered: number of arrays with a row per token that are gathered if several replicas share the weights.
    """
    several = mesh.ranks_sharing(axis) > 1
    return Counter(
        {"all-reduce": int(mesh.model > 1), "all-gather": gathered * several, "reduce-scatter": int(several)}
    )


def wrong(found: Sequence[Exchange], wanted: Expected) -> list[str]:
    """Return a text for each difference between a program's exchanges and those that the model accounts for; [] if
    there is none.

    Reported are exchanges that no code wrote, that are too large, too many, missing, or of another kind.
    """
    places = by_place(found)
    texts = [f"no code wrote {exchange.text}" for exchange in found if not exchange.place]
    texts += [
        f"more than {wanted.most_elements:,} elements in {exchange.text}"
        for exchange in found
        if exchange.elements > wanted.most_elements
    ]
    for index, layer in enumerate(wanted.layers):
        own = places.get(f"layer {index}", {})
        if own != layer:
            texts.append(f"layer {index} has {_kinds_text(own)} instead of {_kinds_text(layer)}")
        most = int(sum(layer.values()) * wanted.exchange_bytes * SLACK)
        if (found_bytes := exchanged_bytes(found, f"layer {index}")) > most:
            texts.append(f"layer {index} exchanges {found_bytes:,} bytes and not at most {most:,}")
    for place in ENCODING:
        if (own := places.get(place, {})) != (planned := wanted.encoding.get(place, {})):
            texts.append(f"{place} has {_kinds_text(own)} instead of {_kinds_text(planned)}")
    for place, limit in AROUND_LAYERS.items():
        if (number := sum(places.get(place, {}).values())) > limit:
            texts.append(f"{place} has {_kinds_text(places[place])}, {number} and not at most {limit}")
    return texts


def _kinds_text(kinds: Mapping[str, int]) -> str:
    """Return counts of exchanges by kind as text, such as "1 all-gather and 2 all-reduce"; "nothing" for {}."""
    return " and ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "nothing"
