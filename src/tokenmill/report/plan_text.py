"""Sentences and table rows about a machine, a model and a plan, for both templates. Pure; plain text, not escaped."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from tokenmill.hardware.machine import Gpu, Machine, PcieLink
from tokenmill.planner.plan import Shortfall
from tokenmill.report.compare import SHOWN
from tokenmill.report.report import (
    Loaded,
    ModelFacts,
    PlanFacts,
    ReportPage,
    TierPicture,
)
from tokenmill.units import format_bytes, format_count, format_gb_s, format_ranges, format_seconds, format_tok_s

UNKNOWN = "unknown"
_DEVICES = {"dram": "CPU", "pmem": "CPU"}
UNITS = (
    "Sizes are binary (GiB), bandwidths decimal (GB/s). Figures are marked as measured or predicted; "
    "unknown ones are left out."
)
NAMES = {
    "weights": "weights",
    "kv": "KV cache",
    "compute": "compute",
    "draft": "draft",
    "staging": "staging",
    "repack": "repack",
    "prompt_cache": "prompt cache",
    "runtime": "runtime",
    "reserve": "reserve",
    "output": "output",
    "page_cache": "page cache",
    "free": "free",
    "computed": "computed",
    "reused": "reused",
}
TIER_HEAD = ("memory", "kind", "size", "free", "nominal", "measured")
GPU_HEAD = ("GPU", "name", "memory", "nominal", "PCIe", "limit")
LINK_HEAD = ("between", "link", "nominal", "measured")
Rows = list[tuple[str, str]]
TierTable = tuple[list[str], list[tuple[str, list[str]]], list[str]]
"""Column names, rows of items with their sizes, and the peaks while loading."""


def subtitle(report: ReportPage) -> str:
    """The model's quantization and size."""
    model = report.model
    if model is None:
        return "the machine and its batches"
    header = "header only, without weights" if model.ghost else None
    return ", ".join(part for part in (model.quantisation, format_bytes(model.bytes), header) if part)


def verdict(report: ReportPage) -> str | None:
    """The answer in one sentence: whether the model fits, its speed, the time of a job and the usable context."""
    plan = report.plan
    if plan is None:
        return None
    if not plan.fits:
        lacks = "; ".join(f"{lack.tier} is {format_bytes(lack.missing_bytes)} short" for lack in plan.shortfalls[:2])
        longest = plan.longest_context
        return f"Does not fit: {lacks}." + (f" The longest context that fits is {longest:,} tokens." if longest else "")
    parts = []
    if plan.decode_tok_s is not None:
        parts.append(f"{format_tok_s(plan.decode_tok_s)} tok/s for one sequence")
    if plan.jobs:
        job = plan.jobs[-1]
        parts.append(f"a prompt of {job.prompt_tokens:,} tokens takes {format_seconds(job.prefill_s)}")
    soaked = report.soaked.usable_context if report.soaked is not None else None
    parts.append(f"usable context {soaked:,}" if soaked else f"context {plan.settings.context:,}")
    origin = "predicted" if soaked is None else "speeds predicted, context measured"
    return f"Fits: {', '.join(parts)} ({origin})."


def made_words(report: ReportPage) -> str:
    """The date of the report, and its units."""
    return f"Made {report.made[:16].replace('T', ' ')} UTC by tokenmill {report.version}. {UNITS}"


def machine_rows(machine: Machine) -> Rows:
    """Processor, memory and system."""
    cpu = machine.cpu
    dram = machine.dram
    cores = f"{_known(cpu.sockets)} x " if (cpu.sockets or 1) > 1 else ""
    threads = f", {cpu.threads_per_core} threads each" if (cpu.threads_per_core or 1) > 1 else ""
    rows = [
        ("processor", f"{cores}{cpu.model or UNKNOWN}"),
        ("cores", f"{_known(cpu.cores)}{threads}; L3 {_size(cpu.l3_bytes)}"),
    ]
    if cpu.isa:
        rows.append(("instructions", " ".join(cpu.isa)))
    kind = ", ".join(
        part
        for part in (
            dram.kind,
            f"{dram.mts} MT/s" if dram.mts else None,
            f"{dram.channels} channels" if dram.channels else None,
        )
        if part
    )
    rows.append(("memory", f"{_size(dram.total_bytes)}" + (f", {kind}" if kind else "")))
    if machine.pmem is not None:
        mode = {"memory": "Memory Mode", "app-direct": "App Direct", "mixed": "both modes"}
        rows.append(("PMem", f"{_size(machine.pmem.total_bytes)}, {mode.get(machine.pmem.mode or '', 'mode unknown')}"))
    if len(machine.numa) > 1:
        cpus = [f"CPUs {format_ranges(node.cpus)}" if node.cpus else "no CPUs" for node in machine.numa]
        nodes = [
            f"{node.index}: {_size(node.memory_bytes)}, {words}" for node, words in zip(machine.numa, cpus, strict=True)
        ]
        rows.append(("NUMA nodes", "; ".join(nodes)))
    rows += [
        (
            "system",
            ", ".join(
                part
                for part in (
                    machine.os,
                    f"virtual machine ({machine.virtual})" if machine.virtual else None,
                    f"container ({machine.container})" if machine.container else None,
                )
                if part
            )
            or UNKNOWN,
        )
    ]
    return rows


def tier_rows(machine: Machine) -> list[tuple[str, ...]]:
    """Each memory: name, kind, capacity, free, nominal and measured bandwidth."""
    return folded(
        (
            tier.name,
            tier.kind,
            _size(tier.capacity_bytes),
            _size(tier.free_bytes),
            _rate(tier.nominal_gb_s),
            _measured_rate(tier.measured_gb_s),
        )
        for tier in machine.tiers()
    )


def folded(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The rows, with neighbours that differ only in their name in one row: gpu0 to gpu7."""
    groups = [list(group) for _, group in groupby(rows, key=lambda row: row[1:])]
    return [(_span([row[0] for row in group]), *group[0][1:]) for group in groups]


def folded_tiers(tiers: Sequence[TierPicture]) -> list[TierPicture]:
    """The memories, with neighbours that differ only in their name as one: gpu0 to gpu7 (each)."""
    groups = [list(group) for _, group in groupby(tiers, key=lambda tier: replace(tier, name=""))]
    return [
        group[0] if len(group) == 1 else replace(group[0], name=f"{_span([tier.name for tier in group])} (each)")
        for group in groups
    ]


def gpu_rows(machine: Machine) -> list[tuple[str, ...]]:
    """Each GPU: index, name, memory, bandwidth, PCIe link and power limit."""
    return folded(_gpu(gpu) for gpu in machine.gpus)


def link_rows(machine: Machine) -> list[tuple[str, ...]]:
    """Links with their nominal and measured bandwidth; equal links share a row."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    for gpu in machine.gpus:
        paths = (f"dram->gpu{gpu.index}", f"gpu{gpu.index}->dram")
        rates = {path: machine.measured.gb_s(path) if machine.measured else None for path in paths}
        known = any(rate is not None for rate in rates.values())
        for path, rate in rates.items():
            key = f"PCIe {_link(gpu.pcie)}", _rate(gpu.pcie.nominal_gb_s), _measured_rate(rate)
            kinds.setdefault(key, []).append(path.replace("->", " → ") if known else f"dram ↔ gpu{gpu.index}")
    for link in machine.nvlinks:
        key = f"NVLink x{_known(link.links)}", _rate(link.nominal_gb_s), "not measured"
        kinds.setdefault(key, []).append(f"gpu{link.gpus[0]} ↔ gpu{link.gpus[1]}")
    rows: list[tuple[str, ...]] = []
    for kind, ends in kinds.items():
        each = list(dict.fromkeys(ends))
        rows.append((", ".join(each) if len(each) < 4 else f"{each[0]} to {each[-1]}, {len(each)} links", *kind))
    return rows


def model_rows(model: ModelFacts) -> Rows:
    """Size and architecture."""
    active = model.active_parameters < 0.95 * model.parameters
    rows = [
        (
            "parameters",
            format_count(model.parameters)
            + (f", {format_count(model.active_parameters)} active per token" if active else ""),
        ),
        ("size", format_bytes(model.bytes) + (f", {model.quantisation}" if model.quantisation else "")),
        (
            "architecture",
            f"{model.architecture}, {model.layers} layers"
            + (f", {model.experts_used} of {model.experts} experts" if model.experts else ""),
        ),
    ]
    if model.training_context:
        rows.append(("training context", f"{model.training_context:,} tokens"))
    return rows


def plan_rows(plan: PlanFacts) -> Rows:
    """Settings and load time."""
    settings = plan.settings
    cache = settings.cache_type_k + (
        "" if settings.cache_type_v == settings.cache_type_k else f" / {settings.cache_type_v}"
    )
    prefill = "" if settings.threads_batch == settings.threads else f", {settings.threads_batch} for prefill"
    loads = [("cold", plan.load_cold_s), ("with a warm page cache", plan.load_warm_s)]
    predicted = ", ".join(f"{_time(seconds)} {words}" for words, seconds in loads if seconds)
    rows = [
        ("fits", "yes" if plan.fits else "no"),
        ("engine", settings.engine),
        ("sequences", f"{settings.sequences} x {settings.context:,} tokens"),
        ("cache", f"{cache}, flash attention {'on' if settings.flash_attention else 'off'}"),
        ("micro-batch", f"{settings.ubatch} tokens"),
        ("threads", f"{settings.threads}{prefill}"),
        ("layers on", ", ".join(f"{_DEVICES.get(name, name)}: {count}" for name, count in plan.layers_on)),
    ]
    if predicted:
        by = f"; limited by {plan.load_bound_by}" if plan.load_bound_by else ""
        rows.append(("load time, predicted", predicted + by))
    if plan.load_s is not None and plan.loaded is not None:
        rows.append(("load time, measured", f"{format_seconds(plan.load_s)}, {(plan.loaded.when or '')[:10]}"))
    return rows


def shortfall_words(shortfall: Shortfall) -> str:
    """Which memory is too small, by how much, and when."""
    when = "while loading" if shortfall.moment == "load_peak" else "at full context"
    return f"{shortfall.tier} is {format_bytes(shortfall.missing_bytes)} short {when}."


def change_words(plan: PlanFacts) -> list[str]:
    """Changes that would make the plan fit."""
    return [f"would fit with {change.what}: {change.effect}" for change in plan.changes]


def decision_rows(plan: PlanFacts) -> list[tuple[str, str, str]]:
    """Every decision of the planner with its reason."""
    return [(decision.name, decision.value, decision.reason) for decision in plan.decisions]


def tier_title(tier: TierPicture) -> str:
    """The name and bandwidth of a memory."""
    nominal = "" if tier.nominal_gb_s is None else f", {format_gb_s(tier.nominal_gb_s)} nominal"
    measured = "" if tier.measured_gb_s is None else f", {format_gb_s(tier.measured_gb_s)} measured"
    return f"{tier.name}{nominal}{measured}"


def load_caption(loaded: Loaded) -> str:
    """The settings and origin of the measured load."""
    return f"last load ({loaded.settings}): {loaded.origin.words}"


def planned_sizes(tier: TierPicture) -> dict[str, int]:
    """The planned bytes of each item in a memory, and the free bytes."""
    free = {} if tier.free_bytes is None else {"free": tier.free_bytes}
    return {part.item: part.bytes for part in tier.planned} | free


def tier_items(tier: TierPicture) -> list[str]:
    """The items of the plan and of the last load in a memory, in drawing order."""
    columns = _columns(tier)
    return [item for item in SHOWN if any(item in sizes for sizes in columns)]


def tier_columns(tier: TierPicture) -> TierTable:
    """The table of one memory: the plan, and the last load predicted and measured."""
    columns = _columns(tier)
    head = ["item", "planned", *(("predicted", "measured") if tier.loaded else ())]
    return head, _item_rows(columns), [format_bytes(tier.loading_bytes), *[""] * (len(columns) - 1)]


def all_tiers_columns(tiers: Sequence[TierPicture]) -> TierTable:
    """The table of all memories of a plan, one column for each."""
    head = ["planned", *(tier.name for tier in tiers)]
    return (
        head,
        _item_rows([planned_sizes(tier) for tier in tiers]),
        [format_bytes(tier.loading_bytes) for tier in tiers],
    )


def loaded_table(tier: TierPicture) -> tuple[list[str], list[list[str]]]:
    """`tier_columns` as column names and rows of text."""
    rows = [[NAMES[item], *sizes] for item, sizes in _item_rows(_columns(tier))]
    return ["item", "planned", "load, predicted", "load, measured"], rows


def _columns(tier: TierPicture) -> list[dict[str, int]]:
    loads = (tier.loaded.predicted, tier.loaded.measured) if tier.loaded else ()
    return [planned_sizes(tier), *({part.item: part.bytes for part in parts} for parts in loads)]


def _item_rows(columns: Sequence[dict[str, int]]) -> list[tuple[str, list[str]]]:
    items = [item for item in SHOWN if any(item in sizes for sizes in columns)]
    return [(item, [format_bytes(sizes[item]) if item in sizes else "" for sizes in columns]) for item in items]


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _gpu(gpu: Gpu) -> tuple[str, ...]:
    power = UNKNOWN if gpu.power_limit_w is None else f"{gpu.power_limit_w:.0f} W"
    return f"gpu{gpu.index}", gpu.name, _size(gpu.vram_bytes), _rate(gpu.nominal_gb_s), _link(gpu.pcie), power


def _link(pcie: PcieLink) -> str:
    generation = pcie.max_generation or pcie.generation
    width = pcie.max_width or pcie.width
    return UNKNOWN if generation is None or width is None else f"{generation}.0 x{width}"


def _size(count: int | None) -> str:
    return UNKNOWN if count is None else format_bytes(count)


def _rate(gb_s: float | None) -> str:
    return UNKNOWN if gb_s is None else format_gb_s(gb_s)


def _time(seconds: float) -> str:
    return "less than 0.1 s" if seconds < 0.1 else format_seconds(seconds)


def _measured_rate(gb_s: float | None) -> str:
    return "not measured" if gb_s is None else format_gb_s(gb_s)


def _known(value: object) -> str:
    return UNKNOWN if value is None else str(value)
