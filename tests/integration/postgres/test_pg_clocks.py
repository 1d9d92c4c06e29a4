"""Hosts whose clocks go wrong: deadlines and retries are held against the server's."""

import time
from pathlib import Path

import pytest

from support.jobs_store import pending, submitted
from support.postgres import cut
from tokenmill.jobs.models import Counts, Failure
from tokenmill.jobs.store.address import PostgresAddress
from tokenmill.jobs.store.store import Store

pytestmark = pytest.mark.usefixtures("unkept")
HOUR_S, MINUTES_S = 3600.0, 600.0
BROKE = Failure("timeout", "too slow")
_true_s = time.time


class Host:
    """The clock of this process, as if it were another host's."""

    ahead_s = 0.0

    def time(self) -> float:
        return _true_s() + self.ahead_s


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    one = Host()
    monkeypatch.setattr(time, "time", one.time)
    return one


def test_a_host_with_a_clock_that_is_ahead_gives_nothing_up(
    server: PostgresAddress, host: Host, tmp_path: Path
) -> None:
    with Store(server) as right:
        batch = submitted(right, tmp_path / "j", ["a", "b"], {"deadline_s": time.time() + MINUTES_S})
        own = submitted(right, tmp_path / "k", ["c", "d"], deadline=int(time.time() + MINUTES_S))
        host.ahead_s = HOUR_S
        with Store(server) as wrong:
            submitted(wrong, tmp_path / "l", ["e"], {"deadline_s": _true_s() + MINUTES_S})
            assert wrong.expire() == 0
            cut(wrong)
            assert wrong.expire() == 0
            counts = [wrong.batch(each.id).counts for each in (batch, own)]
            assert abs(wrong.now_s() - _true_s()) < HOUR_S / 2
    assert counts == [Counts(pending=2), Counts(pending=2)]


def test_one_with_a_clock_that_is_behind_gives_up_in_time(server: PostgresAddress, host: Host, tmp_path: Path) -> None:
    with Store(server) as right:
        batch = submitted(right, tmp_path / "j", ["a"], {"deadline_s": time.time() - MINUTES_S})
    host.ahead_s = -HOUR_S
    with Store(server) as wrong:
        assert wrong.batch(batch.id).counts == Counts(failed=1)
        late = submitted(wrong, tmp_path / "k", ["b"], {"deadline_s": _true_s() - MINUTES_S})
        assert late.counts == Counts(failed=1)


@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S])
def test_a_retry_is_due_after_its_delay_for_everybody(
    server: PostgresAddress, host: Host, tmp_path: Path, ahead_s: float
) -> None:
    with Store(server) as right:
        batch = submitted(right, tmp_path / "j", ["a", "b", "c"])
        now, later, died = pending(right, batch)
        host.ahead_s = ahead_s
        with Store(server) as wrong:
            wrong.start([now, later, died])
            wrong.fail(now, BROKE, retry_at_s=wrong.now_s() - 1)
            wrong.fail(later, BROKE, retry_at_s=wrong.now_s() + MINUTES_S)
            wrong.record_crash([died], BROKE, retry_at_s=wrong.now_s() - 1)
            found = wrong.next_retry_s([batch.id])
            assert found is not None
            assert abs(found - _true_s()) < 60
            assert pending(wrong, batch) == [now, died]
        host.ahead_s = 0.0
        assert pending(right, batch) == [now, died]
