"""`tokenmill bench`: measures the speed of an engine through the path that requests take."""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, get_args

from cyclopts import Parameter
from rich.console import Console

from tokenmill.api.engines.choose import EngineChoice, plan_for
from tokenmill.api.planning.plan import EnginePlan
from tokenmill.cli.options import EngineFlags, ModelArgument, TokenCount
from tokenmill.cli.output import Common, say, show, show_json, show_text
from tokenmill.cli.progress import choose, opened
from tokenmill.cli.views.bench import document, render
from tokenmill.engine.engine import Engine
from tokenmill.errors import UsageError
from tokenmill.hardware.catalog import find
from tokenmill.hardware.identity import machine_id
from tokenmill.hardware.machine import Machine
from tokenmill.tuner import history
from tokenmill.tuner.bench.energy import Price, parse_price
from tokenmill.tuner.bench.rig import Rig, Tell, pids_of
from tokenmill.tuner.bench.run import PARTS, Bench, BenchOptions, BenchSection
from tokenmill.tuner.bench.run import bench as measure
from tokenmill.tuner.bench.served import Prose
from tokenmill.tuner.bench.sweep import thread_counts as usual_threads
from tokenmill.tuner.bench.tables import as_csv, as_markdown
from tokenmill.tuner.noise_monitor import NoiseMonitor
from tokenmill.tuner.point import PointScope

DEPTH = 2048
STEP = 512
MIN_GENERATED = 16
MAX_GENERATED = 128
BenchFormat = Literal["table", "json", "csv", "markdown"]


def bench(
    model: ModelArgument = None,
    *,
    what: Annotated[str | None, Parameter(metavar="LIST")] = None,
    depth: TokenCount = DEPTH,
    step: TokenCount | None = None,
    tokens: TokenCount | None = None,
    repeat: int = 3,
    thread_counts: Annotated[str | None, Parameter(metavar="LIST")] = None,
    sequence_counts: Annotated[str | None, Parameter(metavar="LIST")] = None,
    price: Annotated[str | None, Parameter(metavar="PRICE")] = None,
    watts: Annotated[float | None, Parameter(metavar="W")] = None,
    format: Annotated[BenchFormat, Parameter(name="--format")] = "table",
    options: EngineFlags = EngineFlags(),  # noqa: B008  frozen
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Benchmark an engine by depth, threads and sequences, with a cold and a warm cache.

    Requests take the same path as in production, to an engine that this command starts, to a running one (--engine
    NAME) or to a URL. T_PP is the time to the first token, T_TG the time from the first token to the last. Figures are
    medians, ± the largest deviation; disturbed runs are repeated. Forecasts of the plan have columns of their own.
    Undisturbed results of an engine that this command started are added to `tokenmill history`.

        tokenmill bench kimi.gguf --context 16k
        tokenmill bench --engine http://localhost:8000 --what sweep,cache --json

    Parameters
    ----------
    model:
        GGUF file, safetensors folder (vLLM) or name of a downloaded model. [default: smollm2]
    what:
        Comma-separated parts: first (the first request after start), cache (a prompt cold, repeated, and with a new
        suffix), sweep (by depth), threads, sequences, energy. [default: all]
    depth:
        Maximum depth of the sweep, in tokens.
    step:
        Tokens between depths. [default: the micro-batch size, as in llama-sweep-bench]
    tokens:
        Tokens generated at each point. [default: a quarter of the step, 16 to 128]
    repeat:
        Undisturbed runs of each point.
    thread_counts:
        Thread counts to measure, such as 4,8,12. [default: several, up to the machine's cores]
    sequence_counts:
        Numbers of concurrent sequences to measure, such as 1,2,4. [default: powers of two up to the engine's slots]
    price:
        Price of electricity, such as 0.30/kWh, to show the energy cost of a million tokens.
    watts:
        Power draw under load in watts, read from a wall meter, for machines without readable energy counters.
    format:
        Output format; csv has one line per point.
    """
    parts = _parts(what)
    if depth < 1 or repeat < 1 or (step is not None and step < 1) or (tokens is not None and tokens < 2):
        raise UsageError(
            "--depth, --step and --repeat must be at least 1, and --tokens at least 2",
            hint="omit them to use the defaults",
        )
    cost = parse_price(price) if price is not None else None
    if watts is not None and watts <= 0:
        raise UsageError("--watts must be greater than 0", hint="use the reading of a wall meter under load")
    threads = _counts(thread_counts, "--thread-counts")
    sequences = _counts(sequence_counts, "--sequence-counts")
    choice = choose(model, options, common)
    wanted = None
    if not (choice.record or choice.url):
        wanted = _planned(choice, options, common, parts, depth + (tokens or MAX_GENERATED))
    elif "first" in parts:
        parts = tuple(part for part in parts if part != "first")
        if what is not None:
            say("skipping part 'first': the engine was already running")
    step = step or (wanted.plan.settings.ubatch if wanted is not None else STEP)
    bench_options = BenchOptions(
        parts,
        depth,
        min(step, depth),
        tokens or min(MAX_GENERATED, max(MIN_GENERATED, step // 4)),
        threads or (),
        sequences,
        watts,
    )
    if wanted is not None and "sweep" in parts:
        _deep_enough(wanted.plan.settings.context, bench_options)
    done = asyncio.run(_work(choice, wanted, bench_options, repeat, common))
    _print_result(done, cost, "json" if common.json else format)
    return 0


def _planned(
    choice: EngineChoice, options: EngineFlags, common: Common, parts: tuple[BenchSection, ...], deep: int
) -> EnginePlan:
    """A plan with enough context. Sends no request, because the first one is measured."""
    asked = replace(options, warm=False) if "first" in parts and options.warm is None else options
    wanted = plan_for(choice, asked, common.load_config())
    if "sweep" in parts and options.context is None and wanted.plan.settings.context < deep:
        wanted = plan_for(choice, replace(asked, context=deep), common.load_config())
    return wanted


def _deep_enough(context: int, wanted: BenchOptions) -> None:
    """UsageError if the context is too small; called before the model is loaded."""
    needed = wanted.depth + wanted.tokens
    if needed > context:
        raise UsageError(
            f"a sweep to depth {wanted.depth:,} with {wanted.tokens} generated tokens needs a context of {needed:,} "
            f"(got {context:,})",
            hint=f"use --context {needed} or a smaller --depth",
        )


async def _work(
    choice: EngineChoice, wanted: EnginePlan | None, bench_options: BenchOptions, repeat: int, common: Common
) -> Bench:
    plan = wanted.plan if wanted is not None else None
    folder = choice.state / "bench" / str(os.getpid())  # names the engine: benchmarks may run concurrently
    async with opened(choice, wanted, folder) as engine:
        here = engine.identity.pid is not None
        machine = plan.machine if plan is not None else find(common.load_config().machine) if here else None
        if not bench_options.threads:
            cores = machine.cpu.cores if machine is not None else None
            bench_options = replace(bench_options, threads=usual_threads(cores or os.cpu_count() or 1))
        if plan is None:
            say("results are not added to the history: the settings of an engine that was already running are unknown")
        with _shown() as tell:
            rig = Rig(engine, Prose(engine, time.time_ns()), repeat, NoiseMonitor if pids_of(engine) else None, tell)
            return await measure(
                rig,
                bench_options,
                place_of(engine, choice, machine),
                plan=plan,
                record=lambda speed: history.append(choice.state, speed),
            )


def place_of(engine: Engine, choice: EngineChoice, machine: Machine | None) -> PointScope:
    """The machine, model and build that results apply to; for a remote server only its URL is known."""
    identity = engine.identity
    return PointScope(
        machine.name if machine is not None else identity.address,
        machine_id(machine) if machine is not None else "",
        _name(choice, identity.model),
        choice.model_id,
        identity.kind,
        identity.build,
    )


def _name(choice: EngineChoice, model: str) -> str:
    """The display name of a model: for a file, the name in its metadata."""
    return model if Path(choice.model).suffix or "/" in choice.model else choice.model


@contextmanager
def _shown() -> Iterator[Tell]:
    """Shows the current measurement: a status line on a terminal, else one line each."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield say
        return
    with console.status("measuring") as status:
        yield lambda words: status.update(f"measuring: {words}")


def _print_result(done: Bench, price: Price | None, format: BenchFormat) -> None:
    if format == "json":
        show_json(document(done, price))
    elif format == "csv":
        show_text(as_csv(done))
    elif format == "markdown":
        show_text(as_markdown(done, price))
    else:
        show(*render(done, price))


def _parts(what: str | None) -> tuple[BenchSection, ...]:
    if what is None:
        return PARTS
    named = [part.strip() for part in what.split(",") if part.strip()]
    known: tuple[str, ...] = get_args(BenchSection)
    wrong = [part for part in named if part not in known]
    if wrong or not named:
        raise UsageError(f"--what: unknown part {(wrong[0] if wrong else what)!r}", hint=f"known: {', '.join(known)}")
    return tuple(part for part in PARTS if part in named)


def _counts(text: str | None, option: str) -> tuple[int, ...] | None:
    if text is None:
        return None
    numbers = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in numbers):
        raise UsageError(f"{option} must be comma-separated numbers (got {text!r})", hint=f"for example {option} 1,2,4")
    return tuple(dict.fromkeys(int(part) for part in numbers))
