"""A damaged store: its damaged answers are computed again, and following the hint leads to a working run."""

import re
import subprocess
from pathlib import Path

from support.run_cli import jobs, names, read, tokenmill, write

NAMES = [line["custom_id"] for line in jobs()]


def test_a_flipped_bit_is_computed_again_and_never_written(home: Path, tmp_path: Path) -> None:
    source, output, store = write(tmp_path / "jobs.jsonl", jobs(max_tokens=3)), tmp_path / "out.jsonl", tmp_path / "s"
    words = ("run", source, "-o", output, "--store", store)
    assert tokenmill(home, *words).returncode == 0
    good = read(output)
    path = store / "store.db"
    raw = bytearray(path.read_bytes())
    raw[raw.index(b'"finish_reason"') + 3] ^= 1
    path.write_bytes(raw)
    assert tokenmill(home, "store", "check", "--store", store).returncode == 1
    again = tokenmill(home, *words)
    assert again.returncode == 0, again.stderr
    assert "damaged" in again.stderr
    assert f"{output}: removed" in again.stderr
    assert [line["custom_id"] for line in read(output)] == NAMES
    assert [line["response"]["body"]["choices"] for line in read(output)] == [
        line["response"]["body"]["choices"] for line in good
    ]
    assert tokenmill(home, "store", "check", "--store", store).returncode == 0


def test_the_hint_for_a_damaged_database_works(home: Path, tmp_path: Path) -> None:
    source, output, store = write(tmp_path / "jobs.jsonl", jobs(max_tokens=3)), tmp_path / "out.jsonl", tmp_path / "s"
    words = ("run", source, "-o", output, "--store", store)
    assert tokenmill(home, *words).returncode == 0
    (store / "store.db").write_bytes(b"\xff" * 100_000)
    refused = tokenmill(home, *words)
    assert refused.returncode == 1
    move = re.search(r"\((mv .+?)\)", refused.stderr)
    assert move, refused.stderr
    subprocess.run(move[1], shell=True, check=True)
    output.rename(tmp_path / "old.jsonl")
    again = tokenmill(home, *words)
    assert again.returncode == 0, again.stderr
    assert names(output) == NAMES
