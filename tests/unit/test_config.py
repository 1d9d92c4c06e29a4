"""`tokenmill.toml`: defaults, the documented example, and errors that name the key."""

import dataclasses
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import pytest

from tokenmill import config
from tokenmill.config import Config
from tokenmill.decode import decode
from tokenmill.errors import ConfigError
from tokenmill.units import GIB

EXAMPLE = Path(__file__).parents[2] / "config.example.toml"


def test_defaults_without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    assert config.load() == Config()


def test_the_example_is_the_defaults() -> None:
    assert config.load(EXAMPLE) == Config()


def uncommented() -> dict[str, Any]:
    """The example with its commented keys and sections as if they were set."""
    return tomllib.loads(re.sub(r"^# (?=\w+ = |\[\[)", "", EXAMPLE.read_text(), flags=re.MULTILINE))


def keys(model: type, path: str = "") -> Iterator[str]:
    """Every key of a configuration class and of the classes of its sections: `machine`, `pull.keep_free_bytes`, ..."""
    for name, kind in get_type_hints(model).items():
        yield path + name
        for section in (kind, *get_args(kind)):
            if dataclasses.is_dataclass(section):
                yield from keys(cast("type", section), f"{path}{name}.")


def documented(section: dict[str, Any], path: str = "") -> Iterator[str]:
    for name, value in section.items():
        yield path + name
        for entry in value if isinstance(value, list) else [value]:
            if isinstance(entry, dict):
                yield from documented(entry, f"{path}{name}.")


def test_the_example_documents_every_key() -> None:
    assert set(keys(Config)) == set(documented(uncommented()))
    assert {"reserve.cores", "costs.per_hour", "engines.name", "gateway.port"} <= set(keys(Config))


def test_what_the_example_shows_is_valid() -> None:
    decode(Config, uncommented(), where="the example")


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
    ("text", "named", "hinted"),
    [
        ("machin = 'x'", "'machin'", "'machine'"),
        ("[pull]\nkeep_fre_bytes = 1", "'pull.keep_fre_bytes'", "'keep_free_bytes'"),
        (
            "zzz = 1",
            "'zzz'",
            "costs, digests, engine, engines, engines_dir, gateway, machine, models_dir, pull, reserve, routes, state_dir, store",
        ),
        ("machine = 3", "machine:", None),
        ("[pull]\nkeep_free_bytes = '2 gigs'", "pull.keep_free_bytes: '2 gigs'", None),
        ("pull = 3", "pull:", None),
        ("[pull]\nkeep_free_bytes = true", "pull.keep_free_bytes: true", None),
        ("[pull]\nkeep_free_bytes = -5", "pull.keep_free_bytes: -5", None),
        ("[gateway]\nlog = 'xml'", "gateway.log:", None),
        ("[gateway]\nport = 70000", "70000", None),
        ("[gateway]\nmax_body_bytes = 0", "max_body_bytes", None),
        ("[gateway]\nidle_timeout_s = 0", "idle_timeout_s", None),
        ("[gateway]\ngrace_s = -1", "grace_s", None),
        ("[gateway]\ntls_cert = 'x'", "tls_key", None),
        ("[[engines]]\nname = 'a'\nurl = 'http://x'\nkind = 'vllm'", "engine a: url and kind", None),
        ("[[engines]]\nname = 'a'\nthreads = 100000", "100000", None),
        ("[[engines]]\nname = 'a'\nthreads_batch = 0", "threads_batch", None),
        ("[[engines]]\nname = ''", "engine name ''", None),
        ("[[engines]]\nname = 'a'\n[[engines]]\nname = 'a'", "duplicate name 'a'", None),
        ("[[engines]]\nnam = 'a'", "'engines[0].nam'", "'name'"),
        ("[[routes]]\nengines = ['b']", "'b'", None),
        ("[[routes]]\nengines = []", "routes.0:", None),
        ("[[routes]]\nengines = ['a']\nlane = 'fast'", "routes.0.lane:", None),
        ("machine = ", "TOML", "line"),
    ],
)
def test_errors_name_the_key_or_the_value(text: str, named: str, hinted: str | None, tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.load(path)
    assert caught.value.code == "invalid_config"
    assert named in caught.value.message
    assert str(path) in caught.value.message
    if hinted is None:
        assert caught.value.hint is None
    else:
        assert hinted in (caught.value.hint or "")


def test_missing_and_unreadable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent.toml"):
        config.load(tmp_path / "absent.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="binary.toml"):
        config.load(tmp_path / "binary.toml")


def test_an_unknown_user() -> None:
    with pytest.raises(ConfigError, match="models_dir: .*~nobody_of_that_name"):
        _ = Config(models_dir="~nobody_of_that_name/x").models_path
