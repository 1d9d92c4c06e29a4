"""Plans vLLM over several hosts: tensor parallel within a stage, pipeline parallel between stages, on Ray.

  hosts            stages                                   sent over the network
  a: gpu0..gpu3    layers of the first half, each over 4    state and residual, once per stage
  b: gpu0..gpu3    layers of the second half, each over 4
  a + b: 8 GPUs    one stage, each layer over 8             two all-reduces per layer

Stages get equal runs of layers, as in vLLM; the stages before the last get one layer of the remainder each.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tokenmill.errors import UsageError
from tokenmill.hardware.fleet import Fleet, FleetHost
from tokenmill.model.profile import Profile
from tokenmill.planner.goal import Goal
from tokenmill.planner.multi_host.forecast import (
    ENGINE,
    disk_gb_s,
    joined,
    lowest_confidence,
    named,
    reduce_terms,
    stage_terms,
    summed,
)
from tokenmill.planner.multi_host.hosts import HostShare, HostsPlan, layer_ranges, merged_ledger, part_of, shortfalls_of
from tokenmill.planner.placement import usable_gpus
from tokenmill.planner.plan import Decision, Forecast, Shortfall, Speed, Term
from tokenmill.planner.settings import DEFAULT_CONTEXT, choose_settings
from tokenmill.planner.speed.forecast import forecast
from tokenmill.planner.vllm import bytes_per_token, place


def make_staged(
    fleet: Fleet, profile: Profile, goal: Goal, *, layers: Sequence[int] | None, pipeline_parallel: int | None
) -> HostsPlan:
    """Plan vLLM over a fleet."""
    context = goal.context or min(DEFAULT_CONTEXT, profile.training_context or DEFAULT_CONTEXT)
    tensor, pipeline, why = _parallel(fleet, profile, goal, pipeline_parallel)
    asked = replace(goal, context=context, sequences=goal.sequences or 1, tensor_parallel=tensor)
    if layers is not None:
        raise UsageError("vLLM divides the layers itself, so --layers has no effect", hint="omit --layers")
    spans = len(fleet.hosts) // pipeline  # hosts per stage
    counts = stage_layers(profile.layers, pipeline)
    shares: list[HostShare] = []
    tokens: list[int] = []
    for stage in range(pipeline):
        for host in fleet.hosts[stage * spans : (stage + 1) * spans]:
            share, held = _share(host, profile, asked, counts, stage)
            shares.append(share)
            tokens.append(held)
    settings = shares[0].settings
    share_of_gpu = settings.gpu_memory_utilization
    decisions = [
        Decision("parallel", f"tensor {tensor}, pipeline {pipeline}", why),
        Decision("placement", layer_ranges(shares), "vLLM divides layers evenly over its stages"),
        Decision("kv tokens", str(min(tokens)), f"{share_of_gpu:.0%} of each GPU minus weights and activations"),
    ]
    shortfalls = [lack for share in shares for lack in shortfalls_of(share)]
    if min(tokens) < settings.cells and not shortfalls:
        tightest = shares[tokens.index(min(tokens))]
        needed = round(bytes_per_token(tightest.part, settings) * settings.cells / tensor)
        available = tightest.ledger.of("gpu0", "kv")
        shortfalls.append(Shortfall(f"{tightest.host.name}/gpu0", needed, min(available, needed - 1), "full_context"))
    warning = (
        "anyone who reaches Ray's ports can run code: use a private network or a tunnel, and RAY_AUTH_MODE=token"
        " (Ray 2.52 or later)"
    )
    speed = _forecast(fleet, profile, shares, pipeline, spans)
    return HostsPlan(
        fleet,
        profile,
        asked,
        settings,
        tuple(shares),
        merged_ledger(shares),
        speed,
        tuple(decisions),
        tuple(shortfalls),
        (warning,),
        pipeline,
    )


def stage_layers(layers: int, stages: int) -> list[int]:
    """Layers per stage as vLLM divides them; a remainder goes to the stages before the last, from the end."""
    counts = [layers // stages] * stages
    for extra in range(layers % stages):
        counts[-2 - extra] += 1
    return counts


def _parallel(fleet: Fleet, profile: Profile, goal: Goal, pipeline: int | None) -> tuple[int, int, str]:
    cards = {host.name: len(usable_gpus(host.machine, goal)) for host in fleet.hosts}
    bare = [name for name, count in cards.items() if not count]
    if bare:
        raise UsageError(f"vLLM over several hosts needs GPUs, but {bare[0]} has none", hint="use --engine llama.cpp")
    each = min(cards.values())
    hosts = len(fleet.hosts)
    if goal.tensor_parallel == 1 and pipeline is None:
        tensor = next(count for count in range(each, 0, -1) if _divides(profile, count))
        return tensor, hosts, "one stage per host, so that all-reduces stay off the network"
    tensor = goal.tensor_parallel if goal.tensor_parallel > 1 or pipeline != 1 else each * hosts
    if not _divides(profile, tensor):
        raise UsageError(
            f"vLLM cannot split the {profile.heads} attention heads of {profile.name} over {tensor} GPUs",
            hint="--tensor-parallel 1, 2, 4 or 8",
        )
    stages = pipeline or (hosts if tensor <= each else each * hosts // tensor)
    spans = hosts // stages if stages else 0
    if not stages or hosts % stages or tensor > each * spans or (spans > 1 and tensor % spans):
        raise UsageError(
            f"--tensor-parallel {tensor} --pipeline-parallel {pipeline or stages} does not divide {hosts} hosts with"
            f" {each} GPUs each",
            hint=f"for one stage per host use --tensor-parallel {each} --pipeline-parallel {hosts}",
        )
    why = "as requested" if spans == 1 else "as requested; every layer needs two all-reduces over the network"
    return tensor, stages, why


def _divides(profile: Profile, count: int) -> bool:
    return not profile.heads or profile.heads % count == 0


def _share(host: FleetHost, profile: Profile, goal: Goal, counts: Sequence[int], stage: int) -> tuple[HostShare, int]:
    """A host's share of its stage, and the KV tokens that fit there."""
    first = sum(counts[:stage])
    count = counts[stage]
    part = part_of(profile, first, count, embeddings=stage == 0, output=stage == len(counts) - 1)
    settings, _ = choose_settings(host.machine, profile, goal, with_gpu=True)
    placement, found, tokens = place(host.machine, part, settings, goal)
    return HostShare(host, first, count, part, settings, placement, found), tokens


def _forecast(fleet: Fleet, profile: Profile, shares: Sequence[HostShare], stages: int, spans: int) -> Forecast:
    """Forecast speeds; a stage is as fast as its slowest host, and stages process different batches concurrently."""
    alone = {s.host.name: forecast(s.host.machine, s.part, s.settings, s.placement) for s in shares}
    groups = [shares[stage * spans : (stage + 1) * spans] for stage in range(stages)]
    embedding = profile.embedding_length or 0
    link = fleet.link

    def linked(tokens: int) -> list[Term]:
        passed = [term for _ in range(stages - 1) for term in stage_terms(link, embedding=embedding, tokens=tokens)]
        for group in groups:
            passed += reduce_terms(link, embedding=embedding, layers=group[0].count, tokens=tokens, hosts=spans)
        return passed

    def slowest(parts: Iterable[tuple[str, Speed]]) -> list[tuple[str, Speed]]:
        by_name = dict(parts)
        return [
            min(((share.host.name, by_name[share.host.name]) for share in group), key=lambda item: item[1].tok_s)
            for group in groups
        ]

    def concurrent(depth: int, sequences: int) -> list[tuple[str, Speed]] | None:
        """Every host's speed at its smallest forecast batch of at least `sequences`; None if one host has none."""
        found = []
        for name, one in alone.items():
            able = [speed for speed in one.decode if speed.depth == depth and speed.sequences >= sequences]
            if not able:
                return None
            found.append((name, min(able, key=lambda speed: speed.sequences)))
        return found

    def decode(key: tuple[int, int, int | None], parts: list[tuple[str, Speed]]) -> Speed:
        """Decode with one batch in flight per stage, or fewer if there are fewer sequences."""
        depth, sequences, _ = key
        busy = min(stages, sequences)
        parts = slowest(concurrent(depth, -(-sequences // busy)) or parts)
        terms = summed([*named(parts, fleet.head.name), *linked(parts[0][1].sequences)])
        # the engine's own work on one batch overlaps with the computation of the others
        longest = max(sum(term.seconds for term in speed.terms if term.name != ENGINE) for _, speed in parts)
        idle = busy * longest - sum(term.seconds for term in terms)
        if idle > 0:
            terms = (*terms, Term("waiting for the slowest stage", idle))
        return Speed(sequences / sum(term.seconds for term in terms), depth, sequences, terms, lowest_confidence(parts))

    def prefill(key: tuple[int, int, int | None], parts: list[tuple[str, Speed]]) -> Speed:
        depth, _, ubatch = key
        tokens = ubatch or 1
        sent = [
            Term(term.name, term.seconds / tokens, term.bytes and term.bytes / tokens, term.gb_s)
            for term in linked(tokens)
        ]
        terms = summed([*named(slowest(parts), fleet.head.name), *sent])
        return Speed(1 / sum(term.seconds for term in terms), depth, 1, terms, lowest_confidence(parts), ubatch=ubatch)

    notes = ["every host reads the whole model: copy the files to each host or use a folder that all of them mount"]
    loads = [_cold_s(share) for share in shares]
    cold = None if None in loads else max(load for load in loads if load is not None)
    return Forecast(
        decode=tuple(joined({name: found.decode for name, found in alone.items()}, decode)),
        prefill=tuple(joined({name: found.prefill for name, found in alone.items()}, prefill)),
        load_cold_s=cold,
        load_warm_s=None,
        load_bound_by="disk" if cold is not None else None,
        notes=tuple(notes),
    )


def _cold_s(share: HostShare) -> float | None:
    rate = disk_gb_s(share.host.machine)
    return None if rate is None else share.part.bytes / rate / 1e9
