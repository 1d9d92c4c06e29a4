"""Documents from files and tables: names, encodings, skipped files."""

import gzip
import json
import os
import re
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from tokenmill.errors import UsageError
from tokenmill.recipes.summarization.documents import MOST_BYTES, DocumentOptions, FoundDocuments, gather_documents

ALL = DocumentOptions()


def names(found: FoundDocuments) -> list[str]:
    return [document.name for document in found.documents]


def texts(found: FoundDocuments) -> dict[str, str]:
    return {document.name: document.text for document in found.documents}


def reasons(found: FoundDocuments) -> dict[str, str]:
    return {skipped.name: skipped.reason for skipped in found.skipped}


def make(folder: Path, **files: str | bytes) -> Path:
    """Write files; in the names, __ stands for a slash and _ for the dot before the suffix."""
    for key, content in files.items():
        path = folder / key.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def test_a_folder_gives_its_text_files_in_order_of_their_names(tmp_path: Path) -> None:
    docs = make(tmp_path / "docs", b_md="b", a_txt="a", deep__c_rst="c", deep__er__d="d", _hidden="h", _git__x_md="x")
    found = gather_documents([docs], ALL)
    assert names(found) == ["a.txt", "b.md", "deep/c.rst", "deep/er/d"]
    assert found.skipped == ()


def test_the_same_folder_elsewhere_gives_the_same_documents(tmp_path: Path) -> None:
    one, other = make(tmp_path / "x" / "docs", a_md="text\r\nmore"), make(tmp_path / "y", a_md="text\nmore")
    first, second = gather_documents([one], ALL).documents[0], gather_documents([other], ALL).documents[0]
    assert (first.name, first.text, first.sha256) == (second.name, second.text, second.sha256)


def test_several_inputs_prefix_names(tmp_path: Path) -> None:
    make(tmp_path, a__docs__x_md="1", b__docs__x_md="2", c__x_md="3", x_md="4")
    places = [tmp_path / "a" / "docs", tmp_path / "b" / "docs", tmp_path / "c", tmp_path / "x.md"]
    found = gather_documents(places, ALL)
    assert texts(found) == {"a/docs/x.md": "1", "b/docs/x.md": "2", "c/x.md": "3", "x.md": "4"}


def test_a_file_named_twice_is_one_document(tmp_path: Path) -> None:
    make(tmp_path, a_md="1", b_md="2")
    assert names(gather_documents([tmp_path / "b.md", tmp_path / "a.md", tmp_path / "b.md"], ALL)) == ["b.md", "a.md"]


def test_names_that_two_inputs_share_are_made_unique(tmp_path: Path) -> None:
    make(tmp_path, docs__a_md="1", x__docs__a_md="2", y__a_md="3")
    found = gather_documents([tmp_path / "docs", tmp_path / "x" / "docs" / "a.md", tmp_path / "y" / "a.md"], ALL)
    assert len({*names(found)}) == 3
    assert sorted(texts(found).values()) == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("globs", "expected"),
    [
        (("*.md",), ["a.md", "deep/c.md", "deep/er/d.md"]),
        (("deep/*.md",), ["deep/c.md"]),
        (("deep/**/*.md",), ["deep/c.md", "deep/er/d.md"]),
        (("*.txt", "a.*"), ["a.md", "b.txt"]),
        (("[ab].*",), ["a.md", "b.txt"]),
        (("deep/**",), ["deep/c.md", "deep/er/d.md"]),
    ],
)
def test_globs(tmp_path: Path, globs: tuple[str, ...], expected: list[str]) -> None:
    docs = make(tmp_path, a_md="a", b_txt="b", deep__c_md="c", deep__er__d_md="d")
    assert names(gather_documents([docs], DocumentOptions(globs))) == expected


def test_the_output_folder_is_not_read(tmp_path: Path) -> None:
    docs = make(tmp_path, a_md="a", out__b_md="b", out__deep__c_md="c")
    found = gather_documents([docs], DocumentOptions(leave_out=docs / "out"))
    assert (names(found), found.contains_output) == (["a.md"], True)
    itself = gather_documents([docs], DocumentOptions(leave_out=docs))
    assert (names(itself), itself.contains_output) == ([], True)
    assert not gather_documents([docs], DocumentOptions(leave_out=docs / "none")).contains_output


def test_skipped_files_have_a_reason(tmp_path: Path) -> None:
    make(
        tmp_path,
        a_pdf=b"%PDF-1.7 text",
        b_docx=b"PK\x03\x04",
        c_bin=b"a\0b",
        d_txt="gr\u00fcn".encode("latin-1"),
        e_txt=" \n",
        f_md="text",
        g_json="{",
        h_json='{"other": 1}',
        i_csv="a,b\n1,2\n",
        j_jsonl="not json\n",
    )
    found = gather_documents([tmp_path], ALL)
    assert names(found) == ["f.md"]
    said = reasons(found)
    assert said.keys() == {"a.pdf", "b.docx", "c.bin", "d.txt", "e.txt", "g.json", "h.json", "i.csv", "j.jsonl"}
    assert (said["a.pdf"], said["c.bin"], said["d.txt"], said["e.txt"]) == (
        "a PDF, not text",
        "not text",
        "not UTF-8",
        "empty",
    )
    assert "--text-column" in said["h.json"]
    assert "its columns: a, b" in said["i.csv"]


def test_huge_files_and_pipes_are_skipped(tmp_path: Path) -> None:
    make(tmp_path, a_md="text", b_txt="")
    with (tmp_path / "b.txt").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    os.mkfifo(tmp_path / "c.txt")
    found = gather_documents([tmp_path], ALL)
    assert names(found) == ["a.md"]
    assert "more than" in reasons(found)["b.txt"]


def test_declared_encodings(tmp_path: Path) -> None:
    page = '<meta charset="iso-8859-1"><p>gr\u00fcn'
    make(
        tmp_path,
        a_txt=b"\xef\xbb\xbfgr\xc3\xbcn",
        b_txt="gr\u00fcn".encode("utf-16"),
        c_html=page.encode("latin-1"),
        d_html=b'<meta charset="hex"><p>gr\xfcn',
    )
    found = gather_documents([tmp_path], ALL)
    assert texts(found) == dict.fromkeys(("a.txt", "b.txt", "c.html"), "gr\u00fcn")
    assert reasons(found) == {"d.html": "not UTF-8"}


def test_tables_have_a_document_in_each_row(tmp_path: Path) -> None:
    rows = [{"id": "one", "text": "first"}, {"id": "../two", "text": ""}, {"id": "three", "text": {"a": 1}}, {"id": ""}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    make(tmp_path, a_jsonl=lines, b_jsonl_gz=gzip.compress(lines.encode()), c_json=json.dumps(rows))
    parquet.write_table(pyarrow.table({"id": [7], "text": ["in parquet"]}), tmp_path / "d.parquet")
    (tmp_path / "e.csv").write_text('id,text\nx,"two\nlines"\n')
    found = gather_documents([tmp_path], DocumentOptions(id_column="id"))
    expected = {"one": "first", "three": '{"a":1}'}
    assert texts(found) == {
        **{f"{name}/{key}": text for name in ("a.jsonl", "b.jsonl.gz", "c.json") for key, text in expected.items()},
        "d.parquet/7": "in parquet",
        "e.csv/x": "two\nlines",
    }
    assert reasons(found)["a.jsonl/../two"] == "empty"
    assert reasons(found)["a.jsonl/row 4"] == "no id in 'id'"
    assert found.documents[0].parts == ("a.jsonl", "one")


def test_rows_without_ids_are_numbered(tmp_path: Path) -> None:
    make(tmp_path, a_csv="body\nx\ny\n")
    assert names(gather_documents([tmp_path / "a.csv"], DocumentOptions(text_column="body"))) == [
        "a.csv/row-0001",
        "a.csv/row-0002",
    ]


def test_a_table_with_duplicate_ids_is_refused(tmp_path: Path) -> None:
    make(tmp_path, a_csv="id,text\n1,x\n1,y\n", b_md="text")
    found = gather_documents([tmp_path], DocumentOptions(id_column="id"))
    assert names(found) == ["b.md"]
    assert reasons(found)["a.csv"] == 'rows 1 and 2 have the same id "1"'


def test_one_object_of_json_is_one_document(tmp_path: Path) -> None:
    make(tmp_path, a_json='{"title": "x", "content": "the text"}')
    assert texts(gather_documents([tmp_path], DocumentOptions(text_column="content"))) == {"a.json": "the text"}


def test_a_lone_surrogate_in_json_skips_only_that_file(tmp_path: Path) -> None:
    make(tmp_path, a_json='{"text": "\\ud800"}', b_json='{"text": "\\ud83d\\ude00"}')
    found = gather_documents([tmp_path], ALL)
    assert texts(found) == {"b.json": "\U0001f600"}
    assert "surrogate" in reasons(found)["a.json"]


def test_file_names_that_are_not_unicode(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/gr\xfcn.md"
    with open(path, "w") as file:  # noqa: PTH123
        file.write("text")
    (document,) = gather_documents([tmp_path], ALL).documents
    assert document.name == "gr\ufffdn.md"
    document.source.encode()


def test_a_missing_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(str(tmp_path / "no"))):
        gather_documents([tmp_path / "no"], ALL)


def test_an_invalid_pattern_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape("[z-a].md")):
        gather_documents([tmp_path], DocumentOptions(("[z-a].md",)))
