"""`tokenmill models pull`, `list` and `verify` as commands."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.gguf_bytes import TINY_KEYS, TINY_TABLE, write
from support.pull_servers import COMMIT, Shelf, serve, stock_hub
from tokenmill.cli import run
from tokenmill.units import format_bytes

REPO = "owner/Tiny-GGUF"
NAME = f"hf:{REPO}:Q4_0"


class Shell:
    """Runs tokenmill with a cache and a hub of its own."""

    def __init__(self, folder: Path, shelf: Shelf) -> None:
        self.folder, self.shelf = folder, shelf
        self.models = folder / "cache" / "tokenmill" / "models"
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | {
            "XDG_CACHE_HOME": str(folder / "cache"),
            "HF_HOME": str(folder / "hf"),
            "HF_ENDPOINT": shelf.url,
            "XDG_CONFIG_HOME": str(folder / "config"),
            "NO_PROXY": "127.0.0.1",
            "COLUMNS": "80",
        }

    def __call__(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            env=self.environment | environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )

    def json(self, *arguments: str) -> Any:
        answer = self(*arguments, "--json")
        assert answer.returncode == 0, answer.stderr
        return json.loads(answer.stdout)

    @staticmethod
    def command(*arguments: str) -> list[str]:
        return [sys.executable, "-m", "tokenmill", "models", *arguments]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    model = write(tmp_path / "Tiny-Q4_0.gguf", TINY_KEYS, TINY_TABLE).read_bytes()
    with serve(Shelf()) as shelf:
        stock_hub(shelf, REPO, {"Tiny-Q4_0.gguf": model, "Tiny-Q8_0.gguf": model})
        yield Shell(tmp_path, shelf)


def test_a_pull_tells_the_outlook_and_prints_the_path_alone(shell: Shell) -> None:
    answer = shell("pull", NAME)
    path = shell.models / "owner" / "Tiny-GGUF" / "Q4_0" / "Tiny-Q4_0.gguf"
    assert (answer.returncode, answer.stdout) == (0, f"{path}\n")
    assert path.is_file()
    size = format_bytes(path.stat().st_size)
    assert f"{NAME}: {size} in 1 file, {size} to download" in answer.stderr
    assert "parameters" in answer.stderr
    assert "read per token" in answer.stderr
    assert "weights and 16384 tokens of cache take" in answer.stderr
    assert "they fit" in answer.stderr
    assert "plan here, llama.cpp with" in answer.stderr
    again = shell("pull", NAME, "--verify")
    assert (again.returncode, again.stdout) == (0, f"{path}\n")
    assert "already downloaded and verified" in again.stderr


def test_a_dry_run_downloads_nothing(shell: Shell) -> None:
    told = shell.json("pull", NAME, "--dry-run")
    assert told["name"] == NAME
    assert told["files"] == ["Tiny-Q4_0.gguf"]
    assert told["bytes"] == told["remaining_bytes"]
    assert told["parameters"] == told["active_parameters"] > 0
    assert told["needed_memory_bytes"] > told["bytes"]
    assert told["fits_memory"] is True
    assert told["free_memory_bytes"]
    assert not shell.models.exists()
    answer = shell("pull", NAME, "--dry-run")
    assert answer.returncode == 0
    assert max(map(len, answer.stdout.splitlines())) <= 80


def test_an_unreadable_header_does_not_stop_the_pull(shell: Shell) -> None:
    stock_hub(shell.shelf, REPO, {"Tiny-Q4_0.gguf": b"not a model at all"})
    answer = shell("pull", NAME)
    assert answer.returncode == 0
    assert "header could not be read" in answer.stderr


def test_the_list_shows_pulled_models_and_known_names(shell: Shell) -> None:
    empty = shell("list")
    assert "tokenmill models pull smollm2" in empty.stdout
    shell("pull", NAME)
    listed = shell.json("list")
    (model,) = listed["pulled"]
    assert (model["name"], model["complete"]) == (NAME, True)
    assert model["bytes"] == Path(model["path"]).stat().st_size
    assert "smollm2" in listed["pullable"]
    assert "kimi-k2.5" in listed["catalog"]
    assert NAME in shell("list").stdout


def verdict(shell: Shell, *arguments: str, **environment: str) -> tuple[int, str, list[str]]:
    """Exit code, the verdict on the model, and those on its files."""
    answer = shell("verify", *arguments, "--json", **environment)
    told = json.loads(answer.stdout)
    return answer.returncode, told["verdict"], [file["verdict"] for file in told["files"]]


def test_a_pulled_model_is_verified_and_a_flipped_byte_found(shell: Shell) -> None:
    shell("pull", NAME)
    path = shell.models / "owner" / "Tiny-GGUF" / "Q4_0" / "Tiny-Q4_0.gguf"
    assert verdict(shell, NAME, HF_HUB_OFFLINE="1") == (0, "ok", ["ok"])
    assert verdict(shell, str(path), "--repo", f"hf:{REPO}") == (0, "ok", ["ok"])
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert verdict(shell, NAME) == (1, "wrong", ["wrong"])
    assert verdict(shell, str(path), "--repo", REPO) == (1, "wrong", ["wrong"])
    shown = shell("verify", NAME)
    assert shown.returncode == 1
    assert shown.stdout.startswith(f"wrong: {path}")
    assert "hint: " in shown.stderr
    assert path.exists()
    damaged = hashlib.sha256(path.read_bytes()).hexdigest()
    assert damaged in shown.stdout
    assert verdict(shell, str(path), "--sha256", damaged) == (0, "ok", ["ok"])


def test_a_model_without_a_published_hash_is_neither_ok_nor_wrong(shell: Shell) -> None:
    path = shell.folder / "Tiny-Q4_0.gguf"
    assert verdict(shell, str(path)) == (2, "unknown", ["unknown"])
    shown = shell("verify", str(path))
    assert shown.returncode == 2
    assert "--repo" in shown.stderr
    assert "--sha256" in shown.stderr
    assert verdict(shell, str(path), "--repo", REPO) == (0, "ok", ["ok"])
    other = path.rename(path.with_name("Other.gguf"))
    assert verdict(shell, str(other), "--repo", REPO) == (2, "unknown", ["unknown"])
    unreachable = shell("verify", str(other), "--repo", REPO, HF_HUB_OFFLINE="1")
    assert (unreachable.returncode, unreachable.stdout) == (1, "")
    assert shell("verify", str(other), "--sha256", "abc").returncode == 2


def test_ctrl_c_keeps_what_has_come(shell: Shell) -> None:
    body = b"GGUF" + bytes(40_000_000)
    stock_hub(shell.shelf, REPO, {"Tiny-Q4_0.gguf": body})
    path = f"/{REPO}/resolve/{COMMIT}/Tiny-Q4_0.gguf"
    shell.shelf.faults[path] = ["", "stall:25000000"]  # the header is read first
    with subprocess.Popen(
        shell.command("pull", NAME), env=shell.environment, cwd=shell.folder, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if " of 38.1 MiB" in line:  # progress: bytes are arriving
                process.send_signal(signal.SIGINT)
                break
        rest = process.stderr.read()
    assert process.returncode == 130
    assert "Traceback" not in rest
    (part,) = (shell.models / "owner" / "Tiny-GGUF" / "Q4_0").glob("*.part")
    kept = part.stat().st_size
    assert kept > 0
    assert "1 of 1 files missing" in " ".join(shell("list").stdout.split())
    assert shell("pull", NAME).returncode == 0
    assert shell.shelf.ranges(path)[-1] == f"bytes={kept}-"


@pytest.mark.parametrize(
    ("arguments", "environment", "code", "words"),
    [
        (["pull", f"hf:{REPO}:Q2_K"], {}, 2, "Q4_0, Q8_0"),
        (["pull", f"hf:{REPO}"], {}, 2, "hf:owner/Tiny-GGUF:QUANT"),
        (["pull", "hf:no/where:Q4_0"], {}, 2, "no/where"),
        (["pull", NAME], {"HF_HUB_OFFLINE": "1"}, 1, "HF_HUB_OFFLINE"),
        (["pull", NAME], {"HF_ENDPOINT": "http://127.0.0.1:1"}, 1, "HF_ENDPOINT"),
        (["pull", NAME], {"HF_ENDPOINT": "elsewhere"}, 2, "HF_ENDPOINT"),
        (["pull", NAME, "--config", "full.toml"], {}, 1, "1000.0 TiB"),
        (["pull", NAME, "--dry-run", "--config", "full.toml"], {}, 1, "1000.0 TiB"),
        (["pull", NAME, "--config", "file.toml"], {}, 1, "models_dir"),
    ],
)
def test_errors_of_a_hub_have_a_message_and_an_exit_code(
    shell: Shell, arguments: list[str], environment: dict[str, str], code: int, words: str
) -> None:
    (shell.folder / "full.toml").write_text('[pull]\nkeep_free_bytes = "1000 TiB"\n')
    (shell.folder / "file.toml").write_text('models_dir = "full.toml/models"\n')
    answer = shell(*arguments, **environment)
    assert (answer.returncode, "Traceback" in answer.stderr) == (code, False)
    assert words in answer.stderr
    assert "tokenmill itself failed" not in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pull"], "NAME"),
        (["pull", "nonsense"], "smollm2"),
        (["pull", "kimi-k2.5"], "hf:unsloth/Kimi-K2.5-GGUF:QUANT"),
        (["pull", "hf:owner"], "hf:OWNER/REPO:QUANT"),
        (["pull", "smollm2", "--config", "absent.toml"], "no configuration file"),
        (["list", "--config", "absent.toml"], "no configuration file"),
    ],
)
def test_wrong_use_exits_with_two(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", *arguments]) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert said.out == ""
