"""The default progress bar."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from tokenmill.api.display import Bar, bar_for, display
from tokenmill.api.progress import Download, Measuring, Progress, ignore
from tokenmill.engine.loading.progress import LoadProgress
from tokenmill.engine.warm import WarmProgress
from tokenmill.jobs.models import Counts
from tokenmill.jobs.worker.progress import Snapshot
from tokenmill.jobs.worker.throughput import RunTokens

SNAPSHOT = Snapshot(
    1.0, Counts(pending=2, running=1, done=3, failed=1), RunTokens(), 0, 1, 1, 0, None, None, None, None, None
)
DRAW = """
from tokenmill.api.display import display
from tokenmill.engine.loading.progress import LoadProgress
from tokenmill.api.progress import Download
with display() as show:
    show(Download("smollm2", 50, 100))
    show(LoadProgress("starting"))
    show(LoadProgress("reading", 25, 100))
    show(LoadProgress("context"))
"""


@pytest.mark.parametrize(
    ("event", "bar"),
    [
        (Download("m", 1, 2), Bar("downloading m", 1, 2)),
        (Download("m", 1, None), Bar("downloading m", 1, None)),
        (LoadProgress("starting"), Bar("loading")),
        (LoadProgress("reading", 1, 2), Bar("loading", 1, 2)),
        (LoadProgress("context", 2, 2), Bar("loading: context")),
        (WarmProgress("page cache", "", 1, 2), Bar("reading the model", 1, 2)),
        (WarmProgress("first decode", ""), Bar("warming up: first decode")),
        (Measuring("measuring the width"), Bar("measuring the width")),
        (SNAPSHOT, Bar("jobs", 4, 7, "job")),
    ],
)
def test_every_event_has_a_bar(event: Progress, bar: Bar) -> None:
    assert bar_for(event) == bar


def test_nothing_is_drawn_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with display() as show:
        assert show is ignore
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_one_bar_after_the_other_and_no_warning() -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", DRAW], stderr=theirs, stdout=subprocess.PIPE, check=False, timeout=250
    )
    os.close(theirs)
    drawn = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 0, drawn
    assert done.stdout == b""
    places = [
        drawn.index(words) for words in ("downloading smollm2:  50%", "loading (", "loading:  25%", "loading: context")
    ]
    assert places == sorted(places)
