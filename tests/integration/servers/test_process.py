"""Supervised processes: exits are detected, descendants killed, and processes stopped with their parent unless detached."""

import asyncio
import ctypes
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tokenmill.engine.process import process as module
from tokenmill.engine.process import supervisor
from tokenmill.engine.process.identity import Pid, descendants
from tokenmill.engine.process.ports import PortHolder, free_port, holder_of
from tokenmill.engine.process.preparation import Preparation
from tokenmill.engine.process.process import Process, last_lines, refused
from tokenmill.engine.process.supervisor import older
from tokenmill.errors import EngineError


def run(scene: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(120):
            await scene()

    asyncio.run(limited())


async def said(process: Process, line: str) -> None:
    """Wait until a process has written a line."""
    while line not in process.tail():
        assert process.running, process.tail()
        await asyncio.sleep(0.005)


async def gone(*pids: Pid) -> None:
    while any(pid.alive for pid in pids):
        await asyncio.sleep(0.005)


FAMILY = "sleep 60 & setsid sleep 60 & (setsid sh -c 'sleep 60 & echo ready; wait' &) ; wait"


def test_a_killed_process_is_noticed_and_its_children_end(tmp_path: Path) -> None:
    async def scene() -> None:
        process = await Process.start(["sh", "-c", FAMILY], log=tmp_path / "log")
        await said(process, "ready")
        family = [Pid.of(pid) for pid in descendants(process.supervisor.pid)]
        assert len(family) >= 5
        os.kill(process.pid.pid, signal.SIGKILL)
        end = await process.wait()
        assert (end.signal, end.asked) == (signal.SIGKILL, False)
        await process.stop()
        assert not [pid for pid in family if pid is not None and pid.alive]
        assert not process.supervisor.alive

    run(scene)


def test_what_a_dead_process_leaves_may_clean_up_before_it_is_killed(tmp_path: Path) -> None:
    tidy = tmp_path / "tidy"
    left = f"setsid sh -c 'trap \"touch {tidy}; exit\" TERM; echo ready; while :; do sleep 0.01; done' & wait"

    async def scene() -> None:
        process = await Process.start(["sh", "-c", left], log=tmp_path / "log")
        await said(process, "ready")
        os.kill(process.pid.pid, signal.SIGKILL)
        await process.wait()
        await process.stop()
        assert tidy.exists()

    run(scene)


def test_stopped_politely_then_by_force(tmp_path: Path) -> None:
    async def scene() -> None:
        polite = await Process.start(
            ["sh", "-c", "trap 'echo bye; exit 4' TERM; echo up; while :; do sleep 0.01; done"], log=tmp_path / "polite"
        )
        await said(polite, "up")
        end = await polite.stop()
        assert (end.code, end.asked, polite.describe()) == (4, True, "was stopped")
        assert polite.tail(1) == ("bye",), "a shell may add that its child was terminated"
        stubborn = await Process.start(
            ["sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.01; done"], log=tmp_path / "stubborn", grace_s=0.1
        )
        await said(stubborn, "up")
        assert (await stubborn.stop()).signal == signal.SIGKILL
        assert (await stubborn.stop()).asked, "stopping twice does no harm"

    run(scene)


def test_killed_without_asking(tmp_path: Path) -> None:
    async def scene() -> None:
        process = await Process.start(
            ["sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.01; done"], log=tmp_path / "x"
        )
        await said(process, "up")
        end = await process.kill()
        assert (end.signal, end.asked) == (signal.SIGKILL, True)

    run(scene)


def test_exit_codes_environment_folder_and_priority(tmp_path: Path) -> None:
    async def scene() -> None:
        process = await Process.start(
            ["sh", "-c", 'echo "$SAID $(pwd) $(nice)"; cat /proc/self/autogroup - || cat; exit 7'],
            log=tmp_path / "deep/log",
            env={"SAID": "hello"},
            cwd=tmp_path,
            preparation=Preparation(nice=19),
            predicted_host_bytes=5,
        )
        end = await process.wait()
        assert (end.code, end.signal, process.exit) == (7, None, end)
        assert process.describe().endswith("code 7")
        said, session = process.tail()  # its input is empty
        assert said == f"hello {tmp_path} 19"
        assert session.endswith((" nice 19", "No such file or directory")), "for its session, if the kernel has those"
        assert end.most_rss_bytes
        await process.stop()

    run(scene)


def test_a_refused_priority_is_a_line_in_the_log(tmp_path: Path) -> None:
    async def scene() -> None:
        process = await Process.start(["true"], log=tmp_path / "log", preparation=Preparation(cpus=(32767,)))
        assert (await process.wait()).code == 0
        assert "tokenmill: CPUs 32767 were refused" in process.tail()[0]
        (note,) = refused(process.log)
        assert note.startswith("CPUs 32767 were refused")
        assert refused(tmp_path / "absent") == ()
        await process.stop()

    run(scene)


@pytest.mark.parametrize(
    ("mode", "word"), [(None, "No such file"), (0o600, "Permission denied"), (0o700, "Exec format")]
)
def test_what_cannot_be_run_is_an_error_with_a_hint(tmp_path: Path, mode: int | None, word: str) -> None:
    program = tmp_path / "program"
    if mode is not None:
        program.write_bytes(b"\x7fELF nonsense")
        program.chmod(mode)

    async def scene() -> None:
        with pytest.raises(EngineError, match=word) as failed:
            await Process.start([str(program)], log=tmp_path / "log")
        assert failed.value.hint

    run(scene)


def test_a_log_stays_small_and_its_end_is_kept(tmp_path: Path) -> None:
    async def scene() -> None:
        log = tmp_path / "log"
        process = await Process.start(["seq", "100000"], log=log, log_bytes=200_000)
        await process.wait()
        await process.stop()
        sizes = [path.stat().st_size for path in (log, older(log))]
        assert sum(sizes) <= 200_000
        assert process.tail(2) == ("99999", "100000")
        again = await Process.start(["echo", "new"], log=log)
        await again.wait()
        await again.stop()
        assert last_lines(log, 2) == ("100000", "new"), "what came before a restart is still there"

    run(scene)


def test_the_last_lines_of_a_process_are_its_own(tmp_path: Path) -> None:
    async def scene() -> None:
        log = tmp_path / "log"
        for command in ("seq 1000; echo first", "kill -SEGV $$"):
            process = await Process.start(["sh", "-c", command], log=log, log_bytes=1000)
            await process.wait()
            await process.stop()
        assert process.tail() == ()
        assert last_lines(log, 2) == ("1000", "first")

    run(scene)


def test_inherited_descriptors_close_with_the_process(tmp_path: Path) -> None:
    async def scene() -> None:
        ours, theirs = socket.socketpair()
        program = f"import os, time; os.write({theirs.fileno()}, b'hi\\n'); time.sleep(60)"
        process = await Process.start(
            [sys.executable, "-S", "-c", program], log=tmp_path / "log", pass_fds=[theirs.fileno()]
        )
        theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        assert await reader.readline() == b"hi\n"
        await process.kill()
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()

    run(scene)


def test_something_is_run_when_all_is_over(tmp_path: Path) -> None:
    async def scene() -> None:
        mark = tmp_path / "mark"
        process = await Process.start(["true"], log=tmp_path / "log", cleanup_command=["touch", str(mark)])
        await process.stop()
        assert mark.exists()

    run(scene)


PARENT = """
import asyncio, json, sys
from pathlib import Path
from tokenmill.engine.process.process import Process

async def main():
    process = await Process.start(["sh", "-c", "sleep 60 & wait"], log=Path(sys.argv[1]), detach=sys.argv[2] == "detach")
    both = [[pid.pid, pid.ticks, pid.boot] for pid in (process.pid, process.supervisor)]
    print(json.dumps(both), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def parent(log: Path, how: str) -> tuple["subprocess.Popen[str]", Pid, Pid]:
    starter = subprocess.Popen([sys.executable, "-c", PARENT, str(log), how], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    engine, supervisor = (Pid(*fields) for fields in json.loads(starter.stdout.readline()))
    return starter, engine, supervisor


def test_it_dies_with_us(tmp_path: Path) -> None:
    starter, engine, supervisor = parent(tmp_path / "log", "tied")
    with starter:
        starter.kill()
    asyncio.run(asyncio.wait_for(gone(engine, supervisor), 5))


def test_detached_it_does_not_and_is_found_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    starter, engine, supervisor = parent(log, "detach")
    with starter:
        starter.kill()

    async def scene() -> None:
        assert engine.alive
        process = Process(engine, supervisor, log)
        assert process.running
        end = await process.stop()
        assert end.asked
        late = Process(engine, supervisor, log)
        assert await late.wait() == end, "and how it ended can still be read"
        assert not supervisor.alive

    run(scene)


def test_it_dies_with_its_supervisor(tmp_path: Path) -> None:
    async def scene() -> None:
        process = await Process.start(["sh", "-c", "sleep 60 & echo up; wait"], log=tmp_path / "log")
        await said(process, "up")
        family = [Pid.of(pid) for pid in descendants(process.pid.pid)]
        os.kill(process.supervisor.pid, signal.SIGKILL)
        end = await process.wait()
        assert (end.supervisor_signal, end.from_outside) == (signal.SIGKILL, True)
        await process.stop()
        await gone(*(pid for pid in family if pid is not None))

    run(scene)


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("tokenmill"), "propagate", True)  # the command line turns it off
    return caplog


LOOP = ["sh", "-c", "echo up; while :; do sleep 0.01; done"]


def test_a_stopped_supervisor_is_resumed_when_the_process_is_to_end(
    tmp_path: Path, messages: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        process = await Process.start(LOOP, log=tmp_path / "log")
        await said(process, "up")
        os.kill(process.supervisor.pid, signal.SIGSTOP)
        end = await process.stop()
        assert (end.signal, end.asked) == (signal.SIGTERM, True)
        assert not process.pid.alive
        assert not process.supervisor.alive
        assert f"(pid {process.supervisor.pid}) was stopped" in messages.text

    run(scene)


def test_a_death_under_a_stopped_supervisor_is_reported(tmp_path: Path) -> None:
    async def scene() -> None:
        process = await Process.start(LOOP, log=tmp_path / "log")
        await said(process, "up")
        os.kill(process.supervisor.pid, signal.SIGSTOP)
        os.kill(process.pid.pid, signal.SIGSEGV)
        assert (await process.wait()).signal == signal.SIGSEGV
        await process.stop()
        assert not process.supervisor.alive

    run(scene)


def test_a_supervisor_that_cannot_be_resumed_is_killed_with_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_SUPERVISOR_TIMEOUT_S", 0.1)
    monkeypatch.setattr(supervisor, "longest_stop_s", lambda grace_s: 0.1)
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    seize, interrupt = 0x4206, 0x4207

    async def scene() -> None:
        process = await Process.start(LOOP, log=tmp_path / "log")
        await said(process, "up")
        if ptrace(seize, process.supervisor.pid, None, None) != 0:
            await process.stop()
            pytest.skip(f"ptrace: {os.strerror(ctypes.get_errno())}")
        assert ptrace(interrupt, process.supervisor.pid, None, None) == 0
        end = await process.stop()
        assert end.asked
        assert not process.pid.alive
        assert not process.supervisor.alive
        assert f"(pid {process.supervisor.pid}) has not exited" in messages.text

    run(scene)


@pytest.mark.parametrize("detach", [False, True])
def test_cancelled_while_starting(tmp_path: Path, detach: bool) -> None:
    async def scene() -> None:
        starting = asyncio.create_task(Process.start(["sleep", "60"], log=tmp_path / "log", detach=detach))
        await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        assert str(tmp_path) not in left

    run(scene)


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        assert holder_of(taken) == PortHolder(os.getpid(), Path("/proc/self/comm").read_text().strip())
        assert free_port("127.0.0.1", taken) != taken
    assert holder_of(taken) is None
    assert free_port("127.0.0.1", taken) == taken
    with pytest.raises(EngineError):
        free_port("203.0.113.7", 0)
