"""The keys and types of what commands print with --json."""

import json
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from support import contracts
from support.run_cli import said, write

# Objects whose keys are data: names of tiers, tensor patterns, error codes, ...
MAPS = (
    "bytes_by_class",
    "bytes_by_type",
    "defaults",
    "env",
    "failed_by_code",
    "kv_bytes_per_token",
    "kv_bytes_per_token_by_layer",
    "placement",
    "read_bytes_per_step",
    "reserves",
)
KIMI = ("kimi-k2.5:Q4_K_S", "--machine", "epyc-9175f", "--context", "32768")

# The same everywhere: a catalogue model on a catalogue machine.
COMMANDS: dict[str, tuple[object, ...]] = {
    "machines": ("machines",),
    "machines_one": ("machines", "epyc-9175f"),
    "probe_known": ("probe", "--machine", "epyc-9554"),
    "inspect": ("inspect", "kimi-k2.5:Q4_K_S"),
    "inspect_tensors": ("inspect", "kimi-k2.5:Q4_K_S", "--tensors", "--layers"),
    "plan": ("plan", *KIMI),
    "plan_compare": ("plan", "qwen3-32b:Q4_K_M", "--machine", "epyc-9175f", "--compare", "Q4_K_M,Q8_0"),
    "plan_hosts": (
        "plan",
        "kimi-k2.5:Q4_K_S",
        "--machine",
        "epyc-9175f,epyc-9554",
        "--context",
        "32768",
        "--link",
        "25Gbit:50us",
    ),
    "models_ghost": ("models", "ghost", "qwen3-32b:Q4_K_M", "-o", "ghost.gguf"),
    "models_synth": ("models", "synth", "--layers", "1", "-o", "synth.gguf"),
}
SMALLEST = ("--context", "512", "--ubatch", "64", "--threads", "1", "--threads-batch", "1")
TOKENS = ("--prefix-tokens", "32", "--own-tokens", "4", "--answer-tokens", "8")

# On this machine and its state folder, one after the other: some work on what those before them wrote.
HERE: dict[str, tuple[object, ...]] = {
    "probe": ("probe",),
    "doctor": ("doctor", "--all"),
    "inspect_file": ("inspect", "{model}"),
    "plan_file": ("plan", "{model}"),
    "report": ("report", "{model}", "-o", "report.md"),
    "models_list": ("models", "list"),
    "models_fits": ("models", "list", "--fits", "desktop-ddr5", "--context", "4096"),
    "models_verify": ("models", "verify", "smollm2"),
    "status": ("status",),
    "status_one": ("status", "last"),
    "results": ("results", "last", "-o", "again.jsonl"),
    "store_check": ("store", "check"),
    "run_dry": ("run", "jobs.jsonl", "-o", "dry.jsonl", "--model", "{model}", "--dry-run"),
    "lint": ("lint", "jobs.jsonl"),
    "digest": ("digest", "jobs.jsonl", "-o", "digest.txt"),
    "history": ("history",),
    "keys_add": ("keys", "add", "bob"),
    "keys_list": ("keys", "list"),
    "keys_revoke": ("keys", "revoke", "bob"),
    "engines_list": ("engines", "list"),
    "engines_log": ("engines", "log", "night"),
    "retry": ("retry", "last", "--failed"),
    "cancel": ("cancel", "last"),
    "expand_dry": ("expand", "rows.jsonl", "-o", "e.jsonl", "--target", "20", "--model", "{model}", "--dry-run"),
    "distill_dry": ("distill", "rows.jsonl", "-o", "d.parquet", "--model", "{model}", "--dry-run"),
    "distill": ("distill", "rows.jsonl", "-o", "d.parquet", "--max-tokens", "3", "--top-logprobs", "2"),
    "export": ("export", "d.parquet", "--to", "messages", "-o", "m.jsonl", "--cut-too"),
    "summarize_dry": (
        "summarize",
        "rows.jsonl",
        "-o",
        "s",
        "--text-column",
        "prompt",
        "--model",
        "{model}",
        "--dry-run",
    ),
    "synth": ("models", "synth", "--kind", "moe", "--layers", "2", "--embed", "256", "-o", "moe.gguf"),
    "tune": ("tune", "moe.gguf", *SMALLEST, "--busy", "--no-warm", "--trials", "1", "--trial-seconds", "0.1", *TOKENS),
    "bench": ("bench", "moe.gguf", *SMALLEST, "--depth", "64", "--tokens", "4", "--repeat", "1", "--what", "sweep"),
    "soak": ("soak", "moe.gguf", *SMALLEST, "--sequences", "1", "--step", "256", "--no-warm"),
    "qualify": ("qualify", "moe.gguf", "--quick", "--depths", "256", "--threads", "1", "--no-warm"),
}
ROWS = [{"id": name, "prompt": f"What is a {name}?"} for name in ("river", "bridge")]


def printed(home: Path, words: tuple[object, ...]) -> Any:
    done = said(home, *words, "--json")
    assert done.returncode in (0, 1), done.stderr  # 1: findings of doctor and lint
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_about_known_machines(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    contracts.check_shape(f"json/{name}.json", contracts.shape_of(printed(tmp_path, COMMANDS[name]), MAPS))


@pytest.fixture(scope="module")
def here(home: Path, smollm2_path: Path) -> dict[str, Any]:
    """What every command of HERE printed."""
    write(home / "rows.jsonl", ROWS)
    with chdir(home):
        return {
            name: printed(home, tuple(str(word).format(model=smollm2_path) for word in words))
            for name, words in HERE.items()
        }


@pytest.mark.parametrize("name", HERE)
def test_commands_about_this_machine(name: str, here: dict[str, Any]) -> None:
    maps = (*MAPS, "counts") if name == "doctor" else MAPS  # by severity
    contracts.check_shape(f"json/{name}.json", contracts.shape_of(here[name], maps), this_machine=True)


@pytest.mark.parametrize("name", ["serve", "run"])
def test_commands_that_made_the_batch(name: str, home: Path) -> None:
    shape = contracts.shape_of(json.loads((home / f"{name}.json").read_text()), MAPS)
    contracts.check_shape(f"json/{name}.json", shape, this_machine=True)
