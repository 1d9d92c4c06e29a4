"""No process is left behind by a script that is interrupted, killed, or ends without closing its engine."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.run_cli import LIMIT_S, until
from tokenmill.engine.process.identity import Pid, descendants

LOAD = """
import json, os, sys
from itertools import repeat
import tokenmill
from tokenmill.engine.process.identity import descendants

def say(**facts):
    print(json.dumps(facts), flush=True)

def progress(event):
    say(event=type(event).__name__, processes=descendants(os.getpid()))

def load():
    options = {"context": 512, "sequences": 2, "threads": 1, "threads_batch": 1}
    return tokenmill.load(sys.argv[1], on_progress=progress, **options)
"""
MAPS = """
try:
    with load() as engine:
        say(event="loaded", processes=descendants(os.getpid()))
        for answer in engine.map(repeat("Tell me a story."), max_tokens=16, ignore_eos=True):
            say(event="answer", processes=descendants(os.getpid()))
except KeyboardInterrupt:
    say(event="interrupted", processes=descendants(os.getpid()))
    raise
"""
STREAMS = MAPS.replace('engine.map(repeat("Tell me a story."), max_tokens=16, ', 'engine.stream("Tell me a story.", ')
CHATS = """
engine = load()
say(event="answer", processes=descendants(os.getpid()), text=engine.chat("Say hello.", max_tokens=4).text)
"""


class Script:
    """A Python process that loads an engine and reports what it does as JSON lines."""

    def __init__(self, code: str, model: Path, state: Path) -> None:
        environment = os.environ | {"XDG_STATE_HOME": str(state)}
        command = [sys.executable, "-c", LOAD + code, str(model)]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def next_line(self) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def reach(self, event: str, *, processes: bool = True) -> dict[str, Any]:
        """Read until it reports an event, with an engine's processes or without."""
        while (found := self.next_line()) is not None:
            if found["event"] == event and bool(found["processes"]) == processes:
                return found
        _, talk = self.process.communicate(timeout=LIMIT_S)
        raise AssertionError(f"{event} was not reported: {talk.decode()}")

    def engine(self) -> list[Pid]:
        """The processes of its engine as they are now."""
        return [found for number in descendants(self.process.pid) if (found := Pid.of(number)) is not None]

    def end(self) -> tuple[int, str]:
        """Its exit status and what it wrote to stderr."""
        _, talk = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, talk.decode()


@contextmanager
def script(code: str, model: Path, state: Path) -> Iterator[Script]:
    started = Script(code, model, state)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate()


@pytest.mark.parametrize(
    ("code", "event"), [(MAPS, "LoadProgress"), (MAPS, "loaded"), (MAPS, "answer"), (STREAMS, "answer")]
)
def test_ctrl_c_leaves_no_process(code: str, event: str, smollm2_path: Path, tmp_path: Path) -> None:
    with script(code, smollm2_path, tmp_path) as running:
        running.reach(event)
        engine = running.engine()
        assert engine
        running.process.send_signal(signal.SIGINT)
        running.reach("interrupted", processes=False)
        assert not any(process.alive for process in engine)
        status, talk = running.end()
    assert status == -signal.SIGINT
    assert "Exception ignored" not in talk
    assert "never retrieved" not in talk


def test_a_killed_script_leaves_no_process(smollm2_path: Path, tmp_path: Path) -> None:
    with script(MAPS, smollm2_path, tmp_path) as running:
        running.reach("answer")
        engine = running.engine()
        assert len(engine) >= 2  # the supervisor and the worker
        running.process.kill()
        until(lambda: not any(process.alive for process in engine))
    with script(CHATS, smollm2_path, tmp_path) as again:  # under the same name
        assert again.reach("answer")["text"]


def test_an_engine_that_was_not_closed_is_closed_when_python_exits(smollm2_path: Path, tmp_path: Path) -> None:
    with script(CHATS, smollm2_path, tmp_path) as running:
        answer = running.reach("answer")
        assert answer["text"]
        status, talk = running.end()
        assert not any(Pid.of(number) for number in answer["processes"])
    assert (status, talk) == (0, "")
