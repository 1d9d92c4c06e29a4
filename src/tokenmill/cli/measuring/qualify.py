"""`tokenmill qualify`: tests whether a quantization is good enough to use."""

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from tokenmill import measurements
from tokenmill.api.engines.choose import EngineChoice, plan_for
from tokenmill.api.planning.plan import EnginePlan
from tokenmill.cli.options import EngineFlags, ModelArgument, parse_tokens
from tokenmill.cli.output import Common, jsonable, say, show, show_json
from tokenmill.cli.progress import choose, opened
from tokenmill.cli.views.qualify import rendered, steps_shown
from tokenmill.engine.engine import Engine, Identity
from tokenmill.errors import UsageError
from tokenmill.hardware.catalog import find
from tokenmill.hardware.identity import machine_id
from tokenmill.model.read import read
from tokenmill.tuner.qualify.agreement import TextReading, compare, count, read_texts
from tokenmill.tuner.qualify.result import Check, QualifyStep, Tell, agreed, verdict
from tokenmill.tuner.qualify.run import (
    DEPTHS,
    POSITIONS,
    QUICK_DEPTHS,
    QUICK_POSITIONS,
    QUICK_TEXTS,
    ask_all,
    fitting,
    room_for,
)
from tokenmill.tuner.qualify.tasks import asks

SLOTS = 4  # of an engine that this command starts
MIN_DEPTH = 256


def qualify(
    model: ModelArgument = None,
    *,
    against: Annotated[str | None, Parameter(metavar="MODEL")] = None,
    depths: Annotated[str | None, Parameter(metavar="LIST")] = None,
    quick: bool = False,
    strict: bool = False,
    options: EngineFlags = EngineFlags(),  # noqa: B008  frozen
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Test whether a quantization is good enough to use, and for which tasks.

    Checks retrieval of numbers from long texts, JSON without a grammar, code, and repeatability; with --against, also
    the agreement of token probabilities with a better quantization of the same model. Small models fail some checks:
    the exit code is still 0, unless --strict is given. The result is saved for `tokenmill report`.

        tokenmill qualify kimi-q4.gguf --against kimi-q8.gguf

    Parameters
    ----------
    model:
        GGUF file, safetensors folder (vLLM) or name of a downloaded model; with the URL of a server, one of its models.
        [default: smollm2]
    against:
        Reference: a file or name of the same model in a better quantization, or the URL of an engine that runs it. It
        is loaded after the first model is unloaded.
    depths:
        Depths of the hidden numbers, in tokens, such as 1K,4K,16K. [default: up to the context]
    quick:
        Run fewer checks: one depth, half of the tasks, fewer positions.
    strict:
        Exit with code 1 if a check fails.
    """
    wanted_depths = _depths(depths) if depths is not None else QUICK_DEPTHS if quick else DEPTHS
    choice = choose(model, options, common)
    reference = _reference(against, options, common) if against is not None else None
    if reference is not None:
        _check_alike(choice, reference)
    plans: list[EnginePlan | None] = []
    for each, own in ((choice, options), (reference, _reference_options(options))):
        plans.append(_plan(each, own, wanted_depths, common, given=depths is not None) if each is not None else None)
    with steps_shown() if not common.json else nullcontext(lambda step: None) as tell:
        identity, checks = asyncio.run(
            _all(choice, reference, plans, wanted_depths, quick=quick, given=depths is not None, tell=tell)
        )
    found = _document(identity, checks, choice, reference, options, common)
    path = _save(found, choice)
    if common.json:
        show_json(found)
    else:
        show(*rendered(found, checks))
        say(f"saved to {path}")
    return 1 if strict and not all(check.good for check in checks) else 0


async def _all(
    choice: EngineChoice,
    reference: EngineChoice | None,
    plans: list[EnginePlan | None],
    depths: tuple[int, ...],
    *,
    quick: bool,
    given: bool,
    tell: Tell,
) -> tuple[Identity, list[Check]]:
    folder = choice.state / "qualified"
    checks: list[Check] = []
    async with opened(choice, plans[0], folder) as engine:
        identity = engine.identity
        async for check in ask_all(engine, depths=_fitting(depths, identity, given), quick=quick, tell=tell):
            checks.append(check)
        mine = await _read(engine, quick, "the model", tell) if reference is not None else None
    if reference is not None and mine is not None:
        async with opened(reference, plans[1], folder / "reference") as engine:
            other = await _read(engine, quick, "the reference", tell, like=mine)
        checks.append(agreed(compare(mine, other)))
    return identity, checks


async def _read(engine: Engine, quick: bool, who: str, tell: Tell, *, like: TextReading | None = None) -> TextReading:
    texts = asks().texts[: QUICK_TEXTS if quick else None]
    positions = QUICK_POSITIONS if quick else POSITIONS
    total = count(texts, positions)

    def told(done: int) -> None:
        tell(QualifyStep("agreement", min(done, total), total, who))

    return await read_texts(engine, texts, positions, like=like, tell=told)


def _fitting(depths: tuple[int, ...], identity: Identity, given: bool) -> tuple[int, ...]:
    """The depths that fit the engine's context; reports the others if the user chose them."""
    kept = fitting(depths, identity.context)
    if given and kept != tuple(sorted(depths)):
        shown = ", ".join(f"{depth:,}" for depth in kept) or "none"
        say(f"the engine's context is {identity.context:,} tokens; using depths {shown}")
    return kept


def _reference(against: str, options: EngineFlags, common: Common) -> EngineChoice:
    if "://" in against:
        return choose(None, replace(_reference_options(options), engine=against), common)
    return choose(against, _reference_options(options), common)


def _check_alike(choice: EngineChoice, reference: EngineChoice) -> None:
    """UsageError if the vocabularies have different sizes, before a model is loaded."""
    sizes = [read(str(each.path)).vocabulary for each in (choice, reference) if each.path is not None]
    if len(sizes) == 2 and None not in sizes and sizes[0] != sizes[1]:
        raise UsageError(
            f"the model and the reference have different vocabularies ({sizes[0]:,} and {sizes[1]:,} tokens)",
            hint="--against requires the same model in another quantization",
        )


def _reference_options(options: EngineFlags) -> EngineFlags:
    """The options for the reference: those of the model, without a URL."""
    foreign = options.engine is not None and "://" in options.engine
    return replace(options, engine=None) if foreign else options


def _plan(
    choice: EngineChoice, options: EngineFlags, depths: tuple[int, ...], common: Common, *, given: bool
) -> EnginePlan | None:
    """A plan whose context holds the deepest text; without --depths, at most the training context."""
    if choice.record is not None or choice.url is not None:
        return None
    if options.context is None:
        context = room_for(max(depths))
        trained = read(str(choice.path)).training_context
        if trained is not None and not given:
            context = min(context, trained)
        options = replace(options, context=context)
    return plan_for(choice, replace(options, sequences=options.sequences or SLOTS), common.load_config())


def _depths(text: str) -> tuple[int, ...]:
    found = []
    for part in text.split(","):
        depth = parse_tokens(part, "--depths")
        if not MIN_DEPTH <= depth <= 1 << 24:
            raise UsageError(f"--depths must be at least {MIN_DEPTH} tokens (got {part.strip()!r})", hint="1K,4K,16384")
        found.append(depth)
    return tuple(sorted(set(found)))


def _document(
    identity: Identity,
    checks: list[Check],
    choice: EngineChoice,
    reference: EngineChoice | None,
    options: EngineFlags,
    common: Common,
) -> dict[str, Any]:
    machine = find(options.machine or common.load_config().machine)
    return {
        "model": choice.model,
        "model_id": choice.model_id,
        "against": None if reference is None else reference.model,
        "machine": machine.name,
        "machine_id": machine_id(machine),
        "engine": identity.kind,
        "build": identity.build,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "verdict": verdict(checks),
        "good": all(check.good for check in checks),
        "checks": {
            check.name: {key: value for key, value in jsonable(check).items() if key != "name"} for check in checks
        },
    }


def _save(found: dict[str, Any], choice: EngineChoice) -> Path:
    """Save the result for `tokenmill report`; return the file."""
    measurements.replace(choice.state, "qualification", found)
    return measurements.journal_path(choice.state)
