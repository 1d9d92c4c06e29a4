"""`tokenmill.toml`: one file, every key known, unknown keys refused.

Looked for as --config, then ./tokenmill.toml, then tokenmill/tokenmill.toml in the user's configuration
folder; without one the defaults below hold. `config.example.toml` documents every key.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

from tokenmill.decode import Bytes, read_toml
from tokenmill.errors import ConfigError
from tokenmill.units import GIB


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
    pin_cores: bool = False  # keep to the cores that the plan does not reserve
    step_limit_s: float = 600.0  # a native engine whose step takes longer is taken to hang
    most_restarts: int = 5  # of an engine that dies again and again, within an hour
    heads_dir: str | None = None  # saved heads of prompts; default: in state_dir


@dataclass(frozen=True, slots=True)
class Config:
    """Everything a user can set in a file."""

    machine: str = "this"  # this, a catalogue name, or a machine file
    models_dir: str | None = None  # where pulled models live; default: tokenmill/models in the user's cache folder
    state_dir: str | None = None  # running engines and stored batches; default: tokenmill in the user's state folder
    pull: PullConfig = field(default_factory=PullConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

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
