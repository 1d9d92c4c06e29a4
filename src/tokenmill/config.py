"""`tokenmill.toml`: one file; unknown keys are errors.

`load` reads the file named by --config, else ./tokenmill.toml, else tokenmill/tokenmill.toml in the user's
configuration folder, else uses the defaults below. `config.example.toml` documents every key.
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
    """Model downloads."""

    keep_free_bytes: Bytes = 2 * GIB  # refuse a download that would leave less than this on the disk


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Defaults for every engine."""

    kind: str = "native"  # native, llama-server, ik_llama, vllm, or the URL of a running server
    library: str | None = None  # native: a libllama.so, or wheel; default: the newest build in engines_dir, else wheel
    header: str | None = None  # the llama.h that this libllama.so was built from
    binary: str | None = None  # servers: the program; default: from PATH; llama-server: the bundled one
    container: str | None = None  # servers: container image to run instead
    container_runtime: str = "podman"  # or docker
    host: str = "127.0.0.1"
    port: int = 8180  # of a server that tokenmill starts
    api_key_env: str | None = None  # environment variable that holds the endpoint's API key
    remote_media: bool = False  # servers: may fetch images that requests name by http(s) URL, from any address
    special_tokens_in_messages: bool = False  # native: parse control tokens such as <|im_end|> in message contents, too
    warm: bool = True  # fill the page cache and decode once before `ready`
    nice: int | None = None  # 19 is the lowest priority; negative values need CAP_SYS_NICE
    scheduling: str = "normal"  # or rr: real-time round robin; needs CAP_SYS_NICE
    pin_cores: bool | None = None  # run on unreserved cores only; None: if the plan reserves any
    step_limit_s: float | None = (
        None  # native: longest step before a restart; None: 12 times the predicted one, min. 30 s
    )
    most_restarts: int = 5  # maximum restarts of a crashing engine per hour
    heads_dir: str | None = None  # saved prompt prefixes; default: in state_dir


_AT_LEAST_ONE = (
    "max_body_bytes",
    "max_file_bytes",
    "max_connections",
    "max_choices",
    "requests_at_once",
    "requests_per_minute",
    "tokens_per_minute",
    "tokens_per_day",
)


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Listener, limits and authentication of `tokenmill serve`."""

    host: str = "127.0.0.1"  # any other address requires a key: tokenmill keys add
    port: int = 8181  # 0: pick a free port
    allowed_hosts: tuple[str, ...] = ()  # accepted Host headers in addition to loopback names
    allowed_origins: tuple[str, ...] = ()  # origins allowed to call it from a browser (CORS)
    tls_cert: str | None = None
    tls_key: str | None = None
    max_body_bytes: Bytes = 32 * MIB
    max_file_bytes: Bytes = 4 * GIB  # of an uploaded file
    max_connections: int = 2000
    idle_timeout_s: float = 75.0  # for request headers to arrive, and between requests
    read_timeout_s: float = 60.0  # for a request body to arrive
    write_timeout_s: float = 60.0  # for a client to read the response
    request_timeout_s: float | None = None  # for a whole response; default: no timeout
    grace_s: float = 30.0  # for requests in flight to finish after SIGTERM
    queue: int = 256  # maximum queued requests per priority class
    max_choices: int = 16  # maximum n of one request
    requests_at_once: int | None = None  # requests in flight per key; the next two limits are also per key
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # without batches
    tokens_per_day: int | None = None  # batches included; a day begins at midnight UTC
    share_answers: bool = False  # stored answers of batches may be reused for other keys
    log: Literal["text", "json", "off"] = "text"  # one line per request

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ValueError(f"port must be 1-65535, or 0 to pick a free port (got {self.port})")
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 (got {value})")
        for name in ("idle_timeout_s", "read_timeout_s", "write_timeout_s", "request_timeout_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be greater than 0 (got {value:g})")
        if self.grace_s < 0 or self.queue < 0:
            raise ValueError("grace_s and queue must not be negative")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be set together")


MAX_THREADS = 512
"""GGML_MAX_N_THREADS; with more threads ggml writes past the end of its arrays."""


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """One engine behind the gateway; unset keys default to those in [engine]."""

    name: str
    model: str | None = None  # default: the server's model; smollm2 for an engine that tokenmill starts
    kind: str | None = None
    url: str | None = None  # a running server, instead of kind
    aliases: tuple[str, ...] = ()  # other names for its model
    context: int | None = None
    sequences: int | None = None
    threads: int | None = None
    threads_batch: int | None = None
    cpu_only: bool = False
    gpus: tuple[int, ...] | None = None
    cache_type: str | None = None
    gpu_memory_utilization: float | None = None  # vLLM
    binary: str | None = None
    port: int | None = None
    api_key_env: str | None = None

    def __post_init__(self) -> None:
        if self.url is not None and self.kind is not None:
            raise ValueError(f"engine {self.name}: url and kind are mutually exclusive")
        for name, value in (("threads", self.threads), ("threads_batch", self.threads_batch)):
            if value is not None and not 1 <= value <= MAX_THREADS:
                raise ValueError(f"engine {self.name}: {name} must be 1-{MAX_THREADS} (got {value})")
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"engine {self.name}: gpu_memory_utilization must be more than 0 and at most 1")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", self.name):
            raise ValueError(f"engine name {self.name!r} must consist of letters, digits, '.', '-' and '_'")


@dataclass(frozen=True, slots=True)
class RouteEntry:
    """Which engines serve which requests; the first matching route applies."""

    engines: tuple[str, ...]  # names, in order; the next one is used if no token has arrived
    model: str | None = None  # requested model; None: any
    lane: Literal["interactive", "batch"] | None = None
    min_prompt_tokens: int | None = None
    max_prompt_tokens: int | None = None
    key: str | None = None  # name of the client's key; None: any

    def __post_init__(self) -> None:
        if not self.engines:
            raise ValueError("a route needs at least one engine")


@dataclass(frozen=True, slots=True)
class DigestEntry:
    """A prompt prefix that engines compute when they start and keep in the cache."""

    name: str
    file: str
    engines: tuple[str, ...] = ()  # default: all


@dataclass(frozen=True, slots=True)
class ReserveConfig:
    """Memory and cores that no engine may use."""

    cores: int = 0
    ram_bytes: Bytes = 0

    def __post_init__(self) -> None:
        if self.cores < 0 or self.ram_bytes < 0:
            raise ValueError("a reserve must not be negative")


@dataclass(frozen=True, slots=True)
class CostsConfig:
    """The machine's hourly cost and its power, for forecasts."""

    per_hour: float | None = None  # None: forecasts omit costs
    currency: str = "EUR"
    watts: float | None = None  # of the whole machine while a batch runs; None: as measured by earlier batches

    def __post_init__(self) -> None:
        if self.per_hour is not None and not 0 <= self.per_hour < float("inf"):
            raise ValueError("per_hour must be a non-negative number")
        if self.watts is not None and not 0 < self.watts < float("inf"):
            raise ValueError("watts must be a positive number")


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of the configuration file."""

    machine: str = "this"  # this, a catalogue name, or a machine file
    models_dir: str | None = None  # downloaded models; default: tokenmill/models in the user's cache folder
    state_dir: str | None = None  # running engines and stored batches; default: tokenmill in the user's state folder
    engines_dir: str | None = None  # builds of llama.cpp; default: tokenmill/engines in the user's data folder
    store: str | None = None  # batch store: a folder, or postgresql://...; default: batches in state_dir
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
                raise ValueError(f"duplicate name {twice!r} in {what}")
        for what, entries in (("route", self.routes), ("digest", self.digests)):
            for name in (name for entry in entries for name in entry.engines):
                if name not in names:
                    raise ValueError(f"a {what} refers to engine {name!r}, which is not defined in [[engines]]")

    @property
    def models_path(self) -> Path:
        """The folder of downloaded models."""
        return _folder("models_dir", self.models_dir) if self.models_dir else cache_home() / "models"

    @property
    def state_path(self) -> Path:
        """The folder of running engines and stored batches."""
        return _folder("state_dir", self.state_dir) if self.state_dir else _home("XDG_STATE_HOME", ".local/state")

    @property
    def engines_path(self) -> Path:
        """The folder of finished builds of llama.cpp."""
        if self.engines_dir:
            return _folder("engines_dir", self.engines_dir)
        return _home("XDG_DATA_HOME", ".local/share") / "engines"

    @property
    def prefixes_path(self) -> Path:
        """The folder of saved prompt prefixes."""
        given = self.engine.heads_dir
        return _folder("engine.heads_dir", given) if given else self.state_path / "heads"


def load(path: Path | None = None) -> Config:
    """Read the configuration; ConfigError if an explicit `path` does not exist."""
    if path is not None:
        if not path.is_file():
            raise ConfigError(f"no configuration file at {path}", hint="see config.example.toml for all keys")
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
        raise ConfigError(f"{key}: unknown user in {given}") from error


def _home(variable: str, default: str) -> Path:
    base = os.environ.get(variable, "")
    # The XDG specification requires relative values to be ignored.
    root = Path(base) if Path(base).is_absolute() else Path.home() / default
    return root / "tokenmill"
