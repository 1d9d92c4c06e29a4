"""Error responses of servers, captured or published, become tokenmill's errors."""

import pytest

from support.http_answers import captured
from tokenmill.engine.server.errors import error_object, is_loading, to_error
from tokenmill.errors import EngineError, RequestRefused, TokenmillError, TooLong


@pytest.mark.parametrize(
    ("name", "needed", "context"),
    [
        ("llama-too-long", 602, 512),
        ("vllm-too-long-chat", 4097, 4096),
        ("vllm-too-long-completion", 4097, 4096),
        ("vllm-too-long-stream", 4097, 4096),
    ],
)
def test_captured_prompts_that_are_too_long(name: str, needed: int, context: int) -> None:
    answer = captured(name)
    fault = to_error(answer.status, answer.text)
    assert isinstance(fault, TooLong)
    assert (fault.needed_tokens, fault.context_tokens) == (needed, context)
    assert fault.hint


@pytest.mark.parametrize(
    ("message", "needed", "context"),
    [
        # vllm-project/vllm#20409
        (
            "This model's maximum context length is 16384 tokens. However, you requested 122946 tokens (112946 in the "
            "messages, 10000 in the completion). Please reduce the length of the messages or completion.",
            122946,
            16384,
        ),
        # vLLM 0.8 to 0.15
        (
            "'max_tokens' or 'max_completion_tokens' is too large: 5000. This model's maximum context length is 4096 tokens "
            "and your request has 20 input tokens (5000 > 4096 - 20).",
            5020,
            4096,
        ),
        (
            "The decoder prompt (length 5000) is longer than the maximum model length of 4096. Make sure that "
            "`max_model_len` is no smaller than the number of text tokens.",
            5000,
            4096,
        ),
        # OpenAI
        (
            "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens.",
            9000,
            8192,
        ),
        # llama.cpp before it sent the numbers as fields
        ("request (20014 tokens) exceeds the available context size (16384 tokens), try increasing it", 20014, 16384),
    ],
)
def test_published_prompts_that_are_too_long(message: str, needed: int, context: int) -> None:
    for text in (
        f'{{"error": {{"message": "{message}", "code": 400}}}}',
        f'{{"object": "error", "message": "{message}"}}',
    ):
        fault = to_error(400, text)
        assert isinstance(fault, TooLong)
        assert (fault.needed_tokens, fault.context_tokens) == (needed, context)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama-refused-grammar", "failed to parse grammar"),
        ("llama-refused-messages", "must contain 'content'"),
        ("vllm-refused-grammar", "Invalid grammar"),
        ("vllm-refused-logprobs", "max allowed: 20"),
        ("vllm-refused-temperature", "non-negative"),
        ("vllm-refused-tools", "--enable-auto-tool-choice"),
        ("vllm-unknown-model", "does not exist"),
    ],
)
def test_other_refusals_keep_the_servers_words(name: str, words: str) -> None:
    answer = captured(name)
    fault = to_error(answer.status, answer.text)
    assert type(fault) is RequestRefused
    assert words in fault.message


@pytest.mark.parametrize(
    ("status", "text", "kind", "words"),
    [
        (401, '{"error":{"code":401,"message":"Invalid API Key"}}', EngineError, "Invalid API Key"),
        (403, "", EngineError, "denied"),
        (429, '{"error":{"message":"slow down"}}', EngineError, "slow down"),
        (500, '{"error":"boom"}', EngineError, "boom"),
        (502, "<html>bad gateway</html>", EngineError, "bad gateway"),
        (503, '{"detail":"no"}', EngineError, "no"),
        (422, '{"detail":[{"msg":"field required"}]}', RequestRefused, "field required"),
        (501, '{"error":{"message":"This feature is disabled"}}', RequestRefused, "disabled"),
        (400, "[1]", RequestRefused, "[1]"),
        # llama.cpp of early 2025 named the kind and no numbers
        (
            400,
            '{"error":{"message":"the request exceeds the available context size","type":"x"}}',
            RequestRefused,
            "exceeds",
        ),
    ],
)
def test_by_status(status: int, text: str, kind: type[TokenmillError], words: str) -> None:
    fault = to_error(status, text)
    assert type(fault) is kind
    assert words in fault.message


def test_an_endless_body_is_cut() -> None:
    assert len(to_error(500, "x" * 100_000).message) < 2100


@pytest.mark.parametrize(
    ("status", "text", "loads"),
    [
        (503, '{"error":{"message":"Loading model","type":"unavailable_error","code":503}}', True),
        (503, '{"error":{"message":"no slot"}}', False),
        (500, "Loading model", False),
    ],
)
def test_a_server_that_still_loads(status: int, text: str, loads: bool) -> None:
    assert is_loading(status, text) is loads


@pytest.mark.parametrize("text", ["", "null", "3", "{", '{"a":1}'])
def test_bodies_without_an_error(text: str) -> None:
    assert error_object(text) == {}
