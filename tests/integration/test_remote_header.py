"""Headers over HTTP, from a real server on loopback."""

from pathlib import Path

import pytest

from support.gguf_bytes import TINY_KEYS, TINY_TABLE, array, write
from support.range_server import range_server
from tokenmill.errors import CorruptModel, MissingSplit, RemoteError
from tokenmill.model.gguf import read_headers
from tokenmill.units import MIB

BIG = [("blk.0.ffn_up_exps.weight", (4096, 4096, 8), "Q8_0"), *TINY_TABLE]
VOCABULARY = {"tokenizer.ggml.tokens": array(8, [f"token number {n}" for n in range(20_000)])}


def test_only_the_header_travels(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", TINY_KEYS | VOCABULARY, BIG)
    with range_server(tmp_path) as server:
        (found,) = read_headers(f"{server.url}/m.gguf")
        assert found.tensors == read_headers(path)[0].tensors
        assert found.file_bytes == path.stat().st_size > 130 * MIB
        assert server.bytes_sent < 2 * MIB


def test_splits_and_redirects(tmp_path: Path) -> None:
    for number in range(3):
        keys = TINY_KEYS | {"split.no": number, "split.count": 3}
        write(tmp_path / f"m-{number + 1:05}-of-00003.gguf", keys, TINY_TABLE[number::3])
    with range_server(tmp_path, "redirect") as server:
        found = read_headers(f"{server.url}/m-00001-of-00003.gguf?download=true")
        assert sum(len(header.tensors) for header in found) == len(TINY_TABLE)
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with range_server(tmp_path) as server, pytest.raises(MissingSplit, match="m-00002-of-00003.gguf cannot be read"):
        read_headers(f"{server.url}/m-00001-of-00003.gguf")


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("ignores-ranges", "range requests"),
        ("no-length", "length of the file"),
        ("too-much", "65536 bytes"),
        ("401", "answered 401"),
        ("404", "answered 404"),
        ("503", "answered 503"),
    ],
)
def test_servers_that_misbehave(behaviour: str, message: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", TINY_KEYS, BIG)
    with range_server(tmp_path, behaviour) as server, pytest.raises(RemoteError, match=message):
        read_headers(f"{server.url}/m.gguf")


def test_the_users_proxy_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with range_server(tmp_path) as proxy:
        for variable in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(variable, proxy.url)
        with pytest.raises(RemoteError, match="answered 404"):
            read_headers("http://models.invalid/m.gguf")
        assert proxy.requests[0].startswith("http://models.invalid/m.gguf")


def test_empty_missing_and_unreachable(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    with range_server(tmp_path) as server:
        url = server.url
        with pytest.raises(CorruptModel, match="is empty"):
            read_headers(f"{url}/empty.gguf")
        with pytest.raises(RemoteError, match="answered 404"):
            read_headers(f"{url}/absent.gguf")
    with pytest.raises(RemoteError, match="cannot read") as caught:
        read_headers(f"{url}/m.gguf")
    assert caught.value.hint
    with pytest.raises(RemoteError):
        read_headers("http://[bad/m.gguf")
