"""How fast a model over several hosts will be: each host's own terms under its name, and those of the network.

A host's terms are what `forecast` says of its part alone. Loading is one thread's work: it reads a tensor, hashes it
where it is large, copies it into a message and sends it, one after the other.
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
from tokenmill.units import format_bytes, format_seconds

STATE_BYTES = 4  # llama.cpp's activations are F32
TENSOR_BYTES = 296  # one tensor's description on the wire (rpc_tensor)
# Tensors of one layer's graph, nodes and what they read: counted for a dense model, inferred from the bytes on the wire
# for one mixture with a latent cache.
DENSE_TENSORS = 43
MIXTURE_TENSORS = 90
STEP_MESSAGES = 7  # inputs that are set, graph, result: each with a description and its sizes
MESSAGE_BYTES = TENSOR_BYTES + 32
GRAPH_TOKENS = PAD  # decoding sends the graph again when the cache grows by another page
INSIDE_TRIPS = 3  # round trips of a state between two devices of one worker: refused copy, fetched, set
INSIDE_MESSAGES = 4  # and the graph behind it
MESSAGE_S = 60e-6  # one message on both ends, without the network: amid 45 to 115 on a busy guest, see docs/hosts.md
HALF_BYTES = 2  # vLLM's activations
GIGA = 1e9


def graph_tensors(part: Profile) -> int:
    """Tensors of the graph that a worker gets for its part of a model."""
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
    """What one worker adds to a step of `tokens` tokens that look at `cells` cells.

    `graph`: tensors of its graph; `takes`: states that it is sent for a token; `inside`: how often one passes between
    that worker's own devices.
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
    """vLLM: from one pipeline stage to the next."""
    return [
        _term("link states", 2.0 * tokens * embedding * HALF_BYTES, link),
        Term("link round trips", link.one_way_s),
    ]


def reduce_terms(link: NetworkLink, *, embedding: int, layers: int, tokens: int, hosts: int) -> list[Term]:
    """vLLM: two sums in every layer, and one of the embedding, round a ring of `hosts` hosts."""
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


NEVER = 1 << 30  # rows from which a worker would copy weights to its GPUs: it does not
HASHED_BYTES = 10 << 20  # larger tensors are hashed before they are sent, in case the worker has them on disk
HASH_GB_S = 0.88  # FNV-1a, a byte at a time: measured, see docs/hosts.md
HANDLED_GB_S = 0.5  # copied into a message, out of it and into place: processor time measured, see docs/hosts.md
ENGINE = "engine"  # the term of an engine's own work in a step: the head's alone


def rpc_forecast(fleet: Fleet, profile: Profile, shares: Sequence[HostShare]) -> Forecast:
    """llama.cpp with RPC servers."""
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
        return Speed(sequences / _seconds(terms), depth, sequences, terms, surest(parts))

    def prefill(key: tuple[int, int, int | None], parts: list[tuple[str, Speed]]) -> Speed:
        depth, _, ubatch = key
        tokens = ubatch or 1
        sent = [
            Term(term.name, term.seconds / tokens, None if term.bytes is None else term.bytes / tokens, term.gb_s)
            for term in linked(tokens, depth + tokens, prefill=True)
        ]
        terms = summed([*named(parts, head), *sent])
        return Speed(1 / _seconds(terms), depth, 1, terms, surest(parts), ubatch=ubatch)

    cold, warm, bound, notes = _load(fleet, shares, alone)
    return Forecast(
        decode=tuple(joined({name: found.decode for name, found in alone.items()}, decode)),
        prefill=tuple(joined({name: found.prefill for name, found in alone.items()}, prefill)),
        load_cold_s=cold,
        load_warm_s=warm,
        load_bound_by=bound,
        notes=(*_own_notes(alone), *notes),
    )


def worker_terms(
    fleet: Fleet, profile: Profile, share: HostShare, tokens: int, cells: int, *, prefill: bool = False
) -> list[Term]:
    """What the network adds to a step for one worker."""
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
    """One speed for every point that all hosts have; none where one host's is not known."""
    tables = {name: {(s.depth, s.sequences, s.ubatch): s for s in found} for name, found in speeds.items()}
    first = next(iter(tables.values()), {})
    for key in first:
        if all(key in table for table in tables.values()):
            yield combine(key, [(name, table[key]) for name, table in tables.items()])


def named(parts: Iterable[tuple[str, Speed]], head: str) -> list[Term]:
    """Every host's terms under its name; an engine's own work is the head's only."""
    return [
        Term(f"{name} {term.name}", term.seconds, term.bytes, term.gb_s)
        for name, speed in parts
        for term in speed.terms
        if term.name != ENGINE or name == head
    ]


def summed(terms: Iterable[Term]) -> tuple[Term, ...]:
    """Terms of one name added up."""
    seconds: defaultdict[str, float] = defaultdict(float)
    moved: defaultdict[str, float] = defaultdict(float)
    for term in terms:
        seconds[term.name] += term.seconds
        moved[term.name] += term.bytes or 0.0
    return tuple(
        Term(name, value, moved[name] or None, moved[name] / value / 1e9 if moved[name] and value else None)
        for name, value in seconds.items()
    )


def surest(parts: Iterable[tuple[str, Speed]]) -> Confidence:
    """Only as sure as the least sure of all hosts; a link is taken at its word."""
    return "calibrated" if all(speed.confidence != "estimated" for _, speed in parts) else "estimated"


def _seconds(terms: Iterable[Term]) -> float:
    return sum(term.seconds for term in terms)


def _own_notes(alone: dict[str, Forecast]) -> Iterable[str]:
    for name, found in alone.items():
        for note in found.notes:
            if "load" not in note:  # the whole load has notes of its own
                yield f"{name}: {note}"


def _load(
    fleet: Fleet, shares: Sequence[HostShare], alone: dict[str, Forecast]
) -> tuple[float | None, float | None, str | None, list[str]]:
    """Cold, warm, what takes most of it, and what to say of it."""
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
        own.load_bound_by or "the head": (cold or warm or 0.0) - sending_s,
    }
    bound = max(shares_of, key=lambda name: shares_of[name]) if cold or warm else None
    notes = []
    if sent:
        notes.append(
            f"{format_bytes(sent)} of weights cross the network at every load: {format_seconds(network_s)}, and"
            f" {format_seconds(handled_s)} of hashing and copying"
        )
        notes.append(
            f"workers keep tensors over 10 MiB on their disks (--cache): later loads send {format_bytes(sent - large)}"
        )
    if cold is None:
        notes.append("no forecast of a cold load: unknown is the head's disk rate; tokenmill probe --measure tells")
    return cold, warm, bound, notes


def disk_gb_s(machine: Machine) -> float | None:
    """What the disk under the model reads: measured, else as stated."""
    measured = machine.measured.gb_s("disk") if machine.measured else None
    return measured if measured is not None else machine.disk.nominal_gb_s if machine.disk else None
