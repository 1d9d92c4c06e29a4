"""Real runner processes on one batch: every answer computed once, heads on as few of them as needed, and kill -9."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support import runner_process
from support.jobs_store import submitted
from tokenmill.jobs.models import Batch, Counts
from tokenmill.jobs.output import Output
from tokenmill.jobs.store.address import PostgresAddress
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.jobs.store.store import Store

HEADS, EACH, LANES = 9, 12, 3
HEAD = " ".join(f"rule{number}" for number in range(400))
PROMPTS = [f"head{head} {HEAD} question{job}" for job in range(EACH) for head in range(HEADS)]
SHORT = Counter(f"head{head} question{job}" for job in range(EACH) for head in range(HEADS))


@dataclass
class Runner:
    """A process and what it told."""

    process: "subprocess.Popen[str]"
    began: list[str] = field(default_factory=list)
    computed: int = 0  # words
    done: int | None = None

    def line(self) -> bool:
        """The next thing that it tells; whether there was one."""
        assert self.process.stdout is not None
        word, _, rest = self.process.stdout.readline().strip().partition(" ")
        if word == "began":
            computed, _, prompt = rest.partition(" ")
            self.computed += int(computed)
            self.began.append(prompt)
        elif word == "done":
            self.done = int(rest)
        return bool(word)

    def until_began(self, jobs: int) -> None:
        while len(self.began) < jobs:
            assert self.line(), self.words()

    def go(self) -> None:
        """It may end its answers from now on."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.finish()

    def finish(self) -> int:
        while self.line():
            pass
        return self.process.wait(120)

    def words(self) -> str:
        assert self.process.stderr is not None
        self.process.kill()
        return self.process.stderr.read()


@contextmanager
def runner(server: PostgresAddress) -> Iterator[Runner]:
    command = [sys.executable, runner_process.__file__, server.url, str(LANES)]
    pipe = subprocess.PIPE
    environment = os.environ | {"PYTHONPATH": str(Path(runner_process.__file__).parents[1])}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        one = Runner(process)
        try:
            assert one.line(), one.words()
            yield one
        finally:
            process.kill()


@pytest.fixture
def batch(store: Store, tmp_path: Path) -> Batch:
    return submitted(store, tmp_path / "jobs.jsonl", PROMPTS, max_tokens=2)


def head(prompt: str) -> str:
    return prompt.partition(" ")[0]


def written(store: Store, batch: Batch) -> list[str]:
    """The prompts of the output lines."""
    with Output(store, batch) as output:
        assert output.finish()
    lines = Path(batch.output or "").read_text().splitlines()
    assert all('"error":null' in line for line in lines)
    return [line.partition('"custom_id":"')[2].partition("-")[0] for line in lines]


def test_three_runners_do_everything_once(server: PostgresAddress, store: Store, batch: Batch) -> None:
    with ExitStack() as stack:
        runners = [stack.enter_context(runner(server)) for _ in range(3)]
        for one in runners:
            one.until_began(1)  # all have some before any has an answer
        for one in runners:
            one.go()
        assert [one.finish() for one in runners] == [0, 0, 0]
    assert Counter(prompt for one in runners for prompt in one.began) == SHORT
    assert sum(one.done or 0 for one in runners) == len(PROMPTS)
    found = store.batch(batch.id)
    assert (found.counts, found.totals.computed) == (Counts(done=len(PROMPTS)), len(PROMPTS))
    assert written(store, batch) == [str(number) for number in range(1, len(PROMPTS) + 1)]
    # Nine heads for three runners: none has to be computed by two, unless one was without work at the end.
    where = Counter(name for one in runners for name in {head(prompt) for prompt in one.began})
    assert sum(where.values()) <= HEADS + 2
    words = len(HEAD.split())
    assert sum(one.computed for one in runners) < (HEADS + 4) * words + 3 * len(PROMPTS)


def test_what_a_killed_runner_had_is_done_once_more_and_nothing_else(
    server: PostgresAddress, store: Store, batch: Batch
) -> None:
    with ExitStack() as stack:
        killed, *others = [stack.enter_context(runner(server)) for _ in range(3)]
        for one in (killed, *others):
            one.until_began(1)
        killed.kill()
        for one in others:
            one.go()
        assert [one.finish() for one in others] == [0, 0]
    lost = Counter(killed.began)
    assert lost
    assert Counter(prompt for one in others for prompt in one.began) == SHORT  # each once, those of it too
    found = store.batch(batch.id)
    assert (found.counts, found.totals.computed) == (Counts(done=len(PROMPTS)), len(PROMPTS))
    assert written(store, batch) == [str(number) for number in range(1, len(PROMPTS) + 1)]
    with StoreReader(server) as reader:
        assert [one.pid for one in reader.runners()] == [os.getpid()]


def test_a_job_that_kills_runners_does_not_go_round_for_ever(
    server: PostgresAddress, store: Store, tmp_path: Path
) -> None:
    prompts = ["poison", *(f"harmless {number}" for number in range(10))]
    batch = submitted(store, tmp_path / "jobs.jsonl", prompts, max_tokens=2)
    deaths = 0
    for _ in range(6):
        with runner(server) as one:
            one.go()
            if one.finish() == 0:
                break
            deaths += 1
    assert deaths == 3  # with others, with others again, and alone
    assert store.batch(batch.id).counts == Counts(done=10, quarantined=1)
    assert store.failures_by_code(batch.id) == {"runner_lost": 1}
