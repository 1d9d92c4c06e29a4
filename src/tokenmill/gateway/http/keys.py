"""API keys: 256 random bits, stored as SHA-256 in a file that only its owner can read.

    <state>/gateway/keys.json     names, hashes and limits; replaced atomically, mode 0600

A fast hash is enough, because 256 random bits cannot be guessed. The file is reloaded when it changes, so a revoked
key stops working while the gateway runs. Once the file exists, every request needs a key, also after the last one was
revoked; deleting the file makes keys optional again on a loopback address.
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
from tokenmill.storage.private import private_folder

PREFIX = "tm-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,99}")
_RELOAD_S = 1.0  # interval between checks of the file
_MAX_KEY_CHARS = 512  # characters of a presented key


LIMITS = ("requests_at_once", "requests_per_minute", "tokens_per_minute", "tokens_per_day")


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of a key; None: use the configured default."""

    requests_at_once: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None  # batches included; a day begins at midnight UTC

    def __post_init__(self) -> None:
        for name in LIMITS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1 (got {value})", code="invalid_limit")


@dataclass(frozen=True, slots=True)
class Key:
    """A stored key. Only its hash is kept; the secret is displayed once."""

    name: str
    sha256: str
    created_s: float
    limits: KeyLimits = field(default_factory=KeyLimits)
    id: str = ""  # unique, unlike the name, which can be used again; empty in files of version 0.1

    @property
    def owner(self) -> str:
        """The owner of files, batches and stored answers of this key."""
        return self.id or self.name


_FILE = TypeAdapter(dict[str, tuple[Key, ...]])


def path_in(state: Path) -> Path:
    """Path of the key file."""
    return state / "gateway" / "keys.json"


def read(state: Path) -> tuple[Key, ...]:
    """All keys, oldest first; raises ConfigError if the file is damaged, so that no client is admitted by mistake."""
    path = path_in(state)
    try:
        return _FILE.validate_json(path.read_bytes()).get("keys", ())
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        raise ConfigError(
            f"{path} is damaged", hint="delete the file and create the keys again with `tokenmill keys add NAME`"
        ) from error


def add(state: Path, name: str, limits: KeyLimits | None = None) -> str:
    """Create a key; returns the secret, which is not stored."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"invalid key name {name!r}",
            hint="use letters, digits, dots, dashes, underscores and @; start with a letter or digit",
            code="invalid_key_name",
        )
    secret = PREFIX + secrets.token_urlsafe(32)
    with _locked(state) as keys:
        if any(key.name == name for key in keys):
            hint = f"choose another name, or revoke it with `tokenmill keys revoke {name}`"
            raise UsageError(f"key {name} already exists", hint=hint, code="key_exists")
        hashed = _hash(secret)
        # "~" is not allowed in names, so no name equals another key's id
        keys.append(Key(name, hashed, time.time(), limits or KeyLimits(), f"{name}~{hashed[:12]}"))
    return secret


def revoke(state: Path, name: str) -> None:
    """Revoke a key; it stops working within a second."""
    with _locked(state) as keys:
        remaining = [key for key in keys if key.name != name]
        if len(remaining) == len(keys):
            known = ", ".join(key.name for key in keys) or "none"
            raise UsageError(f"unknown key {name}", hint=f"known keys: {known}", code="key_not_found")
        keys[:] = remaining


@contextmanager
def _locked(state: Path) -> Iterator[list[Key]]:
    """The keys as a list that is written back on exit; a lock excludes other processes."""
    path = path_in(state)
    private_folder(path.parent)
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
        self._stamp = self._file_stamp()
        self._keys = read(state)
        self._checked_s = time.monotonic()

    def all(self) -> tuple[Key, ...]:
        """The current keys, at most one second old. If the file cannot be read, no key is accepted."""
        if time.monotonic() - self._checked_s >= _RELOAD_S:
            self._checked_s = time.monotonic()
            stamp = self._file_stamp()
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._keys = read(self._state)
                except ConfigError:
                    self._keys = tuple(replace(key, sha256="") for key in self._keys)
        return self._keys

    @property
    def required(self) -> bool:
        """Whether requests need a key: a key exists, or existed and was revoked."""
        self.all()
        return self._stamp is not None

    def owned_by(self, owner: str | None) -> Key | None:
        """The key of an owner; None without one, or if the key was revoked."""
        return next((key for key in self.all() if key.owner == owner), None)

    def find(self, given: str) -> Key | None:
        """The key with this secret, compared in constant time."""
        hashed = _hash(given[:_MAX_KEY_CHARS])
        found = None
        for key in self.all():
            if hmac.compare_digest(key.sha256, hashed):
                found = key
        return found

    def _file_stamp(self) -> tuple[int, int, int] | None:
        try:
            now = path_in(self._state).stat()
        except OSError:
            return None
        return now.st_mtime_ns, now.st_ino, now.st_size
