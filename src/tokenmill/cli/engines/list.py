"""`tokenmill engines list`: lists the running engines and their state."""

import asyncio
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from tokenmill.cli.output import Common, jsonable, show, show_json
from tokenmill.engine.engine import EngineStatus
from tokenmill.engine.process import registry
from tokenmill.engine.process.registry import Record
from tokenmill.errors import TokenmillError
from tokenmill.native.launching import adopt
from tokenmill.units import format_seconds

_ASK_S = 15.0


def list_engines(
    *,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """List the engines that run on this machine, with their state and requests in flight.

    An engine that does not respond within 15 seconds is shown as not responding.

        tokenmill engines list
    """
    state = common.load_config().state_path
    found = registry.listed(state)
    asked = asyncio.run(_ask_all(state, found))
    if common.json:
        show_json(
            [{**jsonable(record), "status": _status_document(how)} for record, how in zip(found, asked, strict=True)]
        )
        return
    if not found:
        show(f"no engines are running (state folder: {state})", "to start one: tokenmill serve --engine-only smollm2")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "kind", "model", "state", "up", "address"):
        table.add_column(column, overflow="fold")
    for record, how in zip(found, asked, strict=True):
        up = format_seconds(max(0.0, time.time() - record.started))
        table.add_row(record.name, record.kind, record.model, _state(how), up, record.address)
    show(table)


async def _ask_all(state: Path, found: tuple[Record, ...]) -> list[EngineStatus | str]:
    return await asyncio.gather(*(_ask(state, record) for record in found))


async def _ask(state: Path, record: Record) -> EngineStatus | str:
    """An engine's state and requests, or why they are unknown."""
    try:
        async with asyncio.timeout(_ASK_S):
            engine = await adopt(state, record.name)
            if engine is None:
                return "gone"
            try:
                return await engine.status()
            finally:
                await engine.close()
    except TimeoutError:
        return "not responding"
    except TokenmillError as error:
        return error.message


def _state(how: EngineStatus | str) -> str:
    if isinstance(how, str):
        return how
    running = how.counters.running
    waiting = how.counters.waiting
    busy = f", {running} running" if running else ""
    return how.state + busy + (f", {waiting} waiting" if waiting else "")


def _status_document(how: EngineStatus | str) -> Any:
    return {"state": None, "detail": how} if isinstance(how, str) else how
