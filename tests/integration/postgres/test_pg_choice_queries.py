"""Choosing takes as many queries beside many runners as beside few."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.jobs_store import submitted
from support.postgres import past
from tokenmill.jobs.models import QueuedJob
from tokenmill.jobs.sharding.view import ShardView
from tokenmill.jobs.store.address import PostgresAddress
from tokenmill.jobs.store.backend import QueryResult
from tokenmill.jobs.store.postgres import Postgres
from tokenmill.jobs.store.store import Store

FEW, MANY, EACH = 3, 40, 6

pytestmark = pytest.mark.usefixtures("unkept")


def beside(server: PostgresAddress, rows: Sequence[QueuedJob], others: int) -> None:
    """So many runners with the first jobs, in stretches."""
    with past(server) as ask:
        ask("DELETE FROM runners WHERE host = 'elsewhere'")
        for at in range(others):
            first, last = rows[at * EACH].key, rows[(at + 1) * EACH - 1].key
            runner = ask(
                "INSERT INTO runners (host, kernel, pid, ticks, lease_until, lanes, jobs, behind) VALUES "
                "('elsewhere', 'k', 1, 1, clock_timestamp() + interval '1 hour', 2, ?, ?) RETURNING id",
                EACH,
                last[3],
            )[0][0]
            ask(
                "INSERT INTO stretches (runner, first_rank, first_batch, first_place, first_id, last_rank, last_batch, "
                "last_place, last_id, jobs, ahead) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, false)",
                runner,
                *first,
                *last,
                EACH,
            )


def chosen(view: ShardView, batch: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[QueuedJob], list[str]]:
    """What a runner gets, and the queries that it took."""
    names, run = list[str](), Postgres.run

    def noted(self: Postgres, name: str, /, **values: Any) -> QueryResult:
        names.append(name)
        return run(self, name, **values)

    with monkeypatch.context() as patched:
        patched.setattr(Postgres, "run", noted)
        found = view.window([batch], again=True, limit=4096)
    return found, names


@pytest.mark.parametrize("free", [EACH, 0])
def test_a_choice_takes_as_many_queries_beside_many(
    server: PostgresAddress, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    """Also where nothing is free, and another's stretch is divided."""
    taken = dict[int, list[str]]()
    for others in (FEW, MANY):
        prompts = [f"{others} {at // EACH}. Question {at}?" for at in range(others * EACH + free)]
        batch = submitted(store, tmp_path / f"{others}.jsonl", prompts).id
        rows = store.waiting([batch], limit=1000)
        beside(server, rows, others)
        view = store.shards(2)
        found, taken[others] = chosen(view, batch, monkeypatch)
        assert found
        assert {row.id for row in found} <= {row.id for row in rows[-free:]}
        view.close()
    assert taken[MANY] == taken[FEW]
