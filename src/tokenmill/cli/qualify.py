"""`tokenmill qualify`: whether a quantisation is good enough to use."""

import asyncio
import re
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tokenmill import measurements
from tokenmill.api.engines import EngineChoice, plan_for
from tokenmill.api.planning import EnginePlan
from tokenmill.cli.options import EngineFlags
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

LANES = 4  # of an engine that is started for this


def qualify(
    model: str | None = None,
    /,
    *,
    against: str | None = None,
    depths: str | None = None,
    quick: bool = False,
    strict: bool = False,
    options: EngineFlags = EngineFlags(),  # noqa: B008  frozen
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Say whether a quantisation is good enough to use, and for what.

    Asks for numbers hidden in long texts, for JSON without a grammar, for code, and for the same answer again; with
    --against, also how far what it says next agrees with a better quantisation of the same model. Small models fail
    some of it: that is a result, and the exit code is 0; with --strict it is 1. The result is kept for
    `tokenmill report`.

    Parameters
    ----------
    model:
        A GGUF file, a folder of safetensors (vLLM), or the name of a pulled model; default: smollm2. With the URL of a
        server that has several: which of them.
    against:
        The reference: a model file or name (in a better quantisation), or the URL of an engine that runs it. It is
        loaded after the model has been let go.
    depths:
        How deep the hidden numbers lie, in tokens, such as 1K,4K,16K; default: as many of those as the context holds.
    quick:
        Ask less: one depth, half of the tasks, fewer positions.
    strict:
        Exit with 1 if any check falls short.
    """
    wanted_depths = _depths(depths) if depths is not None else QUICK_DEPTHS if quick else DEPTHS
    choice = choose(model, options, common)
    reference = _reference(against, options, common) if against is not None else None
    if reference is not None:
        _check_alike(choice, reference)
    plans: list[EnginePlan | None] = []
    for each, own in ((choice, options), (reference, _beside(options))):
        wanted = _plan(each, own, wanted_depths, common, said=depths is not None) if each is not None else None
        plans.append(wanted)
    with steps_shown() if not common.json else nullcontext(lambda step: None) as tell:
        identity, checks = asyncio.run(
            _all(choice, reference, plans, wanted_depths, quick=quick, said=depths is not None, tell=tell)
        )
    found = _document(identity, checks, choice, reference, options, common)
    kept = _keep(found, choice)
    if common.json:
        show_json(found)
    else:
        show(*rendered(found, checks))
        say(f"kept in {kept}")
    return 1 if strict and not all(check.good for check in checks) else 0


async def _all(
    choice: EngineChoice,
    reference: EngineChoice | None,
    plans: list[EnginePlan | None],
    depths: tuple[int, ...],
    *,
    quick: bool,
    said: bool,
    tell: Tell,
) -> tuple[Identity, list[Check]]:
    folder = choice.state / "qualified"
    checks: list[Check] = []
    async with opened(choice, plans[0], folder) as engine:
        identity = engine.identity
        async for check in ask_all(engine, depths=_held(depths, identity, said), quick=quick, tell=tell):
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


def _held(depths: tuple[int, ...], identity: Identity, said: bool) -> tuple[int, ...]:
    """Depths that the engine has room for; what it has none for is told."""
    kept = fitting(depths, identity.context)
    if said and kept != tuple(sorted(depths)):
        shown = ", ".join(f"{depth:,}" for depth in kept) or "none"
        say(f"the engine has {identity.context:,} tokens of context: depths asked at are {shown}")
    return kept


def _reference(against: str, options: EngineFlags, common: Common) -> EngineChoice:
    if "://" in against:
        return choose(None, replace(_beside(options), engine=against), common)
    return choose(against, _beside(options), common)


def _check_alike(choice: EngineChoice, reference: EngineChoice) -> None:
    """Refuse what could not be compared, before anything is loaded; equal sizes are looked at more closely later."""
    sizes = [read(str(each.path)).vocabulary for each in (choice, reference) if each.path is not None]
    if len(sizes) == 2 and None not in sizes and sizes[0] != sizes[1]:
        raise UsageError(
            f"the two have different vocabularies, of {sizes[0]:,} and {sizes[1]:,} tokens",
            hint="--against wants the same model in another quantisation",
        )


def _beside(options: EngineFlags) -> EngineFlags:
    """Options for the reference: those of the model, but for where it runs."""
    foreign = options.engine is not None and "://" in options.engine
    return replace(options, engine=None) if foreign else options


def _plan(
    choice: EngineChoice, options: EngineFlags, depths: tuple[int, ...], common: Common, *, said: bool
) -> EnginePlan | None:
    """A plan with room for the deepest question; by default no deeper than the model was trained for."""
    if choice.record is not None or choice.url is not None:
        return None
    if options.context is None:
        context = room_for(max(depths))
        trained = read(str(choice.path)).training_context
        if trained is not None and not said:
            context = min(context, trained)
        options = replace(options, context=context)
    return plan_for(choice, replace(options, sequences=options.sequences or LANES), common.load_config())


def _depths(text: str) -> tuple[int, ...]:
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*([kK]?)\s*", part)
        if match is None or not 256 <= (depth := int(match[1]) * (1024 if match[2] else 1)) <= 1 << 24:
            raise UsageError(f"--depths: {part.strip()!r} is no depth", hint="tokens, at least 256: 1K,4K,16384")
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


def _keep(found: dict[str, Any], choice: EngineChoice) -> Path:
    """Store the result where `tokenmill report` looks for it."""
    measurements.replace(choice.state, "qualification", found)
    return measurements.journal_path(choice.state)
