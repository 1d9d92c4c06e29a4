"""A worker in a separate process, with an engine that only counts.

    runner_process.py STORE SLOTS

Prints a line per event: `ready` when the store is open; `began` when an answer is started, with the number of computed
words and the first and last word of the prompt; `done` with the number of answers. No answer ends before a line arrives
on stdin. A prompt with `poison` ends the process as the kernel would, after earlier answers are stored.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable

from support.prefix_engine import PrefixEngine
from tokenmill.engine.engine import Answer, Piece, Request
from tokenmill.jobs.scheduler.shape import shape_of
from tokenmill.jobs.store.address import address_of
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.worker.loop import WorkOptions, WorkTask, work


class Told(PrefixEngine):
    """An engine that says what it does, and ends nothing before it may."""

    def __init__(self, slots: int, running: Callable[[], int]) -> None:
        super().__init__(slots=slots, context=100_000)
        self._running = running
        self.may_end = asyncio.Event()
        self._prompt = ""

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        self._prompt = str(request.prompt)
        async for piece in super().stream(request):
            yield piece

    async def work(self, computed: int) -> None:
        words = self._prompt.split()
        print("began", computed, words[0], words[-1], flush=True)  # short, because nothing may be reading
        if "poison" in words:
            while await asyncio.to_thread(self._running) > self.at_once:  # an answer is being stored
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        await self.may_end.wait()


async def main(store: Store, slots: int) -> None:
    engine = Told(slots, lambda: sum(batch.counts.running for batch in store.batches()))
    asyncio.get_running_loop().add_reader(sys.stdin, engine.may_end.set)
    batches = [batch for batch in store.batches() if not batch.finished]
    shape = shape_of(engine.capabilities, engine.identity)
    report = await work(
        WorkTask(store, batches, engine, shape, options=WorkOptions(tick_s=0.1), shards=store.shards(shape.width))
    )
    asyncio.get_running_loop().remove_reader(sys.stdin)
    print("done", report.answers, flush=True)


if __name__ == "__main__":
    with Store(address_of(sys.argv[1])) as opened:
        print("ready", flush=True)
        asyncio.run(main(opened, int(sys.argv[2])))
