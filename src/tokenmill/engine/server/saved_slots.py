"""Tests whether the installed build of llama.cpp's server restores saved slots correctly.

Some builds report that a restore succeeded, but recompute the prompt (llama.cpp#26676). The test therefore checks the
number of cached tokens of the next request.
"""

import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenmill.engine.engine import Engine, Request, Sampling, answer
from tokenmill.errors import TokenmillError

_TEXT = " ".join(f"The {number}th stone lies next to the {number + 7}th." for number in range(12))
RESTORED = 0.9  # minimum cached share of a restored prompt; the last one or two tokens are always computed


SlotAction = Callable[[int, str, str | None], Awaitable[dict[str, Any]]]
"""`act(slot, action, file)` saves, restores or erases a slot."""


async def probe_saved_slots(
    engine: Engine, act: SlotAction, *, slot: int = 0, folder: Path | None = None
) -> tuple[bool, str]:
    """Test whether a slot can be saved, erased and restored; returns the result and a description.

    Occupies one slot for a few seconds and erases it. Removes the saved file from `folder`, the server's slot folder.
    """
    name = f"probe-{secrets.token_hex(8)}.bin"
    try:
        fresh = await _reused(engine, slot)
        await act(slot, "save", name)
        await act(slot, "erase", None)
        erased = await _reused(engine, slot)
        await act(slot, "erase", None)
        await act(slot, "restore", name)
        restored = await _reused(engine, slot)
        await act(slot, "erase", None)
    except TokenmillError as error:
        return False, f"saving slots does not work: {error}"
    finally:
        if folder is not None:
            with suppress(OSError):
                (folder / name).unlink()
    return verdict(erased, restored, fresh[1])


def verdict(erased: tuple[int, int], restored: tuple[int, int], tokens: int) -> tuple[bool, str]:
    """Evaluate (cached tokens, prompt tokens) after erasing the slot and after restoring it."""
    enough = RESTORED * tokens
    if erased[0] > tokens - enough:
        details = (
            f"an erased slot still reused {erased[0]} of {tokens} tokens: another cache makes the test inconclusive"
        )
        return False, details
    if restored[0] < enough:
        return False, f"a restored slot reused {restored[0]} of {tokens} tokens"
    return True, f"a restored slot reused {restored[0]} of {tokens} tokens, an erased one {erased[0]}"


async def _reused(engine: Engine, slot: int) -> tuple[int, int]:
    request = Request(_TEXT, Sampling(temperature=0.0), max_tokens=1, slot=slot)
    usage = (await answer(engine, request)).usage
    return usage.cached_tokens or 0, usage.prompt_tokens
