"""Interactive requests beside a batch that saturates the native engine: first tokens, and what becomes of the batch.

    python bench/interactive.py [--models moe,smollm2] [--requests 10] [--seconds 6] [--rounds 3]

Eight batch requests run at all times; when one ends the next begins. Each round measures the batch alone, then with
interactive requests that come one after another at moments drawn by lot, then alone again. A first token is counted in
steps of the engine as they were just before: the goal is one and a half and the prompt's own. "Own" is what the same
prompt takes on the idle engine. The batch's rate afterwards is held against the rate before. Writes
results/interactive.json; exits 1 when a goal is missed.
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
from tokenmill.engine.engine import Piece, Request, Sampling  # noqa: E402
from tokenmill.engine.native.engine import NativeEngine  # noqa: E402
from tokenmill.engine.native.order import goal_for  # noqa: E402
from tokenmill.engine.native.start import start  # noqa: E402
from tokenmill.hardware.cpu import read_cpu  # noqa: E402
from tokenmill.hardware.host import LocalHost  # noqa: E402
from tokenmill.hardware.probe import probe  # noqa: E402
from tokenmill.model.read import read  # noqa: E402
from tokenmill.plan.goal import Goal  # noqa: E402
from tokenmill.plan.make import make  # noqa: E402

LANES, PROMPT, ANSWER = 8, 200, 120
CHAT_PROMPT, CHAT_ANSWER = 40, 8
MOST_STEPS, LEAST_AFTER = 1.5, 0.95


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one model; seconds and tokens a second."""

    before_tok_s: float
    beside_tok_s: float
    after_tok_s: float
    own_s: float  # first token of such a prompt on the idle engine, median
    step_s: float  # of the engine with the batch alone
    first_token_s: list[float]

    @property
    def steps(self) -> list[float]:
        """Steps that each first token waited beyond its own prompt's time."""
        return [max(0.0, seconds - self.own_s) / self.step_s for seconds in self.first_token_s]


def drawn(seed: int, tokens: int, most: int, vocab: int = 400) -> Request:
    """A prompt like no other."""
    pick = random.Random(seed)
    prompt = tuple(pick.randrange(3, vocab) for _ in range(tokens))
    return Request(prompt, Sampling(temperature=0.0), max_tokens=most, ignore_eos=True)


async def first_token(engine: NativeEngine, request: Request) -> float:
    """Seconds until its first token; the answer is taken to its end."""
    began, first = time.perf_counter(), 0.0
    async with aclosing(engine.stream(request)) as events:
        async for event in events:
            if isinstance(event, Piece) and not first:
                first = time.perf_counter() - began
    return first or time.perf_counter() - began


class Batch:
    """Requests without end, so many at a time."""

    def __init__(self, engine: NativeEngine, seed: int) -> None:
        self._engine, self._seed, self.tokens = engine, seed, 0
        self._tasks = [asyncio.create_task(self._lane(lane)) for lane in range(LANES)]

    async def _lane(self, lane: int) -> None:
        for number in range(10**6):
            async with aclosing(
                self._engine.stream(drawn(self._seed + 1000 * number + lane, PROMPT, ANSWER))
            ) as events:
                async for event in events:
                    self.tokens += event.tokens if isinstance(event, Piece) else PROMPT

    async def rate(self, seconds: float) -> float:
        """Tokens a second, those of finished prompts counted."""
        began, before = time.perf_counter(), self.tokens
        await asyncio.sleep(seconds)
        return (self.tokens - before) / (time.perf_counter() - began)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def play(engine: NativeEngine, number: int, requests: int, seconds: float) -> Round:
    """One round."""
    chats = [replace(drawn(10**8 * number + index, CHAT_PROMPT, CHAT_ANSWER), priority="interactive")
             for index in range(2 * requests)]  # fmt: skip
    own = [await first_token(engine, chat) for chat in chats[:requests]]
    batch, pick = Batch(engine, 10**9 * number), random.Random(number)
    await asyncio.sleep(2.0)  # until answers end at different times
    counters = (await engine.status()).counters
    before = await batch.rate(seconds)
    later = (await engine.status()).counters
    step_s = ((later.decode_s or 0) - (counters.decode_s or 0)) / ((later.steps or 1) - (counters.steps or 0))
    began, tokens, firsts = time.perf_counter(), batch.tokens, list[float]()
    for chat in chats[requests:]:
        firsts.append(await first_token(engine, chat))
        await asyncio.sleep(pick.uniform(0.1, 0.5))
    beside = (batch.tokens - tokens) / (time.perf_counter() - began)
    after = await batch.rate(seconds)
    await batch.stop()
    return Round(before, beside, after, median(own), step_s, firsts)


async def measured(model: str, folder: Path, asked: argparse.Namespace) -> tuple[str, list[Round]]:
    """The engine's build, and all rounds of one model."""
    path, cores = model_file(model, folder), len(os.sched_getaffinity(0))
    goal = goal_for(Goal(context=512, sequences=LANES, threads=cores, threads_batch=cores))
    plan = make(probe(Path.cwd()), read(str(path)), goal)
    engine = await start(plan, model_path=path, config=EngineConfig(), state=folder / "state", name=model)
    try:
        rounds = [await play(engine, number + 1, asked.requests, asked.seconds) for number in range(asked.rounds)]
        return engine.identity.build, rounds
    finally:
        await engine.close()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="moe,smollm2")
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    load, build, found, missed = os.getloadavg()[0], "", {}, False
    with tempfile.TemporaryDirectory() as folder:
        for model in asked.models.split(","):
            build, rounds = asyncio.run(measured(model, Path(folder), asked))
            steps = sorted(step for one in rounds for step in one.steps)
            after = median(one.after_tok_s / one.before_tok_s for one in rounds)
            beside = median(one.beside_tok_s / one.before_tok_s for one in rounds)
            missed |= median(steps) > MOST_STEPS or after < LEAST_AFTER
            print(
                f"{model}: first token after {median(steps):.2f} steps at the median, {steps[-1]:.2f} at most (of "
                f"{len(steps)}; a step {median(one.step_s for one in rounds) * 1e3:.0f} ms, its own prompt "
                f"{median(one.own_s for one in rounds) * 1e3:.0f} ms); the batch {beside:.0%} beside them, "
                f"{after:.0%} afterwards"
            )
            found[model] = [asdict(one) | {"steps": one.steps} for one in rounds]
    result = {
        "date": datetime.now(UTC).date().isoformat(), "load_before": load, "build": build,
        "machine": f"{read_cpu(LocalHost())[0].model or platform.machine()}, {os.cpu_count()} cores",
        "lanes": LANES, "models": found,
    }  # fmt: skip
    (HERE / "results" / "interactive.json").write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(missed)


if __name__ == "__main__":
    main()
