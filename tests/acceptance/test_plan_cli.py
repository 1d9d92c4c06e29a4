"""`tokenmill plan`: text, JSON, files to run, existing commands, verification and errors."""

import json
import os
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from support.audited import audited
from support.run_cli import USUAL_HOME, said
from tokenmill.model import catalog
from tokenmill.model.gguf_write import encode


def tokenmill(*words: str) -> subprocess.CompletedProcess[str]:
    return said(USUAL_HOME, *words)


def plan_json(*words: str) -> dict[str, Any]:
    done = tokenmill("plan", *words, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


KIMI = (
    "kimi-k2.5:Q4_K_S",
    "--machine",
    "epyc-9175f",
    "--context",
    "32768",
    "--sequences",
    "1",
    "--engine",
    "llama.cpp",
)


def test_json_holds_what_it_promises() -> None:
    found = plan_json(*KIMI)
    assert found["fits"] is True
    items = {"weights", "kv", "compute", "staging", "repack", "prompt_cache", "runtime", "reserve"}
    for name in ("ledger", "ledger_at_load_peak"):
        assert found[name]
        for row in found[name]:
            assert set(row) == {"tier", "item", "bytes"}
            assert row["item"] in items
    for name in ("decode_tok_s", "prefill_tok_s"):
        for speed in found["forecast"][name]:
            assert speed["tok_s"] > 0
            assert speed["confidence"] in ("measured", "calibrated", "estimated")
            assert sum(term["seconds"] for term in speed["terms"]) > 0
    assert set(found["placement"].values()) <= {"gpu0", "dram"}
    assert found["command"]["argv"][0].endswith("llama-server")
    assert isinstance(found["command"]["env"], dict)
    assert all(set(decision) == {"name", "value", "reason"} for decision in found["decisions"])


def test_a_person_sees_it_in_80_columns() -> None:
    done = tokenmill("plan", *KIMI, "--explain")
    assert done.returncode == 0
    before_command = done.stdout.partition("run:")[0]
    assert max(len(line) for line in before_command.splitlines()) <= 80
    for words in ("gpu0", "dram", "decode tok/s", "estimated", "fits", "% of decode time"):
        assert words in done.stdout


def test_it_loads_and_starts_nothing(smollm2_path: Path, tmp_path: Path) -> None:
    words = ("plan", smollm2_path, "--machine", "epyc-9175f", "--json")
    plan = audited(tmp_path / "seen", *words)
    assert plan.code == 0, plan.stderr
    assert plan.programs == []
    assert plan.loaded == []
    assert plan.read_bytes < smollm2_path.stat().st_size / 2  # a sixth, most of it Python's own


def test_with_verify_it_starts_a_process(smollm2_path: Path, tmp_path: Path) -> None:
    """A check of the test above: it would notice a started process."""
    plan = audited(tmp_path / "seen", "plan", smollm2_path, "--machine", "epyc-9175f", "--verify")
    assert plan.programs != []


def test_what_does_not_fit_exits_with_3() -> None:
    done = tokenmill("plan", "kimi-k2.5:Q4_K_M", "--machine", "epyc-7763", "--context", "32768")
    assert done.returncode == 3
    assert "does not fit: dram is" in done.stdout
    assert "would fit with quantization" in done.stdout


def test_comparison_in_one_table() -> None:
    done = tokenmill("plan", "kimi-k2.5:Q4_K_S", "--machine", "epyc-9175f", "--compare", "Q4_K_S,Q8_0")
    assert done.returncode == 0
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[1] for row in rows[1:3]] == ["yes", "NO"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no model"),
        (("nope:Q4_K_M",), "no model 'nope' in the catalogue"),
        (("kimi-k2.5:Q4_K_S", "--machine", "nope"), "nope"),
        (("kimi-k2.5:Q4_K_S", "--machine", "epyc-9175f", "--context", "0"), "context must be at least 1"),
        (("kimi-k2.5:Q4_K_S", "--machine", "epyc-9175f", "--gpus", "a"), "gpus must be numbers"),
        (("kimi-k2.5:Q4_K_S", "--machine", "epyc-9175f", "--cache-type", "q9"), "q9"),
        (("kimi-k2.5:Q4_K_S", "--machine", "epyc-9175f", "--reserve-ram", "lots"), "'lots' is not a size"),
        (("kimi-k2.5:Q4_K_S", "--machine", "epyc-9175f", "--engine", "ollama"), "ollama"),
        (("kimi-k2.5:Q4_K_S", "--machine", "epyc-9175f", "--gpus", "7"), "epyc-9175f has no GPU 7"),
        (("kimi-k2.5:Q4_K_S", "--machine", "epyc-9175f", "--gpus", "0", "--cpu-only"), "contradict"),
        (("kimi-k2.5:Q4_K_S", "--machine", "epyc-9175f", "--reserve-cores", "16"), "--reserve-cores 16"),
        (("kimi-k2.5:Q4_K_S", "--machine", "epyc-9175f", "--fit-margin", "9"), "fit_margin needs own_fit"),
        (("kimi-k2.5:Q4_K_S", "--machine", "epyc-9175f", "--batch", "64", "--ubatch", "128"), "smaller than ubatch"),
        (("kimi-k2.5:Q4_K_S", "--machine", "epyc-9175f", "--compare", "0"), "at least 256 tokens (got 0)"),
        (("kimi-k2.5:Q4_K_S", "--machine", "epyc-9175f", "--compare", "Q8_0", "--verify"), "--compare and --verify"),
        (
            ("kimi-k2.5:Q4_K_S", "--machine", "epyc-9175f", "--from-command", "llama-server", "--context", "1"),
            "--context cannot be combined with --from-command",
        ),
        (
            ("llama-3.3-70b:Q4_K_M", "--machine", "epyc-7532-8x3090", "--engine", "vllm", "--tensor-parallel", "3"),
            "64 attention heads",
        ),
    ],
)
def test_wrong_use_says_what_is_right(words: tuple[str, ...], message: str) -> None:
    done = tokenmill("plan", *words)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


# --- a command that somebody runs ---------------------------------------------------------------------------------

COMMANDS = Path(__file__).parents[1] / "data" / "commands"
EIGHT_CARDS = ("kimi-k2.5:Q4_X", "--machine", "epyc-7532-8x3090")


def used_mib(found: dict[str, Any], moment: str = "ledger_after_load") -> list[float]:
    sums = {f"gpu{index}": 0.0 for index in range(8)}
    for row in found[moment]:
        if row["tier"] in sums and row["item"] != "reserve":
            sums[row["tier"]] += row["bytes"] / 2**20
    return list(sums.values())


@pytest.mark.parametrize(
    ("command", "engine", "measured"),
    [
        ("001-fit", "ik_llama-2026-03", (22303, 21962, 21961, 21744, 22248, 21744, 21962, 22933)),
        (
            "001-fit-margins",
            "ik_llama-2026-04",
            tuple(1024 * gib for gib in (21.2, 20.9, 20.9, 20.7, 20.9, 20.9, 20.9, 13.5)),
        ),
    ],
)
def test_a_published_command_costs_what_was_measured(command: str, engine: str, measured: tuple[float, ...]) -> None:
    text = (COMMANDS / f"{command}.txt").read_text(encoding="utf-8")
    done = tokenmill("plan", *EIGHT_CARDS, "--from-command", text, "--engine", engine, "--json")
    assert done.returncode == 3, "both ran out of memory before their context was full, margins counted"
    found = json.loads(done.stdout)
    assert used_mib(found) == pytest.approx(measured, abs=1024)
    assert found["settings"]["engine"] == engine


def test_what_is_wrong_with_a_command_is_said() -> None:
    text = (COMMANDS / "001-overrides.txt").read_text(encoding="utf-8")
    done = tokenmill("plan", *EIGHT_CARDS, "--from-command", text)
    assert done.returncode == 0, done.stderr
    for words in ("-ub 256", "-muge copies", "9 overrides would replace the 180"):
        assert words in done.stdout


def test_versions_that_disagree_are_all_shown() -> None:
    """The report's crash came from a build of April; the newest one would have had room."""
    command = str(COMMANDS / "001-fit-margins.txt")
    done = tokenmill("plan", *EIGHT_CARDS, "--from-command", command, "--json")
    assert done.returncode == 0, done.stderr
    verdicts = {version["engine"]: version for version in json.loads(done.stdout)["versions"]}
    assert verdicts["ik_llama"]["fits"] is True
    april = verdicts["ik_llama-2026-04"]
    assert april["fits"] is False
    assert april["shortfalls"][0]["tier"] == "gpu0"
    assert 88_064 <= april["longest_context"] < 90_112
    told = tokenmill("plan", *EIGHT_CARDS, "--from-command", command, "--engine", "ik_llama-2026-04", "--json")
    assert told.returncode == 3
    assert json.loads(told.stdout)["versions"] == []


def test_a_program_is_asked_for_its_version(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    flags = files("tokenmill.launch") / "flags" / "llama.cpp-b8156.txt"
    program.write_text(f"#!/bin/sh\n[ \"$1\" = --version ] && echo 'version: 8156 (x)' && exit\ncat {flags}\n")
    program.chmod(0o755)
    words = ("plan", *KIMI[:3], "--from-command", "llama-server -m x -c 16384", "--json")
    assert json.loads(tokenmill(*words).stdout)["settings"]["engine"] == "llama.cpp"
    asked = json.loads(tokenmill(*words, "--binary", str(program)).stdout)
    assert asked["settings"]["engine"] == "llama.cpp-2025"


def test_a_command_may_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "start.sh"
    file.write_text("#!/bin/sh\nllama-server -m x \\\n  -c 8192 -t 12\n")
    for given in (str(file), f"@{file}"):
        done = tokenmill("plan", *KIMI[:3], "--from-command", given, "--json")
        assert json.loads(done.stdout)["settings"]["threads"] == 12, done.stderr
    missing = tokenmill("plan", *KIMI[:3], "--from-command", f"@{file}.gone")
    assert missing.returncode == 2


def test_a_command_that_its_engine_refuses_fails() -> None:
    done = tokenmill("plan", *KIMI[:3], "--from-command", "llama-server -m x -ngl 99 --cmoe -c 8192", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["unknown_flags"] == ["--cmoe"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("llama-server -m x --fit on -ngl 99 -ot exps=CPU -c 8192", "--fit"),
        ("llama-server -m x -ngl 99 -ncmoe 40 -ts 1,1,1,1,1,1,1,1 -c 8192", "--n-cpu-moe 40"),
        ("llama-server -m x -ngl 99 -ot exps=CPU -np 4 -c 32768 --no-kv-unified", "8192 tokens each"),
    ],
)
def test_common_mistakes_are_found(command: str, words: str) -> None:
    done = tokenmill("plan", *EIGHT_CARDS, "--from-command", command, "--json")
    assert words in " ".join(finding["text"] for finding in json.loads(done.stdout)["findings"]), done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "llama-server -c -5",
        "llama-server -c abc",
        "llama-server -ts a,b -ngl 99",
        "vllm serve x --gpu-memory-utilization abc",
        "ls -l",
        "llama-server 'x",
    ],
)
def test_a_command_that_cannot_be_read_is_wrong_use(command: str) -> None:
    done = tokenmill("plan", "kimi-k2.5:Q4_K_S", "--machine", "epyc-9175f", "--from-command", command)
    assert done.returncode == 2
    assert "error:" in done.stderr
    assert "itself failed" not in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "llama-server -t 0 -c 4096",
        "llama-server -t -1 -ngl -1 -c 4096",
        "GGML_OP_OFFLOAD_MIN_BATCH=x llama-server -ngl 99 -ncmoe 60 -np 64 -c 65536",
    ],
)
def test_defaults_that_engines_know_are_read(command: str) -> None:
    done = tokenmill("plan", "kimi-k2.5:Q4_K_S", "--machine", "epyc-9175f", "--from-command", command, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["settings"]["threads"] > 0


# --- several engines on one machine ---------------------------------------------------------------------------------

TWO_ENGINES = """
machine = "epyc-9175f"
[[engines]]
name = "cpu"
model = "llama-4-scout:Q6_K"
kind = "llama-server"
cpu_only = true
context = 8192
sequences = 1
threads = 15
[[engines]]
name = "gpu"
model = "llama-4-scout:nvfp4"
kind = "vllm"
context = 110000
sequences = 1
gpu_memory_utilization = 0.88
[[engines]]
name = "cloud"
url = "https://api.example.org/v1"
"""


def test_the_engines_of_a_configuration_are_planned_together(tmp_path: Path) -> None:
    config = tmp_path / "two.toml"
    config.write_text(TWO_ENGINES)
    found = plan_json("--config", str(config))
    assert found["fits"] is True
    assert [engine["name"] for engine in found["engines"]] == ["cpu", "gpu"]
    assert (found["threads"], found["cores"]) == (16, 16)
    dram = next(tier for tier in found["tiers"] if tier["name"] == "dram")
    assert dram["needed_bytes"] == sum(dram["by_engine"].values()) + dram["reserve_bytes"]
    shown = tokenmill("plan", "--config", str(config))
    assert max(map(len, shown.stdout.splitlines())) <= 80
    smaller = tokenmill("plan", "--config", str(config), "--machine", "desktop-ddr5-5090", "--json")
    assert smaller.returncode == 3
    assert [lack["tier"] for lack in json.loads(smaller.stdout)["shortfalls"]] == ["gpu0"]


# --- files to run -------------------------------------------------------------------------------------------------

TO_RUN = (
    "kimi-k2.5:Q4_K_S",
    "--machine",
    "epyc-9175f",
    "--context",
    "32768",
    "--sequences",
    "1",
    "--mlock",
    "--reserve-cores",
    "3",
)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shell", ("numactl --physcpubind=0-12", "--host 127.0.0.1", "ulimit -l unlimited", "/health")),
        ("podman", ("--cpuset-cpus 0-12", "--publish 127.0.0.1:", "--ulimit memlock=-1:-1", "--health-cmd")),
        ("quadlet", ("--cpuset-cpus=0-12", "PublishPort=127.0.0.1:", "Ulimit=memlock=-1:-1", "HealthCmd=")),
        ("systemd", ("AllowedCPUs=0-12", "--host 127.0.0.1", "LimitMEMLOCK=infinity", "/health")),
        ("compose", ('cpuset: "0-12"', '"127.0.0.1:8080:8080"', "memlock", "healthcheck:")),
    ],
)
def test_files_to_run(kind: str, words: tuple[str, ...], tmp_path: Path) -> None:
    done = tokenmill("plan", *TO_RUN, "--as", kind)
    assert done.returncode == 0, done.stderr
    for word in words:
        assert word in done.stdout
    assert done.stdout.count("_exps") <= 3, "one override for a run of layers"
    if kind in ("shell", "podman"):
        script = tmp_path / "run.sh"
        script.write_text(done.stdout, encoding="utf-8")
        subprocess.run(["sh", "-n", str(script)], check=True)


def test_nothing_is_written_for_what_does_not_fit() -> None:
    done = tokenmill("plan", "kimi-k2.5:Q4_K_M", "--machine", "epyc-7763", "--as", "shell")
    assert (done.returncode, done.stdout) == (3, "")
    assert "does not fit: dram" in done.stderr


# --- against the real engine --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("kimi-k2.5:Q4_K_S", "--machine", "epyc-9175f", "--cpu-only", "--context", "32768", "--sequences", "1"),
        (
            "gpt-oss-120b:MXFP4",
            "--machine",
            "epyc-9175f",
            "--cpu-only",
            "--context",
            "8192",
            "--sequences",
            "4",
            "--ubatch",
            "1024",
            "--cache-type",
            "q8_0",
        ),
    ],
    ids=["kimi", "gpt-oss"],
)
def test_prediction_and_projection_agree(words: tuple[str, ...]) -> None:
    found = plan_json(*words, "--verify")["verification"]
    assert found["agrees"] is True
    rows = {row["item"]: row for row in found["rows"]}
    assert set(rows) >= {"weights", "kv", "compute"}
    for item in ("weights", "kv"):
        assert rows[item]["predicted_bytes"] == pytest.approx(rows[item]["projected_bytes"], rel=0.001)


def test_an_engine_that_cannot_be_asked_is_not_verified() -> None:
    done = tokenmill("plan", *KIMI[:3], "--engine", "ik_llama", "--context", "8192", "--verify")
    assert done.returncode == 2
    assert "cannot be verified" in done.stderr


# --- what does not fit --------------------------------------------------------------------------------------------


def test_changes_make_it_fit() -> None:
    words = ("gpt-oss-120b:MXFP4", "--machine", "desktop-ddr5-3090", "--context", "131072", "--sequences", "64")
    done = tokenmill("plan", *words, "--json")
    assert done.returncode == 3
    changes = json.loads(done.stdout)["changes"]
    assert 1 < len(changes) <= 3
    assert [change["cost"] for change in changes] == sorted(change["cost"] for change in changes)
    assert len({change["what"].split()[0] for change in changes}) > 1, "not one knob alone"
    for change in changes:
        option, value = change["what"].split()
        given = list(words)
        given[given.index(option) + 1] = value
        assert plan_json(*given)["fits"] is True


def test_the_longest_context_is_planned_on_request() -> None:
    words = ("llama-3.3-70b:Q4_K_M", "--machine", "desktop-ddr5", "--cpu-only", "--sequences", "2")
    longest = plan_json(*words, "--max-context")["settings"]["context"]
    assert 4096 < longest < 131_072
    assert plan_json(*words, "--cache-type", "f16", "--context", str(longest))["fits"]
    over = tokenmill("plan", *words, "--cache-type", "f16", "--context", str(longest + 2048), "--json")
    assert over.returncode == 3
    found = json.loads(over.stdout)
    assert found["longest_context"] == longest
    assert f"--context {longest}" in [change["what"] for change in found["changes"]]
    both = tokenmill("plan", *words, "--max-context", "--context", "8192")
    assert both.returncode == 2


def compared(*words: str) -> dict[str, dict[str, Any]]:
    done = tokenmill("plan", "kimi-k2.5:Q4_K_S", *words, "--json")
    assert done.returncode == 0, done.stderr
    return {row["variant"]: row for row in json.loads(done.stdout)}


def test_threads_are_compared() -> None:
    """A published sweep: 12.94 tok/s with 16 threads, 12.5, 11.67 and 11.86 with 14, 13 and 12."""
    words = ("--machine", "epyc-9175f", "--cpu-only", "--context", "8192", "--cache-type", "q8_0")
    found = compared(*words, "--sequences", "1", "--compare", "threads=12,13,14,16")
    decode = {name: row["forecast"]["decode_tok_s"][0]["tok_s"] for name, row in found.items()}
    measured = {"threads 12": 11.86, "threads 13": 11.67, "threads 14": 12.5, "threads 16": 12.94}
    assert decode == pytest.approx(measured, rel=0.1)


def test_cache_types_and_machines_are_compared() -> None:
    words = ("--context", "16k", "--sequences", "1")
    found = compared(*words, "--machine", "epyc-9175f", "--compare", "f16,q8_0")
    kv = {name: sum(row["bytes"] for row in one["ledger"] if row["item"] == "kv") for name, one in found.items()}
    assert kv["cache-type q8_0"] < 0.6 * kv["cache-type f16"]
    machines = "epyc-9175f,threadripper-pro-3995wx-2933"
    assert list(compared(*words, "--compare", machines)) == machines.split(",")
    table = tokenmill("plan", "kimi-k2.5:Q4_K_S", *words, "--compare", machines).stdout
    assert "…" not in table
    for value in ("12,13", "colour=red", "context=12"):
        assert tokenmill("plan", "kimi-k2.5:Q4_K_S", *words, "--compare", value).returncode == 2


def test_a_plan_tells_what_one_job_costs() -> None:
    """A published run: 16,148 tokens of prompt took 44 minutes, 333 tokens of answer 136 s."""
    words = ("kimi-k2.5:Q4_K_M", "--machine", "epyc-9175f", "--cpu-only", "--context", "32768", "--sequences", "1")
    forecast = plan_json(*words, "--threads", "13", "--ubatch", "256")["forecast"]
    jobs = {job["prompt_tokens"]: job for job in forecast["jobs"]}
    assert list(jobs) == [1024, 4096, 16384, 32768 - 300]
    assert jobs[16384]["prefill_s"] == pytest.approx(16384 / 6.15, rel=0.1)
    assert jobs[16384]["decode_s"] == pytest.approx(300 / 2.44, rel=0.1)


def test_two_changes_together_where_one_is_not_enough() -> None:
    done = tokenmill(
        "plan", "llama-3.3-70b:F16", "--machine", "desktop-ddr5", "--context", "131072", "--sequences", "4"
    )
    assert done.returncode == 3
    assert "--sequences 1 and quantization Q8_0" in done.stdout


def test_tensor_parallel_shows_all_its_gpus() -> None:
    words = ("llama-3.3-70b:Q4_K_M", "--machine", "epyc-7532-8x3090", "--engine", "vllm", "--tensor-parallel", "4")
    command = plan_json(*words)["command"]
    assert command["env"]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


APP_DIRECT = """
name = "app-direct"
[cpu]
cores = 12
[dram]
total_bytes = "192 GiB"
nominal_gb_s = 140.8
[pmem]
mode = "app-direct"
nominal_gb_s = 39
[[pmem.namespaces]]
name = "namespace0.0"
mode = "fsdax"
size_bytes = "740 GiB"
mount = "/mnt/pmem"
"""


def test_persistent_memory_beside_dram_is_read_through_the_mapped_file(tmp_path: Path) -> None:
    machine = tmp_path / "machine.toml"
    machine.write_text(APP_DIRECT, encoding="utf-8")
    found = plan_json("kimi-k2.5:Q4_K_S", "--machine", str(machine), "--context", "8192", "--sequences", "1")
    assert set(found["placement"].values()) == {"dram", "pmem"}
    assert (found["settings"]["mmap"], found["settings"]["repack"]) == (True, False)
    assert any("/mnt/pmem" in warning for warning in found["warnings"])


def test_a_config_is_planned_and_compared_with_llama_cpp(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3",
        "num_hidden_layers": 4,
        "max_position_embeddings": 8192,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "vocab_size": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ("--machine", "epyc-7763", "--context", "4096", "--sequences", "1", "--verify", "--json")
    planned = tokenmill("plan", f"{tmp_path}/config.json:Q4_K_M", *asked)
    assert planned.returncode == 0, planned.stderr
    found = json.loads(planned.stdout)
    assert found["verification"]["agrees"]
    assert found["model"]["quantisation"] == "Q4_K_M"
    wrong = tokenmill("plan", f"{tmp_path}/config.json:Q4_K_XL", *asked)
    assert wrong.returncode == 2
    assert "did you mean Q4_K_" in wrong.stderr


def test_an_architecture_that_tokenmill_does_not_know_is_planned_with_what_is_assumed(tmp_path: Path) -> None:
    header = catalog.header("qwen3-32b:Q8_0", words=False)
    keys = {f"brandnew.{name}": value for name, value in catalog.entry("qwen3-32b").model.keys.items()}
    rows = [(tensor.name, tensor.shape, tensor.type) for tensor in header.tensors if ".attn_q" not in tensor.name]
    rows += [(f"blk.{layer}.attn_memory.weight", (5120, 512), "Q8_0") for layer in range(64)]
    encoded = encode(keys | {"general.architecture": "brandnew", catalog.GHOST_KEY: True}, rows, "brandnew")
    (tmp_path / "new.gguf").write_bytes(encoded.raw)
    os.truncate(tmp_path / "new.gguf", encoded.header.file_bytes)
    found = plan_json(str(tmp_path / "new.gguf"), "--machine", "epyc-9175f", "--context", "4096", "--sequences", "1")
    assert found["fits"]
    assert found["forecast"]["decode_tok_s"]
    assert any("brandnew" in guess for guess in found["model"]["guesses"])
