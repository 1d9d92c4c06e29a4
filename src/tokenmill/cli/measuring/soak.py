"""`tokenmill soak`: finds the largest usable context by filling it step by step."""

import asyncio
import os
import time
from dataclasses import dataclass, replace

from tokenmill.api.engines.choose import EngineChoice, plan_for
from tokenmill.api.planning.plan import EnginePlan
from tokenmill.cli.measuring.bench import place_of
from tokenmill.cli.options import EngineFlags, ModelArgument, Size, TokenCount
from tokenmill.cli.output import Common, say, show, show_json
from tokenmill.cli.progress import choose, opened
from tokenmill.cli.views.soak import document, progress, render
from tokenmill.errors import DoesNotFit, UsageError
from tokenmill.hardware.catalog import find
from tokenmill.planner.plan import Plan
from tokenmill.tuner import history
from tokenmill.tuner.bench.rig import Rig, pids_of
from tokenmill.tuner.bench.run import now
from tokenmill.tuner.bench.served import Prose
from tokenmill.tuner.noise_monitor import NoiseMonitor
from tokenmill.tuner.point import PointScope
from tokenmill.tuner.soak.judge import Limit, SoakResult, SoakStep, size
from tokenmill.tuner.soak.memory_watch import Gauge
from tokenmill.tuner.soak.run import TOKENS, Filled, default_step, fill
from tokenmill.tuner.soak.store import save, speed_of
from tokenmill.units import MIB

KEEP_FREE = 512 * MIB
KEEP_SHARE = 0.05
STEP = 512


@dataclass(frozen=True, slots=True)
class _SoakOptions:
    """The options of a soak."""

    depth: int | None
    step: int | None
    all_slots: bool
    memory_limit: int | None
    keep_free: int
    gpu_margin: int


def soak(
    model: ModelArgument = None,
    *,
    depth: TokenCount | None = None,
    step: TokenCount | None = None,
    lanes: bool = False,
    memory_limit: Size | None = None,
    keep_free: Size | None = None,
    options: EngineFlags = EngineFlags(),  # noqa: B008  frozen
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Find the largest usable context: fill it step by step, and stop before memory runs out.

    Each step reports the depth, both speeds, and the predicted, measured and free bytes of every memory. The growth so
    far predicts whether the next step is safe. The result is saved for this machine and model. Exit code 0: the whole
    context is usable; 3: only part of it; 1: the engine crashed.

        tokenmill soak kimi.gguf --context 90k

    Parameters
    ----------
    model:
        GGUF file, safetensors folder (vLLM) or name of a downloaded model. [default: smollm2]
    depth:
        Tokens to fill. [default: the engine's whole context]
    step:
        Tokens per step. [default: a sixteenth of the depth, in whole micro-batches]
    lanes:
        After one slot is full, also fill all slots concurrently.
    memory_limit:
        Host memory that the engine may use, such as "12 GiB", to simulate a smaller machine or cgroup. [default: all]
    keep_free:
        Host memory that must stay free; --margin is the same for GPUs. [default: 512 MiB, or 5 % of --memory-limit if
        less]
    """
    for name, value in (("depth", depth), ("step", step)):
        if value is not None and value <= TOKENS:
            raise UsageError(
                f"--{name} must be more than {TOKENS} (got {value}), because each step generates {TOKENS} tokens"
            )
    choice = choose(model, options, common)
    wanted = None
    if not (choice.record or choice.url):
        asked = replace(options, context=depth) if options.context is None and depth is not None else options
        wanted = plan_for(choice, asked, common.load_config())
        if depth is not None and depth > wanted.plan.settings.context:
            raise UsageError(
                f"--depth {depth} exceeds the context of {wanted.plan.settings.context:,} tokens",
                hint=f"use --context {depth}, or a smaller --depth",
            )
    keep = keep_free if keep_free is not None else min(KEEP_FREE, round(KEEP_SHARE * (memory_limit or 1 << 62)))
    result = asyncio.run(
        _work(choice, wanted, _SoakOptions(depth, step, lanes, memory_limit, keep, options.margin), common)
    )
    path = save(choice.state, result) if result.machine_id and memory_limit is None else None
    if common.json:
        show_json(document(result))
    else:
        show(*render(result))
    if path is not None:
        say(f"saved to {path}")
    elif memory_limit is not None:
        say("not saved: with --memory-limit the result does not describe this machine")
    return 1 if result.ended == "died" else 0 if result.ended == "goal" else DoesNotFit.exit_code


async def _work(choice: EngineChoice, wanted: EnginePlan | None, asked: _SoakOptions, common: Common) -> SoakResult:
    plan = wanted.plan if wanted is not None else None
    folder = choice.state / "soak" / str(os.getpid())  # names the engine: several soaks may run concurrently
    async with opened(choice, wanted, folder) as engine:
        here = engine.identity.pid is not None
        machine = plan.machine if plan is not None else find(common.load_config().machine) if here else None
        if not here:
            say("memory is not measured: the engine's process is not on this machine")
        rig = Rig(engine, Prose(engine, time.time_ns()), repeat=1, quiet=NoiseMonitor if here else None)
        gauge = Gauge(lambda: pids_of(engine), plan, limit_bytes=asked.memory_limit)
        await rig.prose.learn()
        limit = _limit(rig, plan, gauge.tier, asked)
        if plan is not None and (spare := plan.ledger.of(gauge.tier, "runtime")):
            say(f"predicted figures include an estimated {size(spare)} for the engine's process itself")
        place = place_of(engine, choice, machine)
        fillings = [await _filled(rig, limit, gauge, 1, plan, place, choice)]
        slots = engine.identity.slots or 1
        if asked.all_slots and slots > 1 and fillings[0].ended == "goal":
            fillings.append(await _filled(rig, limit, gauge, slots, plan, place, choice))
        return _result(place, limit, fillings, asked)


def _limit(rig: Rig, plan: Plan | None, tier: str, asked: _SoakOptions) -> Limit:
    goal = asked.depth or rig.room
    if goal is None:
        raise UsageError("the engine does not report its context length", hint="use --depth N")
    step = asked.step or default_step(goal, plan.settings.ubatch if plan is not None else STEP)
    gpus = plan.placement.gpus if plan is not None else ()
    return Limit(goal, min(step, goal), ((tier, asked.keep_free), *((gpu, asked.gpu_margin) for gpu in gpus)))


async def _filled(
    rig: Rig, limit: Limit, gauge: Gauge, sequences: int, plan: Plan | None, place: PointScope, choice: EngineChoice
) -> Filled:
    def tell(step: SoakStep) -> None:
        say(progress(step, limit))
        if plan is not None and step.whole and step.disturbed is None:
            history.append(choice.state, speed_of(step, place, plan, now()))

    return await fill(rig, limit, gauge.read, sequences=sequences, tell=tell)


def _result(place: PointScope, limit: Limit, fillings: list[Filled], asked: _SoakOptions) -> SoakResult:
    alone = fillings[0]
    last = fillings[-1]
    together = last if len(fillings) > 1 else None
    return SoakResult(
        place.machine,
        place.machine_id,
        place.model,
        place.model_id,
        place.engine,
        place.build,
        now(),
        limit.goal,
        tuple(step for filling in fillings for step in filling.steps),
        alone.verdict.usable_context,
        last.verdict.reason,
        last.ended,
        lanes=last.steps[-1].sequences if together and last.steps else 1,
        usable_with_lanes=together.verdict.usable_context if together else None,
        limit_bytes=asked.memory_limit,
        reserve_bytes=limit.reserve_bytes,
        last_words=last.last_words,
    )
