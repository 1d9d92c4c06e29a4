"""Kill storm: kills random processes of a running batch with SIGKILL and counts the damage.

`Storm.run` runs the jobs of a reference (`storm_reference`): at random moments it kills the runner, the engine, its
supervisor, all three, a `tokenmill work` process or the database server, and starts the same command again. When the
batch is complete it compares the output file and the store with the reference. If kills are left, it begins another
batch in a new store. Used by the test suite (a few kills) and by bench/storm.py (many).
"""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from support.postgres import Cluster, text_of
from support.run_cli import LIMIT_S, command, environment, tokenmill, write
from support.storm_reference import SETTINGS, Line, Reference, output_damage, read_lines
from tokenmill.engine.process.identity import Pid, descendants
from tokenmill.errors import StoreError
from tokenmill.jobs.models import State
from tokenmill.jobs.store.address import Address
from tokenmill.jobs.store.reader import StoreReader

Target = Literal["runner", "worker", "engine", "supervisor", "all", "server", "backend"]

SQLITE_TARGETS: tuple[Target, ...] = ("runner", "engine", "supervisor", "all")
POSTGRES_TARGETS: tuple[Target, ...] = (*SQLITE_TARGETS, "worker", "server", "backend")
WORKERS = 2  # `tokenmill work` processes next to the runner, on PostgreSQL

_START_S = 2.0  # about as long as a runner needs until its engine is ready
_JITTER_S = 0.05
_POLL_S = 0.02
_MAX_UNEXPLAINED = 5
_QUARANTINED = "runner_lost"


@dataclass(frozen=True, slots=True)
class StormOrder:
    """How many kills, which choices, and what may be killed; None: everything that the store has."""

    kills: int
    seed: int
    targets: tuple[Target, ...] | None = None


@dataclass(slots=True)
class Tally:
    """What a storm did, and what it found. `damage` is empty if every guarantee held."""

    seed: int
    kills: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    jobs: int = 0
    lost: int = 0  # lines without an answer, in the output or in the store
    doubled: int = 0  # lines that are in the output twice, answers that the store counts twice
    changed: int = 0  # answers that differ from the reference, or between output and store
    misplaced: int = 0  # lines out of input order
    rewritten: int = 0  # times that lines already in the output changed
    unexplained: int = 0  # commands that failed although nothing of theirs was killed
    tracebacks: int = 0
    leftovers: int = 0  # processes that outlived their batch
    quarantined: int = 0  # jobs in flight in three lost runners, retried: documented behaviour on PostgreSQL
    exits: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)  # of lost lines: batch, job, code and message
    wall_s: float = 0.0

    @property
    def damage(self) -> dict[str, int]:
        """Every broken guarantee and how often it broke."""
        names = ("lost", "doubled", "changed", "misplaced", "rewritten", "unexplained", "tracebacks", "leftovers")
        return {name: getattr(self, name) for name in names if getattr(self, name)}


class _Command:
    """One tokenmill command, started again after each kill."""

    def __init__(self, home: Path, *words: object) -> None:
        home.mkdir(parents=True)
        self._home = home
        self._words = words
        self._stderr = home / "stderr"
        self.disturbed = False  # something of it was killed since it was started
        self.counted = False  # its end is in the tally
        self.process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        with self._stderr.open("wb") as stderr:
            return subprocess.Popen(
                command(*self._words),
                env=environment(self._home),
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )

    def restart(self) -> None:
        self.disturbed = self.counted = False
        self.process = self._start()

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def said(self) -> str:
        return self._stderr.read_text(errors="replace")

    def pids(self, target: Target) -> list[int]:
        """The processes to kill; empty while the engine is not started."""
        below = descendants(self.process.pid)
        if target == "all":
            return [self.process.pid, *below]
        if target in ("runner", "worker"):
            return [self.process.pid]
        for pid in below:
            engine = descendants(pid)
            if engine:  # the runner's only child with children of its own is the supervisor
                return [pid if target == "supervisor" else engine[0]]
        return []


class Storm:
    """Runs batches and kills random processes until `kills` are done."""

    def __init__(
        self,
        folder: Path,
        reference: Reference,
        order: StormOrder,
        server: Cluster | None = None,
        progress: Callable[[Tally], None] = lambda _: None,
    ) -> None:
        self._folder = folder
        self._reference = reference
        self._server = server
        self._progress = progress
        self._kills = order.kills
        self._targets = order.targets or (SQLITE_TARGETS if server is None else POSTGRES_TARGETS)
        self._chance = random.Random(order.seed)
        self._deck = list[Target]()
        self._seen = set[Pid]()
        self._max_answers = max(1, len(reference.lines) // 12)
        self.tally = Tally(order.seed)

    def run(self) -> Tally:
        """Run to the end and return the counts. AssertionError: commands fail again and again without a kill."""
        began_s = time.monotonic()
        while self.tally.kills.total() < self._kills:
            folder = self._folder / f"batch-{self.tally.batches}"
            batch = _Batch(folder, self._reference, self._server)
            try:
                self._disturb(batch)
                self._complete(batch)
            finally:
                batch.stop()
            self._compare(batch)
            self.tally.batches += 1
            self.tally.jobs += len(self._reference.lines)
            shutil.rmtree(folder)
            self.tally.wall_s = time.monotonic() - began_s
            self._progress(self.tally)
        self.tally.leftovers = self._leftovers()
        return self.tally

    def _disturb(self, batch: "_Batch") -> None:
        while self.tally.kills.total() < self._kills:
            self._wait(batch)
            if not self._kill(batch, self._next_target()):
                return
            self._progress(self.tally)
            self._check_output(batch)
            for each in batch.commands:
                if each.ended and not self._finished(batch, each):
                    each.restart()

    def _next_target(self) -> Target:
        """Every target equally often, in random order."""
        if not self._deck:
            self._deck = self._chance.sample(self._targets, len(self._targets))
        return self._deck.pop()

    def _wait(self, batch: "_Batch") -> None:
        """Until a random moment: while the runner starts, or after a random number of further answers."""
        if self._chance.random() < 1 / 3:
            time.sleep(self._chance.random() * _START_S)
            return
        goal = batch.answers() + self._chance.randint(1, self._max_answers)
        self._await(batch, lambda: batch.answers() >= goal)
        time.sleep(self._chance.random() * _JITTER_S)

    def _await(self, batch: "_Batch", holds: Callable[[], bool]) -> bool:
        """Whether it holds before the batch is complete; a command that fails meanwhile is started again."""
        end_s = time.monotonic() + LIMIT_S
        while not holds():
            assert time.monotonic() < end_s, "\n".join(each.said for each in batch.commands)
            for each in batch.commands:
                if each.ended:
                    if self._finished(batch, each):
                        return False
                    each.restart()
            time.sleep(_POLL_S)
        return True

    def _finished(self, batch: "_Batch", ended: _Command) -> bool:
        """Whether the runner is done. Counts, once, how a command ended and whether that had a reason."""
        code = ended.process.returncode
        if ended.counted:
            return code == 0 and ended is batch.runner
        ended.counted = True
        self.tally.exits[f"{'run' if ended is batch.runner else 'work'} {code}"] += 1
        self.tally.tracebacks += "Traceback (most recent call last)" in ended.said
        if code == 0 and ended is batch.runner:
            return True
        if not ended.disturbed:
            self.tally.unexplained += 1
            assert self.tally.unexplained <= _MAX_UNEXPLAINED, ended.said
        return False

    def _kill(self, batch: "_Batch", target: Target) -> bool:
        """Whether something was killed; False: the batch was complete before."""
        members = {"runner": [batch.runner], "worker": batch.workers}.get(target, batch.commands)
        member = self._chance.choice(members)
        pids = list[int]()

        def find() -> bool:
            pids[:] = self._pids(target, member)
            return bool(pids)

        if not self._await(batch, find) or batch.runner.process.poll() == 0:
            self._deck.append(target)
            return False
        self._seen |= {found for pid in pids if (found := Pid.of(pid))}
        for each in batch.commands if target in ("server", "backend") else [member]:
            each.disturbed = True
            self._seen |= {found for pid in descendants(each.process.pid) if (found := Pid.of(pid))}
        if self._server is not None and target == "server":
            self._server.stop(signal.SIGKILL)
            self._server.start()
        elif self._server is not None and target == "backend":
            self._server.kill_backend(pids[0])
        else:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if target in ("runner", "worker", "all"):
            member.process.wait(LIMIT_S)
        self.tally.kills[target] += 1
        return True

    def _pids(self, target: Target, member: _Command) -> list[int]:
        if target not in ("server", "backend"):
            return member.pids(target)
        assert self._server is not None
        if target == "server":
            return [self._server.pid]
        backends = self._server.backends()
        return [self._chance.choice(backends)] if backends else []

    def _check_output(self, batch: "_Batch") -> None:
        """Lines that are in the output are final: it may only grow."""
        now = batch.output.read_bytes() if batch.output.exists() else b""
        whole = now[: now.rfind(b"\n") + 1]
        self.tally.rewritten += not whole.startswith(batch.written)
        batch.written = whole

    def _complete(self, batch: "_Batch") -> None:
        """Let the batch finish. Jobs that lost runners put into quarantine are retried, as a person would."""
        while True:
            self._await(batch, lambda: False)
            self._check_output(batch)
            count = sum(_code(line) == _QUARANTINED for line in read_lines(batch.output))
            if not count:
                return
            self.tally.quarantined += count
            batch.retry()

    def _compare(self, batch: "_Batch") -> None:
        """Output and store against the reference."""
        lines = list(read_lines(batch.output))
        with StoreReader(batch.address) as reader:
            (stored,) = reader.batches()
            results = reader.results(stored.id, 0, len(self._reference.lines) + 1)
        damage = output_damage(self._reference, lines)
        unanswered = sum(result.state is not State.DONE for result in results)
        self.tally.lost += max(damage["lost"], unanswered)
        self.tally.doubled += damage["doubled"]
        self.tally.doubled += max(0, stored.totals.computed + stored.totals.reused - len(results))
        self.tally.misplaced += damage["misplaced"]
        bodies = {line["custom_id"]: line["response"]["body"] for line in lines if line["response"]}
        self.tally.changed += damage["changed"] + sum(
            json.loads(result.body) != bodies.get(result.custom_id or "") for result in results if result.body
        )
        self.tally.errors += [
            f"batch {self.tally.batches}, {line['custom_id']}: {line['error']['code']}: {line['error']['message']}"
            for line in lines
            if line["error"]
        ]

    def _leftovers(self) -> int:
        """Processes of the storm that are still there after a minute."""
        end_s = time.monotonic() + 60
        while any(pid.alive for pid in self._seen) and time.monotonic() < end_s:
            time.sleep(_POLL_S)
        return sum(pid.alive for pid in self._seen)


class _Batch:
    """One batch in a store of its own, and the commands that work on it."""

    def __init__(self, folder: Path, reference: Reference, server: Cluster | None) -> None:
        folder.mkdir(parents=True)
        self.address: Address = folder / "store" if server is None else server.fresh()
        self._home = folder / "retry"
        self.output = folder / "out.jsonl"
        self.written = b""
        source = write(folder / "jobs.jsonl", reference.lines)
        words = ("--store", text_of(self.address), "--model", reference.model, *SETTINGS, "--json")
        self.runner = _Command(folder / "run", "run", source, "-o", self.output, *words)
        self.workers = [
            _Command(folder / f"work-{number}", "work", "--stay", *words)
            for number in range(WORKERS if server is not None else 0)
        ]

    @property
    def commands(self) -> list[_Command]:
        return [self.runner, *self.workers]

    def answers(self) -> int:
        """Answers in the store; 0 while it is being made or its server is away."""
        try:
            with StoreReader(self.address) as reader:
                return sum(batch.counts.done for batch in reader.batches())
        except StoreError:
            return 0

    def retry(self) -> None:
        """Put quarantined jobs back into the queue and run the same command again."""
        done = tokenmill(self._home, "retry", "last", "--failed", "--store", text_of(self.address))
        assert done.returncode == 0, done.stderr
        self.written = b""
        self.runner.restart()

    def stop(self) -> None:
        """End all commands and their engines."""
        for each in self.commands:
            if not each.ended:
                each.process.terminate()
        for each in self.commands:
            with suppress(subprocess.TimeoutExpired):
                each.process.wait(60)
            each.process.kill()
            each.process.wait()


def _code(line: Line) -> str | None:
    return line["error"]["code"] if line["error"] else None
