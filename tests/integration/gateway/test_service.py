"""`tokenmill.serve` with the real engine and OpenAI's client."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import tokenmill
from support.processes import command_lines
from support.run_cli import LIMIT_S, until
from tokenmill.config import Config, EngineConfig, GatewayConfig
from tokenmill.engine.process import registry
from tokenmill.engine.process.registry import Record
from tokenmill.errors import EngineError, UsageError

SMALL: dict[str, Any] = {"context": 512, "sequences": 2, "threads": 1, "threads_batch": 1, "warm": False, "port": 0}
Serve = Callable[..., tokenmill.Server]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(state_dir=str(tmp_path), gateway=GatewayConfig(log="off"), engine=EngineConfig(most_restarts=0))


@pytest.fixture
def serve(smollm2_path: Path, config: Config) -> Iterator[Serve]:
    """A small server of smollm2; every one of them is closed after the test."""
    servers: list[tokenmill.Server] = []

    def serve(**options: Any) -> tokenmill.Server:
        servers.append(tokenmill.serve("smollm2", **{"config": config, **SMALL, **options}))
        return servers[-1]

    yield serve
    for server in servers:
        server.close()


@pytest.fixture
def port() -> int:
    """A port that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
        return number


def chat(server: tokenmill.Server) -> str:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=LIMIT_S) as client:
        messages: Any = [{"role": "user", "content": "Say hello."}]
        answer = client.chat.completions.create(model=server.models[0], messages=messages, max_tokens=4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    return answer.choices[0].message.content or ""


def wait_and_interrupt(server: tokenmill.Server) -> None:
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    server.wait()


def engine(state: Path, name: str = "smollm2") -> Record:
    record = registry.read(state, name)
    assert record is not None
    return record


def assert_no_engine(state: Path) -> None:
    assert registry.listed(state) == ()
    assert not any(str(state) in " ".join(command) for command in command_lines().values())


def test_chat_and_close(serve: Serve, tmp_path: Path) -> None:
    threads: set[int] = set()
    with serve(on_progress=lambda _event: threads.add(threading.get_ident())) as server:
        assert threads == {threading.get_ident()}
        assert server.url.startswith("http://127.0.0.1:")
        assert server.url.endswith("/v1")
        assert server.models == ("smollm2",)
        assert chat(server)
        processes = (engine(tmp_path).engine, engine(tmp_path).supervisor)
        assert [process.alive for process in processes] == [True, True]
    assert [process.alive for process in processes] == [False, False]
    assert_no_engine(tmp_path)
    assert "stopped" in repr(server)
    with pytest.raises(openai.APIConnectionError):
        chat(server)
    server.close()  # again: nothing happens
    server.wait()  # returns, because it was stopped and did not fail


def test_inside_a_running_event_loop(serve: Serve, tmp_path: Path) -> None:
    async def cell() -> str:
        with serve() as server:
            return await asyncio.to_thread(chat, server)

    assert asyncio.run(cell())
    assert_no_engine(tmp_path)


def test_two_servers_of_one_model(serve: Serve, tmp_path: Path) -> None:
    first, second = serve(), serve()
    assert first.url != second.url
    assert {record.name for record in registry.listed(tmp_path)} == {"smollm2", "smollm2-2"}
    first.close()
    assert chat(second)
    second.close()
    assert_no_engine(tmp_path)
    with serve():
        assert engine(tmp_path).alive, "the name is free again"


def test_a_load_that_fails_leaves_nothing(smollm2_path: Path, config: Config, tmp_path: Path, port: int) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(smollm2_path.read_bytes().replace(b"blk.7.attn_k.weight", b"blk.7.attn_x.weight"))
    with pytest.raises(EngineError, match=r"attn_k\.weight"):
        tokenmill.serve(broken, config=config, **{**SMALL, "port": port})
    assert_no_engine(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", port))


def test_an_interrupted_load_leaves_nothing(serve: Serve, tmp_path: Path, port: int) -> None:
    def interrupt(_event: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        serve(port=port, on_progress=interrupt)
    assert_no_engine(tmp_path)
    with serve(port=port) as server:
        assert server.url == f"http://127.0.0.1:{port}/v1"


def test_wait_raises_when_the_engine_is_not_restarted(serve: Serve, tmp_path: Path) -> None:
    server = serve()
    os.kill(engine(tmp_path).engine.pid, signal.SIGKILL)
    with pytest.raises(EngineError):
        server.wait()
    assert_no_engine(tmp_path)


def test_ctrl_c_stops_a_waiting_server_and_lets_requests_end(serve: Serve, tmp_path: Path) -> None:
    server = serve()
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=LIMIT_S)
    stream = client.completions.create(model="smollm2", prompt="One, two,", max_tokens=40, stream=True)
    next(iter(stream))
    pieces: list[Any] = []
    reading = threading.Thread(target=lambda: pieces.extend(stream))
    reading.start()
    with pytest.raises(KeyboardInterrupt):
        wait_and_interrupt(server)
    reading.join(LIMIT_S)
    assert pieces[-1].choices[0].finish_reason in ("stop", "length")
    client.close()
    assert_no_engine(tmp_path)


def test_a_server_that_is_not_closed_ends_with_python(smollm2_path: Path, tmp_path: Path) -> None:
    script = (
        "import tokenmill\n"
        f"server = tokenmill.serve('smollm2', {', '.join(f'{name}={value!r}' for name, value in SMALL.items())})\n"
        "print(server.url)"
    )
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    assert done.stdout.startswith("http://127.0.0.1:")
    assert done.stderr == ""
    until(lambda: registry.listed(tmp_path / "tokenmill") == ())


@pytest.mark.parametrize("options", [{"port": 70000}, {"host": "203.0.113.1"}, {"sequence": 2}, {"engine": "nothing"}])
def test_wrong_options_are_refused_before_a_load(serve: Serve, tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        serve(**options)
    assert not (tmp_path / "engines").exists()
