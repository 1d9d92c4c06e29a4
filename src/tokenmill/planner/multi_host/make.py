"""Plans a model over several hosts: `make_over(fleet, profile, goal)` returns a `HostsPlan`. Pure.

With llama.cpp's RPC servers a token passes through the hosts in turn, so their times add up: the fastest host gets
as many layers as it can hold, then the next, until all layers are placed; the other hosts are left out. If the GPUs of
the head host compute all its layers, these are the model's last, next to the output; otherwise they are its first, and
the state of the model's last layer is sent back.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tokenmill.errors import UsageError
from tokenmill.hardware.fleet import Fleet, FleetHost
from tokenmill.model.profile import Profile
from tokenmill.planner.compute_graph.engines import TRAITS
from tokenmill.planner.draft import capacity, make_draft
from tokenmill.planner.goal import Goal
from tokenmill.planner.multi_host.forecast import rpc_forecast, worker_terms
from tokenmill.planner.multi_host.hosts import HostShare, HostsPlan, layer_ranges, merged_ledger, part_of, shortfalls_of
from tokenmill.planner.multi_host.vllm import make_staged
from tokenmill.planner.multi_host.worker import worker_share
from tokenmill.planner.placement import host_tier, os_reserve, usable_gpus
from tokenmill.planner.plan import Decision, Ledger, LedgerRow
from tokenmill.planner.settings import DEFAULT_CONTEXT
from tokenmill.planner.speed.forecast import decode_speed

UBATCH = 512


def make_over(
    fleet: Fleet,
    profile: Profile,
    goal: Goal,
    *,
    layers: Sequence[int] | None = None,
    pipeline_parallel: int | None = None,
) -> HostsPlan:
    """Plan a model over a fleet; `layers` sets each host's number of layers, in the fleet's order."""
    if layers is not None:
        _check_layers(fleet, profile, layers)
    if goal.engine == "vllm":
        return make_staged(fleet, profile, goal, layers=layers, pipeline_parallel=pipeline_parallel)
    if pipeline_parallel is not None:
        raise UsageError("--pipeline-parallel works with vLLM only", hint="use --engine vllm, or omit it")
    if TRAITS[goal.engine].ik is not None or goal.engine != "llama.cpp":
        raise UsageError(
            f"cannot plan {goal.engine} over several hosts", hint="use --engine llama.cpp or --engine vllm"
        )
    if goal.own_fit:
        raise UsageError("--own-fit works on a single host only", hint="omit it")
    asked = _settled(profile, goal)
    if layers is None:
        counts, why = _counts(fleet, profile, asked)
    else:
        counts = dict(zip((host.name for host in fleet.hosts), layers, strict=True))
        why = "--layers"
    order = _order(fleet, profile, asked, counts[fleet.head.name])
    shares = _shares(fleet, order, profile, asked, counts)
    return _finished(fleet, profile, asked, shares, why)


def _settled(profile: Profile, goal: Goal) -> Goal:
    """The goal with all settings chosen that must be equal on all hosts."""
    context = goal.context or min(DEFAULT_CONTEXT, profile.training_context or DEFAULT_CONTEXT)
    return replace(goal, context=context, sequences=goal.sequences or 1, ubatch=goal.ubatch or min(UBATCH, context))


def _order(fleet: Fleet, profile: Profile, goal: Goal, count: int) -> tuple[FleetHost, ...]:
    """Order of the hosts: the head host last if its GPUs compute all its layers, else first, for its CPU layers."""
    head = fleet.head
    workers = fleet.hosts[1:]
    share = _share(fleet, head, profile, goal, profile.layers - count, count)
    on_gpus = all(tier.startswith("gpu") for tier in share.placement.layers)
    return (*workers, head) if on_gpus else (head, *workers)


def _share(fleet: Fleet, host: FleetHost, profile: Profile, goal: Goal, first: int, count: int) -> HostShare:
    if host != fleet.head:
        return worker_share(host, profile, goal, first, count)
    part = part_of(profile, first, count, embeddings=True, output=True)
    draft = make_draft(host.machine, part, goal, None, even=False)
    settings = replace(draft.settings, offload_min_batch=None)  # commands for several hosts do not set it
    share = HostShare(host, first, count, part, settings, draft.placement, draft.ledger)
    return share if count == profile.layers else replace(share, ledger=_with_message(share, profile))


def _counts(fleet: Fleet, profile: Profile, goal: Goal) -> tuple[dict[str, int], str]:
    """Layers per host and the reason: the fastest hosts hold as many as fit, the head host at least one."""
    limits = {host.name: _max_layers(fleet, host, profile, goal) for host in fleet.hosts}
    pace = {host.name: _seconds_per_layer(fleet, host, profile, goal, limits[host.name]) for host in fleet.hosts}
    head = fleet.head.name
    # among equally fast hosts the head host comes first, because its layers need no network
    ranked = sorted((host.name for host in fleet.hosts), key=lambda name: (pace[name], name != head))
    counts = dict.fromkeys(limits, 0)
    left = profile.layers
    for name in ranked:
        kept = 0 if name == head else int(counts[head] == 0)  # one layer for the head host
        counts[name] = max(0, min(limits[name], left - kept))
        if name == head:
            counts[name] = max(1, counts[name])
        left -= counts[name]
    why = "a token passes through the hosts in turn, so the fastest host gets as many layers as fit, then the next"
    if counts[head] == profile.layers:
        why = f"{head} holds the whole model; more hosts would only add network time"
    if left > 0:
        largest = max(limits, key=lambda name: (limits[name], name))
        counts[largest] += left
        why = f"all hosts together hold only {profile.layers - left} of {profile.layers} layers"
    return counts, why


def _max_layers(fleet: Fleet, host: FleetHost, profile: Profile, goal: Goal) -> int:
    """Number of layers that a host holds, counted from the model's end, where layers are never smaller."""

    def holds(count: int) -> bool:
        share = _share(fleet, host, profile, goal, profile.layers - count, count)
        return not any(shortfalls_of(share))

    low = 0
    high = profile.layers
    step = 1
    count = _guess(host, profile, goal)
    while low < high:  # bisect from an estimate, because a draft takes tens of milliseconds
        if holds(count):
            low = count
        else:
            high = count - 1
        near = low + step if low == count else high - step + 1
        count = near if low < near <= high else (low + high + 1) // 2
        step *= 4
    return low


def _guess(host: FleetHost, profile: Profile, goal: Goal) -> int:
    """Estimate how many layers a host holds from their sizes alone; at least 1."""
    tiers = (*usable_gpus(host.machine, goal), host_tier(host.machine))
    available = sum(capacity(host.machine, tier) for tier in tiers)
    available -= os_reserve(host.machine) + goal.reserve_ram_bytes
    cache = profile.cache_bytes((goal.context or 0) * (goal.sequences or 1)) if profile.layers else 0
    return max(1, min(profile.layers, int(0.97 * available * profile.layers / (profile.bytes + cache))))


def _seconds_per_layer(fleet: Fleet, host: FleetHost, profile: Profile, goal: Goal, count: int) -> float:
    """Seconds per layer on a full host, network included; infinite if a fact is unknown.

    The head host is treated like a worker, without embeddings and output, which it always has.
    """
    if not count:
        return float("inf")
    share = worker_share(host, profile, goal, profile.layers - count, count)
    depth = (goal.context or 0) // 4
    speed = decode_speed(host.machine, share.part, share.settings, share.placement, depth=depth)
    if speed is None:
        return float("inf")
    linked = 0.0 if host == fleet.head else sum(term.seconds for term in worker_terms(fleet, profile, share, 1, depth))
    return (1 / speed.tok_s + linked) / count


def _shares(
    fleet: Fleet, order: Sequence[FleetHost], profile: Profile, goal: Goal, counts: dict[str, int]
) -> tuple[HostShare, ...]:
    shares: list[HostShare] = []
    first = 0
    for host in order:
        if counts[host.name]:
            share = _share(fleet, host, profile, goal, first, counts[host.name])
            shares.append(replace(share, takes=2) if shares and shares[-1].host == fleet.head else share)
        first += counts[host.name]
    return tuple(shares)


def _with_message(share: HostShare, profile: Profile) -> Ledger:
    """The head host's ledger plus the message that carries the largest tensor during the load."""
    largest = max((tensor.bytes for tensor in profile.tensors if tensor.layer is not None), default=0)
    row = LedgerRow(host_tier(share.host.machine), "staging", largest)
    return replace(share.ledger, load_peak=(*share.ledger.load_peak, row))


def _finished(fleet: Fleet, profile: Profile, goal: Goal, shares: tuple[HostShare, ...], why: str) -> HostsPlan:
    used = {share.host.name for share in shares}
    idle = [host.name for host in fleet.hosts if host.name not in used]
    decisions = [Decision("placement", layer_ranges(shares), why)]
    if idle:
        decisions.append(Decision("left out", ", ".join(idle), "the other hosts hold the model and are faster alone"))
    settings = next(share.settings for share in shares if share.host == fleet.head)
    return HostsPlan(
        fleet,
        profile,
        goal,
        settings,
        shares,
        merged_ledger(shares),
        rpc_forecast(fleet, profile, shares),
        tuple(decisions),
        tuple(lack for share in shares for lack in shortfalls_of(share)),
        tuple(_warnings(fleet, shares)),
    )


def _warnings(fleet: Fleet, shares: Sequence[HostShare]) -> Iterator[str]:
    if len(shares) > 1:
        yield "llama.cpp's RPC server has no authentication or encryption: use a private network or a tunnel"
    for share in shares:
        if share.hops and share.host != fleet.head:
            yield (
                f"{share.host.name} moves every token {share.hops} times between its own devices, each time through the"
                " head host; more GPU memory on it avoids that"
            )
        for tier in share.host.machine.tiers():
            if tier.capacity_bytes is None and tier.kind != "disk":
                name = f"{share.host.name}/{tier.name}"
                yield f"the size of {name} is unknown and counts as 0; state it in the machine file"


def _check_layers(fleet: Fleet, profile: Profile, layers: Sequence[int]) -> None:
    if len(layers) != len(fleet.hosts) or sum(layers) != profile.layers:
        raise UsageError(
            f"--layers {','.join(map(str, layers))} does not divide {profile.layers} layers over"
            f" {len(fleet.hosts)} hosts",
            hint=f"give one number per host, the head host first, with a sum of {profile.layers}",
        )
    if min(layers) < 0 or layers[0] < 1:
        raise UsageError(
            f"--layers {','.join(map(str, layers))} leaves the head host without layers", hint="give it at least 1"
        )
