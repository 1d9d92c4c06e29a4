"""API keys: 256 random bits, stored as SHA-256 in a file that only its owner can read.

    <state>/gateway/keys.json     names, hashes and limits; replaced atomically, mode 0600

Slow hashes are for passwords, which people choose; 256 random bits cannot be guessed. The file is reloaded when it
changes, so a revoked key stops working while the gateway runs.
"""

import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tokenmill.errors import ConfigError, UsageError
from tokenmill.storage.atomic import replace_file

PREFIX = "tm-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,99}")
_LOOK_S = 1.0  # between checks of the file
_MOST_GIVEN = 512  # characters of a presented key


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of a key; None: as configured."""

    requests_at_once: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        for name in ("requests_at_once", "requests_per_minute", "tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1 (got {value})", code="invalid_limit")


@dataclass(frozen=True, slots=True)
class Key:
    """A stored key; the key itself is displayed once and not stored."""

    name: str
    sha256: str
    created_s: float
    limits: KeyLimits = field(default_factory=KeyLimits)


_FILE = TypeAdapter(dict[str, tuple[Key, ...]])


def path_in(state: Path) -> Path:
    """Path of the key file."""
    return state / "gateway" / "keys.json"


def read(state: Path) -> tuple[Key, ...]:
    """Every key, oldest first; raises ConfigError if the file is damaged, so that no client is admitted by mistake."""
    path = path_in(state)
    try:
        return _FILE.validate_json(path.read_bytes()).get("keys", ())
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        raise ConfigError(
            f"{path} is damaged", hint="move it away and add the keys again: tokenmill keys add"
        ) from error


def add(state: Path, name: str, limits: KeyLimits | None = None) -> str:
    """Create a key; the returned text is the only copy."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be the name of a key",
            hint="use letters, digits, dots, dashes, underscores and @",
            code="invalid_key_name",
        )
    secret = PREFIX + secrets.token_urlsafe(32)
    with _changing(state) as keys:
        if any(key.name == name for key in keys):
            hint = f"tokenmill keys revoke {name}, or choose another name"
            raise UsageError(f"a key named {name} exists already", hint=hint, code="key_exists")
        keys.append(Key(name, _hash(secret), time.time(), limits or KeyLimits()))
    return secret


def revoke(state: Path, name: str) -> None:
    """Revoke a key; it stops working within a second."""
    with _changing(state) as keys:
        left = [key for key in keys if key.name != name]
        if len(left) == len(keys):
            known = ", ".join(key.name for key in keys) or "none"
            raise UsageError(f"there is no key named {name}", hint=f"known keys: {known}", code="key_not_found")
        keys[:] = left


@contextmanager
def _changing(state: Path) -> Iterator[list[Key]]:
    """The keys as a list that is written back on exit; one process at a time."""
    path = path_in(state)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(path.parent / "keys.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        keys = list(read(state))
        yield keys
        _write(path, keys)
    finally:
        os.close(lock)


def _write(path: Path, keys: list[Key]) -> None:
    text = json.dumps({"keys": [asdict(key) for key in keys]}, indent=1)
    replace_file(path, text.encode(), mode=0o600)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


class Keys:
    """The keys of a running gateway, reloaded when the file changes."""

    def __init__(self, state: Path) -> None:
        """Load the keys; raises ConfigError if the file is damaged."""
        self._state = state
        self._stamp = self._seen()
        self._keys = read(state)
        self._looked_s = time.monotonic()

    def all(self) -> tuple[Key, ...]:
        """The current keys, at most a second old. If the file is unreadable, every client is refused."""
        if time.monotonic() - self._looked_s >= _LOOK_S:
            self._looked_s = time.monotonic()
            stamp = self._seen()
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._keys = read(self._state)
                except ConfigError:
                    self._keys = tuple(replace(key, sha256="") for key in self._keys)
        return self._keys

    def owner(self, given: str) -> Key | None:
        """The owner of a key, compared in constant time."""
        hashed = _hash(given[:_MOST_GIVEN])
        found = None
        for key in self.all():
            if hmac.compare_digest(key.sha256, hashed):
                found = key
        return found

    def _seen(self) -> tuple[int, int, int] | None:
        try:
            now = path_in(self._state).stat()
        except OSError:
            return None
        return now.st_mtime_ns, now.st_ino, now.st_size
