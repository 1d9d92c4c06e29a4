"""Where a store is, and what of it may be read."""

from pathlib import Path

import pytest

from tokenmill.errors import UsageError
from tokenmill.jobs.store.address import PostgresAddress, address_of


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://mill@host/batches", "postgresql://mill@host/batches"),
        ("postgresql://host/batches", "postgresql://host/batches"),
        ("postgresql:///batches", "postgresql:///batches"),
        ("postgres://mill:word@host:5433/batches", "postgres://mill:***@host:5433/batches"),
        ("postgresql://mill:@host/b", "postgresql://mill:***@host/b"),
        ("postgresql://mill:w%40rd@host/b?sslmode=require", "postgresql://mill:***@host/b?sslmode=require"),
        ("postgresql://mill:w@rd@host/b", "postgresql://mill:***@host/b"),
        ("postgresql://mill:123?word@host/b", "postgresql://mill:***@host/b"),
        ("postgresql://mill:ge?word@host:5433/b?sslmode=require", "postgresql://mill:***@host:5433/b?sslmode=require"),
        ("postgresql://mill:word@host/b?user=m@il", "postgresql://mill:***@host/b?user=m@il"),
        ("postgresql://host:5433/b?user=m@il&password=wo@word", "postgresql://host:5433/b?user=m@il&password=***"),
        ("postgresql://mill@[::1]:5433,other:5434/b", "postgresql://mill@[::1]:5433,other:5434/b"),
        ("postgresql://host/b?user=mill&password=word", "postgresql://host/b?user=mill&password=***"),
        ("postgresql://host/b?sslpassword=word&host=/tmp", "postgresql://host/b?sslpassword=***&host=/tmp"),
    ],
)
def test_a_server_as_it_is_shown(text: str, shown: str) -> None:
    found = address_of(text)
    assert isinstance(found, PostgresAddress)
    assert found.url == text
    assert str(found) == f"{found}" == shown
    assert repr(found) == f"PostgresAddress('{shown}')"
    if "***" in shown:
        assert "word" not in repr([found]).replace("password", "")


@pytest.mark.parametrize("text", ["postgresql://m:w%40rd@host/b", "postgresql://m@host/b?password=w%40rd"])
def test_words_about_it_do_not_say_the_password(text: str) -> None:
    server = PostgresAddress(text)
    for said in ("w@rd", "w%40rd"):
        assert server.redacted(f"cannot use {said}: refused") == "cannot use ***: refused"


def test_a_piece_that_is_taken_for_a_host_is_not_said_either() -> None:
    """libpq ends a password at its first @."""
    assert PostgresAddress("postgresql://m:ge@heim@host/b").redacted('no host "heim@host"') == 'no host "***@host"'


def test_a_folder_is_a_folder() -> None:
    assert address_of("batches/here") == Path("batches/here")


@pytest.mark.parametrize(
    "text",
    [
        "mysql://host/b",
        "postgresql://m:word@host:port/b",
        "postgresql://m:word/b",
        "postgresql:/m:word@host/b",
        "postgresql:m:word@host/b",
        "postgres:///m:word@host/b",
        "PostgreSQL:/m:word@host/b",
        "postgresql//m:word@host/b",
        "m:word@postgresql://host/b",
        "postgresql://m:wo/rd?word@host/b",
        "postgresql://m:12/word@host",
        "postgresql://m:1/a?word@host/b",
    ],
)
def test_what_no_store_can_be_at(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        address_of(text)
    assert "postgresql://" in (caught.value.hint or "")
    assert "word" not in caught.value.message
