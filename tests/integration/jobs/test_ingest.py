"""Jobs that run while their file is still being stored."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support import growing
from support.fake_engine import FakeEngine
from support.growing import GROUP_LINES, submission, worked
from support.jobs_store import write_jobs
from support.postgres import text_of
from support.worked import LIMIT_S
from tokenmill.errors import UsageError
from tokenmill.jobs.ingest.background import Ingest
from tokenmill.jobs.ingest.submit import Hooks
from tokenmill.jobs.models import Counts
from tokenmill.jobs.store.address import Address
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.jobs.store.store import Store, ask_to_cancel
from tokenmill.jobs.worker.progress import RunReport, Snapshot

JOBS = 200
PROMPTS = [f"{number} " + "x" * 60 for number in range(JOBS)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    growing.small_groups(monkeypatch.setattr)


class Gate:
    """Holds the thread that stores lines in front of the second group until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.lines = list[int]()

    def passed(self, line: int) -> None:
        if self.lines:
            assert self.opened.wait(LIMIT_S)
        self.lines.append(line)


def run(store: Store, ingest: Ingest, tell: Callable[[Snapshot], None] | None = None) -> tuple[RunReport, FakeEngine]:
    async def once() -> tuple[RunReport, FakeEngine]:
        engine = FakeEngine()
        return await worked(store, ingest, engine, tell=tell), engine

    return asyncio.run(once())


def names(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


def expected() -> list[str]:
    return [f"{number}-{prompt}" for number, prompt in enumerate(PROMPTS, 1)]


def test_answers_are_stored_before_the_last_line_is(tmp_path: Path, address: Address) -> None:
    write_jobs(tmp_path / "jobs.jsonl", PROMPTS)
    gate, seen = Gate(), list[tuple[int, int]]()

    def tell(now: Snapshot) -> None:
        seen.append((now.counts.done, now.counts.total))
        if now.counts.done >= GROUP_LINES:
            gate.opened.set()

    with Store(address) as store, Ingest(submission(store, tmp_path, Hooks(gate.passed))) as ingest:
        found = ingest.found.batch
        assert found.sealed_s is None
        assert 0 < found.counts.pending < JOBS
        assert not (tmp_path / "out.jsonl").exists()
        report, engine = run(store, ingest, tell)
        assert not ingest.growing
        assert report.end == "finished"
        assert report.counts == Counts(done=JOBS)
        assert store.batch(found.id).finished
    assert any(done and total < JOBS for done, total in seen)
    totals = [total for _, total in seen]
    assert totals == sorted(totals)
    assert sorted(engine.seen.streams) == sorted(PROMPTS)
    assert names(tmp_path / "out.jsonl") == expected()


def test_jobs_are_read_again_when_their_prefix_was_passed(tmp_path: Path, address: Address) -> None:
    """Lines that arrive behind the position of the worker in prefix order are worked on, too."""
    prompts = [f"{number % 7} {'y' * 70} {number}" for number in range(JOBS)]
    write_jobs(tmp_path / "jobs.jsonl", prompts)
    with Store(address) as store, Ingest(submission(store, tmp_path)) as ingest:
        report, engine = run(store, ingest)
    assert report.counts == Counts(done=JOBS)
    assert sorted(engine.seen.streams) == sorted(prompts)


def test_a_refused_file_leaves_answers_and_nothing_else(tmp_path: Path, address: Address) -> None:
    path = write_jobs(tmp_path / "jobs.jsonl", PROMPTS)
    whole = path.read_text()
    path.write_text(whole + whole.splitlines()[0] + "\n")
    gate = Gate()

    def tell(now: Snapshot) -> None:
        if now.counts.done >= GROUP_LINES:
            gate.opened.set()

    with Store(address) as store:
        with (
            pytest.raises(UsageError, match="lines .* and 201"),
            Ingest(submission(store, tmp_path, Hooks(gate.passed))) as ingest,
        ):
            run(store, ingest, tell)
        assert store.batches() == []
        assert not (tmp_path / "out.jsonl").exists()
        path.write_text(whole)
        with Ingest(submission(store, tmp_path)) as ingest:
            report, engine = run(store, ingest)
        assert report.counts == Counts(done=JOBS)
        assert len(engine.seen.streams) <= JOBS - GROUP_LINES
    assert names(tmp_path / "out.jsonl") == expected()


def test_strict_refuses_before_any_job_is_started(tmp_path: Path, address: Address) -> None:
    path = write_jobs(tmp_path / "jobs.jsonl", PROMPTS)
    good = path.read_text()
    with Store(address) as store:
        path.write_text(good + "{\n")
        with pytest.raises(UsageError, match="line 201"), Ingest(submission(store, tmp_path, strict=True)):
            pytest.fail("a bad line was accepted")
        assert store.batches() == []
        path.write_text(good)
        with Ingest(submission(store, tmp_path, strict=True)) as ingest:
            assert not ingest.growing
            assert ingest.found.batch.counts == Counts(pending=JOBS)


def test_a_run_that_is_stopped_while_storing_continues(tmp_path: Path, address: Address) -> None:
    write_jobs(tmp_path / "jobs.jsonl", PROMPTS)
    gate = Gate()

    async def stopped(store: Store, ingest: Ingest) -> tuple[RunReport, FakeEngine]:
        engine, stop = FakeEngine(), asyncio.Event()

        def tell(now: Snapshot) -> None:
            if now.counts.done >= GROUP_LINES:
                stop.set()

        return await worked(store, ingest, engine, stop=stop, tell=tell), engine

    with Store(address) as store:
        with Ingest(submission(store, tmp_path, Hooks(gate.passed))) as ingest:
            report, _ = asyncio.run(stopped(store, ingest))
            assert report.end == "stopped"
            gate.opened.set()
        half = store.batch(ingest.found.batch.id)
        assert half.sealed_s is None
        assert 0 < half.counts.total < JOBS
        with Ingest(submission(store, tmp_path)) as ingest:
            assert ingest.found.continued
            assert ingest.found.batch.id == half.id
            report, second = run(store, ingest)
        assert report.counts == Counts(done=JOBS)
        assert store.batch(half.id).totals.computed == JOBS
        assert len(second.seen.streams) == JOBS - half.counts.done
    assert names(tmp_path / "out.jsonl") == expected()


def test_a_batch_is_cancelled_when_all_its_lines_are_stored(tmp_path: Path, address: Address) -> None:
    write_jobs(tmp_path / "jobs.jsonl", [f"gated {prompt}" for prompt in PROMPTS])
    gate = Gate()

    async def cancelled(store: Store, ingest: Ingest) -> RunReport:
        running = asyncio.create_task(worked(store, ingest, engine := FakeEngine()))
        await engine.changed.wait()
        await asyncio.to_thread(ask_to_cancel, address, ingest.found.batch.name)
        gate.opened.set()
        return await running

    with Store(address) as store, Ingest(submission(store, tmp_path, Hooks(gate.passed))) as ingest:
        report = asyncio.run(cancelled(store, ingest))
        assert report.end == "cancelled"
        assert store.batch(ingest.found.batch.id).counts == Counts(cancelled=JOBS)


def test_killed_again_and_again_each_line_is_answered_once(tmp_path: Path, address: Address) -> None:
    write_jobs(tmp_path / "jobs.jsonl", PROMPTS)
    chance, done = random.Random(3), 0
    for held in (True, False):  # on a server, a job that is in flight at a third kill is set aside
        _killed(address, tmp_path, done + 1, chance, held=held)
        with StoreReader(address) as reader:
            (batch,) = reader.batches()
            assert batch.sealed_s is None or not held
            assert batch.counts.done > done
            assert batch.totals.computed == batch.counts.done
            done = batch.counts.done
    assert _killed(address, tmp_path, JOBS + 1, chance, held=False)
    with StoreReader(address) as reader:
        (batch,) = reader.batches()
        assert batch.counts == Counts(done=JOBS)
        assert batch.totals.computed == JOBS
    assert names(tmp_path / "out.jsonl") == expected()


def _killed(address: Address, folder: Path, answers: int, chance: random.Random, *, held: bool) -> bool:
    """Kill a run with -9 a moment after it has so many answers; whether it finished before that.

    With `held`, the run does not get beyond the second group of lines that it stores.
    """
    command = [sys.executable, growing.__file__, text_of(address), str(folder)]
    pipe, env = subprocess.PIPE, os.environ | {"PYTHONPATH": str(Path(growing.__file__).parents[1])}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        if not held:
            child.stdin.close()
        for line in child.stdout:
            word, number = (*line.split(), "0")[:2]
            if word == "finished":
                assert child.wait(LIMIT_S) == 0, child.stderr.read()
                return True
            if word == "done" and int(number) >= answers:
                break
        time.sleep(0.02 * chance.random())  # not only behind a commit
        child.kill()
        assert child.wait(LIMIT_S) == -signal.SIGKILL, child.stderr.read()
        return False
