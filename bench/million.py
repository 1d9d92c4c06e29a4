"""A million jobs through the store: submitted, ordered, answered, written out.

    python bench/million.py [--jobs 1000000] [--rounds 3] [--folder /tmp]

Two files: lines of about 300 bytes, and lines that begin with one of eight prefixes of 2 KB. Every round runs in its
own process, to measure its peak memory. The result is the best round's rate, because other programs may use the same
cores; all rounds are stored, with the load of the machine and the CPU time per line. No engine is involved: answers are
made up. Exits 1 if a goal is missed. Writes results/million.json.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from tokenmill.hardware.cpu import read_cpu
from tokenmill.hardware.host import LocalHost
from tokenmill.jobs.ingest.submit import submit
from tokenmill.jobs.models import FinishedJob, Submission
from tokenmill.jobs.output import Output
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.jobs.store.store import Store

HERE = Path(__file__).parent
HEADS = {"300 B lines": 0, "2 KB heads": 2048}
MIN_LINES_S = 50_000
MAX_RSS_MB = 500
MAX_DISPATCH_S = 5.0
MAX_STATUS_S = 0.1
MODEL = "0" * 64
GROUP = 2000  # answers per transaction when filling the store; a batch commits far fewer
WORDS = ["a", "batch", "of", "jobs", "shares", "its", "head,", "and", "what", "differs", "comes", "last;"]


@dataclass(frozen=True, slots=True)
class Round:
    """Measurements of one round."""

    variant: str
    lines: int
    line_bytes: int
    load_before: float  # load average of the machine
    submit_lines_s: float
    submit_cpu_us: float  # CPU time per line in the process that stores ...
    parse_cpu_us: float  # ... and in those that parse
    first_dispatch_s: float  # from the start of the submission, while it is running
    dispatch_after_s: float  # the same after the submission: a page of 64 jobs and eight started jobs
    rss_mb: float  # peak of the storing process and the largest parser
    store_mb: float
    status_s: float  # from opening the store to the counts
    walk_jobs_s: float  # pending jobs in prefix order, page by page
    commit_ms: float  # one answer, on disk
    output_lines_s: float
    output_mb_s: float
    check_lines_s: float  # checking a finished output against the store
    again_s: float  # submitting the same file again
    reuse_lines_s: float  # the same lines in another batch, all answered


def main() -> int:
    """Run the rounds and judge them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, default=None, help="folder for the files, which take about 12 GB for a million jobs"
    )
    parser.add_argument("--play", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        print(json.dumps(asdict(play(options.play[0], Path(options.play[1])))))
        return 0
    rounds = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for variant, head_bytes in HEADS.items():
            path = Path(folder) / "jobs.jsonl"
            write_jobs(path, options.jobs, head_bytes)
            for number in range(options.rounds):
                print(f"{variant}: round {number + 1} of {options.rounds}", file=sys.stderr)
                command = [sys.executable, __file__, "--play", variant, str(path)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                rounds.append(Round(**json.loads(done.stdout)))
    return report(rounds)


def write_jobs(path: Path, count: int, head_bytes: int) -> None:
    """Write OpenAI batch lines with shuffled prefixes."""
    heads = [f"Digest {number}. {' '.join(WORDS * (head_bytes // 50 + 1))}"[:head_bytes] for number in range(8)]
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            messages = [
                {"role": "system", "content": heads[number * 7919 % 8] or "Be brief."},
                {"role": "user", "content": f"Summarize document {number}: {' '.join(WORDS[:8])}"},
            ]
            body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 64}
            line = {"custom_id": f"job-{number:07d}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def play(variant: str, path: Path) -> Round:
    """One round, from an empty store."""
    load = os.getloadavg()[0]
    folder = path.parent / "round"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    how = Submission(MODEL, output=str(folder / "out.jsonl"))
    with Store(folder / "store") as store:
        dispatched: list[float] = []

        def progress(line: int) -> None:
            if not dispatched:
                (batch,) = store.batches()
                store.release([job.id for job in store.start(_page(store, batch.id)[:8]).running])
                dispatched.append(time.perf_counter() - began)

        before = os.times()
        began = time.perf_counter()
        batch = submit(store, path, how, progress=progress).batch
        took = time.perf_counter() - began
        after = os.times()
        began = time.perf_counter()
        store.release([job.id for job in store.start(_page(store, batch.id)[:8]).running])
        dispatch_after_s = time.perf_counter() - began
        lines = batch.counts.total
        began = time.perf_counter()
        with StoreReader(folder / "store") as reader:
            assert reader.batches()[0].counts.pending == lines
        status_s = time.perf_counter() - began
        rss_mb = (
            sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1024
        )
        store_mb = sum(file.stat().st_size for file in (folder / "store").iterdir()) / 1e6
        began = time.perf_counter()
        walked = sum(len(page) for page in _pages(store, batch.id))
        walk_s = time.perf_counter() - began
        assert walked == lines
        commit_ms = _answer_all(store, batch.id)
        written = _written(store, batch.id)
        began = time.perf_counter()
        assert submit(store, path, how).continued
        again_s = time.perf_counter() - began
        began = time.perf_counter()
        other = submit(store, path, Submission(MODEL, output=str(folder / "other.jsonl"))).batch
        reuse_s = time.perf_counter() - began
        assert other.counts.done == lines
    return Round(
        variant=variant,
        lines=lines,
        line_bytes=path.stat().st_size // lines,
        load_before=load,
        submit_lines_s=lines / took,
        submit_cpu_us=1e6 * (after.user + after.system - before.user - before.system) / lines,
        parse_cpu_us=1e6
        * (after.children_user + after.children_system - before.children_user - before.children_system)
        / lines,
        first_dispatch_s=dispatched[0],
        dispatch_after_s=dispatch_after_s,
        rss_mb=rss_mb,
        store_mb=store_mb,
        status_s=status_s,
        walk_jobs_s=lines / walk_s,
        commit_ms=commit_ms,
        output_lines_s=lines / written[0],
        output_mb_s=written[1] / 1e6 / written[0],
        check_lines_s=lines / written[2],
        again_s=again_s,
        reuse_lines_s=lines / reuse_s,
    )


def _page(store: Store, batch: int) -> list[int]:
    return [item.id for item in store.waiting([batch], limit=64)]


def _pages(store: Store, batch: int) -> Iterator[list[int]]:
    after = None
    while page := store.waiting([batch], after=after, limit=10_000):
        after = page[-1].key
        yield [item.id for item in page]


def _answer_all(store: Store, batch: int) -> float:
    """Answer every job; returns the median milliseconds of 50 single commits."""
    alone = []
    for job in [item.id for item in store.waiting([batch], limit=50)]:
        store.start([job])
        began = time.perf_counter()
        store.commit([FinishedJob(job, _body(job))])
        alone.append(1000 * (time.perf_counter() - began))
    while page := [item.id for item in store.waiting([batch], limit=GROUP)]:
        store.commit([FinishedJob(job, _body(job)) for job in page])
    return sorted(alone)[len(alone) // 2]


def _body(job: int) -> bytes:
    text = f"Document {job & 0xFFFFFFFF} says that a batch of jobs shares its head, and that what differs comes last."
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return json.dumps({"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "choices": [choice]}).encode()


def _written(store: Store, batch: int) -> tuple[float, int, float]:
    """Seconds to write the output, its bytes, and seconds to check it when it is opened again."""
    began = time.perf_counter()
    with Output(store, store.batch(batch)) as output:
        assert output.finish()
    took = time.perf_counter() - began
    began = time.perf_counter()
    with Output(store, store.batch(batch)) as output:
        assert output.advance() == 0
    return took, Path(store.batch(batch).output or "").stat().st_size, time.perf_counter() - began


def report(rounds: list[Round]) -> int:
    """Print the table and write the JSON; returns 1 if a goal is missed."""
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": read_cpu(LocalHost())[0].model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
    }
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    missed = []
    variants = []
    for variant in HEADS:
        own = [item for item in rounds if item.variant == variant]
        best = max(own, key=lambda item: item.submit_lines_s)
        variants.append({"best": asdict(best), "rounds": [asdict(item) for item in own]})
        print(f"\n{variant}: {best.lines} lines of {best.line_bytes} bytes")
        for label, value, goal, met in _judged(best):
            print(f"  {label:34}{value:>16}  {goal}{'' if met else '  MISSED'}")
            if not met:
                missed.append(label)
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results/million.json").write_text(json.dumps({**about, "variants": variants}, indent=2) + "\n")
    return 1 if missed else 0


def _judged(best: Round) -> Iterator[tuple[str, str, str, bool]]:
    cpu = f"{best.submit_cpu_us:.1f} + {best.parse_cpu_us:.1f} us"
    rate = f"{best.submit_lines_s:,.0f} lines/s"
    yield "submitted", rate, f"goal {MIN_LINES_S:,}", best.submit_lines_s >= MIN_LINES_S
    yield "  processor time, store + parse", cpu, f"load before {best.load_before:.1f}", True
    first = max(best.first_dispatch_s, best.dispatch_after_s)
    yield (
        "first job dispatched after",
        f"{best.first_dispatch_s:.2f} s",
        f"goal {MAX_DISPATCH_S:g} s",
        first <= MAX_DISPATCH_S,
    )
    yield "  when all is stored", f"{1000 * best.dispatch_after_s:.1f} ms", "", True
    yield "peak memory", f"{best.rss_mb:.0f} MB", f"goal {MAX_RSS_MB} MB", best.rss_mb < MAX_RSS_MB
    yield "status", f"{1000 * best.status_s:.1f} ms", f"goal {1000 * MAX_STATUS_S:g} ms", best.status_s < MAX_STATUS_S
    yield "pending jobs walked in order", f"{best.walk_jobs_s:,.0f} jobs/s", "", True
    yield "one answer committed to the disk", f"{best.commit_ms:.1f} ms", "", True
    yield "output written", f"{best.output_lines_s:,.0f} lines/s", f"{best.output_mb_s:.0f} MB/s", True
    yield "output checked", f"{best.check_lines_s:,.0f} lines/s", "", True
    yield "the same command again", f"{best.again_s:.1f} s", "", True
    yield "another batch, all answered", f"{best.reuse_lines_s:,.0f} lines/s", "", True
    yield "store on the disk", f"{best.store_mb:.0f} MB", "", True


if __name__ == "__main__":
    sys.exit(main())
