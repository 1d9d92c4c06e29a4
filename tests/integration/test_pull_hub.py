"""Downloads of all splits of a repository through huggingface_hub from a hub on loopback."""

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.pull_servers import COMMIT, Shelf, serve, stock_hub
from tokenmill.errors import ChecksumMismatch, NoSpace, PullError, TokenmillError, UnknownModel, UsageError
from tokenmill.model.pull import Offer, Pulled, hub, offer, pull, pulled
from tokenmill.units import format_bytes

REPO = "owner/Big-GGUF"
NAME = f"hf:{REPO}:Q4_K_S"
SPLITS = [f"Q4_K_S/Big-Q4_K_S-{index:05}-of-00003.gguf" for index in (1, 2, 3)]
FILES = {
    **{path: random.Random(path).randbytes(200_000 + len(path)) for path in SPLITS},
    "Big-Q8_0.gguf": b"GGUF" * 1000,
    "mmproj-F16.gguf": b"GGUF",
    "README.md": b"hello",
}
TOTAL = sum(len(FILES[path]) for path in SPLITS)


def resolved(path: str) -> str:
    return f"/{REPO}/resolve/{COMMIT}/{path}"


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)  # 10 MiB are lost at most
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)  # between its own attempts
    with serve(Shelf()) as running:
        stock_hub(running, REPO, FILES)
        yield running


class Pulling:
    """A pull into a fresh cache, and what it said."""

    def __init__(self, shelf: Shelf, models_path: Path) -> None:
        self.shelf, self.models_path = shelf, models_path
        self.said: list[str] = []
        self.offers: list[Offer] = []
        self.reports: list[int] = []
        self.stop_after: int | None = None

    def __call__(self, name: str = NAME, *, keep_free_bytes: int = 0, verify: bool = False) -> Pulled:
        return pull(
            name,
            models_path=self.models_path,
            keep_free_bytes=keep_free_bytes,
            announce=self.announce,
            progress=self.progress,
            notify=self.said.append,
            verify=verify,
            endpoint=self.shelf.url,
        )

    def announce(self, offer: Offer) -> None:
        assert not self.downloads(), "announced too late"
        self.offers.append(offer)

    def progress(self, done: int, total: int | None) -> None:
        assert total == TOTAL
        self.reports.append(done)
        if self.stop_after is not None and done >= self.stop_after:
            raise KeyboardInterrupt

    def downloads(self) -> list[tuple[str, str]]:
        return [(a.path.rpartition("/")[2][11:16], a.range) for a in self.shelf.asked if "/resolve/" in a.path]


@pytest.fixture
def pulling(shelf: Shelf, tmp_path: Path) -> Pulling:
    return Pulling(shelf, tmp_path / "models")


def test_every_split_lands_after_it_was_announced(pulling: Pulling, capfd: pytest.CaptureFixture[str]) -> None:
    got = pulling()
    folder = pulling.models_path / "owner" / "Big-GGUF" / "Q4_K_S"
    assert got.name == NAME
    assert got.path == folder / "Big-Q4_K_S-00001-of-00003.gguf"
    assert [path.read_bytes() for path in got.files] == [FILES[path] for path in SPLITS]
    assert (got.was_here, got.bytes, got.fetched_bytes) == (False, TOTAL, TOTAL)
    assert pulling.reports == sorted(pulling.reports)
    assert pulling.reports[-1] == TOTAL
    (announced,) = pulling.offers
    assert announced.url == pulling.shelf.url + resolved(SPLITS[0])
    assert (announced.bytes, announced.remaining_bytes, len(announced.files)) == (TOTAL, TOTAL, 3)
    assert capfd.readouterr() == ("", "")  # the library's bars stay silent


def test_what_is_here_needs_no_hub(pulling: Pulling) -> None:
    first = pulling()
    pulling.shelf.url = "http://127.0.0.1:1"
    again = pulling("hf:owner/Big-GGUF:q4_k_s", verify=True)
    assert (again.files, again.was_here, again.fetched_bytes) == (first.files, True, 0)


def test_damage_on_disk_is_found_and_repaired(pulling: Pulling) -> None:
    second = pulling().files[1]
    second.write_bytes(b"x" * second.stat().st_size)
    with pytest.raises(ChecksumMismatch, match="damaged"):
        pulling(verify=True)
    assert not second.exists()
    pulling.offers.clear()
    pulling.shelf.asked.clear()
    assert pulling().fetched_bytes == len(FILES[SPLITS[1]])
    assert pulling.downloads() == [("00002", "")]


def test_an_interrupted_pull_asks_for_the_rest_only(pulling: Pulling) -> None:
    pulling.stop_after = len(FILES[SPLITS[0]]) + 100_000
    with pytest.raises(KeyboardInterrupt):
        pulling()
    (model,) = pulled(pulling.models_path)
    assert (model.name, model.missing, model.complete) == (NAME, 2, False)
    kept = model.partial_bytes
    assert 100_000 <= kept < len(FILES[SPLITS[1]])
    pulling.stop_after = None
    pulling.shelf.asked.clear()
    got = pulling()
    assert pulling.downloads() == [("00002", f"bytes={kept}-"), ("00003", "")]
    assert got.fetched_bytes == len(FILES[SPLITS[1]]) - kept + len(FILES[SPLITS[2]])
    assert [path.read_bytes() for path in got.files] == [FILES[path] for path in SPLITS]
    assert any(format_bytes(kept) in said and "Big-Q4_K_S-00002-of-00003.gguf" in said for said in pulling.said)
    assert pulling.offers[-1].remaining_bytes == got.fetched_bytes
    assert not list(pulling.models_path.rglob("*.part"))


def test_a_cut_connection_is_taken_up_in_the_same_run(pulling: Pulling) -> None:
    pulling.shelf.faults[resolved(SPLITS[0])] = ["cut:50000"]
    got = pulling()
    assert got.path.read_bytes() == FILES[SPLITS[0]]
    assert pulling.shelf.ranges(resolved(SPLITS[0])) == ["", "bytes=50000-"]


def test_a_server_that_ignores_ranges_begins_again(pulling: Pulling) -> None:
    pulling.shelf.faults[resolved(SPLITS[0])] = ["cut:50000", "ignore-range"]
    assert pulling().path.read_bytes() == FILES[SPLITS[0]]


def test_files_too_large_for_one_answer_come_in_pieces(pulling: Pulling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "MAX_RESPONSE_BYTES", 100_000)
    monkeypatch.setattr(hub, "PIECE_BYTES", 80_000)
    size = len(FILES[SPLITS[0]])
    pulling.shelf.faults[resolved(SPLITS[0])] = ["", "cut:30000"]
    got = pulling()
    assert [path.read_bytes() for path in got.files] == [FILES[path] for path in SPLITS]
    assert pulling.shelf.ranges(resolved(SPLITS[0])) == [
        "bytes=0-79999",
        "bytes=80000-159999",
        "bytes=110000-159999",
        f"bytes=160000-{size - 1}",
    ]


def test_bytes_that_are_not_the_promised_ones_are_removed(pulling: Pulling) -> None:
    body = bytearray(FILES[SPLITS[0]])
    body[7] ^= 1
    pulling.shelf.files[resolved(SPLITS[0])] = bytes(body)
    with pytest.raises(ChecksumMismatch, match=hashlib.sha256(body).hexdigest()):
        pulling()
    assert not list(pulling.models_path.rglob("*.gguf*"))


def test_a_part_of_another_version_is_not_continued(pulling: Pulling) -> None:
    pulling.stop_after = 100_000
    with pytest.raises(KeyboardInterrupt):
        pulling()
    newer = dict(FILES) | {SPLITS[0]: FILES[SPLITS[0]][::-1]}
    stock_hub(pulling.shelf, REPO, newer)
    pulling.stop_after = None
    pulling.shelf.asked.clear()
    assert pulling().path.read_bytes() == newer[SPLITS[0]]
    assert pulling.downloads()[0] == ("00001", "")


def test_one_file_by_its_path(pulling: Pulling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "progress", lambda _done, _total: None)
    got = pulling(f"hf:{REPO}:Big-Q8_0.gguf")
    assert (got.name, got.files) == (f"hf:{REPO}:Q8_0", (pulling.models_path / REPO / "Q8_0" / "Big-Q8_0.gguf",))


def test_tokens_go_to_the_hub_and_nowhere_else(pulling: Pulling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    with serve(Shelf(files={f"/{index}": FILES[path] for index, path in enumerate(SPLITS)})) as network:
        for index, path in enumerate(SPLITS):
            pulling.shelf.faults[resolved(path)] = ["302"]
            pulling.shelf.headers[resolved(path)]["Location"] = f"{network.url}/{index}"
        got = pulling()
        assert [path.read_bytes() for path in got.files] == [FILES[path] for path in SPLITS]
        assert {asked.headers.get("authorization") for asked in pulling.shelf.asked} == {"Bearer hf_secretsecret"}
        assert {asked.headers.get("authorization") for asked in network.asked} == {None}
    assert "secret" not in repr(pulling.offers) + " ".join(pulling.said)


def test_a_full_disk_is_noticed_before_the_download(pulling: Pulling) -> None:
    with pytest.raises(NoSpace, match="hf:owner/Big-GGUF:Q4_K_S needs 586"):
        pulling(keep_free_bytes=1 << 60)
    assert len(pulling.offers) == 1
    assert pulling.downloads() == []
    assert not pulling.models_path.exists()


def test_an_offer_downloads_nothing(pulling: Pulling) -> None:
    found = offer(NAME, models_path=pulling.models_path, endpoint=pulling.shelf.url)
    assert (found.bytes, found.disk_bytes) == (TOTAL, TOTAL)
    assert pulling.downloads() == []
    assert not pulling.models_path.exists()


ABOUT = f"/api/models/{REPO}"
FIRST = resolved(SPLITS[0])


@pytest.mark.parametrize(
    ("path", "status", "headers", "error", "message", "hint"),
    [
        (ABOUT, "404", {"X-Error-Code": "RepoNotFound"}, UnknownModel, "owner/Big-GGUF", "HF_TOKEN"),
        (ABOUT, "401", {}, PullError, "401", "HF_TOKEN"),
        (ABOUT, "403", {"X-Error-Code": "GatedRepo"}, PullError, "gated", "HF_TOKEN"),
        (ABOUT, "403", {}, PullError, "403", "HF_TOKEN"),
        (ABOUT, "429", {}, PullError, "429", "wait"),
        (ABOUT, "400", {}, PullError, "400", "later"),
        (ABOUT, "500", {}, PullError, "500", "later"),
        (FIRST, "401", {"X-Error-Code": "GatedRepo"}, PullError, "gated", "terms"),
        (FIRST, "404", {"X-Error-Code": "EntryNotFound"}, PullError, "404", "changed"),
        (FIRST, "502", {}, PullError, "502", "later"),
    ],
)
def test_refusals_of_the_hub_become_errors(
    pulling: Pulling,
    path: str,
    status: str,
    headers: dict[str, str],
    error: type[TokenmillError],
    message: str,
    hint: str,
) -> None:
    pulling.shelf.faults[path] = [status]
    pulling.shelf.headers[path] = headers
    with pytest.raises(error, match=message) as caught:
        pulling()
    assert hint in str(caught.value.hint)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("body", [b"<html>hotel wifi</html>", b"[]", b"3", b'{"siblings": [{}]}', b'{"siblings": 1}'])
def test_something_that_is_not_a_hub(pulling: Pulling, body: bytes) -> None:
    pulling.shelf.files[ABOUT] = body
    with pytest.raises(PullError, match=pulling.shelf.url) as caught:
        pulling()
    assert "HF_ENDPOINT" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("http://127.0.0.1:1", PullError),
        ("nonsense", UsageError),
        ("ftp://host", UsageError),
        ("http://host:port", UsageError),
        ("http://", UsageError),
    ],
)
def test_an_endpoint_that_is_none(pulling: Pulling, url: str, error: type[TokenmillError]) -> None:
    pulling.shelf.url = url
    with pytest.raises(error) as caught:
        pulling()
    assert caught.value.hint


@pytest.mark.parametrize(
    "path", ["../Q4_K_S.gguf", ".Q4_K_S.gguf", "../x/.-Q4_K_S.gguf", "a\x1b[2J-Q4_K_S.gguf", "../m.gguf"]
)
def test_names_that_lead_elsewhere_are_refused(pulling: Pulling, path: str) -> None:
    stock_hub(pulling.shelf, REPO, {path: b"GGUF"})
    with pytest.raises(PullError) as refused:
        pulling(f"hf:{REPO}:{path}")
    assert type(refused.value) is PullError
    assert not any("/resolve/" in asked.path for asked in pulling.shelf.asked)
    assert not pulling.models_path.exists()
