"""What reaches stdout and stderr when names come from hostile files and odd filesystems."""

import json
from pathlib import Path

import pytest
from rich.table import Table

from tokenmill.cli.output import harmless, say, show, show_json


def test_names_are_neither_markup_nor_emoji(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table.grid()
    table.add_row("[/bold]blk.0 :smile: [red]x")
    show(table, "in /models/[/x]")
    say("[/bold] :smile:")
    out, err = capsys.readouterr()
    assert out.splitlines() == ["[/bold]blk.0 :smile: [red]x", "in /models/[/x]"]
    assert err == "[/bold] :smile:\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\n", "plain\ttext\n"),
        ("\x1b[1mbold\x1b[0m", "\x1b[1mbold\x1b[0m"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x1b[2J\x9b2J\r\x7f", "\\x1b[2J\\x9b2J\\x0d\\x7f"),
        ("Füße, 潮汐", "Füße, 潮汐"),
    ],
)
def test_control_characters_are_shown_and_not_obeyed(text: str, shown: str) -> None:
    assert harmless(text) == shown


def test_json_holds_paths_that_are_not_unicode(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("/models/Füße\udcff.gguf")
    show_json({"path": path})
    out = capsys.readouterr().out
    assert "Füße" in out
    out.encode("utf-8")
    assert json.loads(out)["path"] == str(path)
