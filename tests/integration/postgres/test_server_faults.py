"""What can happen to a server: each in words, no secret shown, nothing acknowledged lost, and work that goes on."""

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support.jobs_store import answer, pending, submitted
from support.postgres import PASSWORD, Cluster, asked, cluster, cut, database_of
from tokenmill.cli import run
from tokenmill.errors import StoreError
from tokenmill.jobs.ingest.submit import submit
from tokenmill.jobs.models import Counts, Submission
from tokenmill.jobs.store import postgres as module
from tokenmill.jobs.store.address import Address, PostgresAddress
from tokenmill.jobs.store.open import has_batches
from tokenmill.jobs.store.postgres_errors import ConnectionLost, ServerUnreachable
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.jobs.store.store import Store


def test_a_connection_that_breaks_is_made_anew(server: PostgresAddress, tmp_path: Path) -> None:
    with Store(server) as store:
        batch = submitted(store, tmp_path / "j", ["a", "b", "c"])
        first, second, third = pending(store, batch)
        store.start([first])
        assert store.claim_output(batch.id)
        cut(store)
        assert store.batch(batch.id).counts == Counts(pending=2, running=1)
        cut(store)
        assert [job.id for job in store.start([second]).running] == [second]
        cut(store)
        assert len(store.commit([answer(first), answer(second)])) == 2
        cut(store)
        assert len(store.batches()) == 1
        with Store(server) as other:
            assert not other.claim_output(batch.id)  # it was claimed again
        assert store.batch(batch.id).counts == Counts(pending=1, done=2)
        assert [item.id for item in store.waiting([batch.id], limit=9)] == [third]


@pytest.mark.parametrize("where", ["add_answer", "answer_job", "add_totals"])
def test_one_that_breaks_in_the_middle_of_a_commit_leaves_half_of_nothing(
    server: PostgresAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    with Store(server) as store:
        batch = submitted(store, tmp_path / "j", ["a", "b"])
        jobs = pending(store, batch)
        store.start(jobs)
        database, left = database_of(store), [where]
        run = database.run

        def breaking(name: str, /, **values: Any) -> Any:
            if name in left:
                left.clear()
                cut(store)
            return run(name, **values)

        monkeypatch.setattr(database, "run", breaking)
        assert len(store.commit([answer(job) for job in jobs])) == 2
        found = store.batch(batch.id)
        assert (found.counts, found.totals.computed) == (Counts(done=2), 2)


def test_a_start_whose_acknowledgement_was_lost_is_taken_back(server: PostgresAddress, tmp_path: Path) -> None:
    with Store(server) as store:
        batch = submitted(store, tmp_path / "j", ["a", "b"])
        first, second = pending(store, batch)
        store.start([first])
        asked(server, "UPDATE jobs SET state = 1, attempts = 1, runner = ? WHERE id = ?", store._coordinator.id, second)
        cut(store)
        assert pending(store, batch) == [second]
        assert store.batch(batch.id).counts == Counts(pending=1, running=1)


def test_what_was_acknowledged_survives_a_server_that_crashes(tmp_path: Path) -> None:
    with cluster(safe=True) as own, Store(own.fresh()) as store:
        batch = submitted(store, tmp_path / "j", ["a", "b"])
        first, second = pending(store, batch)
        store.start([first, second])
        store.commit([answer(first)])
        own.stop(signal.SIGQUIT)
        waiting = threading.Thread(target=store.commit, args=([answer(second)],))
        waiting.start()
        own.start()
        waiting.join(120)
        assert store.batch(batch.id).counts == Counts(done=2)


def test_a_server_that_stays_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OUTAGE_S", 0.0)
    with cluster() as own:
        store = Store(own.fresh())
        batch = submitted(store, tmp_path / "j", ["a"])
        own.stop(signal.SIGQUIT)
        with pytest.raises(ConnectionLost, match="postgresql://") as caught:
            store.start(pending(store, batch))
        assert "same command" in (caught.value.hint or "")
        store.close()
        with pytest.raises(ServerUnreachable, match="postgresql://"):
            Store(PostgresAddress(own.url()))


def test_two_in_each_others_way_both_get_through(server: PostgresAddress, tmp_path: Path) -> None:
    with Store(server) as one, Store(server) as other:
        batches = [submitted(one, tmp_path / name, [name]).id for name in "ab"]
        both = threading.Barrier(2, timeout=60)
        tries: list[str] = []

        def turn(store: Store, order: list[int], priority: int) -> None:
            def work() -> None:
                tries.append(store.batches()[0].name)
                with database_of(store).writing(durable=False):
                    database_of(store).run("set_priority", batch=order[0], priority=priority)
                    if len(tries) <= 2:
                        both.wait()
                    database_of(store).run("set_priority", batch=order[1], priority=priority)

            database_of(store).transaction(work)

        threads = [
            threading.Thread(target=turn, args=(one, batches, 1)),
            threading.Thread(target=turn, args=(other, batches[::-1], 2)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(tries) >= 3
        assert len({batch.priority for batch in one.batches()}) == 1


def test_several_that_come_first_make_one_store(server: PostgresAddress) -> None:
    failed: list[BaseException] = []

    def opened() -> None:
        try:
            Store(server).close()
        except StoreError as error:
            failed.append(error)

    threads = [threading.Thread(target=opened) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    assert asked(server, "SELECT version FROM tokenmill") == [(module.VERSION,)]


def test_nothing_there_to_look_at(server: PostgresAddress) -> None:
    assert not has_batches(server)
    with pytest.raises(StoreError, check=lambda error: error.code == "no_batches"):
        StoreReader(server)
    Store(server).close()
    assert has_batches(server)
    with StoreReader(server) as reader, pytest.raises(StoreError, match="read-only"):
        reader.ask_cancel(1)


@pytest.mark.parametrize("what", ["TABLE jobs", "TABLE totals", "TABLE runners", "TABLE stretches", "VIEW runners"])
def test_tables_of_others_are_left_alone(server: PostgresAddress, what: str) -> None:
    asked(server, f"CREATE {what} AS SELECT 1 AS theirs")
    with pytest.raises(StoreError, check=lambda error: error.code == "foreign_database"):
        Store(server)


def test_what_is_not_ours(postgres: Cluster) -> None:
    newer = postgres.fresh()
    Store(newer).close()
    asked(newer, "UPDATE tokenmill SET version = 99")
    for opening in (Store, StoreReader):
        with pytest.raises(StoreError, match="99", check=lambda error: error.code == "store_too_new"):
            opening(newer)
    for change in ("UPDATE tokenmill SET version = 0", "DELETE FROM tokenmill"):
        asked(newer, change)
        for opening in (Store, StoreReader):
            with pytest.raises(StoreError, match="version 0", check=lambda error: error.code == "store_too_old"):
                opening(newer)
    with pytest.raises(StoreError, check=lambda error: error.code == "schema_missing"):
        Store(PostgresAddress(postgres.url("nowhere")))


def test_a_statement_that_a_timeout_ends_is_not_repeated(server: PostgresAddress) -> None:
    with Store(server) as store:
        database, tries = database_of(store), list[int]()

        def work() -> None:
            tries.append(1)
            with database.writing(durable=False):
                database._connection.execute("SET LOCAL statement_timeout = '300ms'")
                database._connection.execute("SELECT pg_sleep(600)")

        with pytest.raises(StoreError, match="statement timeout") as caught:
            database.transaction(work)
        assert not isinstance(caught.value, ConnectionLost)
        assert "statement_timeout = 0" in (caught.value.hint or "")
        assert tries == [1]
        assert store.batches() == []


def test_what_has_to_be_on_the_disk_is_whatever_the_role_is_set_to(server: PostgresAddress) -> None:
    with Store(server) as store:
        database = database_of(store)
        for role in ("off", "on"):
            database._connection.execute(f"SET synchronous_commit = {role}")
            found = list[Any]()
            for durable in (True, False):
                with database.writing(durable=durable):
                    found.append(database._connection.execute("SHOW synchronous_commit").fetchone())
            assert found == [("on",), ("off",)]


def test_a_database_that_cannot_hold_every_text(postgres: Cluster) -> None:
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE old ENCODING 'SQL_ASCII' TEMPLATE template0")
    with pytest.raises(StoreError, match="not in UTF-8"):
        Store(PostgresAddress(postgres.url().replace("/postgres?", "/old?")))


def test_every_text_that_json_has_is_kept(address: Address, tmp_path: Path) -> None:
    """PostgreSQL has no U+0000; what stands for it, and everything else, comes back as it was."""
    names = ["a\0b", "\0", "\uffff", "\uffff0", "\0\uffff\0", "0\uffff\uffff\0", "plain", "\U0001f600"]
    with Store(address) as store:
        batch = submitted(store, tmp_path / "j", names)
        found = store.results(batch.id, 0, 99)
        assert [result.custom_id for result in found] == [f"{at}-{name}" for at, name in enumerate(names, 1)]
        (tmp_path / "k").write_text('{"prompt": "a", "\\u0000": 1}\n')
        bad = submit(store, tmp_path / "k", Submission("m")).batch
        assert [result.message is not None for result in store.results(bad.id, 0, 9)] == [True]


def test_no_password_is_shown(postgres: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    url = postgres.url("nowhere", password=PASSWORD) + "&password=" + PASSWORD.replace("%", "%25").replace("?", "%3F")
    for wrong in (
        url,
        url.replace("mill:", "nobody:"),
        url.replace("host=", "hort="),
        url.replace("/postgres?", "/x?"),
    ):
        assert run(["status", "--store", wrong]) == 1
        assert PASSWORD not in repr(PostgresAddress(wrong)) + str(PostgresAddress(wrong))
    said = "".join(capsys.readouterr())
    assert "postgresql://" in said
    assert "tell" not in said
    assert ":***@" in said


def test_the_driver_is_an_extra() -> None:
    text = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from tokenmill.cli import run\n"
        "sys.exit(run(['status', '--store', 'postgresql://localhost/x']))"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    assert "hint: pip install 'psycopg[binary]" in done.stderr
