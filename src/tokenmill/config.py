"""`tokenmill.toml`: one file, every key known, unknown keys refused.

Looked for as --config, then ./tokenmill.toml, then tokenmill/tokenmill.toml in the user's configuration
folder; without one the defaults below hold. `config.example.toml` documents every key.
"""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tokenmill.decode import Bytes, read_toml
from tokenmill.errors import ConfigError
from tokenmill.units import GIB, MIB


@dataclass(frozen=True, slots=True)
class PullConfig:
    """How models are downloaded."""

    keep_free_bytes: Bytes = 2 * GIB  # refuse a download that would leave less than this on the disk


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How engines are run."""

    kind: str = "native"  # native, llama-server, ik_llama, vllm, or the URL of one that runs
    library: str | None = None  # native: a libllama.so of one's own (a CUDA build) ...
    header: str | None = None  # ... and the llama.h it was built from
    binary: str | None = None  # servers: the program; default: the one on PATH, for llama-server the embedded one
    container: str | None = None  # servers: an image to run instead
    container_runtime: str = "podman"  # or docker
    host: str = "127.0.0.1"
    port: int = 8180  # of a server that we start
    api_key_env: str | None = None  # environment variable with the key of an endpoint that wants one
    warm: bool = True  # fill the page cache and decode once before `ready`
    nice: int | None = None  # 19 yields to everything, negative needs a right
    scheduling: str = "normal"  # or rr: real-time round robin, needs a right
    pin_cores: bool | None = None  # keep to the cores that the plan does not reserve; None: when it reserves any
    step_limit_s: float = 600.0  # a native engine whose step takes longer is taken to hang
    most_restarts: int = 5  # of an engine that dies again and again, within an hour
    heads_dir: str | None = None  # saved heads of prompts; default: in state_dir


_AT_LEAST_ONE = (
    "max_body_bytes",
    "max_file_bytes",
    "max_connections",
    "max_choices",
    "requests_at_once",
    "requests_per_minute",
    "tokens_per_minute",
)


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """How `tokenmill serve` listens, and what it lets in."""

    host: str = "127.0.0.1"  # another needs a key: tokenmill keys add
    port: int = 8181  # 0: any that is free
    allowed_hosts: tuple[str, ...] = ()  # names in a Host header beside the loopback's own
    allowed_origins: tuple[str, ...] = ()  # pages of other origins that may call it from a browser
    tls_cert: str | None = None
    tls_key: str | None = None
    max_body_bytes: Bytes = 32 * MIB
    max_file_bytes: Bytes = 4 * GIB  # of an uploaded file
    max_connections: int = 2000
    idle_timeout_s: float = 75.0  # for the headers of a request to arrive, and between requests
    read_timeout_s: float = 60.0  # for a body to arrive
    write_timeout_s: float = 60.0  # for a client to take what was sent
    request_timeout_s: float | None = None  # for a whole answer; default: none
    grace_s: float = 30.0  # for what runs to end after SIGTERM
    queue: int = 256  # requests of a lane that may wait for an engine
    max_choices: int = 16  # n of one request
    requests_at_once: int | None = None  # of one key; so are the next two
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    log: Literal["text", "json", "off"] = "text"  # a line for each request

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ValueError(f"port {self.port} is none: 1 to 65535, or 0 for any that is free")
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        for name in ("idle_timeout_s", "read_timeout_s", "write_timeout_s", "request_timeout_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be more than 0, not {value:g}")
        if self.grace_s < 0 or self.queue < 0:
            raise ValueError("grace_s and queue cannot be negative")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together")


MAX_THREADS = 512
"""ggml's own limit (GGML_MAX_N_THREADS); it writes past its arrays with more."""


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """One engine behind the gateway; what is not said here is as in [engine]."""

    name: str
    model: str | None = None  # default: what the server has; smollm2 for an engine of ours
    kind: str | None = None
    url: str | None = None  # one that runs already, instead of kind
    aliases: tuple[str, ...] = ()  # further names that clients may use for its model
    context: int | None = None
    sequences: int | None = None
    threads: int | None = None
    threads_batch: int | None = None
    cpu_only: bool = False
    gpus: tuple[int, ...] | None = None
    cache_type: str | None = None
    binary: str | None = None
    port: int | None = None
    api_key_env: str | None = None

    def __post_init__(self) -> None:
        if self.url is not None and self.kind is not None:
            raise ValueError(f"engine {self.name}: url and kind exclude each other")
        for name, value in (("threads", self.threads), ("threads_batch", self.threads_batch)):
            if value is not None and not 1 <= value <= MAX_THREADS:
                raise ValueError(f"engine {self.name}: {name} must be 1-{MAX_THREADS} (got {value})")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", self.name):
            raise ValueError(f"{self.name!r} cannot be an engine's name: letters, digits, dots, dashes, underscores")


@dataclass(frozen=True, slots=True)
class RouteEntry:
    """Which engines answer what; the first route that holds counts."""

    engines: tuple[str, ...]  # by name; the next is tried while no token has come
    model: str | None = None  # what clients ask for; None: any
    lane: Literal["interactive", "batch"] | None = None
    min_prompt_tokens: int | None = None
    max_prompt_tokens: int | None = None
    key: str | None = None  # a key's name

    def __post_init__(self) -> None:
        if not self.engines:
            raise ValueError("a route needs engines")


@dataclass(frozen=True, slots=True)
class DigestEntry:
    """A prompt head that engines hold from their start."""

    name: str
    file: str
    engines: tuple[str, ...] = ()  # default: all


@dataclass(frozen=True, slots=True)
class ReserveConfig:
    """What every engine that is started leaves to the rest of the machine."""

    cores: int = 0
    ram_bytes: Bytes = 0

    def __post_init__(self) -> None:
        if self.cores < 0 or self.ram_bytes < 0:
            raise ValueError("a reserve cannot be negative")


@dataclass(frozen=True, slots=True)
class CostsConfig:
    """What an hour of the machine costs, for forecasts."""

    per_hour: float | None = None  # None: no costs are named
    currency: str = "EUR"

    def __post_init__(self) -> None:
        if self.per_hour is not None and not 0 <= self.per_hour < float("inf"):
            raise ValueError("per_hour must be a number that is not negative")


@dataclass(frozen=True, slots=True)
class Config:
    """Everything a user can set in a file."""

    machine: str = "this"  # this, a catalogue name, or a machine file
    models_dir: str | None = None  # where pulled models live; default: tokenmill/models in the user's cache folder
    state_dir: str | None = None  # running engines and stored batches; default: tokenmill in the user's state folder
    store: str | None = None  # batches: a folder, or postgresql://...; default: batches in state_dir
    pull: PullConfig = field(default_factory=PullConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    reserve: ReserveConfig = field(default_factory=ReserveConfig)
    costs: CostsConfig = field(default_factory=CostsConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    engines: tuple[EngineEntry, ...] = ()
    routes: tuple[RouteEntry, ...] = ()
    digests: tuple[DigestEntry, ...] = ()

    def __post_init__(self) -> None:
        names = [engine.name for engine in self.engines]
        for listed, what in ((names, "engines"), ([digest.name for digest in self.digests], "digests")):
            if twice := next((name for name in listed if listed.count(name) > 1), None):
                raise ValueError(f"two {what} are called {twice!r}")
        for what, entries in (("route", self.routes), ("digest", self.digests)):
            for name in (name for entry in entries for name in entry.engines):
                if name not in names:
                    raise ValueError(f"a {what} names the engine {name!r}, which is not in [[engines]]")

    @property
    def models_path(self) -> Path:
        """The folder of pulled models."""
        return _folder("models_dir", self.models_dir) if self.models_dir else cache_home() / "models"

    @property
    def state_path(self) -> Path:
        """The folder of running engines and stored batches."""
        return _folder("state_dir", self.state_dir) if self.state_dir else _home("XDG_STATE_HOME", ".local/state")

    @property
    def heads_path(self) -> Path:
        """The folder of saved heads."""
        given = self.engine.heads_dir
        return _folder("engine.heads_dir", given) if given else self.state_path / "heads"


def load(path: Path | None = None) -> Config:
    """Read the configuration; a path that was asked for must exist."""
    if path is not None:
        if not path.is_file():
            raise ConfigError(f"no configuration file at {path}", hint="config.example.toml shows every key")
        return read_toml(Config, path)
    for candidate in (Path("tokenmill.toml"), _home("XDG_CONFIG_HOME", ".config") / "tokenmill.toml"):
        if candidate.is_file():
            return read_toml(Config, candidate)
    return Config()


def cache_home() -> Path:
    """tokenmill's folder under the XDG cache."""
    return _home("XDG_CACHE_HOME", ".cache")


def _folder(key: str, given: str) -> Path:
    try:
        return Path(given).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{key}: {given} names a user that is not here") from error


def _home(variable: str, default: str) -> Path:
    base = os.environ.get(variable, "")
    # The XDG specification says that relative values are to be ignored.
    root = Path(base) if Path(base).is_absolute() else Path.home() / default
    return root / "tokenmill"
