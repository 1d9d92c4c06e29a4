"""Finds problems of a command on a given machine: cores, overfull GPUs, overrides that match nothing."""

import re
from collections import Counter
from collections.abc import Iterator

from tokenmill.errors import NotSpellable, UsageError
from tokenmill.hardware.machine import Machine
from tokenmill.launch.parse.findings import by_severity
from tokenmill.launch.parse.parsed import Finding, ReadCommand
from tokenmill.launch.parse.placement import to_placement
from tokenmill.launch.tensor_patterns import patterns, resolve
from tokenmill.model.profile import Profile
from tokenmill.planner.plan import Placement
from tokenmill.units import format_bytes

LOPSIDED = 2.0  # minimum ratio between the fullest and the emptiest GPU for a finding


def findings_for(read: ReadCommand, machine: Machine, profile: Profile | None = None) -> tuple[Finding, ...]:
    """All findings for a command on a machine, those from the command alone included."""
    return by_severity((*read.findings, *_machine(read, machine), *(_model(read, machine, profile) if profile else ())))


def _machine(read: ReadCommand, machine: Machine) -> Iterator[Finding]:
    yield from _threads(read, machine)
    gpus = _gpu_count(read, machine)
    named = read.named_gpus or 0
    if not read.goal.cpu_only and named > gpus:
        yield Finding("error", f"the command uses {named} GPUs, but {machine.name} has {gpus}", None)
    nodes = [node for node in machine.numa if node.cpus]
    bound = read.numactl or read.options.has("--numa") or (read.container and read.container.all_of("cpuset-mems"))
    if len(nodes) > 1 and not bound and (read.goal.cpu_only or read.hybrid):
        yield Finding(
            "warning",
            f"{machine.name} has {len(nodes)} NUMA nodes, but the command sets no memory policy: two sockets can then "
            "be three times slower than one",
            "use numactl --interleave=all, or bind to one node that fits the model",
        )
    limit = machine.limits.memlock_bytes
    if read.goal.mlock and read.container is None and limit is not None:
        yield Finding(
            "warning", f"the memlock limit is {format_bytes(limit)}: mlock will fail", "set ulimit -l unlimited"
        )


def _threads(read: ReadCommand, machine: Machine) -> Iterator[Finding]:
    cores = machine.cpu.cores
    per_core = machine.cpu.threads_per_core or 1
    if cores is None:
        return
    for flag, threads in (("--threads", read.goal.threads), ("--threads-batch", read.goal.threads_batch)):
        if threads is None or threads <= cores:
            continue
        if threads > cores * per_core:
            text = f"{flag} {threads} is more than the {cores * per_core} CPUs: threads wait for each other"
            yield Finding("warning", text, f"use {flag} {cores} or fewer")
        elif flag == "--threads":
            text = (
                f"{flag} {threads} is more than the {cores} cores: decoding is limited by memory bandwidth, not threads"
            )
            yield Finding("warning", text, f"use {flag} {cores} or fewer")
        else:
            yield Finding(
                "note", f"{flag} {threads} uses both threads of {cores} cores, which may only speed up prefill"
            )


def _model(read: ReadCommand, machine: Machine, profile: Profile) -> Iterator[Finding]:
    trained = profile.training_context
    if trained is not None and read.slot_tokens is not None and read.slot_tokens > trained:
        text = f"a slot of {read.slot_tokens} tokens is longer than the {trained} that {profile.name} was trained on"
        yield Finding("warning", text, f"use -c {trained * (1 if read.unified else read.slots)}")
    if read.engine == "vllm" or not read.explicit or read.goal.cpu_only:
        return
    yield from _unused_overrides(read, profile)
    count = _gpu_count(read, machine)
    try:
        placement = to_placement(read, profile, count, free_bytes=free_of(read, machine))
    except UsageError as error:
        yield Finding("error", error.message, error.hint)
        return
    yield from _lopsided(read, profile, placement, count)
    yield from _shorter(read, profile, placement)


def _unused_overrides(read: ReadCommand, profile: Profile) -> Iterator[Finding]:
    written = {device for _, device in read.overrides}
    if not read.options.has("--override-tensor") or not written:
        return
    reached: Counter[int] = Counter()
    numbered = [(regex, str(index)) for index, (regex, _) in enumerate(read.overrides)]
    for tensor in profile.tensors:
        first = resolve(tensor.name, numbered)
        if first is not None:
            reached[int(first)] += 1
    for index, (regex, device) in enumerate(read.overrides):
        if not reached[index]:
            yield Finding(
                "warning",
                f"the override {regex}={device} places no tensor of {profile.name}",
                "it matches none, or earlier overrides match all of them",
            )


def _lopsided(read: ReadCommand, profile: Profile, placement: Placement, count: int) -> Iterator[Finding]:
    """A finding if one GPU gets far more weights than another."""
    held = {f"gpu{index}": 0 for index in (read.goal.gpus or range(count))}
    for tensor, home in zip(profile.tensors, placement.homes, strict=True):
        if home in held:
            held[home] += tensor.bytes
    if len(held) < 2 or max(held.values()) <= LOPSIDED * min(held.values()):
        return
    fullest = max(held, key=held.__getitem__)
    emptiest = min(held, key=held.__getitem__)
    why = ""
    if read.cpu_moe_layers and not read.options.has("--cpu-moe"):
        why = f"--n-cpu-moe {read.cpu_moe_layers} only moves the experts of the first layers: "
    yield Finding(
        "warning",
        f"{why}{fullest} holds {format_bytes(held[fullest])} of weights, {emptiest} {format_bytes(held[emptiest])}",
        "distribute the experts with --override-tensor; tokenmill plan writes the clauses",
    )


def _shorter(read: ReadCommand, profile: Profile, placement: Placement) -> Iterator[Finding]:
    """A finding if fewer clauses give the same placement."""
    try:
        clauses = patterns(placement, profile, output_first=not read.fork)
    except NotSpellable:
        return
    if len(clauses) * 2 > len(read.overrides) or not read.options.has("--override-tensor"):
        return
    gpus = [f"gpu{index}" for index in (read.goal.gpus or range(len(placement.gpus)))]
    prefix = next((re.sub(r"\d+$", "", device) for _, device in read.overrides if device != "CPU"), "CUDA")
    text = ",".join(
        f"{regex}={prefix}{gpus.index(tier)}" if tier in gpus else f"{regex}=CPU" for regex, tier in clauses
    )
    yield Finding(
        "note", f"{len(clauses)} overrides would replace the {len(read.overrides)} of the command", f"use -ot '{text}'"
    )


def _gpu_count(read: ReadCommand, machine: Machine) -> int:
    return len(read.goal.gpus) if read.goal.gpus is not None else len(machine.gpus)


def free_of(read: ReadCommand, machine: Machine) -> tuple[int, ...]:
    """Free memory of the GPUs in the engine's order, which is the default split without -ts; empty: unknown."""
    by_index = {gpu.index: gpu.free_bytes or gpu.vram_bytes for gpu in machine.gpus}
    found = [by_index.get(index) for index in (read.goal.gpus if read.goal.gpus is not None else by_index)]
    return tuple(size for size in found if size is not None) if None not in found else ()
