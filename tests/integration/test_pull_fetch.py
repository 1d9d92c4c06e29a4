"""Downloads of one file over HTTP from a server that interrupts, loses and falsifies responses."""

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.pull_servers import Shelf, serve
from tokenmill.errors import ChecksumMismatch, PullError
from tokenmill.model.pull.fetch import ATTEMPTS, DownloadRefused, fetch

BODY = random.Random(1).randbytes(300_000)
PATH = "/files/model.whl"


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    with serve(Shelf(files={PATH: BODY})) as running:
        yield running


class Fetching:
    """A fetch without waiting, and what it reported."""

    def __init__(self, shelf: Shelf, part: Path) -> None:
        self.shelf, self.part = shelf, part
        self.reports: list[tuple[int, int | None]] = []
        self.pauses: list[float] = []
        self.stop_after: int | None = None

    def __call__(self, size_bytes: int = len(BODY)) -> int:
        with httpx.Client(follow_redirects=True, trust_env=False) as client:
            return fetch(
                self.shelf.url + PATH,
                self.part,
                size_bytes=size_bytes,
                client=client,
                progress=self.report,
                pause=self.pauses.append,
            )

    def report(self, done: int, total: int | None) -> None:
        self.reports.append((done, total))
        if self.stop_after is not None and done >= self.stop_after:
            raise KeyboardInterrupt


@pytest.fixture
def fetching(shelf: Shelf, tmp_path: Path) -> Fetching:
    return Fetching(shelf, tmp_path / "model.part")


def test_a_whole_file_with_progress(fetching: Fetching) -> None:
    assert fetching() == len(BODY)
    assert fetching.part.read_bytes() == BODY
    assert fetching.reports[-1] == (len(BODY), len(BODY))
    assert [done for done, _ in fetching.reports] == sorted(done for done, _ in fetching.reports)
    assert fetching() == 0  # nothing is missing, so there is no request
    assert len(fetching.shelf.asked) == 1


def test_a_cut_connection_is_taken_up_for_the_rest_only(fetching: Fetching) -> None:
    fetching.shelf.faults[PATH] = ["cut:100000", "503", "cut:50000"]
    assert fetching() == len(BODY)
    assert fetching.part.read_bytes() == BODY
    assert fetching.shelf.ranges(PATH) == ["", "bytes=100000-", "bytes=100000-", "bytes=150000-"]
    assert fetching.shelf.sent_bytes[PATH] == len(BODY)
    assert fetching.pauses == [1.0, 2.0, 1.0]  # longer only while nothing comes


def test_an_interrupted_run_is_continued_by_the_next(fetching: Fetching) -> None:
    fetching.stop_after = 120_000
    with pytest.raises(KeyboardInterrupt):
        fetching()
    kept = fetching.part.stat().st_size
    assert 120_000 <= kept < len(BODY)
    fetching.stop_after = None
    assert fetching() == len(BODY) - kept
    assert fetching.part.read_bytes() == BODY
    second = fetching.shelf.asked[-1]
    assert second.range == f"bytes={kept}-"
    assert second.headers["if-range"] == f'"{hashlib.sha256(BODY).hexdigest()[:16]}"'


def test_a_file_that_changed_meanwhile_starts_over(fetching: Fetching) -> None:
    fetching.shelf.faults[PATH] = ["cut:100000"] + ["500"] * ATTEMPTS
    with pytest.raises(PullError, match="failed") as caught:
        fetching()
    assert "97.7 KiB are kept" in str(caught.value.hint)
    other = BODY[::-1]
    fetching.shelf.files[PATH] = other
    assert fetching() == len(other)
    assert fetching.part.read_bytes() == other


def test_a_server_without_ranges_starts_over(fetching: Fetching) -> None:
    fetching.shelf.faults[PATH] = ["cut:100000", "ignore-range"]
    assert fetching() == 100_000 + len(BODY)
    assert fetching.part.read_bytes() == BODY


def test_a_server_without_etags_still_resumes(fetching: Fetching) -> None:
    fetching.shelf.etags = False
    fetching.shelf.faults[PATH] = ["cut:100000"]
    assert fetching() == len(BODY)
    assert "if-range" not in fetching.shelf.asked[-1].headers


def test_another_range_than_asked_for_is_not_glued_on(fetching: Fetching) -> None:
    fetching.shelf.faults[PATH] = ["cut:100000", "wrong-range"]
    fetching()
    assert fetching.part.read_bytes() == BODY


def test_a_part_that_is_too_long_is_dropped(fetching: Fetching) -> None:
    fetching.part.write_bytes(BODY + b"more")
    fetching()
    assert fetching.part.read_bytes() == BODY


def test_a_part_beyond_the_servers_end_is_dropped(fetching: Fetching) -> None:
    fetching.part.write_bytes(BODY)
    with pytest.raises(ChecksumMismatch, match="300000 bytes, not 300004"):
        fetching(size_bytes=len(BODY) + 4)
    assert fetching.shelf.ranges(PATH) == ["bytes=300000-", ""]
    assert not fetching.part.exists()


@pytest.mark.parametrize("size_bytes", [len(BODY) - 1, len(BODY) + 1, 1])
def test_another_length_than_promised_is_another_file(fetching: Fetching, size_bytes: int) -> None:
    with pytest.raises(ChecksumMismatch):
        fetching(size_bytes=size_bytes)
    assert list(fetching.part.parent.iterdir()) == []


@pytest.mark.parametrize("status", ["401", "403", "407"])
def test_a_refusal_is_told_from_a_failure(fetching: Fetching, status: str) -> None:
    fetching.shelf.faults[PATH] = [status]
    with pytest.raises(DownloadRefused, match=f"model.whl on 127.0.0.1: the server answered {status}"):
        fetching()


@pytest.mark.parametrize("status", ["404", "410", "400"])
def test_what_will_not_get_better_is_not_tried_again(fetching: Fetching, status: str) -> None:
    fetching.shelf.faults[PATH] = [status] * 2
    with pytest.raises(PullError, match=status):
        fetching()
    assert len(fetching.shelf.asked) == 1


def test_a_server_that_never_answers_is_given_up(fetching: Fetching) -> None:
    fetching.shelf.faults[PATH] = ["500"] * 50
    with pytest.raises(DownloadRefused, match="answered 500"):
        fetching()
    assert len(fetching.shelf.asked) == ATTEMPTS


def test_an_unreachable_server_is_a_sentence(fetching: Fetching) -> None:
    fetching.shelf.url = "http://127.0.0.1:1"
    with pytest.raises(DownloadRefused) as caught:
        fetching()
    assert "network" in str(caught.value.hint)
