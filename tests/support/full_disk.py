"""Runs a scenario on a disk that fills up, as a program, because only it sees the disk.

    full_disk.py SCENARIO FOLDER

FOLDER is a file system of three MiB if this process may mount one; otherwise its files are limited to one MiB.
"""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tokenmill.errors import StoreError, TokenmillError
from tokenmill.jobs.ingest.submit import submit
from tokenmill.jobs.models import FinishedJob, JobId, Submission
from tokenmill.jobs.output import Output
from tokenmill.jobs.store.store import Store

MOUNTED = "mounted"
BODY_BYTES = 20_000


def run(scenario: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a scenario on a small disk, or under a limit where nothing may be mounted."""
    folder.mkdir()
    command = [sys.executable, __file__, scenario, str(folder)]
    mount = f"mount -t tmpfs -o size=3m none '{folder}' && exec \"$@\""
    for namespace in (["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"]):
        tried = subprocess.run([*namespace, "sh", "-c", mount, "sh", "true"], check=False, capture_output=True)
        if tried.returncode == 0:
            return _finished([*namespace, "sh", "-c", mount, "sh", *command, MOUNTED])
    return _finished(command)


def _finished(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=200, env=environment)


def until_full(work: Callable[[], object], error: type[TokenmillError]) -> None:
    """The work must fail for want of room, with words."""
    try:
        work()
    except error as found:
        assert found.hint, found
        return
    raise AssertionError("the disk did not fill up")


def give_room(folder: Path) -> None:
    """The operator frees some space."""
    if len(sys.argv) > 3:
        subprocess.run(["mount", "-o", "remount,size=40m", str(folder)], check=True)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


def body(job: int) -> bytes:
    return json.dumps({"text": f"{job} " + "x" * BODY_BYTES}).encode()


def answers(folder: Path, jobs: Path) -> None:
    """Commit answers until the disk is full: what was acknowledged is stored, and the rest can follow."""
    acknowledged: list[int] = []
    with Store(folder / "s") as store:
        batch = submit(store, jobs, Submission("m", output=str(folder / "out"))).batch
        waiting = [item.id for item in store.waiting([batch.id], limit=1000)]

        def work() -> None:
            for job in waiting:
                store.start([job])
                store.commit([FinishedJob(job, body(job))])
                acknowledged.append(job)

        until_full(work, StoreError)
        assert 10 < len(acknowledged) < len(waiting)
    give_room(folder)
    with Store(folder / "s") as store:
        found = {
            JobId.of(batch.id, result.number): result.body for result in store.results(batch.id, 0, 1000) if result.body
        }
        assert {job: found[job] for job in acknowledged} == {job: body(job) for job in acknowledged}
        assert len(found) - len(acknowledged) in (0, 1)  # the last one was not acknowledged; it may have come through
        rest = [item.id for item in store.waiting([batch.id], limit=1000)]
        store.start(rest)
        store.commit([FinishedJob(job, body(job)) for job in rest])
        assert store.batch(batch.id).counts.done == len(waiting)


def small_answers(folder: Path, jobs: Path) -> None:
    """A batch whose file and answers fit the disk, each answer in a transaction of its own: it comes to its end."""
    with Store(folder / "s") as store:
        batch = submit(store, jobs, Submission("m", output=str(folder / "out"))).batch
        for item in store.waiting([batch.id], limit=10_000):
            store.start([item.id])
            store.commit([FinishedJob(item.id, b'{"text": "%d"}' % item.id)])
        assert store.batch(batch.id).finished


def lines(folder: Path, jobs: Path) -> None:
    """A file that does not fit is not sealed, and submitting it again continues."""
    how = Submission("m", output=str(folder / "out"))
    with Store(folder / "s") as store:
        until_full(lambda: submit(store, jobs, how), StoreError)
    give_room(folder)
    with Store(folder / "s") as store:
        batch = submit(store, jobs, how).batch
        assert batch.counts.pending == batch.counts.total == sum(1 for _ in jobs.open())


def output(folder: Path, jobs: Path) -> None:
    """The output's disk fills up: whole lines only, and the rest when there is room."""
    with Store(jobs.parent / "elsewhere") as store:
        batch = submit(store, jobs, Submission("m", output=str(folder / "out"))).batch
        waiting = [item.id for item in store.waiting([batch.id], limit=1000)]
        store.start(waiting)
        store.commit([FinishedJob(job, body(job)) for job in waiting])
        with Output(store, batch) as target:
            until_full(target.advance, TokenmillError)
            written = (folder / "out").read_bytes()
            assert written.endswith(b"\n") or not written
            give_room(folder)
            assert target.finish()
        found = (folder / "out").read_bytes()
        assert found.startswith(written)
        assert [json.loads(line)["custom_id"] for line in found.splitlines()] == [
            json.loads(line)["custom_id"] for line in jobs.read_text().splitlines()
        ]


def main() -> None:
    folder = Path(sys.argv[2])
    if len(sys.argv) == 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    jobs = folder.parent / "jobs.jsonl"
    {"answers": answers, "small_answers": small_answers, "lines": lines, "output": output}[sys.argv[1]](folder, jobs)
    print("passed")


if __name__ == "__main__":
    main()
