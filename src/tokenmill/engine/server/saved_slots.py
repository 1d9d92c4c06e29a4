"""Tests whether the installed build of llama.cpp's server restores saved slots correctly.

Some builds answer a restore with success and compute the prompt again (llama.cpp#26676): nothing but the number of
reused tokens of the next request counts.
"""

import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenmill.engine.engine import Engine, Request, Sampling, answer
from tokenmill.errors import TokenmillError

_TEXT = " ".join(f"The {number}th stone lies beside the {number + 7}th." for number in range(12))
RESTORED = 0.9  # of a prompt must be found again; the last token or two are always computed


SlotAction = Callable[[int, str, str | None], Awaitable[dict[str, Any]]]
"""`act(slot, action, file)` saves, restores or erases a slot."""


async def probe_slot_state(
    engine: Engine, act: SlotAction, *, lane: int = 0, folder: Path | None = None
) -> tuple[bool, str]:
    """Test whether a slot's state survives being saved, erased and restored; return the result and a description.

    Uses one slot for a few seconds and erases it. The file is removed if `folder` is the server's folder of slots.
    """
    name = f"probe-{secrets.token_hex(8)}.bin"
    try:
        fresh = await _reused(engine, lane)
        await act(lane, "save", name)
        await act(lane, "erase", None)
        erased = await _reused(engine, lane)
        await act(lane, "erase", None)
        await act(lane, "restore", name)
        restored = await _reused(engine, lane)
        await act(lane, "erase", None)
    except TokenmillError as error:
        return False, f"saving slots does not work here: {error}"
    finally:
        if folder is not None:
            with suppress(OSError):
                (folder / name).unlink()
    return verdict(erased, restored, fresh[1])


def verdict(erased: tuple[int, int], restored: tuple[int, int], tokens: int) -> tuple[bool, str]:
    """Interpret (reused tokens, prompt tokens) after an erasure and after a restore."""
    enough = RESTORED * tokens
    if erased[0] > tokens - enough:
        return (
            False,
            f"an erased slot still reused {erased[0]} of {tokens} tokens: another cache hides what saving does",
        )
    if restored[0] < enough:
        return False, f"a restored slot reused {restored[0]} of {tokens} tokens"
    return True, f"a restored slot reused {restored[0]} of {tokens} tokens, an erased one {erased[0]}"


async def _reused(engine: Engine, lane: int) -> tuple[int, int]:
    asked = Request(_TEXT, Sampling(temperature=0.0), max_tokens=1, lane=lane)
    usage = (await answer(engine, asked)).usage
    return usage.cached_tokens or 0, usage.prompt_tokens
