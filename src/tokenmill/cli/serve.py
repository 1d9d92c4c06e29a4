"""`tokenmill serve`: engines that stay, and the gateway before them."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from tokenmill.api.engines import SlowLoad, name_after, watch_engine
from tokenmill.api.planning import EnginePlan, plan_engine
from tokenmill.api.tokens import count_digests
from tokenmill.cli.options import EngineFlags
from tokenmill.cli.output import Common, facts, jsonable, say, show, show_json
from tokenmill.cli.progress import load_shown
from tokenmill.cli.signals import CancelOnSignals, exit_code
from tokenmill.engine.pinned_prefixes import PinnedPrefix, WarmedHead, digest_in
from tokenmill.engine.reconcile import Reconciliation
from tokenmill.errors import EngineError, UsageError
from tokenmill.gateway.service import serve_extra
from tokenmill.native.launching import ReadyEngine, launch_engine
from tokenmill.units import format_bytes, format_seconds


def serve(
    model: str | None = None,
    *,
    engine_only: bool = False,
    detach: bool = False,
    name: str | None = None,
    host: str | None = None,
    digest: tuple[Path, ...] = (),
    options: EngineFlags = EngineFlags(),  # noqa: B008  frozen
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
    config = common.load_config()
    wanted = plan_engine(model, options, config).require_fit()
    heads = count_digests(heads, model, wanted, config)
    signals = CancelOnSignals()
    try:
        asyncio.run(_serve(wanted, name or name_after(model, wanted), heads, detach, common, signals))
    except asyncio.CancelledError:
        return served_code(signals.code)
    return 0


def served_code(code: int | None) -> int:
    """The exit code of a server that a signal ended: SIGTERM and Ctrl-C are the usual way to stop one."""
    return 0 if code in (None, exit_code(signal.SIGINT), exit_code(signal.SIGTERM)) else code


def _gateway() -> Callable[..., int]:
    with serve_extra():
        from tokenmill.cli.serve_gateway import gateway  # noqa: PLC0415  its packages are an extra
    return gateway


async def _serve(
    wanted: EnginePlan,
    name: str,
    heads: tuple[PinnedPrefix, ...],
    detach: bool,
    common: Common,
    signals: CancelOnSignals,
) -> None:
    config = common.load_config()
    signals.begin()
    try:
        with load_shown() as tell:
            up = await launch_engine(
                wanted.plan,
                model_path=wanted.model_path,
                config=wanted.config,
                state=config.state_path,
                name=name,
                tell=tell,
                slow=SlowLoad().report,
                detach=detach,
                heads=heads,
                heads_dir=config.heads_path,
            )
    except asyncio.CancelledError:
        raise EngineError(f"{name} was told to stop before it was ready; nothing of it is left") from None
    if common.json:
        show_json(_document(name, up))
    else:
        show(*_shown(name, up, detach=detach))
    try:
        if not detach:
            await watch_engine(up.engine)
    finally:
        await up.engine.close()
        if not detach:
            say(f"{name} has stopped")


def _shown(name: str, up: ReadyEngine, *, detach: bool) -> list[RenderableType]:
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


def _read_ahead(up: ReadyEngine) -> str:
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
        table.add_row(
            row.tier,
            row.item,
            format_bytes(row.predicted_bytes),
            format_bytes(row.measured_bytes),
            share + (" *" if row.flagged else ""),
        )
    told = [f"* {row.tier} {row.item}: {row.explanation}" for row in held.flagged if row.explanation]
    return [table, *told]


def _document(name: str, up: ReadyEngine) -> dict[str, Any]:
    engine = up.engine
    return {
        "name": name,
        **jsonable(engine.identity),
        "capabilities": jsonable(engine.capabilities),
        "load_s": up.load_s,
        "read_ahead": jsonable(up.filled),
        "warm": jsonable(up.warmth),
        "refused": up.refused,
        "reconciliation": [
            {**jsonable(row), "difference_bytes": row.difference_bytes, "flagged": row.flagged} for row in up.held.rows
        ],
    }
