"""Images go to the engine of a route that reads them, everything else to the first one."""

from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support import patient
from support.fake_engine import CAPABILITIES, FakeEngine
from support.gateway import Served, config_in, fake_engines, served
from tokenmill.engine.engine import Answer, Capabilities, Piece, Request, Usage
from tokenmill.native.chat.messages import messages_of

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}


class TextEngine(FakeEngine):
    """Refuses images as the native engine does."""

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        messages_of(request.prompt)  # type: ignore[arg-type]
        yield Answer("text", "stop", Usage(1, 1, 0))


class VisionEngine(FakeEngine):
    """Reads images."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(CAPABILITIES, images=True)

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        yield Answer("vision", "stop", Usage(1, 1, 0))


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Served]:
    engines = fake_engines(lambda: [("text", TextEngine()), ("vision", VisionEngine())])
    with served(engines, config_in(tmp_path)) as one:
        yield one


def ask(gateway: Served, path: str, **body: Any) -> str:
    answer = patient.post(f"{gateway.url}/v1{path}", json={"model": "fake", **body})
    assert answer.status_code == 200, answer.text
    return answer.headers["x-tokenmill-engine"]


def test_by_the_contents_of_the_request(gateway: Served) -> None:
    def chat(content: Any) -> str:
        return ask(gateway, "/chat/completions", messages=[{"role": "user", "content": content}])

    text = {"type": "text", "text": "What is it?"}
    assert [chat("Hi."), chat([text]), chat([text, IMAGE]), chat("Hi.")] == ["text", "text", "vision", "text"]


def test_of_every_api(gateway: Served) -> None:
    url = "data:image/png;base64,AA"
    part = {"type": "input_image", "image_url": url}
    assert ask(gateway, "/responses", input=[{"role": "user", "content": [part]}]) == "vision"
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    assert ask(gateway, "/messages", max_tokens=4, messages=[{"role": "user", "content": [block]}]) == "vision"


def test_audio_that_no_engine_reads_is_refused_by_name(gateway: Served) -> None:
    audio = {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}
    body = {"model": "fake", "messages": [{"role": "user", "content": [audio]}]}
    answer = patient.post(f"{gateway.url}/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "audio_not_supported")
