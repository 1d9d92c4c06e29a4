"""API keys: displayed once, stored as hashes in a file that only its owner can read."""

import json
import stat
import time
from pathlib import Path

import pytest

from tokenmill.errors import ConfigError, UsageError
from tokenmill.gateway.http import keys
from tokenmill.gateway.http.keys import KeyLimits, Keys


def test_a_key_is_kept_as_its_hash(tmp_path: Path) -> None:
    secret = keys.add(tmp_path, "ann", KeyLimits(requests_per_minute=5))
    path = keys.path_in(tmp_path)
    assert secret not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert len(secret) >= len("tm-") + 43
    owner = Keys(tmp_path).find(secret)
    assert owner is not None
    assert (owner.name, owner.limits.requests_per_minute) == ("ann", 5)
    for wrong in ("", "tm-", secret[:-1], secret + "x", secret.upper(), "é" * 1000, "\udc80"):
        assert Keys(tmp_path).find(wrong) is None


def test_two_keys_are_distinguished_and_one_is_revoked(tmp_path: Path) -> None:
    first, second = keys.add(tmp_path, "a"), keys.add(tmp_path, "b")
    with pytest.raises(UsageError) as caught:
        keys.add(tmp_path, "a")
    assert caught.value.code == "key_exists"
    keys.revoke(tmp_path, "a")
    kept = Keys(tmp_path)
    assert kept.find(first) is None
    assert kept.find(second) is not None
    with pytest.raises(UsageError) as caught:
        keys.revoke(tmp_path, "a")
    assert caught.value.code == "key_not_found"
    assert [key.name for key in keys.read(tmp_path)] == ["b"]


@pytest.mark.parametrize("name", ["", "a b", "-a", "a\n", "x" * 101, "../a"])
def test_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError) as caught:
        keys.add(tmp_path, name)
    assert caught.value.code == "invalid_key_name"


def test_limits_are_at_least_one() -> None:
    with pytest.raises(UsageError, match="tokens_per_minute") as caught:
        KeyLimits(tokens_per_minute=0)
    assert caught.value.code == "invalid_limit"


def test_changes_are_reloaded_and_a_damaged_file_admits_no_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    kept = Keys(tmp_path)
    assert kept.all() == ()
    secret = keys.add(tmp_path, "a")
    assert kept.find(secret) is None
    now_s += 1
    assert kept.find(secret) is not None
    keys.path_in(tmp_path).write_text("{")
    now_s += 1
    assert kept.find(secret) is None
    assert len(kept.all()) == 1  # so that a key is still asked for
    with pytest.raises(ConfigError, match="keys.json"):
        keys.read(tmp_path)
    keys.path_in(tmp_path).write_text(json.dumps({"keys": [{"name": "a"}]}))
    with pytest.raises(ConfigError, match="keys.json"):
        Keys(tmp_path)
