"""`tokenmill serve`: engines that stay, and the gateway before them."""

import asyncio
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from tokenmill.cli.output import Common, facts, jsonable, say, show, show_json
from tokenmill.cli.plan_view import render
from tokenmill.cli.starting import EngineOptions, Findings, Wanted, load_shown, planned
from tokenmill.cli.tokens import tokeniser
from tokenmill.engine.bring_up import Up, bring_up
from tokenmill.engine.heads import Head, WarmedHead, digest_in
from tokenmill.engine.reconcile import Reconciliation
from tokenmill.engine.watched import Watched
from tokenmill.engine.written.launch import slug
from tokenmill.errors import EngineError, UsageError
from tokenmill.units import format_bytes, format_seconds

DOES_NOT_FIT = 3


def serve(
    model: str | None = None,
    *,
    engine_only: bool = False,
    detach: bool = False,
    name: str | None = None,
    host: str | None = None,
    digest: tuple[Path, ...] = (),
    options: EngineOptions = EngineOptions(),  # noqa: B008  frozen
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Serve models at one URL, in OpenAI's protocol, until it is stopped.

    With a model, that one; without, the engines of the configuration; without those, smollm2. Each is planned, loaded,
    warmed and watched, and started again when it dies. Interactive requests go before batches. It listens on this
    machine alone; another address needs a key (`tokenmill keys add`). Ctrl-C lets what runs end and stops it, a second
    one stops it at once; nothing is left behind.

    Parameters
    ----------
    model:
        A GGUF file, a folder of safetensors (vLLM), or the name of a pulled model, such as smollm2.
    engine_only:
        Serve the engine's own interface, nothing before it: a server's URL, or the native engine's socket, which
        `tokenmill engines` and `tokenmill run` use. What it took is shown beside what the plan said.
    detach:
        With --engine-only: leave it running and come back; `tokenmill engines` shows it, `tokenmill engines stop` ends
        it.
    name:
        What to call the engine; default: after the model.
    host:
        The address to listen on; default: the configuration's, else 127.0.0.1.
    digest:
        A file whose text is the system message of many requests to come, as `tokenmill digest` writes; may be given
        several times. It is computed before the engine is ready and kept; the native engine pins it, saves it, and at
        the next start reads it back.
    """
    if not engine_only:
        if detach:
            raise UsageError("only an engine can be left running", hint="add --engine-only, or leave --detach out")
        return _gateway()(model, name, host, digest, options, common)
    if model is None:
        raise UsageError("no model given", hint="for example: tokenmill serve --engine-only smollm2")
    if host is not None:
        raise UsageError("--host is for the gateway", hint="engine.host says where a server engine listens")
    heads = tuple(map(digest_in, digest))
    wanted = planned(model, options, common)
    if not wanted.plan.fits:
        show(*render(wanted.plan))
        return DOES_NOT_FIT
    if heads:
        heads = counted(heads, model, wanted, common)
    try:
        asyncio.run(_serve(wanted, name or named_after(model, wanted), heads, detach, common))
    except asyncio.CancelledError:
        return 0
    return 0


def _gateway() -> Callable[..., int]:
    """The gateway's own command; its packages are an extra."""
    try:
        from tokenmill.cli.serve_gateway import gateway  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("tokenmill"):
            raise
        raise UsageError(
            f"the gateway needs {error.name}, which is not here", hint="pip install 'tokenmill[serve]'"
        ) from error
    return gateway


def counted(heads: tuple[Head, ...], model: str, wanted: Wanted, common: Common) -> tuple[Head, ...]:
    """Digests with their tokens where a vocabulary is here; one that no sequence can hold is refused before a load."""
    with tokeniser(model, common) as counting:
        if counting.count is None:
            return heads
        heads = tuple(replace(head, tokens=counting.count(head.text)) for head in heads)
    context = wanted.plan.settings.context
    for head in heads:
        if head.tokens is not None and head.tokens >= context:
            raise UsageError(
                f"the digest {head.name} has {head.tokens:,} tokens, and a sequence {context:,}",
                hint="a larger --context, or a shorter one: tokenmill digest --tokens N",
            )
    return heads


def named_after(model: str, wanted: Wanted) -> str:
    """A pulled model's short name, else what the file calls itself."""
    short = "/" not in model and not Path(model).exists()
    return slug(model if short else wanted.plan.profile.name).lower()


async def _serve(wanted: Wanted, name: str, heads: tuple[Head, ...], detach: bool, common: Common) -> None:
    config = common.load_config()
    _end_on_signals()
    try:
        with load_shown() as tell:
            up = await bring_up(
                wanted.plan, model_path=wanted.model_path, config=wanted.config, state=config.state_path, name=name,
                tell=tell, slow=Findings().tell, detach=detach, heads=heads, heads_dir=config.heads_path,
            )  # fmt: skip
    except asyncio.CancelledError:
        raise EngineError(f"{name} was told to stop before it was ready; nothing of it is left") from None
    if common.json:
        show_json(_document(name, up))
    else:
        show(*_shown(name, up, detach=detach))
    try:
        if not detach and isinstance(up.engine, Watched):
            await stay(up.engine)
    finally:
        await up.engine.close()
        if not detach:
            say(f"{name} has stopped")


def _end_on_signals() -> None:
    task = asyncio.current_task()
    for number in (signal.SIGTERM, signal.SIGINT):
        if task is not None:
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)


async def stay(engine: Watched, name: str | None = None) -> None:
    """Say when it dies, with its last words, and when it comes back; leave when it has failed for good.

    `name`: said with it, where there are several.
    """
    whose = "" if name is None else f"engine {name}: "
    before = "ready"
    while not engine.failed.done():
        await asyncio.wait({engine.failed}, timeout=0.5)
        status = await engine.status()
        if status.state != before:
            say(whose + (f"{status.state}: {status.detail}" if status.detail else status.state))
            if status.state == "restarting" and engine.death is not None and engine.death.hint:
                say(engine.death.hint)
            before = status.state
    raise engine.failed.result()


def _shown(name: str, up: Up, *, detach: bool) -> list[RenderableType]:
    identity = up.engine.identity
    rows = {
        "engine": f"{name}: {identity.kind}, {identity.build}",
        "model": identity.model,
        "address": identity.address,
        "lanes": f"{identity.lanes} of {identity.context} tokens",
        "load": format_seconds(up.load_s) + _read_ahead(up),
    }
    if up.warmth is not None:
        rows["warm"] = up.warmth.cold_against_warm.as_words()
        if up.warmth.heads:
            rows["digest"] = "\n".join(map(held_words, up.warmth.heads))
    notes = (*up.refused, *up.engine.capabilities.notes, *(up.warmth.notes if up.warmth else ()))
    if notes:
        rows["note"] = "\n".join(notes)
    left = f"to stop it: tokenmill engines stop {name}" if detach else "ready; Ctrl-C stops it"
    return [facts(rows), "", *held_against_plan(up.held), "", left]


def held_words(head: WarmedHead) -> str:
    """What became of a digest."""
    if head.how == "not held":
        return f"{head.name} is not held"
    where = f"; saved as {head.saved}" if head.saved and head.how == "computed" else ""
    return f"{head.name}: {head.prompt_tokens:,} tokens {head.how} in {format_seconds(head.seconds)}{where}"


def _read_ahead(up: Up) -> str:
    if up.filled is None or not up.filled.read_bytes:
        return ""
    return f", after reading {format_bytes(up.filled.read_bytes)} ahead in {format_seconds(up.filled.seconds)}"


def held_against_plan(held: Reconciliation) -> list[RenderableType]:
    """Predicted beside measured, item by item, and why they differ where they do."""
    table = Table(box=None, pad_edge=False)
    for column in ("memory", "item"):
        table.add_column(column)
    for column in ("predicted", "measured", "difference"):
        table.add_column(column, justify="right")
    for row in held.rows:
        if row.measured_bytes is None or not (row.measured_bytes or row.predicted_bytes):
            continue
        share = "" if row.share is None else f"{row.share:+.1%}"
        table.add_row(row.tier, row.item, format_bytes(row.predicted_bytes), format_bytes(row.measured_bytes),
                      share + (" *" if row.flagged else ""))  # fmt: skip
    told = [f"* {row.tier} {row.item}: {row.explanation}" for row in held.flagged if row.explanation]
    return [table, *told]


def _document(name: str, up: Up) -> dict[str, Any]:
    engine = up.engine
    return {
        "name": name, **jsonable(engine.identity), "capabilities": jsonable(engine.capabilities), "load_s": up.load_s,
        "read_ahead": jsonable(up.filled), "warm": jsonable(up.warmth), "refused": up.refused,
        "reconciliation": [
            {**jsonable(row), "difference_bytes": row.difference_bytes, "flagged": row.flagged} for row in up.held.rows
        ],
    }  # fmt: skip
