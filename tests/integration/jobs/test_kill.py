"""kill -9 at random moments: what was acknowledged is there, byte for byte, and nothing is there twice."""

import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path

from support import killed_worker
from tokenmill.jobs.models import JobId
from tokenmill.jobs.store.reader import StoreReader

JOBS = 1500
PROMPTS = 1400  # the rest are the same again
KILLS, HALVES = 12, 4  # HALVES in the middle of the submit


def test_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    chance = random.Random(5)
    lines = [{"custom_id": f"job {number}", "prompt": f"{number % PROMPTS} " + "x" * 600} for number in range(JOBS)]
    (tmp_path / "jobs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    acknowledged: dict[str, str] = {}
    written, halves = b"", 0
    for _ in range(KILLS):
        # First in the middle of the submit, which takes about a dozen transactions; then anywhere in the work.
        words = chance.randint(1, 3) if halves < HALVES else chance.choice((1, 2, 3, chance.randint(3, 60)))
        told, ended = _killed_after(tmp_path, words)
        assert not ended, "the batch was done before it was killed often enough"
        halves += "sealed" not in told
        acknowledged |= dict(line.split() for line in told if " " in line)
        _check(tmp_path, acknowledged)
        now = (tmp_path / "out.jsonl").read_bytes() if (tmp_path / "out.jsonl").exists() else b""
        whole = now[: now.rfind(b"\n") + 1]
        assert whole.startswith(written)  # final is final, whatever happened since
        written = whole
    assert acknowledged
    assert halves >= HALVES
    told, ended = _killed_after(tmp_path, None)
    assert ended
    acknowledged |= dict(line.split() for line in told if " " in line)
    _check(tmp_path, acknowledged)
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["custom_id"] for line in found] == [line["custom_id"] for line in lines]
    assert (tmp_path / "out.jsonl").read_bytes().startswith(written)
    for number, line in enumerate(found, 1):  # equal prompts have one answer
        assert (line["response"]["body"]["number"] - number) % PROMPTS == 0


def _killed_after(folder: Path, words: int | None) -> tuple[list[str], bool]:
    """Run the worker; kill it after so many lines from it, wherever it is then. What it told, and whether it ended."""
    command = [sys.executable, killed_worker.__file__, str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, bufsize=1) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        told: list[str] = []
        while (words is None or len(told) < words) and (line := child.stdout.readline()):
            told.append(line.strip())
            if told[-1] == "stored":
                child.stdin.write("\n")
        if words is None:
            assert child.wait(120) == 0, child.stderr.read()
        else:
            child.kill()
        told += child.stdout.read().split("\n")  # acknowledged, and on its way to us
        child.wait(120)
        return [line for line in told if line.strip()], "finished" in told


def _check(folder: Path, acknowledged: dict[str, str]) -> None:
    if not (folder / "store" / "store.db").exists():
        assert not acknowledged
        return
    with StoreReader(folder / "store") as reader:
        batches = reader.batches()
        assert len(batches) <= 1
        kept = {
            str(JobId.of(batch.id, result.number)): result.body
            for batch in batches
            for result in reader.results(batch.id, 0, JOBS)
        }
        for job, digest in acknowledged.items():
            assert hashlib.sha256(kept[job] or b"").hexdigest() == digest
        assert sum(batch.counts.total for batch in batches) == len(kept)
