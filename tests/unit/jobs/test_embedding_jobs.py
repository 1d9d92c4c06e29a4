"""Jobs that ask for embeddings: their values, identities and answers."""

import asyncio
from typing import Any

import pytest

from support.fake_engine import FakeEngine
from tokenmill.engine.engine import Answer, Usage
from tokenmill.errors import RequestRefused
from tokenmill.jobs.ingest.identity import place
from tokenmill.jobs.openai.answers import answer_body, is_cut, text_of
from tokenmill.jobs.openai.call import check, stored_call
from tokenmill.jobs.worker.attempts import events_of

BODY: dict[str, Any] = {"model": "m", "input": ["A fox.", "Tax law."], "dimensions": 64}


def test_the_body_is_sent_as_it_is() -> None:
    call = check("embeddings", BODY)
    assert call.values["embedding"] == BODY
    assert stored_call("embeddings", BODY) == call
    assert call.model == "m"


def test_identities_depend_on_the_input_and_the_options() -> None:
    bodies = [BODY, BODY | {"input": ["A fox."]}, BODY | {"input": "A fox."}, BODY | {"dimensions": 32}]
    assert len({place("m", check("embeddings", body)).identity for body in bodies}) == 4
    same = place("m", check("embeddings", BODY | {"model": "other", "user": "u"})).identity
    assert same == place("m", check("embeddings", BODY)).identity


@pytest.mark.parametrize(
    ("body", "param"), [({"model": "m"}, "input"), ({"input": []}, "input"), ({"input": "x", "inptu": 1}, "inptu")]
)
def test_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        check("embeddings", body)
    assert refused.value.param == param


def test_the_answer_is_the_engines_response() -> None:
    response = {"object": "list", "data": [{"embedding": [0.5], "index": 0}], "model": "file.gguf"}
    body = answer_body(
        "embeddings", Answer("", "stop", Usage(3, 0, None), message=response), id="x", model="m", created_s=1
    )
    assert body == response | {"model": "m"}
    assert (text_of(body), is_cut(body)) == (None, False)


def test_an_engine_without_embeddings_refuses() -> None:
    async def run() -> None:
        call = check("embeddings", BODY)
        await anext(events_of(call, call.request(), FakeEngine()))

    with pytest.raises(RequestRefused) as refused:
        asyncio.run(run())
    assert refused.value.code == "embeddings_not_supported"
