"""The manifest of a folder of summaries: ownership of files, and changes that require new summaries."""

import json
from dataclasses import asdict, replace
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import StoreInUse, TokenmillError, UsageError
from tokenmill.recipes.summarization.documents import SourceDocument
from tokenmill.recipes.summarization.manifest import (
    MANIFEST,
    Manifest,
    ManifestEntry,
    SummaryInputs,
    change_of,
    file_names,
    is_below,
    locked,
    put,
    read_manifest,
    remove,
    sha256_of,
    sha256_of_file,
)

RECIPE = SummaryInputs("d1", "p1", "m1", {"max_tokens": 64, "temperature": 0.0})
DOCUMENT = SourceDocument(("a.md",), "text", "/docs/a.md", "t1")
OLD, NEW, OTHER = b"old\n", b"new\n", b"by hand\n"
ENTRY = ManifestEntry(
    "a.md",
    "/docs/a.md",
    "t1",
    "d1",
    "p1",
    "m1",
    {"max_tokens": 64, "temperature": 0.0},
    0,
    "done",
    "a.md.md",
    summary_sha256=sha256_of(NEW),
    before_sha256=sha256_of(OLD),
)


@pytest.mark.parametrize(
    ("entry", "content", "recipe", "expected"),
    [
        pytest.param(ENTRY, NEW, RECIPE, "unchanged", id="nothing changed"),
        pytest.param(None, None, RECIPE, "to do", id="new"),
        pytest.param(None, OTHER, RECIPE, "to do", id="a file without an entry is compared with the summary"),
        pytest.param(ENTRY, None, RECIPE, "to do", id="its file is gone"),
        pytest.param(ENTRY, OLD, RECIPE, "to do", id="killed between manifest and file"),
        pytest.param(ENTRY, OTHER, RECIPE, "edited", id="edited"),
        pytest.param(replace(ENTRY, sha256="t0"), NEW, RECIPE, "to do", id="another text"),
        pytest.param(replace(ENTRY, sha256="t0"), OTHER, RECIPE, "edited", id="another text, edited"),
        pytest.param(replace(ENTRY, state="failed"), NEW, RECIPE, "to do", id="failed"),
        pytest.param(ENTRY, NEW, replace(RECIPE, digest_sha256=None), "to do", id="no digest"),
        pytest.param(ENTRY, NEW, replace(RECIPE, prompts_sha256="p2"), "to do", id="other prompts"),
        pytest.param(ENTRY, NEW, replace(RECIPE, model_id="m2"), "to do", id="another model"),
        pytest.param(ENTRY, NEW, replace(RECIPE, sampling={"max_tokens": 65}), "to do", id="other sampling"),
        pytest.param(ENTRY, NEW, replace(RECIPE, overlap=9), "to do", id="an overlap"),
    ],
)
def test_verdicts(
    tmp_path: Path, entry: ManifestEntry | None, content: bytes | None, recipe: SummaryInputs, expected: str
) -> None:
    manifest = Manifest(tmp_path, {"a.md": entry} if entry else {})
    if content is not None:
        (tmp_path / "a.md.md").write_bytes(content)
    assert change_of(DOCUMENT, "a.md.md", manifest, recipe, force=False) == expected
    forced = change_of(DOCUMENT, "a.md.md", manifest, recipe, force=True)
    assert forced == ("to do" if expected == "edited" else expected)


def test_a_manifest_is_written_and_read(tmp_path: Path) -> None:
    odd = replace(ENTRY, document="line\u2028 and \u0085 next", summary="x.md")
    manifest = Manifest(tmp_path, {odd.document: odd, "a.md": ENTRY})
    manifest.save()
    assert read_manifest(tmp_path) == manifest
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST]
    before = (tmp_path / MANIFEST).stat()
    manifest.save()
    after = (tmp_path / MANIFEST).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_unknown_keys_are_ignored(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps(asdict(ENTRY) | {"mood": "good"}) + "\n")
    assert read_manifest(tmp_path).entries == {"a.md": ENTRY}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1 of"),
        ("[]", "line 1 of"),
        ("{}", "line 1 of"),
        (json.dumps(asdict(ENTRY) | {"document": 5}), "line 1 of"),
        (json.dumps(asdict(ENTRY) | {"summary": "../a.md"}), "line 1 of .*../a.md"),
        (json.dumps(asdict(ENTRY) | {"summary": "/etc/a.md"}), "line 1 of .*/etc/a.md"),
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / MANIFEST).write_text(line + "\n")
    with pytest.raises(UsageError, match=words):
        read_manifest(tmp_path)


def test_a_missing_manifest_is_empty(tmp_path: Path) -> None:
    assert read_manifest(tmp_path / "no").entries == {}
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file"):
        read_manifest(tmp_path / "file")


PART = st.text(min_size=1, max_size=20) | st.sampled_from(
    ["..", ".", "a/b", "a", "A", "a.md", MANIFEST, ".x", " ", "x" * 300]
)


@given(st.lists(st.lists(PART, min_size=1, max_size=3).map(tuple), unique=True, max_size=8))
def test_every_document_has_its_own_file_inside_the_folder(all_parts: list[tuple[str, ...]]) -> None:
    documents = {"/".join(parts): SourceDocument(parts, "", "") for parts in all_parts}
    files = file_names(documents.values(), {})
    assert files.keys() == documents.keys()
    folded = [file.casefold() for file in files.values()]
    assert len({*folded}) == len(folded)
    folders = {parent.as_posix().casefold() for file in files.values() for parent in PurePosixPath(file).parents}
    assert not folders & {*folded}
    assert MANIFEST not in folders
    for file in files.values():
        assert is_below(file)
        assert file.endswith(".md")
        assert not any(part.startswith(".") or len(part.encode()) > 200 for part in file.split("/"))
    assert file_names(reversed(documents.values()), files) == files


def test_ordinary_names_are_kept() -> None:
    names = ["guide/a.md", "b & c (2).txt", "Bericht über Mühlen.md", "हिन्दी.txt", "t.jsonl/row-0001"]
    documents = [SourceDocument(tuple(name.split("/")), "", "") for name in names]
    assert list(file_names(documents, {}).values()) == [f"{name}.md" for name in names]


def test_a_folder_is_locked_by_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "out"
    with locked(folder), pytest.raises(StoreInUse), locked(folder):
        pass
    with locked(folder):
        pass


def test_a_failed_write_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(TokenmillError, match="b.md"):
        put(tmp_path / "a" / "b.md", b"")
    with pytest.raises(UsageError, match=str(tmp_path / "a")), locked(tmp_path / "a"):
        pass


def test_a_partial_file_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / ".a.md.part").write_text("half")
    put(tmp_path / "a.md", b"whole")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a.md": b"whole"}


def test_empty_folders_are_removed(tmp_path: Path) -> None:
    put(tmp_path / "a" / "b" / "c.md", b"")
    put(tmp_path / "a" / "d.md", b"")
    remove(tmp_path / "a" / "b" / "c.md", tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "d.md"]
    remove(tmp_path / "a" / "d.md", tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert sha256_of_file(tmp_path / "a" / "d.md") is None
