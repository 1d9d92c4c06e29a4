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
class Config:
    """Everything a user can set in a file."""

    machine: str = "this"  # this, a catalogue name, or a machine file
    models_dir: str | None = None  # where pulled models live; default: tokenmill/models in the user's cache folder
    pull: PullConfig = field(default_factory=PullConfig)

    @property
    def models_path(self) -> Path:
        """The folder of pulled models."""
        if not self.models_dir:
            return cache_home() / "models"
        try:
            return Path(self.models_dir).expanduser()
        except RuntimeError as error:
            raise ConfigError(f"models_dir: {self.models_dir} names a user that is not here") from error


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


def _home(variable: str, default: str) -> Path:
    base = os.environ.get(variable, "")
    # The XDG specification says that relative values are to be ignored.
    root = Path(base) if Path(base).is_absolute() else Path.home() / default
    return root / "tokenmill"
