"""A login by password over TCP, as on a server elsewhere: it works, and nobody reads the password anywhere."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest

from support.cut_line import line
from support.jobs_store import answer, pending, submitted
from support.postgres import PASSWORD, cluster, database_of
from tokenmill.cli import run
from tokenmill.errors import StoreError
from tokenmill.jobs.store.address import PostgresAddress, address_of
from tokenmill.jobs.store.store import Store

WRONG = "a wrong word"
UNSAID = (PASSWORD, quote(PASSWORD, safe=""), PASSWORD.partition(":")[0], WRONG, quote(WRONG))


@pytest.fixture(scope="module")
def place() -> Iterator[str]:
    """Where a server is that asks this user for a password, by scram."""
    with cluster() as own:
        with psycopg.connect(own.url(), autocommit=True) as connection:
            connection.execute("SET password_encryption = 'scram-sha-256'")
            connection.execute(f"CREATE ROLE keeper LOGIN PASSWORD '{PASSWORD}'")
            connection.execute("CREATE SCHEMA keeper AUTHORIZATION keeper")
        rules = own.folder / "data" / "pg_hba.conf"
        own.stop()
        rules.write_text("local all keeper scram-sha-256\n" + rules.read_text())
        own.start()
        with line(own.folder / ".s.PGSQL.5432") as wire:
            yield f"127.0.0.1:{wire.port}/postgres"


def url(place: str, password: str | None) -> str:
    owner = "keeper" if password is None else f"keeper:{quote(password, safe='')}"
    return f"postgresql://{owner}@{place}"


def test_the_password_is_used_and_never_said(
    place: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    caplog.set_level(logging.DEBUG)
    there = url(place, PASSWORD)
    server = address_of(there)
    assert isinstance(server, PostgresAddress)
    with Store(server) as store:
        batch = submitted(store, tmp_path / "j", ["a", "b"])
        first, second = pending(store, batch)
        store.start([first, second])
        store.commit([answer(first)])
        assert database_of(store)._connection.pgconn.used_password
        assert run(["status", "--store", there, "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)
        assert (found["succeeded"], len(found["runners"])) == (1, 1)
        assert run(["status", "last", "--store", there]) == 0
        assert run(["results", "last", "--store", there]) == 0
        assert run(["status", "nothing", "--store", there]) == 2
        seen = [repr(store._database), str(database_of(store).server), repr(server)]
    assert run(["status", "--store", url(place, WRONG)]) == 1
    assert run(["status", "--store", url(place, None)]) == 1
    told = capsys.readouterr()
    assert "password authentication failed" in told.err
    assert "no password supplied" in told.err
    with pytest.raises(StoreError) as caught:
        Store(address_of(url(place, WRONG)))
    seen += [told.out, told.err, caplog.text, str(caught.value), repr(caught.value), str(caught.value.hint)]
    for path in tmp_path.rglob("*"):
        if path.is_file():
            seen.append(path.read_text(errors="replace"))
    assert [word for word in UNSAID for text in seen if word in text] == []


def test_what_is_in_the_environment_is_taken(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    with Store(address_of(url(place, None))) as store:
        assert database_of(store)._connection.pgconn.used_password
