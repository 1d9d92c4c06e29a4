"""Makes a large GPU behave like a small one: a process that allocates all of its memory except a given amount.

    python bench/gpu/prove_card.py LEAVE_BYTES      prints `held` when it is allocated, and ends with its input

Uses plain driver allocations, so an engine that needs more than the rest fails as it would on a small GPU.
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
    """Allocate the rest and wait for the end of the input."""
    cuda = load()
    if cuda is None:
        sys.exit("error: no NVIDIA driver was found")
    with cuda.current(0):
        rest = cuda.free_bytes() - leave_bytes
        if rest < MIB:
            sys.exit("error: the GPU has no more free memory than that")
        with cuda.device_memory(rest // (2 * MIB) * 2 * MIB):
            print("held", cuda.free_bytes(), flush=True)
            sys.stdin.read()


@asynccontextmanager
async def limited(leave_bytes: int | None) -> AsyncIterator[int | None]:
    """Limit the free memory of the GPU during the block; yields the free bytes, or None if nothing was allocated."""
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
            raise EngineError(
                "the GPU's memory could not be allocated", hint="nvidia-smi lists the processes that use it"
            )
        yield int(said[1])
    finally:
        process.stdin.close()
        await process.wait()


if __name__ == "__main__":
    hold(int(sys.argv[1]))
