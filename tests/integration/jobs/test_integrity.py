"""Damage in a store: found by checksums, computed again, never written to an output."""

import json
import logging
import sqlite3
from pathlib import Path

import pytest

from support.jobs_store import answer, pending, submitted
from support.run_cli import said
from tokenmill.jobs.models import Batch, Counts, JobId
from tokenmill.jobs.output import Output
from tokenmill.jobs.store.queries import migrations
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.jobs.store.sqlite import APPLICATION_ID, Database
from tokenmill.jobs.store.store import Store

PROMPTS = ["a", "b", "c", "d"]


def answered(store: Store, path: Path) -> Batch:
    """A batch whose every line has a different answer, and whose output is written."""
    batch = submitted(store, path, PROMPTS)
    jobs = pending(store, batch)
    store.start(jobs)
    store.commit([answer(job, f"answer {job}") for job in jobs])
    with Output(store, batch) as output:
        assert output.finish()
    return store.batch(batch.id)


def change(folder: Path, statement: str) -> None:
    with sqlite3.connect(folder / "store.db") as connection:
        connection.execute(statement)
    connection.close()


def flip_bit(folder: Path, text: bytes) -> None:
    """Change one bit in the only place of the database file that holds this text."""
    path = folder / "store.db"
    raw = bytearray(path.read_bytes())
    assert raw.count(text) == 1
    raw[raw.index(text) + 1] ^= 4
    path.write_bytes(raw)


@pytest.fixture
def finished(tmp_path: Path) -> Batch:
    with Store(tmp_path / "s") as store:
        return answered(store, tmp_path / "j")


def test_a_damaged_answer_is_requeued_and_not_written(
    tmp_path: Path, finished: Batch, caplog: pytest.LogCaptureFixture
) -> None:
    output = Path(finished.output or "")
    good = output.read_bytes()
    with Store(tmp_path / "s") as store:
        jobs = [JobId.of(finished.id, number) for number in range(1, 5)]
    flip_bit(tmp_path / "s", b"answer %d" % jobs[2])
    with Store(tmp_path / "s") as store, Output(store, finished) as target, caplog.at_level(logging.WARNING):
        assert not target.finish()
        assert good.startswith(output.read_bytes())
        assert store.batch(finished.id).counts == Counts(pending=1, done=3)
        assert pending(store, finished) == [jobs[2]]
        store.start([jobs[2]])
        store.commit([answer(jobs[2], f"answer {jobs[2]}")])
        assert target.finish()
    assert output.read_bytes() == good


def test_what_is_requeued_or_removed_is_logged(
    tmp_path: Path, finished: Batch, caplog: pytest.LogCaptureFixture
) -> None:
    change(tmp_path / "s", "UPDATE answers SET body = CAST('{}' AS BLOB) WHERE id = 2")
    with Store(tmp_path / "s") as store, caplog.at_level(logging.WARNING), Output(store, finished):
        pass
    requeued, removed = caplog.messages
    assert "2" in requeued
    assert finished.name in requeued
    assert "3 lines" in removed
    assert str(finished.output) in removed


def test_half_a_line_at_the_end_is_removed_silently(
    tmp_path: Path, finished: Batch, caplog: pytest.LogCaptureFixture
) -> None:
    output = Path(finished.output or "")
    good = output.read_bytes()
    output.write_bytes(good[:-5])
    with Store(tmp_path / "s") as store, caplog.at_level(logging.WARNING), Output(store, finished) as target:
        assert target.finish()
    assert output.read_bytes() == good
    assert not caplog.messages


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE answers SET body = CAST('{}' AS BLOB) WHERE id = 2",
        "UPDATE answers SET checksum = zeroblob(8) WHERE id = 2",
        "UPDATE jobs SET answer = 3 WHERE answer = 2",
        "UPDATE jobs SET answer = 99 WHERE answer = 2",
        "UPDATE jobs SET answer = NULL WHERE answer = 2",
        "DELETE FROM answers WHERE id = 2",
    ],
)
def test_every_kind_of_damage_is_found_and_repaired(tmp_path: Path, finished: Batch, damage: str) -> None:
    change(tmp_path / "s", damage)
    with StoreReader(tmp_path / "s") as reader:
        assert [result.number for result in reader.results(finished.id, 0, 10) if not result.state.final] == [2]
        report = reader.check()
        assert not report.clean
        assert dict(report.damage.lines()) == {finished.id: [2]}
    with Store(tmp_path / "s") as store:
        assert store.requeue_damaged(finished.id) == 1
        assert store.requeue_damaged(finished.id) == 0
        assert store.check().clean
        assert store.batch(finished.id).counts == Counts(pending=1, done=3)
        (job,) = pending(store, finished)
        if not store.start([job]).answered:  # the answer itself may be intact
            store.commit([answer(job)])
        assert store.batch(finished.id).finished


def test_a_shared_answer_is_requeued_in_every_batch(tmp_path: Path, finished: Batch) -> None:
    with Store(tmp_path / "s") as store:
        other = submitted(store, tmp_path / "k", [*PROMPTS, "e"])
        assert other.counts == Counts(pending=1, done=4)
    change(tmp_path / "s", "UPDATE answers SET body = CAST('{}' AS BLOB) WHERE id = 4")
    with Store(tmp_path / "s") as store:
        assert store.requeue_damaged(finished.id) == 1
        assert store.batch(other.id).counts == Counts(pending=2, done=3)


def test_check_reports_and_repairs(tmp_path: Path, finished: Batch) -> None:
    words = ("store", "check", "--store", tmp_path / "s", "--json")
    clean = said(tmp_path, *words)
    assert clean.returncode == 0
    assert json.loads(clean.stdout)["answers"] == 4
    flip_bit(tmp_path / "s", b"answer %d" % JobId.of(finished.id, 3))
    found = said(tmp_path, *words)
    assert found.returncode == 1
    document = json.loads(found.stdout)
    assert document["batches"] == [{"batch": finished.name, "damaged_lines": [3]}]
    assert (document["damaged_answers"], document["clean"], document["requeued"]) == (1, False, None)
    left_out = said(tmp_path, "results", "last", "--store", tmp_path / "s")
    assert left_out.returncode == 1
    assert len(left_out.stdout.splitlines()) == 3
    repaired = said(tmp_path, *words, "--repair")
    assert (repaired.returncode, json.loads(repaired.stdout)["requeued"]) == (1, 1)
    assert said(tmp_path, *words).returncode == 0


@pytest.mark.parametrize("part", ["a page inside", "first page"])
def test_check_of_a_broken_database_is_a_report(tmp_path: Path, finished: Batch, part: str) -> None:
    path = tmp_path / "s" / "store.db"
    raw = bytearray(path.read_bytes())
    half = len(raw) // 2 if part == "a page inside" else 0
    raw[half : half + 8192] = b"\xff" * 8192
    path.write_bytes(raw)
    found = said(tmp_path, "store", "check", "--store", tmp_path / "s", "--json")
    assert found.returncode == 1
    assert json.loads(found.stdout)["problems"]


def old_store(folder: Path) -> None:
    """A store of version 1 with large pages: one job of each kind, and an answer without a checksum."""
    folder.mkdir()
    connection = sqlite3.connect(folder / "store.db", isolation_level=None)
    connection.execute("PRAGMA page_size = 16384")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.executescript(migrations()[1])
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute("PRAGMA user_version = 1")
    connection.execute(
        "INSERT INTO batches (id, name, created_s, sealed_s, source, model_id, reuse, priority, defaults, lines)"
        " VALUES (1, 'batch_old', 1, 1, 'file', 'm', 1, 0, '{}', 3)"
    )
    connection.executemany(
        "INSERT INTO counts VALUES (1, ?, ?)", [(state, int(state in (0, 1, 2))) for state in range(6)]
    )
    for number, state in enumerate((0, 1, 2), 1):
        values = (JobId.of(1, number), state, f"c{number}", bytes([number]) * 32, 1 if state == 2 else None)
        connection.execute(
            "INSERT INTO jobs (id, batch, state, custom_id, identity, place, rank, prompt_bytes, answer)"
            " VALUES (?, 1, ?, ?, ?, x'00', 0, 1, ?)",
            values,
        )
    connection.execute("INSERT INTO answers VALUES (1, ?, CAST('{}' AS BLOB), 1, 1, 1)", (bytes([3]) * 32,))
    connection.execute("INSERT INTO blocks VALUES (?, ?)", (JobId.of(1, 1), b'{"prompt": "x"}\n' * 3))
    connection.close()


def test_a_store_of_version_1_is_migrated(tmp_path: Path) -> None:
    old_store(tmp_path / "s")
    with Store(tmp_path / "s") as store:
        assert isinstance(store._database, Database)
        assert store._database._connection.execute("PRAGMA page_size").fetchone() == (16384,)
        assert store.batch(1).counts == Counts(pending=2, done=1)  # what ran is pending again
        assert [result.body for result in store.results(1, 0, 10)] == [None, None, b"{}"]
        report = store.check()
        assert (report.clean, report.answers, report.without_checksum) == (True, 1, 1)
        jobs = pending(store, store.batch(1))
        store.start(jobs)
        store.commit([answer(job) for job in jobs])
        assert store.batch(1).finished
        assert store.check().without_checksum == 1
