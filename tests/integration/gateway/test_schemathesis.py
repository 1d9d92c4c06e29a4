"""Fuzzing of the OpenAPI document: no request makes the gateway fail, and every response matches the document."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from support import patient
from support.gateway import Served, config_in, native_engine, served

EXAMPLES = 15
CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
)


@pytest.fixture(scope="module")
def gateway(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    state = tmp_path_factory.mktemp("state")
    with served(native_engine(smollm2_path, context=256), config_in(state, max_choices=4)) as one:
        yield one


@pytest.fixture(scope="module")
def document(gateway: Served) -> BaseSchema:
    given = patient.get(f"{gateway.url}/openapi.json").json()
    return schemathesis.openapi.from_dict(given)


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        *(
            ("POST", path, mode)
            for path in (
                "/v1/chat/completions",
                "/v1/completions",
                "/v1/embeddings",
                "/v1/responses",
                "/v1/messages",
                "/v1/messages/count_tokens",
            )
            for mode in GenerationMode
        ),
        ("GET", "/v1/models/{model}", GenerationMode.POSITIVE),  # any text is a name
    ],
)
def test_nothing_breaks(gateway: Served, document: BaseSchema, method: str, path: str, mode: GenerationMode) -> None:
    @given(document[path][method].as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def attack(case: "schemathesis.Case[Any]") -> None:
        if isinstance(case.body, dict):
            if isinstance(case.body.get("model"), str):
                case.body["model"] = "smollm2"  # others are not found, and nothing else is looked at
            limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
            if path != "/v1/messages/count_tokens" and isinstance(case.body.get(limit, 2), int):
                case.body[limit] = 2  # an answer of a few hundred tokens says no more
            case.body.pop("timeout", None)  # a millisecond is not enough, and 504 is right
        case.call_and_validate(base_url=gateway.url, checks=list(CHECKS))

    attack()


def test_every_other_page_answers_as_described(gateway: Served, document: BaseSchema) -> None:
    asked = set()
    for operation in document.get_all_operations():
        assert isinstance(operation, Ok)
        found = operation.ok()
        answers = document.raw_schema["paths"][found.path].get("get", {}).get("responses", {}).get("200", {})
        endless = set(answers.get("content", {})) == {"text/event-stream"}
        if found.method.upper() == "GET" and "{" not in found.path and not endless:
            found.Case().call_and_validate(base_url=gateway.url, checks=list(CHECKS))
            asked.add(found.path)
    assert {"/health", "/metrics", "/v1/models"} <= asked
