"""What can happen to the folder: each in words, nothing damaged, and the same again goes on."""

import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from support import full_disk
from support.jobs_store import answer, pending, submitted, write_jobs
from tokenmill.errors import StoreError, StoreFull, StoreInUse, TokenmillError
from tokenmill.jobs.models import Counts
from tokenmill.jobs.store import sqlite as database
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.jobs.store.sqlite import PAGE_BYTES, Database
from tokenmill.jobs.store.sqlite_errors import STORE_DAMAGED, _mapped, unusable
from tokenmill.jobs.store.store import Store


def test_one_process_works(tmp_path: Path) -> None:
    with Store(tmp_path / "s"):
        with pytest.raises(StoreInUse, match=f"process {os.getpid()} ") as caught:
            Store(tmp_path / "s")
        assert "tokenmill status" in (caught.value.hint or "")
    Store(tmp_path / "s").close()


HOLD = """
import sys, pathlib
from tokenmill.jobs.store.store import Store
store = Store(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path / "s"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(StoreInUse, match=str(child.pid)):
            Store(tmp_path / "s")
        child.kill()
        child.wait(120)
    Store(tmp_path / "s").close()


def test_a_program_that_holds_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_WAIT_S", 0.01)
    with Store(tmp_path / "s") as store:
        batch = submitted(store, tmp_path / "j", ["a"])
        other = sqlite3.connect(tmp_path / "s" / "store.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreInUse, match="store.db is locked"):
            store.start(pending(store, batch))
        other.execute("ROLLBACK")
        other.close()
        assert len(store.start(pending(store, batch)).running) == 1


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_the_folder_is_gone(tmp_path: Path, how: str) -> None:
    store = Store(tmp_path / "s")
    batch = submitted(store, tmp_path / "j", ["a"])
    (job,) = pending(store, batch)
    store.start([job])
    (tmp_path / "s").rename(tmp_path / "moved")
    if how == "replaced":
        shutil.copytree(tmp_path / "moved", tmp_path / "s")
    with pytest.raises(StoreError, check=lambda error: error.code == "store_removed"):
        store.commit([answer(job)])
    shutil.rmtree(tmp_path / "s", ignore_errors=True)
    (tmp_path / "moved").rename(tmp_path / "s")
    store.commit([answer(job)])
    assert store.batch(batch.id).counts == Counts(done=1)
    store.close()


def test_nothing_there_to_look_at(tmp_path: Path) -> None:
    with pytest.raises(StoreError, check=lambda error: error.code == "no_batches") as caught:
        StoreReader(tmp_path)
    assert caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=str(tmp_path / "file" / "s")):
        Store(tmp_path / "file" / "s")


def test_a_file_system_that_is_read_only(tmp_path: Path) -> None:
    """What SQLite says then, said in our words: root may write where others may not, so the error is provoked there."""
    with Store(tmp_path / "s") as store:
        batch = submitted(store, tmp_path / "j", ["a"])
        assert isinstance(store._database, Database)
        store._database._connection.execute("PRAGMA query_only = ON")
        with pytest.raises(StoreError, match="cannot be written"):
            store.start(pending(store, batch))


def _used(folder: Path, batch: int) -> None:
    with Store(folder) as store:
        store.start(item.id for item in store.waiting([batch], limit=10))
        store.results(batch, 0, 10_000)


@pytest.mark.parametrize("damage", ["first page", "a page inside", "another file", "cut short"])
def test_a_damaged_database(tmp_path: Path, damage: str) -> None:
    with Store(tmp_path / "s") as store:
        batch = submitted(store, tmp_path / "j", [f"prompt {number}" for number in range(2000)])
    path = tmp_path / "s" / "store.db"
    raw = bytearray(path.read_bytes())
    if damage == "first page":
        raw[:PAGE_BYTES] = b"\xff" * PAGE_BYTES
    elif damage == "a page inside":
        raw[PAGE_BYTES * 2 :] = b"\xff" * (len(raw) - PAGE_BYTES * 2)
    elif damage == "another file":
        raw = bytearray(b"this is not a database, but it is long enough to be one " * 200)
    else:
        del raw[len(raw) // 2 :]
    path.write_bytes(raw)
    with pytest.raises(StoreError) as caught:
        _used(tmp_path / "s", batch.id)
    assert caught.value.code == STORE_DAMAGED
    assert path.read_bytes() == raw
    moved = re.search(r"\((mv .+?)\)", caught.value.hint or "")
    assert moved
    subprocess.run(moved[1], shell=True, check=True)
    with Store(tmp_path / "s") as store:
        assert submitted(store, tmp_path / "j", ["a"]).counts.total == 1


def test_another_programs_database(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    other = sqlite3.connect(tmp_path / "s" / "store.db")
    other.execute("CREATE TABLE theirs (a)")
    other.close()
    before = (tmp_path / "s" / "store.db").read_bytes()
    with pytest.raises(StoreError, check=lambda error: error.code == "foreign_database"):
        Store(tmp_path / "s")
    assert (tmp_path / "s" / "store.db").read_bytes() == before


def test_a_newer_store_is_refused(tmp_path: Path) -> None:
    Store(tmp_path / "s").close()
    other = sqlite3.connect(tmp_path / "s" / "store.db")
    other.execute("PRAGMA user_version = 99")
    other.close()
    for opening in (Store, StoreReader):
        with pytest.raises(StoreError, match="99", check=lambda error: error.code == "store_too_new"):
            opening(tmp_path / "s")


def test_an_older_store_is_brought_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(tmp_path / "s") as store:
        batch = submitted(store, tmp_path / "j", ["a"])
    step = "ALTER TABLE batches ADD COLUMN colour TEXT;"
    monkeypatch.setattr(database, "newest", lambda: 99)
    monkeypatch.setattr(database, "migrations", lambda: {3: "nonsense", 99: step})
    with pytest.raises(StoreError, match="version 3", check=lambda error: error.code == "store_too_old"):
        StoreReader(tmp_path / "s")
    with Store(tmp_path / "s") as store:
        assert store.batch(batch.id).counts.total == 1
        assert isinstance(store._database, Database)
        assert store._database._connection.execute("SELECT colour FROM batches").fetchall() == [(None,)]
    with StoreReader(tmp_path / "s") as reader:
        assert reader.batch(batch.id).counts.total == 1


@pytest.mark.parametrize(
    ("scenario", "count", "size"),
    [("answers", 300, 10), ("output", 300, 10), ("lines", 20_000, 100), ("small_answers", 600, 200)],
)
def test_the_disk_is_full(tmp_path: Path, scenario: str, count: int, size: int) -> None:
    write_jobs(tmp_path / "jobs.jsonl", [f"{number} " + "x" * size for number in range(count)])
    done = full_disk.run(scenario, tmp_path / "small")
    assert done.stdout == "passed\n", done.stderr


def test_the_log_is_short_after_opening_and_closing(tmp_path: Path) -> None:
    log = tmp_path / "s" / "store.db-wal"
    with Store(tmp_path / "s") as store:
        batch = submitted(store, tmp_path / "j", ["a", "b"])
        store.start(pending(store, batch))
        store.flush()
        shutil.copytree(tmp_path / "s", tmp_path / "killed")  # as a kill would leave it
        with StoreReader(tmp_path / "s"):  # keeps SQLite from removing the log at the end
            assert log.stat().st_size > 0
            store.close()
            assert log.stat().st_size == 0
    left = tmp_path / "killed" / "store.db-wal"
    assert left.stat().st_size > 0
    database = Database(tmp_path / "killed", "work")
    assert left.stat().st_size == 0
    database.close()


@pytest.mark.parametrize(("free", "pages"), [(1 << 40, (128 << 20) // PAGE_BYTES), (40 << 20, 2560), (4096, 64)])
def test_the_limit_of_the_log_depends_on_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, pages: int
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=free))
    with Store(tmp_path / "s") as store:
        assert isinstance(store._database, Database)
        assert store._database._connection.execute("PRAGMA wal_autocheckpoint").fetchone() == (pages,)


def test_a_started_job_is_committed_with_the_next_answer(tmp_path: Path) -> None:
    """One transaction for both; until then only this process sees that it runs, and others can read."""
    with Store(tmp_path / "s") as store, StoreReader(tmp_path / "s") as reader:
        batch = submitted(store, tmp_path / "j", ["a", "b"])
        first, second = pending(store, batch)
        store.start([first])
        assert store.batch(batch.id).counts.running == 1
        assert reader.batch(batch.id).counts.running == 0
        store.flush()
        assert reader.batch(batch.id).counts.running == 1
        store.start([second])
        store.commit([answer(first)])
        assert reader.batch(batch.id).counts == Counts(running=1, done=1)
        assert not store.unflushed


def test_a_failing_transaction_keeps_the_deferred_one_before_it(tmp_path: Path) -> None:
    with Store(tmp_path / "s") as store:
        batch = submitted(store, tmp_path / "j", ["a", "b"])
        store.start(pending(store, batch)[:1])
        with suppress(InterruptedError), store._database.writing(durable=True):
            store._database.run("cancel_waiting", batch=batch.id)
            raise InterruptedError
        assert store.batch(batch.id).counts == Counts(pending=1, running=1)
        store.flush()
    with StoreReader(tmp_path / "s") as reader:
        assert reader.batch(batch.id).counts == Counts(pending=1, running=1)


def test_a_store_whose_creation_failed_has_no_batches(tmp_path: Path) -> None:
    (tmp_path / "store.db").touch()
    with pytest.raises(StoreError, check=lambda error: error.code == "no_batches"):
        StoreReader(tmp_path)


def test_a_disk_that_is_full_is_told_from_one_that_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk SQLite may report a failed write."""
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_WRITE
    assert not isinstance(_mapped(error, tmp_path / "store.db"), StoreFull)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=8192))
    assert isinstance(_mapped(error, tmp_path / "store.db"), StoreFull)


READ_AS_NOBODY = """
import os, sys
from pathlib import Path
from tokenmill.errors import StoreError
from tokenmill.jobs.store import sqlite as database
from tokenmill.jobs.store import reader
if os.geteuid() == 0:
    os.setuid(65534)
try:
    reader.StoreReader(Path(sys.argv[1]))
except StoreError as error:
    print(type(error).__name__, error.message[:31].strip())
"""


def test_a_store_of_another_user_is_named(tmp_path: Path) -> None:
    """What is wrong is the permission, and not the version or the program."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # its parents can be entered by everybody
        folder = Path(name) / "s"
        with Store(folder) as store:
            submitted(store, tmp_path / "j", ["a"])
        Path(name).chmod(0o755)
        folder.chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-c", READ_AS_NOBODY, folder], check=False, capture_output=True, text=True
        )
    assert (done.returncode, done.stdout) == (0, "StoreError no permission to read and write\n"), done.stderr


def test_every_error_has_a_hint(tmp_path: Path) -> None:
    for code in range(1, 30):
        error = sqlite3.OperationalError("words")
        error.sqlite_errorcode = code | 3 << 8
        mapped = _mapped(error, tmp_path)
        assert isinstance(mapped, TokenmillError)
        assert mapped.hint
    for number in (28, 122, 13, 95):
        assert unusable(tmp_path, OSError(number, os.strerror(number))).hint
