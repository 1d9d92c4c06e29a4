"""Latency of interactive requests while a batch saturates the native engine, and their effect on the batch.

    python bench/interactive.py [--models moe,smollm2] [--requests 10] [--seconds 6] [--rounds 3]

Eight batch requests run at all times; when one ends, the next begins. Each round measures the batch alone, then with
interactive requests at random moments, one after another, then alone again. The waiting time is the engine's: seconds
until the first step with a part of the prompt, and steps that ended before, the first of which was running on arrival.
The goal is one and a half steps plus the request's own prefill. Steps are unequal: one with prefill takes many times as
long as one that only decodes. The batch's rate afterwards is compared with the rate before, by the tokens that the
engine computed. Writes results/interactive.json; exits 1 if a goal is missed.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import sys
import tempfile
import time
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from bench.batch import model_file  # noqa: E402

from tokenmill.config import EngineConfig  # noqa: E402
from tokenmill.engine.engine import Answer, Request, Sampling, Timings, answer  # noqa: E402
from tokenmill.hardware.cpu import read_cpu  # noqa: E402
from tokenmill.hardware.host import LocalHost  # noqa: E402
from tokenmill.hardware.probe import probe  # noqa: E402
from tokenmill.model.read import read  # noqa: E402
from tokenmill.native.client import NativeEngine  # noqa: E402
from tokenmill.native.start import start  # noqa: E402
from tokenmill.native.worker_config import goal_for  # noqa: E402
from tokenmill.planner.goal import Goal  # noqa: E402
from tokenmill.planner.make import make  # noqa: E402

LANES = 8
PROMPT = 200
ANSWERS = (60, 180)
CHAT_PROMPT = 40
CHAT_ANSWER = 8
MAX_STEPS = 1.5
MIN_AFTER = 0.95


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one model: tokens per second, and seconds and steps of each request."""

    before_tok_s: float
    beside_tok_s: float  # while interactive requests run, which are included
    after_tok_s: float
    own_s: float  # median time to first token of the same prompt on the idle engine
    first_token_s: list[float]
    queued_s: list[float]
    queued_steps: list[int]


def drawn(seed: int, tokens: int, most: int, vocab: int = 400) -> Request:
    """A prompt that differs from all others."""
    pick = random.Random(seed)
    prompt = tuple(pick.randrange(3, vocab) for _ in range(tokens))
    return Request(prompt, Sampling(temperature=0.0), max_tokens=most, ignore_eos=True)


async def first_token(engine: NativeEngine, request: Request) -> tuple[float, Timings]:
    """Seconds to the first token, and the engine's notes; the answer is read to its end."""
    began = time.perf_counter()
    first = 0.0
    timings = Timings()
    async with aclosing(engine.stream(request)) as events:
        async for event in events:
            if isinstance(event, Answer):
                timings = event.timings
            elif not first:
                first = time.perf_counter() - began
    return first or time.perf_counter() - began, timings


async def rate(engine: NativeEngine, seconds: float) -> float:
    """Prompt and answer tokens per second that the engine computes."""
    began = time.perf_counter()
    before = (await engine.status()).counters
    await asyncio.sleep(seconds)
    after = (await engine.status()).counters
    return ((after.step_tokens or 0) - (before.step_tokens or 0)) / (time.perf_counter() - began)


class Batch:
    """Endless requests, a fixed number concurrently."""

    def __init__(self, engine: NativeEngine, seed: int) -> None:
        self._engine = engine
        self._chance = random.Random(seed)
        self._tasks = [asyncio.create_task(self._lane()) for _ in range(LANES)]

    async def _lane(self) -> None:
        while True:
            await answer(self._engine, drawn(self._chance.randrange(1 << 60), PROMPT, self._chance.randint(*ANSWERS)))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def play(engine: NativeEngine, number: int, requests: int, seconds: float) -> Round:
    """One round."""
    chats = [
        replace(drawn(10**8 * number + index, CHAT_PROMPT, CHAT_ANSWER), priority="interactive")
        for index in range(2 * requests)
    ]
    own = [await first_token(engine, chat) for chat in chats[:requests]]
    batch = Batch(engine, number)
    chance = random.Random(number)
    await asyncio.sleep(seconds)  # until the answers end at different times
    before = await rate(engine, 2 * seconds)
    began = time.perf_counter()
    tokens = (await engine.status()).counters.step_tokens or 0
    asked = list[tuple[float, Timings]]()
    for chat in chats[requests:]:
        asked.append(await first_token(engine, chat))
        await asyncio.sleep(chance.uniform(0.1, 0.5))
    during = (((await engine.status()).counters.step_tokens or 0) - tokens) / (time.perf_counter() - began)
    after = await rate(engine, 2 * seconds)
    await batch.stop()
    return Round(
        before,
        during,
        after,
        median(first for first, _ in own),
        [first for first, _ in asked],
        [timings.queued_s or 0.0 for _, timings in asked],
        [timings.queued_steps or 0 for _, timings in asked],
    )


async def measured(model: str, folder: Path, asked: argparse.Namespace) -> tuple[str, list[Round]]:
    """The engine's build, and all rounds of one model."""
    path = model_file(model, folder)
    cores = len(os.sched_getaffinity(0))
    goal = goal_for(Goal(context=512, sequences=LANES, threads=cores, threads_batch=cores))
    plan = make(probe(Path.cwd()), read(str(path)), goal)
    engine = await start(plan, model_path=path, config=EngineConfig(), state=folder / "state", name=model)
    try:
        rounds = [await play(engine, number + 1, asked.requests, asked.seconds) for number in range(asked.rounds)]
        return engine.identity.build, rounds
    finally:
        await engine.close()


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="moe,smollm2")
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    build = ""
    found = {}
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        for model in asked.models.split(","):
            build, rounds = asyncio.run(measured(model, Path(folder), asked))
            steps = sorted(step for one in rounds for step in one.queued_steps)
            after = median(one.after_tok_s / one.before_tok_s for one in rounds)
            during = median(one.beside_tok_s / one.before_tok_s for one in rounds)
            missed |= steps[-1] > MAX_STEPS or after < MIN_AFTER
            first, waits, own = (
                [each for one in rounds for each in of(one)]
                for of in (lambda one: one.first_token_s, lambda one: one.queued_s, lambda one: [one.own_s])
            )
            print(
                f"{model}: {steps[-1]} steps at most before its own (of {len(steps)} requests), that is "
                f"{median(waits):.3f} s at the median and {max(waits):.2f} s at most; first token after "
                f"{median(first):.3f} s, {max(first):.2f} s at most, {median(own):.3f} s alone; batch at {during:.0%} "
                f"during them and {after:.0%} afterwards"
            )
            found[model] = [asdict(one) for one in rounds]
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "load_before": load,
        "build": build,
        "machine": f"{read_cpu(LocalHost())[0].model or platform.machine()}, {os.cpu_count()} cores",
        "lanes": LANES,
        "models": found,
    }
    (HERE / "results" / "interactive.json").write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(missed)


if __name__ == "__main__":
    main()
