"""SIGHUP, SIGQUIT and SIGTERM during long commands: graceful shutdown, message and exit code."""

import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from support.run_cli import (
    LIMIT_S,
    begun,
    command,
    environment,
    last_batch,
    names,
    ran_here,
    slow_at_the_end,
    until,
    write,
)

SIGNALS = [(signal.SIGHUP, 129), (signal.SIGQUIT, 131), (signal.SIGTERM, 143)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "jobs.jsonl", slow_at_the_end())


@contextmanager
def ended(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_run_keeps_everything_and_goes_on(
    number: signal.Signals, code: int, home: Path, source: Path, tmp_path: Path, store: tuple[str, Path]
) -> None:
    output = tmp_path / "out.jsonl"
    process = begun(home, source, "--output", output, *store)
    with ended(process):
        until(lambda: last_batch(store[1])[0].done >= 3)
        process.send_signal(number)
        _, talk = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code
    assert number.name in talk.decode()
    counts = last_batch(store[1])[0]
    assert counts.running == 0
    totals = ran_here(home, source, "--output", output, *store)
    assert totals["computed"] == 12 - counts.done
    assert len(names(output)) == 12


def test_nohup_keeps_a_run_alive(home: Path, source: Path, tmp_path: Path, store: tuple[str, Path]) -> None:
    words = ["nohup", *command("run", source, "--output", tmp_path / "out.jsonl", *store)]
    process = subprocess.Popen(words, env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with ended(process):
        until(lambda: last_batch(store[1])[0].done >= 1)
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    assert len(names(tmp_path / "out.jsonl")) == 12


def test_a_run_whose_terminal_is_closed_stops_in_an_orderly_way(
    home: Path, tmp_path: Path, store: tuple[str, Path]
) -> None:
    lines = slow_at_the_end()
    for line in lines[8:]:
        line["body"]["max_tokens"] = 600
    source = write(tmp_path / "jobs.jsonl", lines)
    words = command("run", source, "--output", tmp_path / "out.jsonl", *store)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(words[0], words, environment(home) | {"TERM": "xterm-256color"})
    until(lambda: _read(terminal) and last_batch(store[1])[0].done >= 1)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 129
    assert last_batch(store[1])[0].running == 0


def _read(terminal: int) -> bool:
    """Drain the terminal, so that the process does not block on writing."""
    os.set_blocking(terminal, False)
    with suppress(BlockingIOError):
        os.read(terminal, 1 << 16)
    return True


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_run_that_still_reads_its_jobs_says_that_it_was_interrupted(
    number: signal.Signals, code: int, home: Path, tmp_path: Path, store: tuple[str, Path]
) -> None:
    pipe = tmp_path / "jobs"
    os.mkfifo(pipe)
    process = begun(home, pipe, "--output", tmp_path / "out.jsonl", *store)
    with ended(process), pipe.open("wb", buffering=0):  # returns when the command reads
        process.send_signal(number)
        _, talk = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code
    assert number.name in talk.decode()
