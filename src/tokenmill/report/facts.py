"""Sentences and tables that the page and the Markdown share. Pure; text only, nothing is escaped here."""

from collections.abc import Iterator, Sequence

from tokenmill.hardware.cpu import format_numbers
from tokenmill.hardware.machine import Gpu, Machine, PcieLink
from tokenmill.report.compare import typical_error
from tokenmill.report.front import throughput
from tokenmill.report.report import Comparison, ModelFacts, PlanFacts, Report, TierPicture
from tokenmill.report.svg import figure_text
from tokenmill.tuner.point import Figures, OperatingPoint, TrialSettings
from tokenmill.units import format_bytes, format_count, format_gb_s, format_seconds, number_of

UNKNOWN = "unknown"
_DEVICES = {"dram": "processors", "pmem": "processors"}
UNITS = (
    "Sizes are binary (GiB), bandwidths decimal (GB/s). Measured and predicted figures are marked as such; "
    "what is unknown is left out, never guessed."
)
Rows = list[tuple[str, str]]


def machine_rows(machine: Machine) -> Rows:
    """What the machine is."""
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
        cpus = [f"CPUs {format_numbers(node.cpus)}" if node.cpus else "no CPUs" for node in machine.numa]
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
    return [
        (
            tier.name,
            tier.kind,
            _size(tier.capacity_bytes),
            _size(tier.free_bytes),
            _rate(tier.nominal_gb_s),
            _measured_rate(tier.measured_gb_s),
        )
        for tier in machine.tiers()
    ]


def gpu_rows(machine: Machine) -> list[tuple[str, ...]]:
    """Each card: number, name, memory, bandwidth, link, power."""
    return [_gpu(gpu) for gpu in machine.gpus]


def link_rows(machine: Machine) -> list[tuple[str, ...]]:
    """Each kind of link: between what, nominal and measured bandwidth; equal ones are one row."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    for gpu in machine.gpus:
        ways = (f"dram->gpu{gpu.index}", f"gpu{gpu.index}->dram")
        rates = {way: machine.measured.gb_s(way) if machine.measured else None for way in ways}
        known = any(rate is not None for rate in rates.values())
        for way, rate in rates.items():
            key = f"PCIe {_link(gpu.pcie)}", _rate(gpu.pcie.nominal_gb_s), _measured_rate(rate)
            kinds.setdefault(key, []).append(way.replace("->", " → ") if known else f"dram ↔ gpu{gpu.index}")
    for link in machine.nvlinks:
        key = f"NVLink x{_known(link.links)}", _rate(link.nominal_gb_s), "not measured"
        kinds.setdefault(key, []).append(f"gpu{link.gpus[0]} ↔ gpu{link.gpus[1]}")
    rows: list[tuple[str, ...]] = []
    for kind, ends in kinds.items():
        each = list(dict.fromkeys(ends))
        rows.append((", ".join(each) if len(each) < 4 else f"{each[0]} to {each[-1]}, {len(each)} links", *kind))
    return rows


def model_rows(model: ModelFacts) -> Rows:
    """What the model is."""
    active = model.active_parameters < 0.95 * model.parameters
    rows = [
        (
            "parameters",
            format_count(model.parameters)
            + (f", {format_count(model.active_parameters)} active for a token" if active else ""),
        ),
        ("size", format_bytes(model.bytes) + (f", {model.quantisation}" if model.quantisation else "")),
        (
            "architecture",
            f"{model.architecture}, {model.layers} layers"
            + (f", {model.experts_used} of {model.experts} experts" if model.experts else ""),
        ),
    ]
    if model.training_context:
        rows.append(("trained for", f"{model.training_context:,} tokens"))
    return rows


def plan_rows(plan: PlanFacts) -> Rows:
    """What the plan sets."""
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
        ("layers computed on", ", ".join(f"{_DEVICES.get(name, name)}: {count}" for name, count in plan.layers_on)),
    ]
    if predicted:
        by = f", bound by {plan.load_bound_by}" if plan.load_bound_by else ""
        rows.append(("load, predicted", predicted + by))
    if plan.load_s is not None and plan.loaded is not None:
        rows.append(("load, measured", f"{format_seconds(plan.load_s)}, {(plan.loaded.when or '')[:10]}"))
    return rows


def planned_sizes(tier: TierPicture) -> dict[str, int]:
    """What a plan puts into a memory, and what it leaves."""
    free = {} if tier.free_bytes is None else {"free": tier.free_bytes}
    return {part.item: part.bytes for part in tier.planned} | free


def dial_rows(dials: TrialSettings) -> Rows:
    """An operating point's settings."""
    rows = [
        ("threads", f"{dials.threads} to decode, {dials.threads_batch} for prefill"),
        ("sequences at once", str(dials.sequences)),
        ("context", f"{dials.context:,} tokens each"),
        ("micro-batch", f"{dials.ubatch} tokens"),
        (
            "cache",
            f"K {dials.cache_type_k}, V {dials.cache_type_v}, "
            f"flash attention {'on' if dials.flash_attention else 'off'}",
        ),
        ("loading", f"mmap {'on' if dials.mmap else 'off'}, repack {'on' if dials.repack else 'off'}"),
    ]
    if dials.offload_min_batch is not None:
        rows.append(("offload", f"to the GPU from {dials.offload_min_batch} rows"))
    return rows


def figure_rows(figures: Figures) -> Rows:
    """What was measured at an operating point."""
    speeds = (
        ("decode, all sequences", figures.decode_tok_s),
        ("prefill", figures.prefill_tok_s),
        ("jobs, prompts included", figures.jobs_tok_s),
    )
    rows = [(name, f"{figure_text(value)} tok/s") for name, value in speeds if value is not None]
    if figures.first_token_s is not None:
        rows.append(("first token beside a full batch", f"{figures.first_token_s:.2f} s"))
    if figures.joules_per_token is not None:
        rows.append(("energy", f"{figures.joules_per_token:.2f} J per token"))
    sizes = (("host memory", figures.host_bytes), ("GPU memory", figures.gpu_bytes))
    return rows + [(name, format_bytes(size)) for name, size in sizes if size]


def point_words(point: OperatingPoint) -> str:
    """Where an operating point holds, and what it took to find it."""
    return (
        f"{_measured(point)}; aim: {point.aim.kind}; {number_of(len(point.trials), 'trial')}, "
        f"{number_of(point.loads, 'load')}, noise {100 * point.noise:.1f} %"
    )


def front_rows(point: OperatingPoint) -> list[tuple[str, ...]]:
    """The Pareto front: dials and what they give."""
    shown: list[tuple[str, ...]] = []
    for trial in point.front:
        found = throughput(trial.figures)
        dials = trial.dials
        figures = trial.figures
        shown.append(
            (
                str(dials.threads),
                str(dials.sequences),
                str(dials.ubatch),
                f"{dials.context:,}",
                figure_text(found[1]) if found else "",
                "" if figures.first_token_s is None else f"{figures.first_token_s:.2f}",
                "" if figures.joules_per_token is None else f"{figures.joules_per_token:.2f}",
                "chosen" if dials == point.dials else "",
            )
        )
    return shown


FRONT_HEAD = ("threads", "sequences", "ubatch", "context", "tok/s", "first token, s", "J/token", "")


def amount(value: float, unit: str) -> str:
    """A figure with its unit."""
    if unit == "bytes":
        return format_bytes(round(value))
    return format_seconds(value) if unit == "s" else f"{figure_text(value)} {unit}"


def error_text(error: float | None) -> str:
    """`+3.1 %`: predicted too much."""
    return "" if error is None else f"{100 * error:+.1f} %"


def headline(report: Report) -> Iterator[tuple[str, str, str]]:
    """The few figures at the top: name, figure, where it is from."""
    plan = report.plan
    point = report.point
    if plan is not None:
        words = "predicted, with reserves" if plan.fits else "predicted: see what would make it fit"
        yield "fits", "yes" if plan.fits else "no", words
    if point is not None and (found := throughput(point.figures)) is not None:
        yield f"{found[0]}, {point.dials.sequences} at once", f"{figure_text(found[1])} tok/s", _measured(point)
    measured = _alone(report, "decode-depth")
    if measured is not None:
        yield "decode, one sequence", f"{figure_text(measured[0])} tok/s", measured[1]
    elif plan is not None and plan.decode_tok_s is not None:
        yield "decode, one sequence", f"{figure_text(plan.decode_tok_s)} tok/s", f"predicted, {plan.confidence}"
    prefill = _alone(report, "prefill-depth")
    if prefill is not None:
        yield "prefill", f"{figure_text(prefill[0])} tok/s", prefill[1]
    elif plan is not None and plan.prefill_tok_s is not None:
        yield "prefill", f"{figure_text(plan.prefill_tok_s)} tok/s", f"predicted, {plan.confidence}"
    if report.soaked is not None and report.soaked.usable_context is not None:
        yield "usable context", f"{report.soaked.usable_context:,}", report.soaked.origin.words
    computed = sum(batch.computed_tokens for batch in report.reuse)
    reused = sum(batch.reused_tokens for batch in report.reuse)
    if computed + reused:
        words = f"measured by the engines in {number_of(len(report.reuse), 'batch', 'batches')}"
        yield "prompt tokens reused", f"{100 * reused / (computed + reused):.0f} %", words
    error = typical_error(speeds_of(report.comparisons))
    if error is not None:
        count = len(speeds_of(report.comparisons))
        yield "typical error of speeds", f"{100 * error:.0f} %", f"median of {count} predicted against measured"


def speeds_of(found: Sequence[Comparison]) -> list[Comparison]:
    """Comparisons of speeds."""
    return [each for each in found if each.unit == "tok/s"]


def shared_words(lists: Sequence[str]) -> str:
    """Of words with commas between them, those that are in every list."""
    parts = [words.split(", ") for words in lists]
    return ", ".join(part for part in parts[0] if all(part in each for each in parts)) if parts else ""


def without(words: str, shared: str) -> str:
    """Words without those that are said elsewhere."""
    gone = set(shared.split(", "))
    return ", ".join(part for part in words.split(", ") if part not in gone)


def _measured(point: OperatingPoint) -> str:
    return f"measured on {point.place.machine}, {point.place.build}, {point.when[:10]}"


def _alone(report: Report, key: str) -> tuple[float, str] | None:
    """The shallowest measured figure of a depth curve."""
    lines = [line for curve in report.depth if curve.key == key for line in curve.lines]
    line = next((line for line in lines if line.origin.kind == "measured" and line.dots), None)
    if line is None:
        return None
    return line.dots[0].y, f"{line.origin.words}, at depth {line.dots[0].x:g}"


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
