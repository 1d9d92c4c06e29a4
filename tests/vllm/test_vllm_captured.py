"""What is stored of vLLM's answers is what it answers."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.vllm_capture import ASKED, DATA, ask
from support.vllm_served import LIMIT_S, Served

NAMES = [name for name in ASKED if name != "metrics-cold"]  # this server has answered by now

pytestmark = pytest.mark.timeout(2400)  # the first test waits for the start


def shape(value: Any) -> Any:
    """Names and kinds without what changes from run to run; null stands for any kind."""
    if isinstance(value, dict):
        return {
            key: _by_token(inner) if key == "top_logprobs" else shape(inner)
            for key, inner in value.items()
            if inner is not None
        }
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def _by_token(value: Any) -> Any:
    """Top log probabilities; the keys of completions are token texts, which random weights choose by processor."""
    if isinstance(value, list) and value and all(isinstance(inner, float) for inner in value[0].values()):
        return [{"token": "float"}]
    return shape(value)


def chunks(text: str) -> list[Any]:
    """Shapes of a stream's chunks, each once."""
    found: list[Any] = []
    for line in text.splitlines():
        if line.startswith("data: {"):
            new = shape(json.loads(line.removeprefix("data: ")))
            if new not in found:
                found.append(new)
    return found


def families(text: str) -> set[str]:
    """Names of metrics."""
    return set(re.findall(r"^# TYPE (vllm:\S+)", text, re.MULTILINE))


@pytest.mark.parametrize("name", NAMES)
def test_the_stored_answer_is_todays(name: str, served: Served) -> None:
    stored = json.loads((DATA / "http" / f"vllm-{name}.json").read_text())
    with httpx.Client(base_url=served.engine.identity.address, timeout=LIMIT_S) as client:
        said = ask(client, *ASKED[name])
    assert (said["status"], said["content_type"]) == (stored["status"], stored["content_type"])
    assert said["request"] == stored["request"]
    if "body" in stored:
        assert shape(said["body"]) == shape(stored["body"])
        assert said["body"].get("error") == stored["body"].get("error")
    elif name == "metrics":
        assert families(said["text"]) == families(stored["text"])
    else:
        assert chunks(said["text"]) == chunks(stored["text"])


def test_the_stored_log_tells_what_todays_does(served: Served) -> None:
    told = re.compile(r"\[([a-z_]+\.py):\d+\] (KV cache|CPU KV cache size|Explicitly set|Loading weights took)")
    stored = (DATA / "logs" / "vllm-cpu.log").read_text()
    assert set(told.findall(stored)) == set(told.findall(served.log))
    assert len(set(told.findall(stored))) == 3


def test_nothing_stored_tells_of_a_machine() -> None:
    files = [*(DATA / "http").glob("vllm-*.json"), DATA / "logs" / "vllm-cpu.log"]
    assert len(files) == len(ASKED) + 1
    for path in files:
        text = path.read_text()
        assert str(Path.home()) not in text
        assert not re.search(r"/(?:work|home|root|tmp/(?!vllm_dist_0))", text), path.name
