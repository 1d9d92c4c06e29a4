"""Facts about running servers, valid and invalid URLs, and API keys."""

from typing import Any

import pytest

from support.http_answers import captured
from tokenmill.engine.server import facts
from tokenmill.engine.server.address import base_url, client_for, key_from, redacted
from tokenmill.errors import ConfigError, EngineError, UsageError

LLAMA_MODELS, PROPS = captured("llama-models").body, captured("llama-props").body
VLLM_MODELS, VERSION = captured("vllm-models").body, captured("vllm-version").body


def test_llama() -> None:
    entry = facts.chosen(LLAMA_MODELS, None)
    assert facts.kind_of(entry, PROPS, None) == "llama-server"
    assert facts.slots_of(PROPS) == 2
    assert facts.context_of(entry, PROPS) == 512
    assert facts.tools_of(PROPS) is False, "SmolLM2's template has no place for tools"
    assert facts.build_of("llama-server", PROPS, "") == "llama.cpp b0-unknown"
    assert facts.foreign_id("llama-server", entry) == "llama-server:SmolLM2:134515008:96576768:49152"


def test_vllm() -> None:
    entry = facts.chosen(VLLM_MODELS, "tiny-moe")
    assert facts.kind_of(entry, None, VERSION) == "vllm"
    assert facts.context_of(entry, None) == 4096
    assert facts.build_of("vllm", None, VERSION["version"]) == "vLLM 0.32.0"
    assert facts.foreign_id("vllm", entry) == "vllm:tiny-moe"


@pytest.mark.parametrize(
    ("entry", "props", "said", "kind"),
    [
        ({"owned_by": "llamacpp"}, {"total_slots": 1}, None, "ik_llama"),
        ({"owned_by": "openai"}, None, None, "url"),
        ({"owned_by": "me"}, {"anything": 1}, {"version": "1"}, "url"),
        ({"owned_by": "me", "max_model_len": 5}, None, {"version": "0.9"}, "vllm"),
    ],
)
def test_other_kinds(
    entry: dict[str, Any], props: dict[str, Any] | None, said: dict[str, Any] | None, kind: str
) -> None:
    assert facts.kind_of(entry, props, said) == kind


@pytest.mark.parametrize(
    ("props", "tools"), [(None, True), ({}, True), ({"chat_template_caps": {"supports_tools": True}}, True)]
)
def test_tools_are_there_unless_denied(props: dict[str, Any] | None, tools: bool) -> None:
    assert facts.tools_of(props) is tools


def test_one_of_several_models_must_be_named() -> None:
    several = {"data": [{"id": "a"}, {"id": "b", "aliases": ["c"]}, "junk"]}
    assert facts.chosen(several, "c")["id"] == "b"
    with pytest.raises(UsageError, match="2 models") as unnamed:
        facts.chosen(several, None)
    assert "a, b" in (unnamed.value.hint or "")
    with pytest.raises(UsageError, match="no model d"):
        facts.chosen(several, "d")
    with pytest.raises(EngineError, match="model"):
        facts.chosen({"data": None}, None)


@pytest.mark.parametrize(
    ("version", "older"), [("0.10.2", True), ("0.11.0", False), ("1.0", False), ("", False), ("main", False)]
)
def test_versions(version: str, older: bool) -> None:
    assert facts.older_than(version, (0, 11)) is older


@pytest.mark.parametrize(
    ("given", "root"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("http://127.0.0.1:8080/v1/", "http://127.0.0.1:8080"),
        ("https://host/prefix/v1", "https://host/prefix"),
        ("HTTPS://Host/", "https://host"),
        ("http://[::1]:80/v1", "http://[::1]:80"),
    ],
)
def test_addresses(given: str, root: str) -> None:
    assert base_url(given) == root


@pytest.mark.parametrize(
    "given",
    [
        "host:80",
        "ftp://host",
        "http://",
        "http://h:99999",
        "http://h/?key=secret",
        "http://u:secret@h/",
        "http://secret@h",
    ],
)
def test_what_is_no_address_is_refused_without_its_secrets(given: str) -> None:
    with pytest.raises(UsageError) as refused:
        base_url(given)
    assert "secret" not in f"{refused.value} {refused.value.hint}"


def test_secrets_are_taken_out() -> None:
    assert redacted("http://me:pass@host:1/path?key=x") == "http://...@host:1/path"
    assert redacted("http://host/a@b") == "http://host/a@b"


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert key_from(None) is None
    monkeypatch.setenv("SOME_KEY", "abc")
    assert key_from("SOME_KEY") == "abc"
    monkeypatch.setenv("SOME_KEY", "")
    with pytest.raises(ConfigError, match="SOME_KEY"):
        key_from("SOME_KEY")


def test_a_key_is_sent_and_not_shown() -> None:
    client = client_for("http://127.0.0.1:1", "hidden")
    assert client.headers["Authorization"] == "Bearer hidden"
    assert "hidden" not in repr(client.headers)
