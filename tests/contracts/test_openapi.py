"""/openapi.json: every path, parameter and schema that clients of the gateway are generated from."""

from pathlib import Path

from support import contracts, patient
from support.fake_engine import FakeEngine
from support.gateway import config_in, fake_engines, served


def test_the_document(tmp_path: Path) -> None:
    with served(fake_engines(lambda: [("one", FakeEngine())]), config_in(tmp_path)) as gateway:
        document = patient.get(f"{gateway.url}/openapi.json").json()
    document["info"].pop("version")
    contracts.check("openapi.json", contracts.written(document))
