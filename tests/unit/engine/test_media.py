"""Images and audio in messages: passed to servers that read them, refused by name otherwise."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tokenmill.engine.engine import Chat, HttpApi, Request
from tokenmill.engine.media import has_remote_media, media_kinds
from tokenmill.engine.server.facts import accepts
from tokenmill.engine.server.request import call_of, capabilities_of
from tokenmill.errors import RequestRefused
from tokenmill.gateway.backends.passthrough import relayed_body
from tokenmill.gateway.http.request import parsed_request
from tokenmill.jobs.ingest.identity import place
from tokenmill.jobs.openai.call import check
from tokenmill.native.chat.messages import messages_of

TEXT = {"type": "text", "text": "What is it?"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
REMOTE = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}
VLLM = HttpApi("vllm", "m")


def said(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [TEXT, *parts]}]


def request(*parts: Any) -> Request:
    return check("chat", {"messages": said(*parts), "max_tokens": 5}).request()


def test_kinds() -> None:
    assert media_kinds(said(IMAGE, AUDIO)) == {"image", "audio"}
    assert media_kinds([{"role": "user", "content": "data:image/png"}, *said()]) == frozenset()
    assert (has_remote_media(said(IMAGE)), has_remote_media(said(REMOTE))) == (False, True)


def test_a_server_gets_the_parts_as_they_are() -> None:
    assert call_of(request(IMAGE, AUDIO), VLLM).body["messages"] == said(IMAGE, AUDIO)
    allowed = replace(VLLM, remote_media=True)
    assert call_of(request(REMOTE), allowed).body["messages"] == said(REMOTE)


@pytest.mark.parametrize(
    ("part", "api", "code"),
    [
        (IMAGE, replace(VLLM, images=False), "images_not_supported"),
        (AUDIO, replace(VLLM, audio=False), "audio_not_supported"),
        (REMOTE, VLLM, "remote_media_not_allowed"),
    ],
)
def test_a_server_that_cannot_refuses(part: Any, api: HttpApi, code: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        call_of(request(part), api)
    assert refused.value.code == code
    can = capabilities_of(api, reports_cached=True)
    assert (can.images, can.audio) == (api.images, api.audio)


@pytest.mark.parametrize(("part", "code"), [(IMAGE, "images_not_supported"), (AUDIO, "audio_not_supported")])
def test_the_native_engine_refuses(part: Any, code: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        messages_of(Chat(tuple(said(part))))
    assert (refused.value.code, refused.value.param) == (code, "messages")


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host/x", "data:text/html,x", "/etc/passwd", ""])
def test_other_urls_are_refused_for_every_engine(url: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        request({"type": "image_url", "image_url": {"url": url}})
    assert refused.value.param == "messages"


def test_only_checked_bodies_are_relayed() -> None:
    def relayed(part: Any, api: HttpApi) -> bool:
        body = {"model": "m", "messages": said(part), "max_tokens": 5}
        parsed = parsed_request("chat", body, "interactive", max_choices=1, raw=json.dumps(body).encode())
        return relayed_body(parsed, api) is not None

    assert not relayed(REMOTE, VLLM)
    assert relayed(REMOTE, replace(VLLM, remote_media=True))
    assert not relayed(IMAGE, replace(VLLM, images=False, remote_media=True))


def test_what_llama_server_reports() -> None:
    props = {"modalities": {"vision": True, "audio": False}}
    assert (accepts(props, "vision"), accepts(props, "audio"), accepts(None, "vision")) == (True, False, True)


def test_jobs_with_different_images_differ() -> None:
    other = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AB"}}
    one, two = (place("m", check("chat", {"messages": said(part)})).identity for part in (IMAGE, other))
    assert one != two
