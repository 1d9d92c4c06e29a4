"""Runs several engines concurrently, one at a time, in turns of a third of a second.

    native   ====    ====    ====
    -np 8        ====    ====    ====        the others are stopped (SIGSTOP)

The speed of a shared machine changes by more than the compared differences, so all engines must see the same minutes.
The engine with the least run time is next. The time of a way is the sum of its turns.
"""

import asyncio
import os
import signal
import time
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

TURN_S = 0.3
T = TypeVar("T")


async def in_turns(works: Mapping[str, Coroutine[Any, Any, T]], pids: Mapping[str, int]) -> dict[str, tuple[T, float]]:
    """Run the works in turns; returns the result of each and the seconds for which its process ran."""
    seconds = dict.fromkeys(works, 0.0)
    for name in works:
        os.kill(pids[name], signal.SIGSTOP)
    try:
        tasks = {name: asyncio.ensure_future(work) for name, work in works.items()}
        left = set(tasks)
        while left:
            name = min(sorted(left), key=lambda each: seconds[each])
            began = time.perf_counter()
            os.kill(pids[name], signal.SIGCONT)
            await asyncio.wait([tasks[name]], timeout=TURN_S)
            os.kill(pids[name], signal.SIGSTOP)
            seconds[name] += time.perf_counter() - began
            left = {each for each in left if not tasks[each].done()}
    finally:
        for name in works:
            os.kill(pids[name], signal.SIGCONT)
    return {name: (task.result(), seconds[name]) for name, task in tasks.items()}
