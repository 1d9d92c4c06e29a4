"""Saved slots of llama.cpp's server, believed only after they were seen to work on the build at hand.

Some builds answer a restore with success and compute the prompt again (llama.cpp#26676): nothing but the number of
reused tokens of the next request counts.
"""

import secrets
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.engine.engine import Request, Sampling, answer
from tokenmill.engine.server.request import LLAMA
from tokenmill.errors import TokenmillError

if TYPE_CHECKING:
    from tokenmill.engine.server.client import ServerEngine

_TEXT = " ".join(f"The {number}th stone lies beside the {number + 7}th." for number in range(12))
RESTORED = 0.9  # of a prompt must be found again; the last token or two are always computed


async def probe_slot_state(engine: "ServerEngine", *, lane: int = 0, folder: Path | None = None) -> tuple[bool, str]:
    """Whether a slot's state survives being saved, erased and restored, and what was seen.

    Uses one lane for a few seconds; what it held is gone afterwards. The file is removed where `folder` says where
    the server put it.
    """
    if engine.speech.kind not in LLAMA or engine.speech.lanes is None:
        return False, "only llama.cpp's server and its fork save slots"
    name = f"probe-{secrets.token_hex(8)}.bin"
    try:
        fresh = await _reused(engine, lane)
        await act(engine, lane, "save", name)
        await act(engine, lane, "erase")
        erased = await _reused(engine, lane)
        await act(engine, lane, "erase")
        await act(engine, lane, "restore", name)
        restored = await _reused(engine, lane)
        await act(engine, lane, "erase")
    except TokenmillError as error:
        return False, f"saving slots does not work here: {error}"
    finally:
        if folder is not None:
            with suppress(OSError):
                (folder / name).unlink()
    return verdict(erased, restored, fresh[1])


def verdict(erased: tuple[int, int], restored: tuple[int, int], tokens: int) -> tuple[bool, str]:
    """What (reused tokens, prompt tokens) after an erasure and after a restore mean."""
    enough = RESTORED * tokens
    if erased[0] > tokens - enough:
        return (
            False,
            f"an erased slot still reused {erased[0]} of {tokens} tokens: another cache hides what saving does",
        )
    if restored[0] < enough:
        return False, f"a restored slot reused {restored[0]} of {tokens} tokens"
    return True, f"a restored slot reused {restored[0]} of {tokens} tokens, an erased one {erased[0]}"


async def _reused(engine: "ServerEngine", lane: int) -> tuple[int, int]:
    asked = Request(_TEXT, Sampling(temperature=0.0), max_tokens=1, lane=lane)
    usage = (await answer(engine, asked)).usage
    return usage.cached_tokens or 0, usage.prompt_tokens


async def act(engine: "ServerEngine", lane: int, action: str, name: str | None = None) -> dict[str, Any]:
    """Save, restore or erase a slot; the server's answer."""
    body = {"filename": name} if name is not None else {}
    return await engine.ask("POST", f"/slots/{lane}?action={action}", body)
