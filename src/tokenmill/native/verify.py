"""Compares a plan's memory with llama.cpp's own projection for the same model, item by item.

`request` turns a plan into a dry run and `compare` compares its result with the plan's ledger; both are pure. `verify`
runs it. If the plan uses GPUs that the installed llama.cpp does not support, weights and cache are compared as sums
over all tiers, and compute buffers are not compared.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenmill.engine.fit_params import Buffer, run_dry, run_fit_params
from tokenmill.errors import UsageError
from tokenmill.model.profile import Profile, TensorClass
from tokenmill.native.llama.dry_run import ContextProjection, DryRun, project
from tokenmill.planner.memory.drafting import draft_context
from tokenmill.planner.memory.kv_cells import context_of
from tokenmill.planner.plan import Item, Placement, Plan
from tokenmill.units import MIB

ComparedItem = Literal["weights", "kv", "compute", "repack", "draft"]
ITEMS: tuple[ComparedItem, ...] = ("weights", "kv", "compute", "repack")
# What must hold: (share of the projection, or bytes, whichever is more).
TOLERANCE: dict[ComparedItem, tuple[float, int]] = {
    "weights": (0.001, 0),
    "kv": (0.001, 0),
    "compute": (0.1, 64 * MIB),
    "repack": (0.001, 0),
    "draft": (0.1, 64 * MIB),
}
# The engine's words for what the ledger counts in finer items.
_LEDGER_ITEMS: dict[ComparedItem, tuple[Item, ...]] = {
    "weights": ("weights",),
    "kv": ("kv",),
    "compute": ("compute", "staging"),
    "repack": ("repack",),
    "draft": ("draft",),
}
HOST = "host"
ALL = "all"
FIT_PARAMS = "llama-fit-params"
# Flags of a server that a program for memory does not know: how many values each takes.
SERVING = {"--alias": 1, "--host": 1, "--port": 1, "--jinja": 0, "--metrics": 0, "--cache-ram": 1, "--fit": 1}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One item of one tier: predicted by the plan, projected by the engine."""

    tier: str  # gpu0, ...; host: all memory except the GPUs'; all: all memory
    item: ComparedItem
    predicted_bytes: int
    projected_bytes: int

    @property
    def difference(self) -> float | None:
        """Relative error of the prediction; None if nothing was projected."""
        return self.predicted_bytes / self.projected_bytes - 1 if self.projected_bytes else None

    @property
    def agrees(self) -> bool:
        """Whether the prediction is within the tolerance."""
        share, least = TOLERANCE[self.item]
        return abs(self.predicted_bytes - self.projected_bytes) <= max(share * self.projected_bytes, least)


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of verifying a plan."""

    rows: tuple[Comparison, ...]
    library: str  # path of the llama.cpp that made the projection
    version: str
    source: Literal["breakdown", "log"]
    notes: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether every row agrees."""
        return all(row.agrees for row in self.rows)


def verify(
    plan: Plan,
    model: Path,
    *,
    library: Path | None = None,
    header: Path | None = None,
    outputs: int | None = None,
    unified: bool = True,
) -> Verification:
    """Compare a plan with a dry run of llama.cpp on the model file, which may be header-only.

    `outputs` and `unified` are requested by the plan's engine in addition to its settings: logits kept per batch (None:
    all), and one cache for all sequences.
    """
    if plan.settings.engine != "llama.cpp":
        raise UsageError(
            f"a plan for {plan.settings.engine} cannot be verified by llama.cpp",
            hint="plan for --engine llama.cpp, or run that engine's own dry run",
        )
    gpus = plan.placement.gpus
    wanted = request(plan, outputs=outputs, unified=unified)
    notes: list[str] = []
    summed = False
    if gpus:
        about = project(model, DryRun((), gpus=wanted.gpus), library=library, header=header)
        there = sum(1 for name in about.devices if Buffer(name).gpu is not None)
        if there < len(gpus):
            notes.append(
                f"this llama.cpp sees {there or 'no'} GPU{'s' * (there != 1)}, the plan uses {len(gpus)}:"
                " sums over all memories are compared, and no compute buffers"
            )
            wanted = DryRun(wanted.contexts, repack=wanted.repack, mtp=wanted.mtp)
            summed = True
    answer = project(model, wanted, library=library, header=header)
    found = answer.contexts[0]
    if found.source == "log":
        notes.append("sizes are from the log, to a hundredth of a MiB; weights are one sum")
        summed = True
    rows = compare(plan, found, summed=summed)
    if len(answer.contexts) > 1 and not summed:
        rows = (*rows, *_compare_draft(plan, answer.contexts[1]))
    return Verification(rows, answer.library, answer.version, found.source, tuple(notes))


def verify_by_binary(plan: Plan, argv: Sequence[str], binary: str) -> Verification:
    """Compare a plan with the engine's own program: `llama-fit-params`, or ik_llama.cpp's server with `--dry-run`.

    `argv` is the plan as it is spelled for that engine. ik_llama.cpp allocates what it logs, so it needs the memory.
    """
    arguments = _without_serving(argv[1:])
    if plan.settings.engine.startswith("ik_llama"):
        buffers = run_dry(binary, arguments)
        tool = binary
    else:
        path = Path(binary)
        tool = binary if path.name == FIT_PARAMS else str(path.with_name(FIT_PARAMS))
        buffers = run_fit_params(tool, arguments)
    found = ContextProjection(buffers, 0, "log")
    return Verification(compare(plan, found), tool, Path(tool).name, "log", ("sizes are from the program's own text",))


def _without_serving(arguments: Sequence[str]) -> list[str]:
    """A server's arguments without those that do not affect memory."""
    kept = []
    skip = 0
    for word in arguments:
        if skip:
            skip -= 1
        elif word in SERVING:
            skip = SERVING[word]
        else:
            kept.append(word)
    return kept


def request(plan: Plan, *, outputs: int | None = None, unified: bool = True) -> DryRun:
    """The dry run of a plan: its context, and its placement as llama.cpp's parameters."""
    placement = plan.placement
    profile = plan.profile
    gpus = placement.gpus
    context = context_of(plan.settings, outputs=outputs, unified=unified)
    mtp = plan.settings.mtp
    contexts = (context, draft_context(plan.settings, prediction=True)) if mtp else (context,)
    if not gpus:
        return DryRun(contexts, repack=plan.settings.repack, mtp=mtp)
    # Multi-token-prediction layers are numbered between the last layer and the output.
    idle = 1 + max((tensor.layer for tensor in profile.tensors if tensor.layer is not None), default=-1)
    idle = max(0, idle - len(placement.layers))
    counts = [sum(1 for tier in placement.layers if tier == gpu) for gpu in gpus]
    last = gpus.index(placement.head) if placement.head in gpus else len(gpus) - 1
    counts[last] += idle + 1
    return DryRun(
        contexts,
        repack=plan.settings.repack,
        mtp=mtp,
        gpus=tuple(int(gpu[3:]) for gpu in gpus),
        gpu_layers=sum(counts),
        tensor_split=tuple(float(count) for count in counts),
        overrides=overrides(profile, placement, mtp=mtp),
    )


def overrides(profile: Profile, placement: Placement, *, mtp: bool = False) -> tuple[tuple[str, str], ...]:
    """Patterns for tensors that are not stored on the device that computes with them."""
    names = {gpu: f"GPU{index}" for index, gpu in enumerate(placement.gpus)}
    elsewhere: dict[tuple[str, str], list[int]] = {}  # (short name, device) -> layers
    patterns = []
    for tensor, home in zip(profile.tensors, placement.homes, strict=True):
        computed = names.get(placement.device_of(tensor), "CPU")
        device = names.get(home, "CPU")
        idle = tensor.cls is TensorClass.MTP and not mtp
        if device == computed or tensor.cls is TensorClass.EMBEDDING or idle:
            continue  # llama.cpp keeps embeddings on the host and skips prediction layers itself
        if tensor.layer is None:
            patterns.append((f"^{re.escape(tensor.name)}$", device))
        else:
            short = tensor.name.split(f"blk.{tensor.layer}.", 1)[-1]
            elsewhere.setdefault((short, device), []).append(tensor.layer)
    for (short, device), layers in elsewhere.items():
        patterns.append((rf"^blk\.({'|'.join(map(str, layers))})\.{re.escape(short)}$", device))
    return tuple(patterns)


def compare(plan: Plan, found: ContextProjection, *, summed: bool = False) -> tuple[Comparison, ...]:
    """Compare the plan's ledger at full context with a projection; `summed` over all tiers."""
    gpus = plan.placement.gpus
    buffers = found.buffers  # without the logits, which the ledger counts as memory of the process
    if summed:
        items: tuple[ComparedItem, ...] = ("weights", "kv") if gpus else ("weights", "kv", "compute")
        return tuple(Comparison(ALL, item, _predicted(plan, None, item), _projected(buffers, item)) for item in items)
    rows = []
    for position, tier in ((None, HOST), *enumerate(gpus)):
        mine = [buffer for buffer in buffers if buffer.gpu == position]
        for item in ITEMS:
            predicted = _predicted(plan, tier, item)
            projected = _projected(mine, item)
            # Repacked weights are a second copy, and so an item of the ledger, only if the file stays mapped.
            if predicted or (projected and item != "repack"):
                rows.append(Comparison(tier, item, predicted, projected))
    return tuple(rows)


def _compare_draft(plan: Plan, found: ContextProjection) -> Iterator[Comparison]:
    """Compare the cache and the buffer of the context that drafts tokens, where its layers are."""
    for position, tier in ((None, HOST), *enumerate(plan.placement.gpus)):
        if predicted := _predicted(plan, tier, "draft"):
            mine = [buffer for buffer in found.buffers if buffer.gpu == position]
            yield Comparison(tier, "draft", predicted, _projected(mine, "kv") + _projected(mine, "compute"))


def _predicted(plan: Plan, tier: str | None, item: ComparedItem) -> int:
    def counts(name: str) -> bool:
        return tier is None or name == tier or (tier == HOST and not name.startswith("gpu"))

    return sum(row.bytes for row in plan.ledger.full_context if row.item in _LEDGER_ITEMS[item] and counts(row.tier))


def _projected(buffers: Sequence[Buffer], item: ComparedItem) -> int:
    if item == "kv":
        return sum(buffer.context_bytes for buffer in buffers)
    if item == "compute":
        return sum(buffer.compute_bytes for buffer in buffers)
    return sum(buffer.model_bytes for buffer in buffers if item == "weights" or buffer.name == "CPU_REPACK")
