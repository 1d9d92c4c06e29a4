"""kill -9 at random moments: what was acknowledged is there, byte for byte, and nothing is there twice."""

import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path

from support import killed_worker
from tokenmill.jobs.reader import Reader

JOBS = 1200
KILLS = 20


def test_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    chance = random.Random(5)
    lines = [{"custom_id": f"job {number}", "prompt": f"{number % 1100} " + "x" * 600} for number in range(JOBS)]
    (tmp_path / "jobs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    acknowledged: dict[str, str] = {}
    written, kills, ended = b"", 0, False
    while kills < KILLS:
        told, ended = _killed_after(tmp_path, chance.choice((1, 1, 2, 3, chance.randint(3, 60))))
        assert not ended, "the batch was done before it was killed often enough"
        kills += 1
        acknowledged |= dict(line.split() for line in told if " " in line)
        _check(tmp_path, acknowledged)
        now = (tmp_path / "out.jsonl").read_bytes() if (tmp_path / "out.jsonl").exists() else b""
        whole = now[: now.rfind(b"\n") + 1]
        assert whole.startswith(written)  # final is final, whatever happened since
        written = whole
    assert acknowledged
    told, ended = _killed_after(tmp_path, None)
    assert ended
    acknowledged |= dict(line.split() for line in told if " " in line)
    _check(tmp_path, acknowledged)
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["custom_id"] for line in found] == [line["custom_id"] for line in lines]
    assert (tmp_path / "out.jsonl").read_bytes().startswith(written)
    for number, line in enumerate(found, 1):  # equal prompts have one answer
        assert line["response"]["body"]["number"] in (number, (number - 1) % 1100 + 1, number + 1100)


def _killed_after(folder: Path, acknowledgements: int | None) -> tuple[list[str], bool]:
    """Run the worker; kill it after so many acknowledgements, wherever it is then. What it told, and whether it ended."""
    command = [sys.executable, killed_worker.__file__, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        told: list[str] = []
        while acknowledgements is None or len(told) < acknowledgements:
            line = child.stdout.readline()
            if not line:
                break
            told.append(line.strip())
        if acknowledgements is None:
            assert child.wait(120) == 0, child.stderr.read()
        else:
            child.kill()
        told += child.stdout.read().split("\n")  # acknowledged, and on its way to us
        child.wait(60)
        return [line for line in told if line.strip()], "finished" in told


def _check(folder: Path, acknowledged: dict[str, str]) -> None:
    if not (folder / "store" / "store.db").exists():
        assert not acknowledged
        return
    with Reader(folder / "store") as reader:
        batches = reader.batches()
        assert len(batches) <= 1
        kept = {
            str(batch.id << 32 | result.number): result.body
            for batch in batches
            for result in reader.results(batch.id, 0, JOBS)
        }
        for job, digest in acknowledged.items():
            assert hashlib.sha256(kept[job] or b"").hexdigest() == digest
        assert sum(batch.counts.total for batch in batches) == len(kept)
