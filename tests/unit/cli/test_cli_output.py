"""stdout and stderr with names from hostile files and unusual file systems."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.live import Live
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


def test_a_message_does_not_overwrite_a_live_display() -> None:
    terminal = StringIO()
    with Live("measuring", console=Console(file=terminal, force_terminal=True), auto_refresh=False, transient=True):
        say("2 slots [/bold]")
    assert "\x1b[2K2 slots [/bold]\n" in terminal.getvalue()


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
