"""Model files and their published hashes: correct, damaged, missing and unknown."""

import hashlib
from pathlib import Path

import pytest

from support.gguf_bytes import TINY_KEYS, TINY_TABLE, value, write
from tokenmill.errors import PullError, UnknownModel, UsageError
from tokenmill.model import verify as module
from tokenmill.model.pull import hub
from tokenmill.model.pull.store import sha256_of, write_note
from tokenmill.model.pull.wheel import WHEELS
from tokenmill.model.verify import VerifiedModel, files_of, published, verify


def tiny(folder: Path, name: str = "tiny.gguf") -> Path:
    return write(folder / name, TINY_KEYS, TINY_TABLE)


def splits(folder: Path, count: int = 3) -> list[Path]:
    paths = []
    for number in range(count):
        keys = TINY_KEYS | {
            "split.no": value(number, 2),
            "split.count": value(count, 2),
            "split.tensors.count": value(len(TINY_TABLE), 5),
        }
        path = folder / f"tiny-{number + 1:05}-of-{count:05}.gguf"
        paths.append(write(path, keys, TINY_TABLE[number::count]))
    return paths


def flip(path: Path, at: int = -1) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def checked(where: Path, **options: str) -> VerifiedModel:
    return verify(published(files_of(where), **options))


def verdicts(found: VerifiedModel) -> list[str]:
    return [file.verdict for file in found.files]


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    write_note(path, "hf:owner/repo:Q4_0", sha256_of(path))
    assert checked(path).verdict == "ok"
    before = path.stat()
    flip(path)
    assert path.stat().st_size == before.st_size
    found = checked(path)
    assert (found.verdict, found.structure) == ("wrong", None)
    assert found.files[0].sha256 == sha256_of(path) != found.files[0].published_sha256[0]
    assert path.exists()  # nothing is removed


def test_every_split_is_read_and_named(tmp_path: Path) -> None:
    paths = splits(tmp_path)
    for path in paths:
        write_note(path, "hf:owner/repo:Q4_0", sha256_of(path))
    assert [file.path for file in checked(paths[1]).files] == paths
    assert [file.path for file in checked(tmp_path).files] == paths
    flip(paths[1])
    assert verdicts(checked(paths[0])) == ["ok", "wrong", "ok"]
    paths[1].unlink()
    missing = checked(paths[0])
    assert verdicts(missing) == ["ok", "wrong", "ok"]
    assert (missing.files[1].bytes, missing.files[1].sha256) == (None, None)


def test_splits_of_two_models_are_wrong_although_each_is_as_published(tmp_path: Path) -> None:
    paths = splits(tmp_path)
    write(paths[2], TINY_KEYS | {"split.no": value(1, 2), "split.count": value(3, 2)}, TINY_TABLE)
    for path in paths:
        write_note(path, "hf:owner/repo:Q4_0", sha256_of(path))
    found = checked(paths[0])
    assert verdicts(found) == ["ok", "ok", "ok"]
    assert found.structure
    assert found.verdict == "wrong"


def test_a_truncated_file_is_wrong_without_any_hash(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    assert checked(path).verdict == "unknown"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1000)
    assert checked(path).verdict == "wrong"


def test_a_hash_from_the_caller_decides(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    write_note(path, "m", "0" * 64)
    right = sha256_of(path)
    assert checked(path, sha256=right.upper()).verdict == "ok"
    assert checked(path, sha256="0" * 64).verdict == "wrong"
    one = splits(tmp_path)[1]
    assert verify(published((one,), sha256=sha256_of(one))).verdict == "ok"
    for given in ("", "abc", "g" * 64):
        with pytest.raises(UsageError):
            checked(path, sha256=given)
    with pytest.raises(UsageError):
        checked(one, sha256=right)


def test_an_unpublished_hash_is_not_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny(tmp_path)
    write_note(path, "hf:owner/repo:Q4_0", sha256_of(path), published=False)

    def unreachable(_repo: str) -> None:
        raise PullError("the hub cannot be reached")

    monkeypatch.setattr(hub, "published_hashes", unreachable)
    unchanged = checked(path)
    assert unchanged.verdict == "unknown"
    assert unchanged.files[0].sha256 == sha256_of(path)
    published_now = {path.name: (sha256_of(path),)}
    flip(path)
    assert checked(path).verdict == "wrong"
    monkeypatch.setattr(hub, "published_hashes", lambda _repo: published_now)
    assert checked(path).verdict == "wrong"
    flip(path)
    assert checked(path).verdict == "ok"


def test_a_pinned_hash_precedes_the_note(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    write_note(path, "smollm2", sha256_of(path))
    found = checked(path)
    assert found.verdict == "wrong"
    assert found.files[0].published_sha256 == (WHEELS["smollm2"].sha256,)


def test_the_hugging_face_cache_names_files_by_their_hash(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "c0ffee"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    plain = tiny(tmp_path)
    blob = plain.rename(blobs / sha256_of(plain))
    link = snapshot / "tiny.gguf"
    link.symlink_to(blob)
    assert checked(link).verdict == "ok"
    flip(blob)
    assert checked(link).verdict == "wrong"


def test_progress_counts_every_byte_of_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REPORT_BYTES", 1000)
    paths = splits(tmp_path)
    total = sum(path.stat().st_size for path in paths)
    told: list[tuple[int, int | None]] = []
    found = verify(published(paths), progress=lambda done, of: told.append((done, of)))
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert [file.sha256 for file in found.files] == [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]


def test_missing_and_ambiguous_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel):
        files_of(tmp_path / "absent.gguf")
    tiny(tmp_path, "a.gguf")
    tiny(tmp_path, "b.gguf")
    with pytest.raises(UnknownModel):
        files_of(tmp_path)
