"""What the commands say of a store on a server, and how they end when it is away."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from support.jobs_store import answer, pending, submitted
from support.postgres import asked, cluster, database_of
from tokenmill.cli import run
from tokenmill.cli.signals import SignalStop
from tokenmill.errors import StoreError
from tokenmill.jobs.models import Failure, Submission
from tokenmill.jobs.output import Output, written_to
from tokenmill.jobs.store.address import PostgresAddress
from tokenmill.jobs.store.backend import Shutdown
from tokenmill.jobs.store.postgres_errors import Stopped
from tokenmill.jobs.store.store import Store

pytestmark = pytest.mark.usefixtures("unkept", "one_state")
LONG = "x" * 200_000


@pytest.fixture
def one_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")


class Interrupted(Shutdown):
    """Somebody presses Ctrl-C as soon as anybody waits for the server."""

    def wait(self, timeout: float | None = None) -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        return super().wait(60)


def test_ctrl_c_ends_the_waiting_for_a_server(tmp_path: Path) -> None:
    ends = list[StoreError]()
    stop = SignalStop()
    stop.shutdown = Interrupted()
    with cluster() as own:
        store = Store(own.fresh(), shutdown=stop.shutdown)
        batch = submitted(store, tmp_path / "j", ["a"])
        own.stop()

        async def main() -> int:
            stop.begin()
            stop.loaded()
            for _ in range(2):  # whoever comes behind does not begin anew
                with pytest.raises(Stopped) as caught:
                    await asyncio.to_thread(store.batch, batch.id)
                ends.append(caught.value)
            return stop.code

        assert asyncio.run(main()) == 130
        store.close()
    assert [(end.exit_code, end.message.startswith("stopped while postgresql://")) for end in ends] == [(130, True)] * 2
    assert "same command" in str(ends[0].hint)


def test_what_is_not_ours_by_now_is_not_changed(server: PostgresAddress, tmp_path: Path) -> None:
    """Asked of each job in the statement that changes it: in between another may have taken it."""
    broke = Failure("timeout", "slow")
    with Store(server) as one, Store(server) as two:
        batch = submitted(one, tmp_path / "j", ["a", "b", "c", "d"])
        jobs = pending(one, batch)
        one.start(jobs)
        asked(server, "UPDATE jobs SET runner = ?", two._coordinator.id)
        assert one.fail(jobs[0], broke) == ()
        assert one.fail(jobs[1], broke, retry_at_s=0.0) == ()
        assert one.record_crash([jobs[2]], broke, retry_at_s=0.0) == ()
        one.release(jobs[3:])
        assert asked(server, "SELECT DISTINCT state, attempts, deaths FROM jobs") == [(1, 1, 0)]
        for query in ("fail", "retry_later", "record_crash", "release"):
            values: dict[str, Any] = {"code": "c", "message": "m", "not_before": 0.0, "most": 2}
            with database_of(one).writing(durable=False):
                found = database_of(one).run(query, job=jobs[0], runner=one._coordinator.id, **values)
                assert found.rowcount == 0


def status(server: PostgresAddress, *words: str, capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    assert run(["status", *words, "--store", server.url]) == 0
    said = capsys.readouterr().out
    return json.loads(said) if "--json" in words else said


def test_status_names_the_runners_of_a_batch(
    server: PostgresAddress, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store(server) as one, Store(server) as two:
        asked(server, "UPDATE runners SET host = 'h' || id")
        mine, other = submitted(one, tmp_path / "a", ["a", "b"]), submitted(two, tmp_path / "b", ["c"])
        one.start(pending(one, mine))
        two.start(pending(two, other))
        third = submitted(one, tmp_path / "c", ["d"])
        hosts = [f"h{store._coordinator.id}" for store in (one, two)]
        for batch, host, jobs in ((mine, hosts[0], 2), (other, hosts[1], 1)):
            (found,) = status(server, batch.name, "--json", capsys=capsys)["runners"]
            assert (found["host"], found["running"]) == (host, jobs)
            text = status(server, batch.name, capsys=capsys)
            assert f"running (1 runner: {host} (" in text
            assert [each in text for each in hosts] == [each == host for each in hosts]
        found = status(server, third.name, "--json", capsys=capsys)
        assert (found["state"], found["runners"]) == ("waiting", [])
        every = status(server, "--json", capsys=capsys)
        assert [len(each["runners"]) for each in every] == [1, 1, 0]
        half = one.submissions.begin(Submission("m"), source="x", key=None)
        assert [each.id for each in one.runners(half)] == [one._coordinator.id]


@pytest.mark.parametrize("apart", [False, True])
def test_an_output_that_nobody_wrote_is_said_to_be_missing(
    server: PostgresAddress, tmp_path: Path, capsys: pytest.CaptureFixture[str], apart: bool
) -> None:
    out, errors = tmp_path / "j.out", tmp_path / "j.err"
    with Store(server) as one:
        batch = submitted(one, tmp_path / "j", ["a", "b", LONG], {"errors": str(errors)} if apart else None)
        first, second, third = sorted(pending(one, batch))
        one.start([first, second, third])
        one.commit([answer(first)])
        assert one.claim_output(batch.id)
        with Output(one, batch) as output:
            output.advance()
        assert written_to(batch) == 1
        assert "of 3 lines" not in status(server, "last", capsys=capsys)  # more is to come
    with Store(server) as two:
        two.start([second, third])
        two.commit([answer(second, LONG)])
        two.fail(third, Failure("refused", LONG))
        text = status(server, "last", capsys=capsys)
        assert "1 of 3 lines" in text
        assert two.claim_output(batch.id)
        assert "of 3 lines" not in status(server, "last", capsys=capsys)  # it is being done
        with Output(two, two.batch(batch.id)) as output:
            assert output.finish()
    assert "of 3 lines" not in status(server, "last", capsys=capsys)
    assert written_to(batch) == 3
    for path in (out, errors):
        path.write_bytes(b"")
    assert "0 of 3 lines" in status(server, "last", capsys=capsys)
    for path in (out, errors):
        path.unlink()  # it may be on another host
    assert "of 3 lines" not in status(server, "last", capsys=capsys)


def test_how_a_line_is_kept_may_be_said_in_the_url(server: PostgresAddress) -> None:
    with Store(PostgresAddress(f"{server.url}&application_name=night&connect_timeout=3&keepalives_idle=7")) as store:
        found = database_of(store)._connection.info.get_parameters()
        assert (found["application_name"], found["connect_timeout"], found["keepalives_idle"]) == ("night", "3", "7")
        assert found["tcp_user_timeout"] == "25000"  # what it leaves open is ours
    with Store(server) as store:
        assert database_of(store)._connection.info.get_parameters()["application_name"] == "tokenmill"


def test_a_newer_store_asks_for_a_newer_tokenmill(server: PostgresAddress) -> None:
    Store(server).close()
    asked(server, "UPDATE tokenmill SET version = 99")
    with pytest.raises(StoreError, check=lambda error: error.code == "store_too_new") as caught:
        Store(server)
    assert "newer tokenmill" in str(caught.value.hint)
    assert "another database" not in str(caught.value.hint)
