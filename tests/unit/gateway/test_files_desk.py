"""What was handed in is remembered, whole or not at all."""

import os
import sqlite3
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tokenmill.errors import StoreError
from tokenmill.gateway.batch_records import BadLine, BatchRecord, File, HttpBatchRequest, Outcome, Page
from tokenmill.gateway.batch_repository import FILE, FOLDER, BatchRepository
from tokenmill.jobs.models import Totals

ALL = Page(100)


class Clock:
    def __init__(self) -> None:
        self.s = 1000.0

    def __call__(self) -> float:
        return self.s


def kept(desk: BatchRepository, name: str = "a", *, owner: str | None = None, expires_s: float | None = None) -> File:
    file, draft = desk.draft()
    draft.write_bytes(name.encode())
    return desk.keep(File(file, owner, name, "batch", len(name), "", desk.now_s(), expires_s))


def order(file: File, **more: object) -> HttpBatchRequest:
    return replace(HttpBatchRequest("/v1/completions", "24h", 86400.0, file.id), **more)  # type: ignore[arg-type]


def taken(desk: BatchRepository, file: File, owner: str | None = None) -> BatchRecord:
    ticket = desk.take(order(file), owner)
    assert ticket is not None
    return ticket


def test_a_file_is_there_when_its_row_is(tmp_path: Path) -> None:
    desk = BatchRepository(tmp_path)
    file, draft = desk.draft()
    draft.write_bytes(b"x")
    assert desk.file(file) is None
    made = desk.keep(File(file, None, "x.jsonl", "batch", 1, "sum", 5.0))
    assert not draft.exists()
    desk.close()
    again = BatchRepository(tmp_path)
    assert again.file(file) == made
    assert again.keep(made) == made  # a kill may have come before it was noted elsewhere
    assert again.path(file).read_bytes() == b"x"
    again.close()


def test_parts_of_a_list(tmp_path: Path) -> None:
    desk = BatchRepository(tmp_path)
    files = [kept(desk, f"f{number}", owner="eva" if number % 2 else None) for number in range(5)]
    seen: list[str] = []
    page = Page(2)
    while found := desk.files(None, page):
        seen += [file.filename for file in found[:2]]
        page = Page(2, found[: page.limit][-1].id)
        assert len(found) <= 3
    assert seen == ["f4", "f3", "f2", "f1", "f0"]
    assert [f.filename for f in desk.files(None, Page(9, files[2].id, newest_first=False)) or ()] == ["f3", "f4"]
    assert [f.filename for f in desk.files("adam", ALL) or ()] == ["f4", "f2", "f0"]
    assert [f.filename for f in desk.files("eva", ALL, purpose="batch") or ()] == ["f4", "f3", "f2", "f1", "f0"]
    assert desk.files(None, ALL, purpose="batch_output") == []
    assert desk.files(None, Page(2, "file-nowhere")) is None
    desk.close()


def test_a_file_that_a_batch_needs_stays(tmp_path: Path) -> None:
    desk = BatchRepository(tmp_path)
    file = kept(desk)
    ticket = taken(desk, file)
    assert desk.drop(file.id) == ticket.id
    assert desk.path(file.id).exists()
    assert desk.move(ticket.id, "failed", since=("validating",))
    assert desk.drop(file.id) is None
    assert not desk.path(file.id).exists()
    assert desk.take(order(file), None) is None
    desk.close()


def test_files_whose_time_is_over_go(tmp_path: Path) -> None:
    clock = Clock()
    desk = BatchRepository(tmp_path, clock=clock)
    short, needed, stays = kept(desk, expires_s=2000.0), kept(desk, expires_s=2000.0), kept(desk)
    ticket = taken(desk, needed)
    clock.s = 2000.0
    assert desk.file(short.id) is None
    assert [file.id for file in desk.files(None, ALL) or ()] == [stays.id]
    assert desk.sweep() == 1
    assert not desk.path(short.id).exists()
    assert desk.path(needed.id).exists()
    desk.move(ticket.id, "cancelled", since=("validating",))
    assert desk.sweep() == 1
    desk.close()


def test_bytes_that_never_became_a_file_go_when_they_are_old(tmp_path: Path) -> None:
    desk = BatchRepository(tmp_path)
    new, old = desk.draft()[1], desk.draft()[1]
    whole = desk.path(desk.draft()[0])
    for path in (new, old, whole):
        path.write_bytes(b"half")
    file = kept(desk)
    long_ago = time.time() - 7200
    for path in (old, whole, desk.path(file.id)):
        os.utime(path, (long_ago, long_ago))
    assert desk.sweep() == 2
    assert {path.name for path in (tmp_path / FOLDER).iterdir()} == {new.name, file.id}
    desk.close()


def test_a_batch_moves_only_from_where_it_is(tmp_path: Path) -> None:
    clock = Clock()
    desk = BatchRepository(tmp_path, clock=clock)
    ticket = desk.take(order(kept(desk), metadata={"a": "b"}, priority=3, output_kept_s=3600), "eva")
    assert ticket is not None
    assert (ticket.status, ticket.owner, ticket.metadata, ticket.priority) == ("validating", "eva", {"a": "b"}, 3)
    assert (ticket.created_s, ticket.expires_s) == (1000.0, 87400.0)
    assert desk.unfinished() == [ticket]
    clock.s = 1001.0
    assert desk.move(ticket.id, "cancelling", since=("validating", "in_progress"))
    assert not desk.move(ticket.id, "in_progress", since=("validating",), model="m")
    outcome = Outcome(2, 1, 3, Totals(2, 0, 10, 5, 7, 1.5))
    bad = (BadLine("c", "m", 7, "p"),)
    assert desk.move(ticket.id, "cancelled", since=("cancelling",), outcome=outcome, errors=bad)
    desk.close()
    again = BatchRepository(tmp_path, clock=clock)
    found = again.ticket(ticket.id)
    assert found is not None
    assert (found.status, found.model, found.outcome, found.errors) == ("cancelled", None, outcome, bad)
    assert found.times == {"cancelling": 1001.0, "cancelled": 1001.0}
    assert again.unfinished() == []
    assert again.tickets("adam", ALL) == []
    assert again.tickets("eva", ALL) == [found]
    again.close()


def test_a_folder_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    BatchRepository(tmp_path).close()
    connection = sqlite3.connect(tmp_path / FILE)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreError, match="newer"):
        BatchRepository(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "batches").write_text("a file")
    with pytest.raises(StoreError, match="cannot use"):
        BatchRepository(tmp_path / "batches")


def test_batches_by_their_metadata(tmp_path: Path) -> None:
    desk = BatchRepository(tmp_path)
    file = kept(desk)
    held: list[dict[str, str] | None] = [{"key": "1", "x": "y"}, {"key": "2"}, None, {"key": "1"}, {"1": "key"}]
    made = [desk.take(order(file, metadata=one), "eva") for one in held]
    assert all(made)

    def found(page: Page = ALL, owner: str = "eva", **wanted: str) -> list[int]:
        return [made.index(ticket) for ticket in desk.tickets(owner, page, metadata=wanted) or ()]

    assert found() == [4, 3, 2, 1, 0]
    assert found(key="1") == [3, 0]
    assert found(key="1", x="y") == [0]
    assert found(key="1' OR '1'='1") == []
    assert found(Page(1), key="1") == [3, 0]  # one more, where there is one
    assert found(Page(1, made[3].id if made[3] else None), key="1") == [0]
    assert found(owner="adam", key="1") == []
    desk.close()
