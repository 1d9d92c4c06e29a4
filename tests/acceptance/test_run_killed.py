"""`tokenmill run` with its own engine: killed processes, a full disk, the display on a terminal."""

import fcntl
import json
import os
import pty
import random
import re
import resource
import signal
import struct
import subprocess
import termios
import time
from pathlib import Path

from support.run_cli import (
    LIMIT_S,
    SMALL,
    begun,
    command,
    environment,
    jobs,
    last_batch,
    names,
    ran_here,
    slow_at_the_end,
    until,
    write,
)
from tokenmill.engine.process import registry
from tokenmill.jobs.ingest.submit import submit
from tokenmill.jobs.models import Submission
from tokenmill.jobs.store.sqlite import PAGE_BYTES
from tokenmill.jobs.store.store import Store
from tokenmill.model.identity import identity_of

NAMES = [line["custom_id"] for line in jobs()]
KILLS = 4


def test_kill_9_of_the_runner_again_and_again_loses_nothing(home: Path, tmp_path: Path) -> None:
    chance, store = random.Random(7), tmp_path / "batches"
    source, output = write(tmp_path / "jobs.jsonl", slow_at_the_end()), tmp_path / "out.jsonl"
    written, kept = b"", dict[int, bytes]()
    for kill in range(KILLS):
        process = begun(home, source, "--output", output, "--store", store, "--engine", "night")
        wanted = kill * 2  # while it submits, while it connects, while jobs run
        while len(last_batch(store)[1]) < wanted and process.poll() is None:
            time.sleep(0.01)
        time.sleep(chance.random() * 0.2)  # at any moment, not only after a commit
        process.kill()
        process.communicate()
        answers = last_batch(store)[1]
        assert {number: answers[number] for number in kept} == kept
        kept = answers
        now = output.read_bytes() if output.exists() else b""
        whole = now[: now.rfind(b"\n") + 1]
        assert whole.startswith(written)
        written = whole
    assert 0 < len(kept) < 12
    totals = ran_here(home, source, "--output", output, "--store", store, "--engine", "night")
    assert totals["computed"] == 12 - len(kept)
    assert totals["batch_totals"]["computed"] == 12
    assert output.read_bytes().startswith(written)
    assert names(output) == NAMES
    answers = last_batch(store)[1]
    assert {number: answers[number] for number in kept} == kept


def test_an_engine_of_its_own_dies_with_the_runner_and_lives_again_when_it_is_killed(
    smollm2_path: Path, tmp_path: Path
) -> None:
    store, state = tmp_path / "batches", tmp_path / "tokenmill"
    source, output = write(tmp_path / "jobs.jsonl", slow_at_the_end()), tmp_path / "out.jsonl"
    words = (source, "--output", output, "--store", store, "--model", smollm2_path, *SMALL, "--no-warm")
    process = begun(tmp_path, *words)
    until(lambda: len(last_batch(store)[1]) >= 2)
    (first,) = registry.listed(state)
    process.kill()
    process.communicate()
    kept = len(last_batch(store)[1])

    process = begun(tmp_path, *words, "--json")  # while the engine of the first run is still exiting
    try:
        until(lambda: len(last_batch(store)[1]) > kept)
        (second,) = registry.listed(state)
        assert second.engine != first.engine
        os.kill(second.engine.pid, signal.SIGKILL)
        out, said = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert b"was killed by SIGKILL" in said
    totals = json.loads(out)
    assert (totals["succeeded"], totals["engine_deaths"], totals["set_aside"]) == (12, 1, 0)
    assert totals["batch_totals"]["computed"] == 12
    assert names(output) == NAMES
    assert registry.listed(state) == ()


def test_a_job_in_flight_at_three_kills_of_the_engine_is_answered(smollm2_path: Path, tmp_path: Path) -> None:
    store, state = tmp_path / "batches", tmp_path / "tokenmill"
    line = jobs(["river"], max_tokens=300, ignore_eos=True)
    source, output = write(tmp_path / "jobs.jsonl", line), tmp_path / "out.jsonl"
    words = (source, "--output", output, "--store", store, "--model", smollm2_path, *SMALL, "--no-warm", "--json")
    process = begun(tmp_path, *words)
    assert process.stderr is not None
    killed = list[int]()
    try:
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):

            def works() -> bool:
                found = [record.engine.pid for record in registry.listed(state)]
                return bool(found) and found[0] not in killed and last_batch(store)[0].running == 1

            until(works)
            killed.append(registry.listed(state)[0].engine.pid)
            os.kill(killed[-1], number)
            until(lambda: last_batch(store)[0].running == 0)  # until the crash has been noticed
        out, said = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, said
    totals = json.loads(out)
    assert (totals["succeeded"], totals["engine_deaths"], totals["set_aside"]) == (1, 3, 0)


def test_a_stopped_supervisor_does_not_keep_a_run_from_ending(smollm2_path: Path, tmp_path: Path) -> None:
    store, state = tmp_path / "batches", tmp_path / "tokenmill"
    source, output = write(tmp_path / "jobs.jsonl", jobs(max_tokens=200, ignore_eos=True)), tmp_path / "out.jsonl"
    words = (source, "--output", output, "--store", store, "--model", smollm2_path, *SMALL, "--no-warm")
    process = begun(tmp_path, *words)
    try:
        until(lambda: last_batch(store)[0].running > 0)
        (record,) = registry.listed(state)
        record.supervisor.send(signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        record.supervisor.send(signal.SIGCONT)
    assert process.returncode == 143
    assert f"supervisor (pid {record.supervisor.pid}) was stopped" in said.decode()
    assert not record.engine.alive
    assert not record.supervisor.alive


def test_a_second_interrupt_ends_it_at_once(smollm2_path: Path, tmp_path: Path) -> None:
    source, state = write(tmp_path / "jobs.jsonl", jobs(max_tokens=500, ignore_eos=True)), tmp_path / "tokenmill"
    words = ("--output", tmp_path / "out.jsonl", "--store", tmp_path / "batches", "--model", smollm2_path, *SMALL)
    process = begun(tmp_path, source, *words, "--no-warm")
    assert process.stderr is not None
    try:
        said = b""
        while b"slots of" not in said:
            said += os.read(process.stderr.fileno(), 1 << 16)
        (record,) = registry.listed(state)
        record.engine.send(signal.SIGSTOP)  # so that it does not react to a request to exit
        process.send_signal(signal.SIGINT)
        while b"stopping (SIGINT)" not in said:
            said += os.read(process.stderr.fileno(), 1 << 16)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 130
        assert record.engine.alive  # the run did not wait for it
    finally:
        process.kill()
        process.communicate()
    record.engine.send(signal.SIGKILL)
    until(lambda: not record.supervisor.alive)


def test_a_full_disk_is_told_and_the_same_command_goes_on(home: Path, smollm2_path: Path, tmp_path: Path) -> None:
    store = tmp_path / "batches"
    source, output = write(tmp_path / "jobs.jsonl", jobs(max_tokens=3)), tmp_path / "out.jsonl"
    with Store(store) as opened:  # as the command will, so that only answers remain to be written
        submit(opened, source, Submission(identity_of(smollm2_path), output=str(output)))
    limit = 6 * PAGE_BYTES  # maximum file size: the log of a few transactions of any number of answers
    words = command("run", source, "--output", output, "--store", store)
    full = subprocess.run(
        words,
        env=environment(home),
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert full.returncode == 1
    assert "store.db" in full.stderr
    assert "the same command" in full.stderr
    assert "Traceback" not in full.stderr
    kept = len(last_batch(store)[1])
    assert kept < 12
    totals = ran_here(home, source, "--output", output, "--store", store)
    assert (totals["succeeded"], totals["computed"]) == (12, 12 - kept)
    assert names(output) == NAMES


def test_the_display_and_the_summary_fit_a_terminal_of_80_columns(home: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "jobs.jsonl", jobs(max_tokens=30, ignore_eos=True))
    words = command("run", source, "--output", tmp_path / "out.jsonl", "--store", tmp_path / "batches")
    code, seen = _on_a_terminal(words, environment(home))
    assert code == 0, seen
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen).replace("\r", "\n")
    assert re.search(r"jobs +[━─]{24} +\d+ of 12", text)
    assert re.search(r"tok/s +prefill [\d,]+ \(average [\d,]+\), decode [\d,]+ \(average [\d,]+\)", text)
    assert re.search(r"prompts +[\d,]+ tokens, [\d.]+ % from cache", text)
    assert re.search(r"slots +[1-4] of 4 busy", text)
    assert re.search(r"left +[\d,]+ prompt and [\d,]+ answer tokens, about .*, done at \d\d:\d\d", text)
    assert re.search(r"batch +batch_\w+  12 of 12 answered \(12 cut at max_tokens\)", text)
    assert max(map(len, text.splitlines())) <= 80


def _on_a_terminal(words: list[str], env: dict[str, str]) -> tuple[int, str]:
    """Run a command on a terminal of 80 columns; its exit code and output."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    seen = b""
    with subprocess.Popen(words, env=env | {"TERM": "xterm-256color"}, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        while True:
            try:
                data = os.read(ours, 1 << 16)
            except OSError:  # the other end of the terminal is closed
                break
            if not data:
                break
            seen += data
        code = process.wait(LIMIT_S)
    os.close(ours)
    return code, seen.decode(errors="replace")
