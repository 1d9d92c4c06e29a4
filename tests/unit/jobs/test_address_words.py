"""What people write who know psql: words instead of a URL, and a URL in capitals."""

from pathlib import Path

import pytest

from tokenmill.errors import UsageError
from tokenmill.jobs.store.address import PostgresAddress, address_of


@pytest.mark.parametrize(
    "text",
    [
        "host=db user=mill password=geheim dbname=x",
        "dbname=x",
        " user = mill password = 'ge heim'",
        "service=mill",
        "hostaddr=10.0.0.1 password=geheim",
        "password=geheim",
        "HOST=db",
        "port=5433 dbname=x",
        "password=ge://heim",
        "application_name=me password=geheim",
        "sslmode=require password=geheim",
        "connect_timeout=3\tpassword=geheim",
    ],
)
def test_words_are_no_folder(text: str) -> None:
    with pytest.raises(UsageError, check=lambda error: error.code == "invalid_store_address") as caught:
        address_of(text)
    assert "postgresql://user@host" in (caught.value.hint or "")
    assert "heim" not in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize(
    "text", ["./user=mill", "runs/user=mill/batches", "my batches", "a=b", "import=1", "viewport=3"]
)
def test_a_folder_may_have_such_a_name(text: str) -> None:
    assert address_of(text) == Path(text)


@pytest.mark.parametrize("scheme", ["PostgreSQL", "POSTGRESQL", "Postgres", "POSTGRES"])
def test_the_scheme_may_be_in_capitals(scheme: str) -> None:
    found = address_of(f"{scheme}://Mill:Word@Host/Batches")
    assert isinstance(found, PostgresAddress)
    assert found.url == f"{scheme.lower()}://Mill:Word@Host/Batches"
    assert str(found) == f"{scheme.lower()}://Mill:***@Host/Batches"
