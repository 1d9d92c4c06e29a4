"""Fuzzing of files and batches, from the OpenAPI document."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from support import patient
from support.batches import created, prompt_line, until
from support.gateway import Served
from support.gateway_clients import faked

EXAMPLES = 20
CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
OPERATIONS = [
    ("POST", "/v1/files"),
    ("GET", "/v1/files"),
    ("GET", "/v1/files/{file_id}"),
    ("DELETE", "/v1/files/{file_id}"),
    ("GET", "/v1/files/{file_id}/content"),
    ("POST", "/v1/batches"),
    ("GET", "/v1/batches"),
    ("GET", "/v1/batches/{batch_id}"),
    ("POST", "/v1/batches/{batch_id}/cancel"),
]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    state: Path = tmp_path_factory.mktemp("state")
    with faked(state) as (one, _):
        yield one


@pytest.fixture(scope="module")
def known(gateway: Served) -> dict[str, str]:
    """Things that are there, so that not everything is not found."""
    client = gateway.client()
    batch = until(client, created(client, prompt_line("a", "x")), "completed")
    return {"file_id": batch.output_file_id, "batch_id": batch.id, "input_file_id": batch.input_file_id}


@pytest.fixture(scope="module")
def document(gateway: Served) -> BaseSchema:
    return schemathesis.openapi.from_dict(patient.get(f"{gateway.url}/openapi.json").json())


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [(*one, mode) for one in OPERATIONS for mode in GenerationMode if "{" not in one[1] or mode.is_positive],
)  # any text is a name
def test_nothing_breaks(
    gateway: Served, document: BaseSchema, known: dict[str, str], method: str, path: str, mode: GenerationMode
) -> None:
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
        if len(str(case.body)) % 2 and isinstance(case.body, dict) and "input_file_id" in case.body:
            case.body["input_file_id"] = known["input_file_id"]
        for name in case.path_parameters or ():
            if len(str(case.path_parameters[name])) % 2 and method != "DELETE":
                case.path_parameters[name] = known[name]
        case.call_and_validate(base_url=gateway.url, checks=list(CHECKS))

    attack()
