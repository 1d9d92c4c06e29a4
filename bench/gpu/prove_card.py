"""Makes a large card a small one: a process that holds all of its memory but so much, for as long as it lives.

    python bench/gpu/prove_card.py LEAVE_BYTES      says `held` once it holds it, and ends with its input

Plain allocations through the driver. What an engine takes beyond what is left fails as it would on such a card.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tokenmill.errors import EngineError
from tokenmill.hardware.bandwidth.gpu import load
from tokenmill.units import MIB

READY_S = 60.0


def hold(leave_bytes: int) -> None:
    """Take the rest and wait for the input's end."""
    cuda = load()
    if cuda is None:
        sys.exit("error: no NVIDIA driver is here")
    with cuda.current(0):
        rest = cuda.free_bytes() - leave_bytes
        if rest < MIB:
            sys.exit("error: the card has no more than that free")
        with cuda.device_memory(rest // (2 * MIB) * 2 * MIB):
            print("held", cuda.free_bytes(), flush=True)
            sys.stdin.read()


@asynccontextmanager
async def limited(leave_bytes: int | None) -> AsyncIterator[int | None]:
    """Inside, the card has no more than that free; what it has. None: nothing is held."""
    if leave_bytes is None:
        yield None
        return
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__)),
        str(leave_bytes),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        said = (await asyncio.wait_for(process.stdout.readline(), READY_S)).split()
        if len(said) != 2:
            raise EngineError("the card's memory could not be held", hint="nvidia-smi says who has it")
        yield int(said[1])
    finally:
        process.stdin.close()
        await process.wait()


if __name__ == "__main__":
    hold(int(sys.argv[1]))
