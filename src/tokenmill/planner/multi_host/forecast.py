"""Forecasts the speed of a model over several hosts from the terms of each host and those of the network.

A host's terms are the single-machine forecast of its part. Loading is single-threaded: for one tensor after another, a
thread reads it, hashes it if it is large, copies it into a message and sends it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from tokenmill.hardware.fleet import Fleet, NetworkLink
from tokenmill.hardware.machine import Machine
from tokenmill.model.profile import Profile, TensorClass
from tokenmill.planner.memory.kv_cells import PAD
from tokenmill.planner.multi_host.hosts import HostShare
from tokenmill.planner.plan import Confidence, Forecast, Speed, Term
from tokenmill.planner.speed.forecast import forecast
from tokenmill.planner.speed.load_time import load_time
from tokenmill.planner.speed.rates import standard
from tokenmill.units import format_bytes, format_seconds

STATE_BYTES = 4  # llama.cpp's activations are F32
TENSOR_BYTES = 296  # size of one tensor description on the wire (rpc_tensor)
# Tensors in one layer's graph, including inputs: counted for a dense model, inferred from the bytes on the wire for a
# mixture-of-experts model with a latent cache.
DENSE_TENSORS = 43
MIXTURE_TENSORS = 90
STEP_MESSAGES = 7  # inputs, graph and result with their descriptions and sizes
MESSAGE_BYTES = TENSOR_BYTES + 32
GRAPH_TOKENS = PAD  # decoding sends the graph again when the cache grows by a page
INSIDE_TRIPS = 3  # round trips to move a state between two devices of one worker: refused copy, get, set
INSIDE_MESSAGES = 4  # the same messages plus the next graph
MESSAGE_S = 60e-6  # CPU time of one message at both ends: 45 to 115 us on a busy virtual machine, see docs/hosts.md
HALF_BYTES = 2  # vLLM's activations
GIGA = 1e9


def graph_tensors(part: Profile) -> int:
    """Number of tensors in the graph that a worker receives for its part of a model."""
    mixed = {tensor.layer for tensor in part.of(TensorClass.ROUTED_EXPERTS)}
    return len(mixed) * MIXTURE_TENSORS + (part.layers - len(mixed)) * DENSE_TENSORS


def rpc_terms(
    link: NetworkLink,
    *,
    embedding: int,
    graph: int,
    tokens: int,
    cells: int,
    mask_bytes: int,
    prefill: bool,
    takes: int = 1,
    inside: int = 0,
) -> list[Term]:
    """Network terms of one worker in a step of `tokens` tokens that attend to `cells` cells.

    `graph` is the number of tensors in its graph, `takes` the number of states sent to it per token, `inside` the
    number of transfers of a state between its own devices.
    """
    padded = -(-cells // PAD) * PAD
    mask = tokens * padded * mask_bytes
    described = graph * TENSOR_BYTES / (1 if prefill else GRAPH_TOKENS)
    state = (takes + 1.0) * tokens * embedding * STATE_BYTES + STEP_MESSAGES * MESSAGE_BYTES
    copies = inside * 2.0 * tokens * embedding * STATE_BYTES
    found = [
        _term("link states", state + copies, link),
        _term("link masks", mask, link),
        _term("link graphs", described, link),
        Term("link round trips", (1 + inside * INSIDE_TRIPS) * link.round_trip_s),
        Term("link messages", (STEP_MESSAGES + inside * INSIDE_MESSAGES) * MESSAGE_S),
    ]
    return [term for term in found if term.seconds > 0]


def stage_terms(link: NetworkLink, *, embedding: int, tokens: int) -> list[Term]:
    """Terms of the transfer from one vLLM pipeline stage to the next."""
    return [
        _term("link states", 2.0 * tokens * embedding * HALF_BYTES, link),
        Term("link round trips", link.one_way_s),
    ]


def reduce_terms(link: NetworkLink, *, embedding: int, layers: int, tokens: int, hosts: int) -> list[Term]:
    """Terms of vLLM's all-reduces on a ring of hosts: two per layer and one for the embedding."""
    if hosts < 2:
        return []
    sums = 2 * layers + 1
    count = sums * 2.0 * (hosts - 1) / hosts * tokens * embedding * HALF_BYTES
    return [
        _term("link sums", count, link),
        Term("link round trips", sums * 2 * (hosts - 1) * link.one_way_s),
    ]


def _term(name: str, count: float, link: NetworkLink) -> Term:
    return Term(name, count / link.gb_s / GIGA, count, link.gb_s)


NEVER = 1 << 30  # offload threshold of a worker: it never copies weights to its GPUs
HASHED_BYTES = 10 << 20  # larger tensors are hashed before sending, in case the worker has them on disk
HASH_GB_S = 0.88  # FNV-1a, bytewise: measured, see docs/hosts.md
HANDLED_GB_S = 0.5  # copying tensors into and out of messages: measured CPU time, see docs/hosts.md
ENGINE = "engine"  # term of the engine's own work in a step; counted on the head host only


def rpc_forecast(fleet: Fleet, profile: Profile, shares: Sequence[HostShare]) -> Forecast:
    """Forecast the speed and load time of llama.cpp with RPC servers."""
    alone = {
        share.host.name: forecast(
            share.host.machine,
            share.part,
            share.settings,
            share.placement,
            min_batch=None if share.host == fleet.head else NEVER,
        )
        for share in shares
    }
    workers = [share for share in shares if share.host != fleet.head]
    head = fleet.head.name

    def linked(tokens: int, cells: int, *, prefill: bool) -> list[Term]:
        return [
            term for share in workers for term in worker_terms(fleet, profile, share, tokens, cells, prefill=prefill)
        ]

    def decode(key: tuple[int, int, int | None], parts: list[tuple[str, Speed]]) -> Speed:
        depth, sequences, _ = key
        terms = summed([*named(parts, head), *linked(sequences, depth + 1, prefill=False)])
        return Speed(sequences / _seconds(terms), depth, sequences, terms, lowest_confidence(parts))

    def prefill(key: tuple[int, int, int | None], parts: list[tuple[str, Speed]]) -> Speed:
        depth, _, ubatch = key
        tokens = ubatch or 1
        sent = [
            Term(term.name, term.seconds / tokens, None if term.bytes is None else term.bytes / tokens, term.gb_s)
            for term in linked(tokens, depth + tokens, prefill=True)
        ]
        terms = summed([*named(parts, head), *sent])
        return Speed(1 / _seconds(terms), depth, 1, terms, lowest_confidence(parts), ubatch=ubatch)

    cold, warm, bound, notes = _load(fleet, shares, alone)
    return Forecast(
        decode=tuple(joined({name: found.decode for name, found in alone.items()}, decode)),
        prefill=tuple(joined({name: found.prefill for name, found in alone.items()}, prefill)),
        load_cold_s=cold,
        load_warm_s=warm,
        load_bound_by=bound,
        notes=(*_host_notes(shares, alone), *notes),
    )


def worker_terms(
    fleet: Fleet, profile: Profile, share: HostShare, tokens: int, cells: int, *, prefill: bool = False
) -> list[Term]:
    """Network terms of one worker in a step."""
    return rpc_terms(
        fleet.link,
        embedding=profile.embedding_length or 0,
        graph=graph_tensors(share.part),
        tokens=tokens,
        cells=cells,
        mask_bytes=2 if share.settings.flash_attention else 4,
        prefill=prefill,
        takes=share.takes,
        inside=share.hops,
    )


def joined(
    speeds: dict[str, tuple[Speed, ...]],
    combine: Callable[[tuple[int, int, int | None], list[tuple[str, Speed]]], Speed],
) -> Iterable[Speed]:
    """Combine the hosts' speeds at every point that all of them have."""
    tables = {name: {(s.depth, s.sequences, s.ubatch): s for s in found} for name, found in speeds.items()}
    first = next(iter(tables.values()), {})
    for key in first:
        if all(key in table for table in tables.values()):
            yield combine(key, [(name, table[key]) for name, table in tables.items()])


def named(parts: Iterable[tuple[str, Speed]], head: str) -> list[Term]:
    """Prefix every host's terms with its name; only the head host keeps the engine's own work."""
    return [
        Term(f"{name} {term.name}", term.seconds, term.bytes, term.gb_s)
        for name, speed in parts
        for term in speed.terms
        if term.name != ENGINE or name == head
    ]


def summed(terms: Iterable[Term]) -> tuple[Term, ...]:
    """Sum terms with equal names."""
    seconds: defaultdict[str, float] = defaultdict(float)
    moved: defaultdict[str, float] = defaultdict(float)
    for term in terms:
        seconds[term.name] += term.seconds
        moved[term.name] += term.bytes or 0.0
    return tuple(
        Term(name, value, moved[name] or None, moved[name] / value / 1e9 if moved[name] and value else None)
        for name, value in seconds.items()
    )


def lowest_confidence(parts: Iterable[tuple[str, Speed]]) -> Confidence:
    """The lowest confidence of all hosts; the link speed is taken as given."""
    return "calibrated" if all(speed.confidence != "estimated" for _, speed in parts) else "estimated"


def _seconds(terms: Iterable[Term]) -> float:
    return sum(term.seconds for term in terms)


def _host_notes(shares: Sequence[HostShare], alone: dict[str, Forecast]) -> Iterable[str]:
    """Notes of every host except those on loading, which `_load` replaces."""
    for share in shares:
        load = load_time(share.host.machine, share.part, share.settings, share.placement, standard())
        for note in alone[share.host.name].notes:
            if note not in load.notes:
                yield f"{share.host.name}: {note}"


def _load(
    fleet: Fleet, shares: Sequence[HostShare], alone: dict[str, Forecast]
) -> tuple[float | None, float | None, str | None, list[str]]:
    """Seconds of a cold and a warm load, the part that takes longest, and notes."""
    own = alone[fleet.head.name]
    sizes = [tensor.bytes for share in shares if share.host != fleet.head for tensor in share.part.tensors]
    sent = sum(sizes)
    large = sum(size for size in sizes if size > HASHED_BYTES)
    network_s = sent / fleet.link.gb_s / 1e9
    handled_s = large / HASH_GB_S / 1e9 + sent / HANDLED_GB_S / 1e9
    sending_s = network_s + handled_s
    disk = disk_gb_s(fleet.head.machine)
    cold = None if own.load_cold_s is None or disk is None else own.load_cold_s + sent / disk / 1e9 + sending_s
    warm = None if own.load_warm_s is None else own.load_warm_s + sending_s
    shares_of = {
        "the network": network_s,
        "hashing and copying": handled_s,
        own.load_bound_by or "the head host": (cold or warm or 0.0) - sending_s,
    }
    bound = max(shares_of, key=lambda name: shares_of[name]) if cold or warm else None
    notes = []
    if sent:
        notes.append(
            f"every load sends {format_bytes(sent)} of weights over the network: {format_seconds(network_s)}, plus"
            f" {format_seconds(handled_s)} of hashing and copying"
        )
        notes.append(
            f"with --cache the workers keep tensors over 10 MiB on disk: later loads send {format_bytes(sent - large)}"
        )
    if cold is None:
        notes.append(
            "no forecast of a cold load: the head host's disk rate is unknown; tokenmill probe --measure measures it"
        )
    return cold, warm, bound, notes


def disk_gb_s(machine: Machine) -> float | None:
    """Read rate of the model's disk: measured, else nominal; None if unknown."""
    measured = machine.measured.gb_s("disk") if machine.measured else None
    return measured if measured is not None else machine.disk.nominal_gb_s if machine.disk else None
