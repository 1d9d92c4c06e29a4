"""tokenmill.toml: every key known, mistakes answered with a sentence."""

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from tokenmill import config
from tokenmill.config import Config, PullConfig
from tokenmill.errors import ConfigError
from tokenmill.units import GIB

EXAMPLE = Path(__file__).parents[2] / "config.example.toml"


def test_defaults_without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    assert config.load() == Config()


def test_the_example_is_the_defaults() -> None:
    assert config.load(EXAMPLE) == Config()


def test_the_example_documents_every_key() -> None:
    text = EXAMPLE.read_text()
    documented = set(tomllib.loads(re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE)))
    assert documented == {field.name for field in dataclasses.fields(Config)}
    assert set(tomllib.loads(text)["pull"]) == {field.name for field in dataclasses.fields(PullConfig)}


def test_the_nearest_file_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    (tmp_path / "xdg" / "tokenmill").mkdir(parents=True)
    (tmp_path / "xdg" / "tokenmill" / "tokenmill.toml").write_text('machine = "user"')
    assert config.load().machine == "user"
    (tmp_path / "tokenmill.toml").write_text('machine = "here"')
    assert config.load().machine == "here"
    (tmp_path / "other.toml").write_text('machine = "asked"')
    assert config.load(tmp_path / "other.toml").machine == "asked"


def test_paths_follow_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Config().models_path == tmp_path / "tokenmill" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Config().models_path == tmp_path / ".cache" / "tokenmill" / "models"
    assert Config(models_dir="~/m").models_path == tmp_path / "m"


def test_sizes_may_be_written_with_units(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text('[pull]\nkeep_free_bytes = "10 GiB"')
    assert config.load(tmp_path / "t.toml").pull.keep_free_bytes == 10 * GIB


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("machin = 'x'", "unknown key 'machin'", "did you mean 'machine'?"),
        ("[pull]\nkeep_fre_bytes = 1", "unknown key 'pull.keep_fre_bytes'", "did you mean 'keep_free_bytes'?"),
        ("zzz = 1", "unknown key 'zzz'", "known keys here: engine, machine, models_dir, pull, state_dir"),
        ("machine = 3", "machine: input should be a valid string", None),
        ("[pull]\nkeep_free_bytes = '2 gigs'", "pull.keep_free_bytes: '2 gigs' is not a size", None),
        ("pull = 3", "pull:", None),
        ("[pull]\nkeep_free_bytes = true", "true is not a size", None),
        ("[pull]\nkeep_free_bytes = -5", "-5 is not a size", None),
        ("machine = ", "is not valid TOML", "check the line that it names"),
    ],
)
def test_mistakes_are_answered(text: str, message: str, hint: str | None, tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.load(path)
    assert message in caught.value.message
    assert str(path) in caught.value.message
    assert caught.value.hint == hint


def test_missing_and_unreadable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no configuration file at"):
        config.load(tmp_path / "absent.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        config.load(tmp_path / "binary.toml")


def test_a_user_that_is_not_here() -> None:
    with pytest.raises(ConfigError, match="names a user that is not here"):
        _ = Config(models_dir="~nobody_of_that_name/x").models_path
