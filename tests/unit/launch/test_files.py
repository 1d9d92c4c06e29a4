"""Scripts, units and compose files: readable, correctly quoted, bound to the right CPUs, published on loopback."""

import re
import shlex
from configparser import RawConfigParser
from dataclasses import replace
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from support.dialect_plans import machine_with, placed, plan_of, small_profile
from tokenmill.errors import UsageError
from tokenmill.hardware.machine import Limits
from tokenmill.launch import Command, spell
from tokenmill.launch.binding import binding
from tokenmill.launch.files import KINDS, write_as
from tokenmill.launch.files.launch import Launch, slug
from tokenmill.launch.files.services import quoted
from tokenmill.planner.goal import Goal
from tokenmill.planner.plan import Plan
from tokenmill.units import GIB

MODEL = "/srv/models/a b/x-00001-of-00002.gguf"


def eight_cards(**changes: Any) -> Plan:
    profile = small_profile(40)
    layers = [f"gpu{layer // 5}" for layer in range(40)]
    goal = changes.pop("goal", Goal(reserve_cores=3))
    return plan_of(
        profile,
        placed(profile, layers, "gpu7", range(1, 40, 5)),
        machine_with(8, nodes=2),
        goal=goal,
        host_gib=400,
        mlock=True,
        **changes,
    )


def on_cpu(**changes: Any) -> Plan:
    profile = small_profile(4)
    goal = changes.pop("goal", Goal(cpu_only=True, reserve_cores=3))
    machine = changes.pop("machine", machine_with())
    return plan_of(profile, placed(profile, ["dram"] * 4, "dram"), machine, goal=goal, **changes)


def unit_words(text: str, key: str) -> list[str]:
    """Arguments of a command in a unit file, split as in systemd.syntax(7) and systemd.service(5)."""
    found = re.search(rf"^{key}=((?:.*\\\n)*.*)$", text, re.MULTILINE)
    assert found is not None
    words: list[str] = []
    for word in re.findall(r'"(?:\\.|[^"\\])*"|\S+', found[1].replace("\\\n", " ")):
        bare = re.sub(r"\\(.)", r"\1", word[1:-1]) if word.startswith('"') else word
        assert not re.search(r"(?<!%)%(?!%)", bare.replace("%%", ""))
        words.append(bare.replace("$$", "$").replace("%%", "%"))
    return words


def script_words(text: str, program: str) -> list[str]:
    command = text[text.index("\nexec numactl") if "\nexec numactl" in text else text.index("\nexec ", 1) :]
    words = shlex.split(command.replace("\\\n", ""))  # as a shell joins lines
    return words[words.index(program) :]


def test_shell_gives_the_program_exactly_its_words() -> None:
    plan = eight_cards()
    command = spell(plan, model=MODEL)
    text = write_as("shell", command, plan)
    assert script_words(text, "llama-server") == list(command.argv)
    assert "set -eu" in text
    assert "ulimit -l unlimited" in text
    assert "export CUDA_DEVICE_ORDER=PCI_BUS_ID" in text
    assert "numactl --physcpubind=0-12 --interleave=all" in text
    assert "/health" in text


def test_every_flag_and_every_override_has_its_line() -> None:
    plan = eight_cards()
    text = write_as("shell", spell(plan, model=MODEL), plan)
    assert "\n  --ctx-size 8192 \\\n" in text
    assert len(re.findall(r"(?m)^(?:  --override-tensor )?'?blk", text)) == 8
    assert max(map(len, text.splitlines())) < 140


def test_podman() -> None:
    plan = eight_cards()
    command = spell(plan, model=MODEL)
    text = write_as("podman", command, plan, image="registry.example/llama:1", name="kimi")
    words = script_words(text, "podman")
    image = words.index("registry.example/llama:1")
    options, given_words = words[:image], words[image + 1 :]
    for expected in (
        "--device",
        "nvidia.com/gpu=all",
        "127.0.0.1:8080:8080",
        "--cap-add=SYS_NICE",
        "--cap-add=IPC_LOCK",
        "memlock=-1:-1",
        "0-12",
        "16g",
        "kimi",
        "/srv/models/a b:/models:ro,Z",
        "CUDA_DEVICE_ORDER=PCI_BUS_ID",
    ):
        assert expected in options
    assert any("curl" in word and "/health" in word for word in options)
    wanted = list(command.argv[1:])
    wanted[wanted.index(MODEL)] = "/models/x-00001-of-00002.gguf"
    wanted[wanted.index("127.0.0.1")] = "0.0.0.0"
    assert given_words == wanted


def test_quadlet() -> None:
    plan = eight_cards()
    command = spell(plan, model=MODEL)
    text = write_as("quadlet", command, plan)
    words = unit_words(text, "Exec")
    assert words[:2] == ["--model", "/models/x-00001-of-00002.gguf"]
    assert words[words.index("--override-tensor") + 1] == command.argv[command.argv.index("--override-tensor") + 1]
    for line in (
        "AddDevice=nvidia.com/gpu=all",
        "PublishPort=127.0.0.1:8080:8080",
        "Ulimit=memlock=-1:-1",
        "AddCapability=SYS_NICE IPC_LOCK",
        "Volume=/srv/models/a b:/models:ro,Z",
        "NUMAPolicy=interleave",
        "PodmanArgs=--cpuset-cpus=0-12 --memory=420g",
        "Restart=on-failure",
    ):
        assert f"\n{line}\n" in text
    assert "HealthCmd=curl" in text


def test_systemd() -> None:
    plan = eight_cards()
    command = spell(plan, model=MODEL)
    text = write_as("systemd", command, plan)
    assert unit_words(text, "ExecStart") == list(command.argv)
    for line in (
        "AllowedCPUs=0-12",
        "CPUAffinity=0-12",
        "LimitMEMLOCK=infinity",
        "MemoryMax=420G",
        "NUMAPolicy=interleave",
        "NUMAMask=all",
        "Restart=on-failure",
        "Environment=CUDA_DEVICE_ORDER=PCI_BUS_ID",
    ):
        assert f"\n{line}\n" in text
    assert re.search(r"ExecStartPost=curl .*--retry \d+ http://127.0.0.1:8080/health", text)
    parser = RawConfigParser(strict=False, allow_no_value=True, delimiters=("=",))
    parser.read_string(text.replace("\\\n", " "))
    assert parser.sections() == ["Unit", "Service", "Install"]


def test_compose() -> None:
    plan = eight_cards()
    command = spell(plan, model=MODEL)
    document = yaml.safe_load(write_as("compose", command, plan, name="kimi"))
    service = document["services"]["kimi"]
    words = [word.replace("$$", "$") for word in service["command"]]
    assert words[words.index("--override-tensor") + 1] == command.argv[command.argv.index("--override-tensor") + 1]
    assert service["ports"] == ["127.0.0.1:8080:8080"]
    assert service["cpuset"] == "0-12"
    assert service["ulimits"] == {"memlock": {"soft": -1, "hard": -1}}
    assert service["mem_limit"] == "420g"
    assert service["volumes"] == ["/srv/models/a b:/models:ro,Z"]
    assert service["environment"] == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert service["healthcheck"]["test"][-1] == "http://127.0.0.1:8080/health"
    devices = service["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]


@pytest.mark.parametrize("kind", KINDS)
def test_without_gpus_mlock_or_reserved_cores_nothing_of_them_is_written(kind: str) -> None:
    plan = on_cpu(goal=Goal(cpu_only=True))
    text = write_as(kind, spell(plan, model="/m/x.gguf"), plan)
    assert not re.search(r"nvidia|memlock|MEMLOCK|cpuset|CPUAffinity|taskset|numactl|NUMAPolicy", text)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_loopback_is_published(kind: str) -> None:
    plan = eight_cards()
    text = write_as(kind, spell(plan, model=MODEL), plan)
    assert "0.0.0.0" not in re.sub(r'--host"?,? "?0\.0\.0\.0', "", text)
    assert "127.0.0.1" in text


def test_an_unknown_kind_is_refused() -> None:
    plan = on_cpu()
    with pytest.raises(UsageError, match="'helm'") as caught:
        write_as("helm", spell(plan, model="m"), plan)
    assert "quadlet" in (caught.value.hint or "")


@given(st.lists(st.text(st.characters(codec="ascii", categories=("L", "N", "P", "S", "Zs")), min_size=1), min_size=1))
def test_any_words_survive_every_quoting(words: list[str]) -> None:
    words = [word for word in words if not re.match(r"--?[A-Za-z]", word)] or ["x"]
    plan = on_cpu(goal=Goal(cpu_only=True))
    command = Command(("llama-server", "--model", "/m/x.gguf", "--values", *words), {"A": words[0]})
    shell = write_as("shell", command, plan)
    assert script_words(shell, "llama-server") == list(command.argv)
    assert unit_words(write_as("systemd", command, plan), "ExecStart") == list(command.argv)
    document = yaml.safe_load(write_as("compose", command, plan, name="x"))
    assert [word.replace("$$", "$") for word in document["services"]["x"]["command"]][3:] == words


def test_unit_words_keep_what_systemd_would_change() -> None:
    assert quoted(r"blk\.1\.=CPU$") == r'"blk\\.1\\.=CPU$$"'
    assert quoted("100%") == "100%%"
    assert quoted("") == '""'


@pytest.mark.parametrize(
    ("model", "source", "inside"),
    [
        ("/m/x.gguf", "/m", "/models/x.gguf"),
        ("models/x.gguf", "./models", "/models/x.gguf"),
        ("x.gguf", ".", "/models/x.gguf"),
        (
            "/hf/hub/models--a--b/snapshots/386f/Q4/x-00001-of-00013.gguf",
            "/hf/hub/models--a--b",
            "/models/snapshots/386f/Q4/x-00001-of-00013.gguf",
        ),
        ("kimi-k2.5:Q4_K_S", "/path/to/models", "/models/kimi-k2.5-Q4_K_S.gguf"),
    ],
)
def test_the_models_folder_is_mounted(model: str, source: str, inside: str) -> None:
    plan = on_cpu()
    mount = Launch.of(spell(plan, model=model), plan, name=None, image=None).mount
    assert (mount.source, mount.model) == (source, inside)
    assert (mount.note is not None) == (":" in model)


def test_vllm_gets_the_hub_cache_and_its_entry_point() -> None:
    plan = on_cpu(goal=Goal(engine="vllm", cpu_only=True))
    command = spell(plan, model="org/model-NVFP4")
    podman = write_as("podman", command, plan)
    assert '--volume "$HOME"/.cache/huggingface:/root/.cache/huggingface:Z' in podman
    assert "--entrypoint vllm" in podman
    assert "serve \\\n  org/model-NVFP4 \\\n" in podman
    assert "Volume=%h/.cache/huggingface" in write_as("quadlet", command, plan)
    service = yaml.safe_load(write_as("compose", command, plan, name="v"))["services"]["v"]
    assert service["entrypoint"] == ["vllm", "serve"]
    assert service["command"][0] == "org/model-NVFP4"
    local = Launch.of(spell(plan, model="/srv/model"), plan, name=None, image=None).mount
    assert (local.source, local.model) == ("/srv/model", "/models")


def test_cores_are_left_to_the_pipeline() -> None:
    assert binding(on_cpu()).cpu_list == "0-12"
    assert binding(on_cpu(goal=Goal(cpu_only=True))).cpus is None
    both = on_cpu(machine=machine_with(threads_per_core=2), threads_batch=26)
    assert binding(both).cpu_list == "0-12,16-28"
    few = on_cpu(machine=replace(machine_with(), limits=Limits(cpuset=(0, 1, 2, 3, 14))))
    assert binding(few).cpu_list == "0-3"


def test_memory_is_bound_to_one_node_where_it_fits() -> None:
    small = binding(on_cpu(machine=machine_with(nodes=2), host_gib=100))
    assert (small.nodes, small.interleave, small.cpu_list) == ((0,), False, "0-7")
    plan = on_cpu(machine=machine_with(nodes=2), host_gib=100)
    command = spell(plan, model="/m/x.gguf")
    assert "exec numactl --physcpubind=0-7 --membind=0 llama-server" in write_as("shell", command, plan)
    assert "--cpuset-mems 0" in write_as("podman", command, plan)
    assert "NUMAPolicy=bind\nNUMAMask=0" in write_as("systemd", command, plan)
    large = binding(on_cpu(machine=machine_with(nodes=2), host_gib=300))
    assert (large.nodes, large.interleave) == (None, True)
    one = binding(on_cpu(machine=machine_with(nodes=1), host_gib=100))
    assert not one.numa
    unknown = binding(on_cpu(machine=replace(machine_with(), numa=()), host_gib=100))
    assert unknown.interleave


def test_memory_limit_is_the_engines_own_peak_and_a_little() -> None:
    assert binding(on_cpu(host_gib=400)).memory_max_bytes == 420 * GIB
    assert binding(on_cpu(host_gib=10)).memory_max_bytes == 12 * GIB


def test_loading_gets_the_time_it_is_forecast() -> None:
    plan = on_cpu()
    slow = replace(plan, forecast=replace(plan.forecast, load_cold_s=2700.0))
    assert "--health-start-period 5400s" in write_as("podman", spell(slow, model="/m/x.gguf"), slow)
    quick = replace(plan, forecast=replace(plan.forecast, load_cold_s=3.0))
    assert "HealthStartPeriod=600s" in write_as("quadlet", spell(quick, model="/m/x.gguf"), quick)


def test_names() -> None:
    assert slug("Kimi K2.5: Q4/K") == "Kimi-K2.5-Q4-K"
    assert slug("...") == "model"
