"""Every part of a request is sent in the server's format or refused; nothing is dropped."""

import json
import math
from dataclasses import fields, replace
from typing import Any

import pytest

from tokenmill.engine.engine import Chat, EngineKind, HttpApi, Request, Sampling
from tokenmill.engine.server.request import call_of, capabilities_of
from tokenmill.errors import RequestRefused

HI = Chat(({"role": "user", "content": "hi"},))
SCHEMA = '{"type": "object"}'
LLAMA, IK = HttpApi("llama-server", "m", slots=4), HttpApi("ik_llama", "m", slots=4)
VLLM, URL = HttpApi("vllm", "m", priorities=True), HttpApi("url", "m")
WRAPPED = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}


def body(api: HttpApi, request: Request) -> dict[str, Any]:
    return call_of(request, api).body


def test_a_chat() -> None:
    chat = replace(HI, tools=({"type": "function"},), tool_choice="auto", template_arguments={"enable_thinking": False})
    call = call_of(Request(chat, max_tokens=5, stop=("x", "y")), LLAMA)
    assert call.path == "/v1/chat/completions"
    assert call.body == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_prompt": True,
        "timings_per_token": True,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function"}],
        "tool_choice": "auto",
        "chat_template_kwargs": {"enable_thinking": False},
        "max_tokens": 5,
        "stop": ["x", "y"],
    }


@pytest.mark.parametrize("api", [LLAMA, IK, VLLM, URL])
@pytest.mark.parametrize(("prompt", "sent"), [("text", "text"), ((1, 2), [1, 2])])
def test_completions_take_text_and_tokens(api: HttpApi, prompt: Any, sent: Any) -> None:
    call = call_of(Request(prompt, max_tokens=1), api)
    assert call.path == "/v1/completions"
    assert call.body["prompt"] == sent
    json.dumps(call.body)


FULL = Sampling(
    temperature=0.5,
    top_k=3,
    top_p=0.9,
    min_p=0.1,
    repeat_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.3,
    penalty_last_n=32,
    seed=7,
    logit_bias=((5, -1.5), (6, -math.inf)),
    top_logprobs=2,
    json_schema=SCHEMA,
)
COMMON = {"temperature": 0.5, "top_p": 0.9, "presence_penalty": 0.2, "frequency_penalty": 0.3, "seed": 7}


@pytest.mark.parametrize("api", [LLAMA, IK])
def test_llama_servers_take_everything(api: HttpApi) -> None:
    wanted = COMMON | {
        "top_k": 3,
        "min_p": 0.1,
        "repeat_penalty": 1.1,
        "repeat_last_n": 32,
        "logit_bias": [[5, -1.5], [6, False]],
        "ignore_eos": True,
        "id_slot": 2,
    }
    chat = body(api, Request(HI, FULL, ignore_eos=True, slot=2))
    assert chat.items() >= (wanted | {"logprobs": True, "top_logprobs": 2, "response_format": WRAPPED}).items()
    text = body(api, Request("x", FULL, ignore_eos=True, slot=2))
    assert text.items() >= (wanted | {"n_probs": 2, "json_schema": {"type": "object"}}).items()


def test_vllm() -> None:
    sampling = replace(FULL, penalty_last_n=None, logit_bias=((5, -1.5),))
    wanted = COMMON | {
        "top_k": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -1.5},
        "ignore_eos": True,
        "priority": 0,
        "response_format": WRAPPED,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    chat = body(VLLM, Request(HI, sampling, ignore_eos=True, priority="interactive"))
    assert chat.items() >= (wanted | {"logprobs": True, "top_logprobs": 2}).items()
    text = body(VLLM, Request("x", sampling, ignore_eos=True))
    assert text.items() >= (wanted | {"logprobs": 2, "priority": 1, "max_tokens": None}).items()
    assert "priority" not in body(replace(VLLM, priorities=False), Request(HI))


def test_vllm_called_grammars_otherwise_before() -> None:
    request = Request(HI, Sampling(grammar='root ::= "a"'))
    assert body(VLLM, request)["structured_outputs"] == {"grammar": 'root ::= "a"'}
    assert body(replace(VLLM, guided=True), request)["guided_grammar"] == 'root ::= "a"'


def test_any_other_server_is_asked_for_openais_own() -> None:
    sampling = Sampling(
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        seed=7,
        top_logprobs=0,
        logit_bias=((5, 1.0),),
        json_schema="{}",
    )
    sent = body(URL, Request(HI, sampling))
    assert sent.items() >= (COMMON | {"logprobs": True, "top_logprobs": 0, "logit_bias": {"5": 1.0}}).items()
    assert sent["response_format"] == {"type": "json_object"}


@pytest.mark.parametrize(
    ("api", "request_", "word"),
    [
        (VLLM, Request(HI, Sampling(penalty_last_n=3)), "penalties"),
        (VLLM, Request(HI, slot=0), "slot 0"),
        (VLLM, Request(HI, Sampling(logit_bias=((1, -math.inf),))), "ban"),
        (VLLM, Request(HI, max_tokens=0), "no tokens"),
        (VLLM, Request(HI, Sampling(grammar="g", json_schema="{}")), "grammar with a JSON schema"),
        (LLAMA, Request(HI, Sampling(grammar="g", json_schema="{}")), "grammar with a JSON schema"),
        (LLAMA, Request(HI, slot=4), "slot 4"),
        (LLAMA, Request(HI, slot=-1), "slot -1"),
        (replace(LLAMA, slots=None), Request(HI, slot=0), "slot 0"),
        (replace(LLAMA, tools=False), Request(replace(HI, tools=({},))), "tools"),
        (URL, Request(HI, Sampling(top_k=1)), "top_k"),
        (URL, Request(HI, Sampling(min_p=0.1)), "min_p"),
        (URL, Request(HI, Sampling(repeat_penalty=1.1)), "repeat_penalty"),
        (URL, Request(HI, Sampling(penalty_last_n=1)), "penalty_last_n"),
        (URL, Request(HI, Sampling(grammar="g")), "grammar"),
        (URL, Request(HI, ignore_eos=True), "end-of-text"),
        (URL, Request(HI, slot=0), "slot 0"),
        (URL, Request("text"), "without a limit"),
        (URL, Request(HI, Sampling(json_schema="{")), "not JSON"),
        (LLAMA, Request(HI, Sampling(json_schema="[]")), "object"),
        (LLAMA, Request(HI, Sampling(top_logprobs=21)), "top_logprobs"),
        (LLAMA, Request(HI, Sampling(logit_bias=((1, math.nan),))), "logit_bias"),
    ],
)
def test_what_cannot_be_done_is_refused(api: HttpApi, request_: Request, word: str) -> None:
    with pytest.raises(RequestRefused, match=word):
        call_of(request_, api)


@pytest.mark.parametrize("kind", ["llama-server", "ik_llama", "vllm", "url"])
@pytest.mark.parametrize("name", [field.name for field in fields(Sampling)])
def test_every_field_changes_the_body_or_is_refused(kind: EngineKind, name: str) -> None:
    value = {"logit_bias": ((1, 2.0),), "grammar": 'root ::= "a"', "json_schema": SCHEMA}.get(name, 1)
    api = HttpApi(kind, "m")
    plain = call_of(Request(HI), api)
    try:
        assert call_of(Request(HI, Sampling(**{name: value})), api) != plain  # type: ignore[arg-type]
    except RequestRefused as refusal:
        assert refusal.hint


def test_one_token_of_probabilities_is_the_least_llama_gives() -> None:
    assert body(LLAMA, Request(HI, Sampling(top_logprobs=0)))["top_logprobs"] == 1
    assert body(LLAMA, Request("x", Sampling(top_logprobs=0)))["n_probs"] == 1


def test_further_keys_win() -> None:
    assert (
        body(URL, Request(HI, extra={"top_k": 4, "model": "other"})).items() >= {"top_k": 4, "model": "other"}.items()
    )


def test_capabilities_say_what_bodies_do() -> None:
    assert capabilities_of(LLAMA, reports_cached=True).chooses_slots
    assert not capabilities_of(replace(LLAMA, slots=None), reports_cached=True).chooses_slots
    assert capabilities_of(VLLM, reports_cached=True).interactive_first
    assert capabilities_of(VLLM, reports_cached=True).shares_prefixes
    plain = capabilities_of(URL, reports_cached=False)
    assert not plain.grammar
    assert not plain.reports_cached_tokens
    assert any("cached prompt tokens" in note for note in plain.notes)
    assert any("template" in note for note in capabilities_of(replace(LLAMA, tools=False), reports_cached=True).notes)


@pytest.mark.parametrize("api", [LLAMA, IK, VLLM, URL])
def test_huge_counts_in_schemas_do_not_reach_a_server(api: HttpApi) -> None:
    shown = json.dumps(body(api, Request(HI, Sampling(json_schema='{"type": "array", "maxItems": 1000000000}'))))
    assert '"array"' in shown
    assert "maxItems" not in shown
    with pytest.raises(RequestRefused):
        body(api, Request(HI, Sampling(json_schema='{"type": "array", "minItems": 1000000000}')))
