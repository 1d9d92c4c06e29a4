"""`tokenmill plan --compare`: one row for each value of a setting, quantization or machine."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.table import Table
from rich.text import Text

from tokenmill.api.options import EngineOptions
from tokenmill.api.planning.plan import locate, plan_engine
from tokenmill.cli.options import parse_tokens
from tokenmill.cli.output import show, show_json
from tokenmill.cli.views.plan import document
from tokenmill.config import Config
from tokenmill.errors import UsageError
from tokenmill.hardware.catalog import names
from tokenmill.launch.tensor_patterns import tiers_by_pattern
from tokenmill.model import catalog, derived
from tokenmill.model.tensor_types import CACHE_TYPES
from tokenmill.planner.plan import JobTime, Plan
from tokenmill.planner.speed.job_time import ANSWER_TOKENS
from tokenmill.units import GIB, format_seconds

MIN_CONTEXT = 256
REFERENCE_PROMPT = 4096  # length of the job that is compared, or the nearest shorter one
_NUMBERS = ("context", "sequences", "ubatch", "batch", "threads", "threads-batch")
_NAMES = ("cache-type", "engine", "machine", "quantization")
_HINT = "for example --compare threads=12,14,16, --compare 8k,32k or --compare Q4_K_S,Q4_K_M"


def compare(model: str, options: EngineOptions, what: str, config: Config, *, json: bool) -> int:
    """Plan the model once for every value in `what` and show the plans as one table."""
    plans = list(_plans(model, options, what, config))
    if json:
        documents = [document(made, tiers_by_pattern(made.placement, made.profile), None) for _, made in plans]
        show_json([{"variant": name, **found} for (name, _), found in zip(plans, documents, strict=True)])
        return 0
    table = Table(box=None, pad_edge=False)
    table.add_column("", overflow="fold")
    for column in ("fits", "weights", "GPU", "host", "decode", "at full", "prefill", "one job"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, made in plans:
        table.add_row(name, *_cells(made))
    prompts = {job.prompt_tokens for _, made in plans if (job := _reference(made.forecast.jobs))}
    lengths = " or ".join(f"{prompt:,}" for prompt in sorted(prompts))
    legend = f"; one job: {lengths} tokens in, {ANSWER_TOKENS} out" if prompts else ""
    show(table, Text(f"GiB at full context, reserves included; decode and prefill in tok/s, forecast{legend}"))
    return 0


def _cells(made: Plan) -> Iterator[str]:
    yield "yes" if made.fits else "NO"
    tiers = made.machine.tiers()
    yield f"{made.profile.bytes / GIB:.1f}"
    for kinds in (("vram",), ("dram", "pmem")):
        yield f"{sum(made.ledger.total(tier.name) for tier in tiers if tier.kind in kinds) / GIB:.1f}"
    alone = [speed.tok_s for speed in made.forecast.decode if speed.sequences == 1]
    job = _reference(made.forecast.jobs)
    prefill = job.prefill_tok_s if job else made.forecast.prefill_tok_s
    for rate in (alone[0] if alone else None, alone[-1] if alone else None, prefill):
        yield "?" if rate is None else f"{rate:.3g}" if rate < 1000 else f"{rate:.0f}"
    yield "?" if job is None else format_seconds(job.prefill_s + job.decode_s)


def _reference(jobs: Sequence[JobTime]) -> JobTime | None:
    """The compared job: the longest up to `REFERENCE_PROMPT`, else the shortest."""
    return next((job for job in reversed(jobs) if job.prompt_tokens <= REFERENCE_PROMPT), jobs[0] if jobs else None)


def _plans(model: str, options: EngineOptions, what: str, config: Config) -> Iterator[tuple[str, Plan]]:
    setting, equals, listed = what.rpartition("=")
    parts = [part.strip() for part in listed.split(",") if part.strip()]
    if not parts:
        raise UsageError("--compare requires a list", hint=_HINT)
    if equals and setting.strip() not in (*_NUMBERS, *_NAMES):
        known = ", ".join((*_NUMBERS, *_NAMES))
        raise UsageError(f"--compare cannot vary {setting.strip()!r}", hint=f"use one of {known}")
    located = locate(model, config, remote=True)
    config_json = derived.reference(located)
    base = located.partition(":")[0] if config_json is None else config_json.where
    for part in parts:
        field = setting.strip() or _recognized(part, base, model)
        yield _planned(field, part, model, base, options, config)


def _recognized(part: str, base: str, model: str) -> str:
    """The setting of a value without a name."""
    if part[0].isdigit():
        return "context"
    if part in names() or part == "this" or part.endswith(".toml"):
        return "machine"
    if part in CACHE_TYPES:  # quantizations of models are written in capitals
        return "cache-type"
    if catalog.looks_like_name(base) or derived.reference(base) is not None:
        return "quantization"
    raise UsageError(
        f"--compare: {part!r} is not a context length, a machine, a cache type or a quantization of {model}", hint=_HINT
    )


def _planned(field: str, part: str, model: str, base: str, options: EngineOptions, config: Config) -> tuple[str, Plan]:
    """The plan with one value, and its name in the table."""
    if field == "quantization":
        return part, plan_engine(f"{base}:{part}", options, config, files=False).plan
    value = parse_tokens(part, f"--compare {field}") if field in _NUMBERS else part
    if field == "context" and isinstance(value, int) and value < MIN_CONTEXT:
        raise UsageError(
            f"--compare: a context must be at least {MIN_CONTEXT} tokens (got {part})",
            hint="numbers are context lengths, such as 8k,32k; other settings have a name, such as threads=12,14",
        )
    name = part if field == "machine" else f"{field} {part}"
    changed: dict[str, Any] = {field.replace("-", "_"): value}
    return name, plan_engine(model, replace(options, **changed), config, files=False).plan
