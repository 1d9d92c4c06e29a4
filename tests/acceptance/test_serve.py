"""`tokenmill serve`: the gateway with OpenAI's client, keys, restarts, signals and errors."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from support.run_cli import LIMIT_S, SMALL, command, environment, until
from tokenmill.cli import run
from tokenmill.engine.process import registry

Said = Callable[..., tuple[int, str, str]]
RULES = " ".join(f"Rule {number}: a report names its author, its date and mill {number}." for number in range(12))


@contextmanager
def serving(home: Path, *words: object) -> Iterator[tuple["subprocess.Popen[bytes]", dict[str, Any]]]:
    """A gateway process and its JSON output; killed at the end if it still runs."""
    process = subprocess.Popen(
        command("serve", *words, "--port", 0, "--json"),
        env=environment(home),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        text = b""
        while not text.endswith(b"\n}\n"):
            line = process.stdout.readline()
            assert line, process.stderr.read().decode() if process.stderr else ""
            text += line
        yield process, json.loads(text)
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def asked(said: dict[str, Any]) -> openai.OpenAI:
    return openai.OpenAI(base_url=said["url"], api_key="none", max_retries=0, timeout=LIMIT_S)


def test_a_night(tmp_path: Path) -> None:
    """A killed gateway restores its digest at the next start, restarts its engine after a crash, and stops."""
    config, rules = tmp_path / "mill.toml", tmp_path / "rules.md"
    rules.write_text(RULES)
    config.write_text(
        '[gateway]\nlog = "json"\n[[engines]]\nname = "small"\nmodel = "smollm2"\naliases = ["gpt-4o-mini"]\n'
        "context = 1024\nsequences = 4\nthreads = 1\nthreads_batch = 1\n"
        f'[[digests]]\nname = "rules"\nfile = "{rules}"\n'
    )
    with serving(tmp_path, "--config", config) as (process, said):
        assert [engine["name"] for engine in said["engines"]] == ["small"]
        assert [(digest["name"], digest["how"]) for digest in said["digests"]] == [("rules", "computed")]
        messages = [{"role": "system", "content": RULES}, {"role": "user", "content": "Who?"}]
        answer = asked(said).chat.completions.create(model="gpt-4o-mini", messages=messages, max_tokens=2)  # type: ignore[arg-type]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert (answer.usage.prompt_tokens_details.cached_tokens or 0) > 0.8 * answer.usage.prompt_tokens
        process.kill()
        _, talk = process.communicate(timeout=LIMIT_S)
        until(lambda: not alive(said["engines"][0]["pid"]))
        line = json.loads(talk.decode().splitlines()[-1])
        assert (line["route"], line["completion_tokens"]) == ("/v1/chat/completions", 2)
        assert "Who?" not in talk.decode()
    with serving(tmp_path, "--model", "smollm2", *SMALL, "--digest", rules) as (process, said):
        assert said["digests"][0]["how"] == "restored"
        engine = said["engines"][0]["pid"]
        os.kill(engine, signal.SIGKILL)
        body = {"model": "smollm2", "prompt": "One, two,", "max_tokens": 1}
        until(lambda: httpx.post(f"{said['url']}/completions", json=body, timeout=LIMIT_S).status_code == 200)
        stream = asked(said).completions.create(model="smollm2", prompt="One, two,", max_tokens=40, stream=True)
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        assert list(stream)[-1].choices[0].finish_reason in ("stop", "length")
        _, talk = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0
        assert "the gateway has stopped" in talk.decode()
        assert "route=/v1/completions status=200" in talk.decode()
        assert "restarting: " in talk.decode()
        assert not alive(engine)


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """Runs a command in this process with its own state folder; returns the exit code, stdout and stderr."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def said(*words: object) -> tuple[int, str, str]:
        code = run([str(word) for word in words])
        return code, *capsys.readouterr()

    return said


def test_keys(said: Said) -> None:
    code, out, err = said("serve", "--host", "0.0.0.0")
    assert code == 2
    assert "tokenmill keys add" in err
    code, secret, err = said("keys", "add", "ann", "--requests-per-minute", 60)
    assert code == 0
    assert secret.startswith("tm-")
    assert "not shown again" in err
    _, out, _ = said("keys", "list")
    assert "ann" in out
    assert secret.strip() not in out
    assert said("keys", "add", "ann")[0] == 2
    assert said("keys", "add", "bob", "--tokens-per-minute", 0)[0] == 2
    assert json.loads(said("keys", "add", "bob", "--json")[1])["key"].startswith("tm-")
    assert json.loads(said("keys", "revoke", "ann", "--json")[1]) == {"name": "ann", "keys_left": 1}
    code, out, err = said("keys", "revoke", "bob")
    assert (code, out) == (0, "")
    assert "no keys are left" in err
    assert json.loads(said("keys", "list", "--json")[1]) == []
    assert "no keys" in said("keys", "list")[2]


def test_wrong_use(said: Said, tmp_path: Path) -> None:
    config = tmp_path / "mill.toml"
    config.write_text('[[engines]]\nname = "a"\n')
    for words, reason in (
        (("--detach",), "--detach requires --engine-only"),
        (("--port", 99999), "port must be 1-65535, or 0 to pick a free port (got 99999)"),
        (("--config", config, "--context", 512), "engines of the configuration"),
        (("--engine-only", "smollm2", "--host", "::1"), "--host cannot be combined with --engine-only"),
        (("--host", "203.0.113.1"), "203.0.113.1"),
        (("--port", 0, "--digest", tmp_path / "none.md"), f"{tmp_path / 'none.md'}"),
        (("--port", 0, "--engine", "nothing"), "unknown engine 'nothing'"),
    ):
        code, _, err = said("serve", *words)
        assert code == 2, (words, err)
        assert reason in err


def test_a_wrong_certificate_is_known_before_a_load(said: Said, tmp_path: Path) -> None:
    config = tmp_path / "mill.toml"
    config.write_text('[gateway]\nport = 0\ntls_cert = "none.pem"\ntls_key = "none.pem"\n')
    code, _, err = said("serve", "--config", config, "--model", "not-here-either")
    assert code == 2
    assert "none.pem cannot be read" in err


def test_what_it_says_to_a_person(smollm2_path: Path, tmp_path: Path) -> None:
    """The dashboard URL, an unreachable engine with its reason, and the message after Ctrl-C."""
    config = tmp_path / "mill.toml"
    config.write_text(
        '[gateway]\nport = 0\n[[engines]]\nname = "away"\nurl = "http://127.0.0.1:9/v1"\nmodel = "big"\n'
        f'[[engines]]\nname = "small"\nmodel = "{smollm2_path}"\ncontext = 256\nsequences = 1\nthreads = 1\n'
        '[[routes]]\nlane = "batch"\nengines = ["small"]\n'
    )
    process = subprocess.Popen(
        command("serve", "--config", config),
        env=environment(tmp_path) | {"COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        lines: list[str] = []
        while not lines or not lines[-1].startswith("ready"):
            lines.append(process.stdout.readline())
            assert lines[-1], process.communicate(timeout=LIMIT_S)
        page = next(line.split()[1] for line in lines if line.startswith("dashboard "))
        assert "<title>" in httpx.get(page).text
        assert "away: url http://127.0.0.1:9; nothing answers" in "".join(lines)
        small = registry.read(tmp_path / "tokenmill", "small")
        assert small is not None
        body = {"model": "small", "prompt": "One,", "max_tokens": 1}
        os.kill(small.engine.pid, signal.SIGKILL)
        until(lambda: not alive(small.engine.pid))
        until(lambda: httpx.post(f"{page}v1/completions", json=body, timeout=LIMIT_S).status_code == 200)
        process.send_signal(signal.SIGINT)
        _, talk = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0
        assert "engine small: restarting: " in talk
        assert 'why="no route matches"' in talk
        assert "again to quit immediately" in talk
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, 129), (signal.SIGQUIT, 131), (signal.SIGTERM, 0)])
def test_a_gateway_stops_and_leaves_no_engine(number: signal.Signals, code: int, tmp_path: Path) -> None:
    with serving(tmp_path, "--model", "smollm2", *SMALL) as (process, said):
        process.send_signal(number)
        _, talk = process.communicate(timeout=LIMIT_S)
        assert process.returncode == code, talk
        assert "the gateway has stopped" in talk.decode()
        assert not alive(said["engines"][0]["pid"])
