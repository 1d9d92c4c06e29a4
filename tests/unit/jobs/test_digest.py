"""A digest has its size, its order and its bytes, whatever the files' order, times and places are."""

import os
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import UsageError
from tokenmill.jobs.digest import DigestDocument, build, estimate, normal
from tokenmill.jobs.digest_files import MAX_BYTES, gather


def numbered(lines: int, width: int = 40) -> str:
    return "".join(f"line {number} {'x' * width}\n" for number in range(1, lines + 1))


def test_all_that_fits_is_there_whole_in_order() -> None:
    made = build(
        [
            DigestDocument("b.txt", "two\r\nlines\r\n\r\n"),
            DigestDocument("a/z.txt", "\ufeffone"),
            DigestDocument("a.txt", ""),
        ],
        1000,
    )
    assert made.text == (
        '<file path="a/z.txt">\none\n</file>\n\n<file path="a.txt">\n</file>\n\n<file path="b.txt">\ntwo\nlines\n</file>\n'
    )
    assert made.tokens == estimate(made.text)
    assert [(entry.name, entry.shown) for entry in made.entries] == [
        ("a/z.txt", "whole"),
        ("a.txt", "whole"),
        ("b.txt", "whole"),
    ]


def test_small_files_are_whole_and_large_ones_share_the_rest() -> None:
    documents = [
        DigestDocument("large", numbered(400)),
        DigestDocument("small", numbered(5)),
        DigestDocument("larger", numbered(900)),
    ]
    made = build(documents, 2000)
    assert {entry.name: entry.shown for entry in made.entries} == {"large": "part", "larger": "part", "small": "whole"}
    shown = {name: int(last) for name, last in re.findall(r'path="(\w+)" lines="1-(\d+) of', made.text)}
    assert shown["large"] == pytest.approx(shown["larger"], abs=2)
    assert 1900 < made.tokens <= 2000
    assert f"[{400 - shown['large']} more lines not shown]" in made.text


def test_what_was_cut_leaves_an_outline() -> None:
    text = "# Title\n" + numbered(200) + "## Far below\n" + numbered(50) + "def deep(x):\n    async def inner():\n"
    made = build([DigestDocument("a.md", text)], 600)
    assert "[" in made.text
    assert "not shown; outline of them:]\n202: ## Far below\n253: def deep(x):\n</file>" in made.text


def test_when_there_is_room_for_few_the_others_are_named() -> None:
    made = build([DigestDocument(f"f{number:03d}.txt", numbered(100 + number)) for number in range(60)], 1000)
    shown = [entry.name for entry in made.entries if entry.shown != "none"]
    assert shown == [f"f{number:03d}.txt" for number in range(len(shown))]
    assert 5 <= len(shown) <= 10
    assert f"[{60 - len(shown)} more files not shown: f{len(shown):03d}.txt, " in made.text
    assert made.text.endswith(", ...]\n")


def test_a_line_that_is_longer_than_the_room_is_cut_inside() -> None:
    made = build([DigestDocument("one", "a " * 9000)], 60)
    assert made.text.startswith('<file path="one" characters="1-')
    assert "[the rest of this line not shown]" in made.text
    assert 55 <= made.tokens <= 60


def test_no_room_for_anything() -> None:
    made = build([DigestDocument("a", numbered(100))], 5)
    assert made.tokens <= 5
    assert [entry.shown for entry in made.entries] == ["none"]


def test_names_cannot_break_out_of_their_tag() -> None:
    assert '<file path="a&quot;&gt;' not in build([DigestDocument('a"><b', "x")], 99).text
    assert '<file path="a&quot;>&lt;b">' in build([DigestDocument('a"><b', "x")], 99).text


def test_an_exact_count_is_obeyed() -> None:
    def count(text: str) -> int:  # joined texts have more than their parts: as a tokenizer might
        return len(text) // 3 + text.count("\n\n") * 7

    documents = [DigestDocument(f"{number}", numbered(20 + number)) for number in range(12)]
    for budget in (50, 200, 500, 3000, 100_000):
        assert count(build(documents, budget, count).text) <= budget


NAMES = st.text(st.sampled_from("abc/."), min_size=1, max_size=5)
FILES = st.dictionaries(NAMES, st.text(st.sampled_from("ab#\n\r é"), max_size=200), min_size=1, max_size=6)


@given(FILES, st.integers(1, 300), st.randoms())
def test_order_and_line_ends_do_not_matter_and_the_budget_holds(
    files: dict[str, str], budget: int, rng: object
) -> None:
    documents = [DigestDocument(name, text) for name, text in files.items()]
    made = build(documents, budget)
    rng.shuffle(documents)  # type: ignore[attr-defined]
    other = build([DigestDocument(one.name, normal(one.text).replace("\n", "\r\n")) for one in documents], budget)
    assert (other.text, other.sha256) == (made.text, made.sha256)
    assert made.tokens <= budget


def tree(root: Path) -> Path:
    for name, text in {
        "README.md": "# One\n",
        "src/b.py": "def b():\n    pass\n",
        "src/a.py": "a = 1\n",
        "src/deep/c.py": "c = 1\n",
        ".hidden/x.md": "no\n",
        ".env": "SECRET=1\n",
        "build/out.txt": "no\n",
        "src/gen/keep.txt": "yes\n",
        "src/gen/drop.txt": "no\n",
        "notes.tmp": "no\n",
        ".gitignore": "build/\n*.tmp\n# comment\n\n/top.txt\n",
        "src/.gitignore": "gen/*\n!gen/keep.txt\n",
        "top.txt": "no\n",
        "src/top.txt": "yes\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "image.png").write_bytes(b"\x89PNG\0\0")
    (root / "latin.txt").write_bytes(b"caf\xe9\n")
    return root


WANTED = ["README.md", "src/a.py", "src/b.py", "src/deep/c.py", "src/gen/keep.txt", "src/top.txt"]


def test_folders_without_what_is_hidden_ignored_or_no_text(tmp_path: Path) -> None:
    found = gather([tree(tmp_path / "one")])
    assert sorted(one.name for one in found.documents) == WANTED
    assert found.skipped == (("image.png", "not text"), ("latin.txt", "not UTF-8"))


def test_copies_times_and_the_order_of_arguments_change_nothing(tmp_path: Path) -> None:
    one = tree(tmp_path / "one")
    other = tmp_path / "elsewhere" / "another name"
    shutil.copytree(one, other)
    for number, path in enumerate(sorted(other.rglob("*"))):
        os.utime(path, (number, number))
    texts = {
        build(gather(places).documents, 4000).text
        for places in (
            [one],
            [other],
            [one / "src", one / "README.md"],
            [other / "README.md", other / "src", other / "src"],
        )
    }
    assert len(texts) == 1
    assert str(tmp_path) not in texts.pop()


def test_names_that_are_not_unicode(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("text\n")
    assert build(gather([tmp_path]).documents, 100).text.startswith('<file path="caf\ufffd.txt">')


def test_a_named_file_is_wanted_even_if_hidden_or_ignored(tmp_path: Path) -> None:
    root = tree(tmp_path)
    assert [one.name for one in gather([root / ".env", root / "notes.tmp"]).documents] == [".env", "notes.tmp"]


def test_a_named_folder_is_wanted_even_if_ignored(tmp_path: Path) -> None:
    root = tree(tmp_path)
    (root / "build" / "other.tmp").write_text("no\n")
    names = [one.name for one in gather([root / "build", root / "README.md"]).documents]
    assert names == ["build/out.txt", "README.md"]


def test_the_digest_does_not_feed_on_itself(tmp_path: Path) -> None:
    root = tree(tmp_path)
    (root / "digest.md").write_text("old\n")
    assert "digest.md" not in [one.name for one in gather([root], leave_out=root / "digest.md").documents]


def test_links_to_folders_are_not_followed_and_files_too_large_are_named(tmp_path: Path) -> None:
    root = tree(tmp_path)
    (root / "loop").symlink_to(root)
    with (root / "huge.txt").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    found = gather([root])
    assert sorted(one.name for one in found.documents) == WANTED
    assert ("huge.txt", "32.0 MiB, more than 32.0 MiB") in found.skipped


@pytest.mark.parametrize(
    ("pattern", "ignored", "kept"),
    [
        ("*.log", ["a.log", "x/y.log"], ["a.logs"]),
        ("/a.log", ["a.log"], ["x/a.log"]),
        ("x/", ["x/a", "y/x/b"], ["z/x"]),
        ("x/*.log", ["x/a.log"], ["x/y/a.log", "z/x/a.log"]),
        ("**/t.log", ["t.log", "a/b/t.log"], ["at.log"]),
        ("x/**", ["x/a", "x/b/c"], ["y"]),
        ("a?c", ["abc"], ["ac"]),
        ("[ab].log", ["a.log"], ["c.log"]),
        ("[!ab].log", ["c.log"], ["a.log"]),
        ("\\#x", ["#x"], ["x"]),
        ("[z-a]", [], ["z"]),
    ],
)
def test_patterns_of_gitignore(tmp_path: Path, pattern: str, ignored: list[str], kept: list[str]) -> None:
    for name in (*ignored, *kept):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text\n")
    (tmp_path / ".gitignore").write_text(pattern + "\n")
    assert sorted(one.name for one in gather([tmp_path]).documents) == sorted(kept)


@pytest.mark.parametrize("places", [[], [Path("absent")]])
def test_nothing_to_read(places: list[Path]) -> None:
    with pytest.raises(UsageError):
        gather(places)
