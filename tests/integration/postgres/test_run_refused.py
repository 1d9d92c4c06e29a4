"""`tokenmill run`, `work` and `retry` where a batch cannot be, is another's, or is not there yet."""

import json
import os
from pathlib import Path

import pytest

from support.jobs_store import submitted
from support.postgres import Cluster, text_of
from support.run_cli import SMALL, said, write
from tokenmill.jobs.store.address import Address
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.jobs.store.store import Store
from tokenmill.jobs.store.submissions import Submissions

LINES = [{"custom_id": "a", "prompt": "Say a.", "max_tokens": 2}]


@pytest.mark.parametrize(("wish", "code"), [(("--cache-type", "q9_9"), 2), (("--sequences", "1000000"), 3)])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_run_without_a_plan_stores_nothing_that_others_could_join(
    address: Address,
    streamed: bool,
    wish: tuple[str, str],
    code: int,
    smollm2_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sealed: list[int] = []
    monkeypatch.setattr(Submissions, "seal", lambda _store, batch, _key: sealed.append(batch))
    jobs, output = write(tmp_path / "jobs.jsonl", LINES), tmp_path / "out.jsonl"
    coming, going = os.pipe()
    os.write(going, jobs.read_bytes())
    os.close(going)
    source = f"/dev/fd/{coming}" if streamed else jobs
    try:
        done = said(
            tmp_path / "home", "run", source, "-o", output, "--store", text_of(address), "--model", smollm2_path, *wish
        )
    finally:
        os.close(coming)
    assert done.returncode == code, done.stderr
    assert sealed == []
    with StoreReader(address) as reader:
        assert reader.batches() == []


def test_what_failed_is_not_taken_up_again_under_one_who_writes_the_output(postgres: Cluster, tmp_path: Path) -> None:
    server = postgres.fresh()
    words = ("retry", "last", "--failed", "--store", server.url)
    with Store(server) as store:
        batch = submitted(store, tmp_path / "jobs.jsonl", ["a"])
        assert store.claim_output(batch.id)
        done = said(tmp_path, *words)
        assert (done.returncode, store.batch(batch.id).counts.pending) == (1, 1)
        assert f"the output of {batch.name}" in done.stderr
        assert "hint: " in done.stderr
    assert said(tmp_path, *words).returncode == 0


def test_who_does_not_write_the_output_says_so(postgres: Cluster, smollm2_path: Path, tmp_path: Path) -> None:
    server, jobs, output = postgres.fresh(), tmp_path / "jobs.jsonl", tmp_path / "out.jsonl"
    jobs.write_text("this is no job\n")  # it has its outcome as soon as it is stored
    words = ("run", jobs, "-o", output, "--store", server.url, "--model", smollm2_path, *SMALL)
    first = said(tmp_path, *words, "--json")
    assert (first.returncode, json.loads(first.stdout)["output_written"]) == (1, True), first.stderr  # no valid line
    with Store(server) as other:
        assert other.claim_output(other.batches()[0].id)
        second, third = said(tmp_path, *words), said(tmp_path, *words, "--json")
        assert "written by another process" in " ".join(second.stdout.split())
        assert json.loads(third.stdout)["output_written"] is False


def test_a_runner_that_comes_before_any_batch_says_so(postgres: Cluster, smollm2_path: Path, tmp_path: Path) -> None:
    words = ("work", "--store", postgres.fresh().url, "--model", smollm2_path, *SMALL, "--json")
    done = said(tmp_path, *words)
    assert (done.returncode, json.loads(done.stdout)["batches"]) == (0, [])
    assert "--stay waits for batches" in done.stderr
