"""Published command lines are parsed, and their problems found."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.dialect_plans import machine_with, placed, plan_of, small_profile
from tokenmill.errors import UsageError
from tokenmill.hardware.catalog import find
from tokenmill.hardware.machine import Limits, Machine
from tokenmill.launch import Finding, ReadCommand, findings_for, read_command, spell, to_placement
from tokenmill.launch.files import write_as
from tokenmill.launch.parse.shell_words import unwrap
from tokenmill.model.read import read
from tokenmill.planner.compute_graph.ik_options import IK_SPRING_2026
from tokenmill.planner.goal import Goal
from tokenmill.units import GIB, MIB

COMMANDS = Path(__file__).parents[2] / "data" / "commands"


def published(name: str) -> ReadCommand:
    return read_command((COMMANDS / f"{name}.txt").read_text())


def said(findings: tuple[Finding, ...], *words: str) -> Finding:
    """The only finding that contains all these words."""
    found = [finding for finding in findings if all(word in finding.text for word in words)]
    assert len(found) == 1, [finding.text for finding in findings]
    return found[0]


def silent(findings: tuple[Finding, ...], word: str) -> bool:
    return not any(word in finding.text for finding in findings)


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        (
            "000-sweep-bench",
            {
                "program": "llama-sweep-bench",
                "engine": "ik_llama",
                "slot_tokens": 131072,
                "overrides": (("exps", "CPU"),),
                "gpu_layers": 999,
            },
        ),
        (
            "000-cpu-16-threads",
            {
                "program": "llama-server",
                "engine": "llama.cpp",
                "slot_tokens": 8192,
                "overrides": (),
                "gpu_layers": None,
            },
        ),
        ("000-cpu-13-threads", {"engine": "llama.cpp", "port": 8080, "host": "0.0.0.0"}),
        ("000-hybrid", {"engine": "ik_llama", "model": None, "overrides": (("exps", "CPU"),)}),
        ("000-recommended", {"engine": "llama.cpp", "slot_tokens": 131072}),
        ("001-overrides", {"engine": "ik_llama", "alias": "Kimi-K2.5-Q4_X", "fit": None, "explicit": True}),
        ("001-fit", {"engine": "ik_llama", "fit": True, "fit_margins_mib": (3072,), "explicit": False}),
        ("001-fit-margins", {"fit": True, "fit_margins_mib": (12000,) * 7 + (12550,), "slot_tokens": 92160}),
        ("002-cpu", {"engine": "llama.cpp-2025", "numactl": ("--cpunodebind=0", "--membind=0")}),
        (
            "002-vllm",
            {
                "program": "vllm",
                "engine": "vllm",
                "slot_tokens": 110000,
                "model": "nvidia/Llama-4-Scout-17B-16E-Instruct-NVFP4",
            },
        ),
    ],
)
def test_published_commands_are_understood(name: str, facts: dict[str, Any]) -> None:
    command = published(name)
    assert {key: getattr(command, key) for key in facts} == facts
    assert command.unknown == ()


@pytest.mark.parametrize(
    ("name", "goal"),
    [
        (
            "000-sweep-bench",
            {
                "context": 131072,
                "ubatch": 4096,
                "batch": 4096,
                "threads": 13,
                "threads_batch": 26,
                "mmap": False,
                "cache_ram_bytes": 0,
                "cpu_only": False,
                "own_fit": False,
            },
        ),
        (
            "000-cpu-13-threads",
            {
                "context": 8192,
                "sequences": 1,
                "cache_type_k": "q8_0",
                "cache_type_v": "q8_0",
                "threads": 13,
                "cpu_only": True,
                "mmap": True,
                "repack": True,
                "own_fit": False,
                "cache_ram_bytes": 8 * GIB,
            },
        ),
        (
            "001-fit",
            {
                "cache_type_k": "q6_0",
                "cache_type_v": "q4_0",
                "own_fit": True,
                "ubatch": 256,
                "fit_margin_bytes": (3072 * MIB,),
                "mmap": False,
            },
        ),
        ("002-cpu", {"mlock": True, "cpu_only": True, "flash_attention": True}),
        ("002-vllm", {"context": 110000, "sequences": 1, "gpu_memory_utilization": 0.88, "cache_type_k": None}),
    ],
)
def test_goals_of_published_commands(name: str, goal: dict[str, Any]) -> None:
    found = published(name).goal
    assert {key: getattr(found, key) for key in goal} == goal


def test_180_clauses_place_what_the_report_says() -> None:
    command = published("001-overrides")
    assert len(command.overrides) == 180
    profile = read("kimi-k2.5:Q4_X")
    placement = to_placement(command, profile, 8)
    homes = {
        row.layer: home for row, home in zip(profile.tensors, placement.homes, strict=True) if "_exps." in row.name
    }
    on_gpus = {layer: home for layer, home in homes.items() if home != "dram"}
    assert on_gpus == {1: "gpu0", 8: "gpu1", 16: "gpu2", 24: "gpu3", 32: "gpu4", 40: "gpu5", 48: "gpu6", 56: "gpu7"}
    assert placement.head == "gpu7"
    assert sorted(Counter(placement.layers).values()) == [6, 7, 8, 8, 8, 8, 8, 8]
    finding = said(findings_for(command, find("epyc-7532-8x3090"), profile), "9 overrides would replace the 180")
    overrides = (finding.hint or "").removeprefix("use ")
    shorter = read_command(f"/x/ik_llama/llama-server -m x -ngl 999 {overrides}")
    assert to_placement(shorter, profile, 8) == placement


def test_experts_on_the_host() -> None:
    profile = read("kimi-k2.5:Q4_K_S")
    placement = to_placement(published("000-hybrid"), profile, 1)
    for row, home in zip(profile.tensors, placement.homes, strict=True):
        assert home == ("dram" if "exps" in row.name or row.name.startswith("token_embd") else "gpu0")
    assert set(placement.layers) == {"gpu0"}


def test_cpu_only_in_a_container_without_a_gpu() -> None:
    profile = small_profile(4)
    placement = to_placement(published("000-cpu-13-threads"), profile, 1, host="pmem")
    assert set(placement.homes) == {"pmem"}
    assert (set(placement.layers), placement.head) == ({"pmem"}, "pmem")


def test_a_fit_leaves_the_placement_to_the_engine() -> None:
    with pytest.raises(UsageError, match="place"):
        to_placement(published("001-fit"), small_profile(4), 8)
    with pytest.raises(UsageError, match="place"):
        to_placement(read_command("llama-server -m x"), small_profile(4), 1)


@pytest.mark.parametrize(
    ("name", "words", "severity"),
    [
        ("000-cpu-13-threads", ("publishes", "all addresses"), "warning"),
        ("000-cpu-13-threads", ("resident twice",), "warning"),
        ("000-hybrid", ("-n 128",), "warning"),
        ("000-hybrid", ("$MODEL",), "note"),
        ("001-overrides", ("-ub 256", "8 times as often"), "warning"),
        ("001-overrides", ("listens on all addresses",), "warning"),
        ("001-fit", ("-muge", "swap"), "warning"),
        ("001-fit", ("-ngl", "with --fit"), "note"),
        ("001-fit", ("while layers are placed",), "note"),
        ("001-fit-margins", ("takes one number", "12000"), "warning"),
        ("002-cpu", ("mlock in a container",), "warning"),
        ("002-vllm", ("all addresses",), "warning"),
    ],
)
def test_what_is_wrong_with_published_commands(name: str, words: tuple[str, ...], severity: str) -> None:
    assert said(published(name).findings, *words).severity == severity


def test_margins_after_a_comma_have_a_flag_of_their_own() -> None:
    finding = said(published("001-fit-margins").findings, "takes one number")
    assert "--gpu-fit-margin 7,12550" in (finding.hint or "")


SERVER = "llama-server -m x.gguf -np 1 --cache-ram 0 --load-mode none "
FORK = "/opt/ik_llama.cpp/llama-server -m x.gguf "


@pytest.mark.parametrize(
    ("command", "words", "severity"),
    [
        (SERVER + "--fit on -ngl 20", ("--fit on has no effect", "-ngl"), "error"),
        (SERVER + "--fit on -ts 1,2 -ot exps=CPU", ("-ts, -ot", "no effect"), "error"),
        (SERVER + "--fit on --n-cpu-moe 3", ("-cmoe or -ncmoe",), "error"),
        (FORK + "-ngl 999 --fit -ot exps=CPU", ("--fit with -ot", "does not accept"), "error"),
        (FORK + "-ngl 999 --fit-margin 1024", ("nothing without --fit",), "warning"),
        (FORK + "-c 4096", ("without -ngl",), "warning"),
        (SERVER + "-ngl 999 -ts 1,1,1 -ncmoe 20", ("--n-cpu-moe 20", "3 GPUs"), "warning"),
        (SERVER + "-ngl 999 -cmoe -ub 128", ("-ub 128", "16 times as often"), "warning"),
        (SERVER + "-ngl 999 -cmoe -ub 2048 -b 512", ("-b 512 is smaller",), "warning"),
        ("llama-server -m x -c 16384 -np 4", ("4 slots: 4096 tokens each",), "warning"),
        (FORK + "-ngl 99 -c 16384 -np 4", ("4 slots: 4096 tokens each",), "warning"),
        ("llama-server -m x -c 16384", ("4 slots", "one KV cache of 16384"), "note"),
        ("llama-server -m x -np 1", ("training context",), "note"),
        (SERVER + "-ctv q8_0 -fa off", ("-ctv q8_0 needs flash attention",), "error"),
        (SERVER + "-ctk q8_0 -fa off", ("-ctk q8_0 without flash attention",), "warning"),
        (SERVER + "-ctk q6_0", ("no cache type q6_0",), "error"),
        (FORK + "-ngl 99 -ctk q5_0", ("GGML_IQK_FA_ALL_QUANTS",), "note"),
        (SERVER + "--host 0.0.0.0", ("listens on all addresses",), "warning"),
        ("llama-server -m x -np 40 -ngl 999 -cmoe", ("40 slots", "five times slower"), "warning"),
        ("llama-server -m x -np 224 -ngl 999 -cmoe --load-mode none", ("224 slots", "see the forecast"), "note"),
        ("llama-server -m x --cache-ram -1", ("--cache-ram -1", "222 GB"), "warning"),
        ("llama-server -m x -np 1", ("without --cache-ram", "8.0 GiB"), "note"),
        (SERVER + "-n 64", ("-n 64",), "warning"),
        ("llama-server -m x --no-mmap --load-mode none", ("has no flag --load-mode",), "error"),
        (SERVER + "--ctx-sizze 1", ("has no flag --ctx-sizze",), "error"),
        (FORK + "-ngl 99 -fmoe", ("has no flag -fmoe",), "error"),
        (FORK + "-ngl 99 --kv-unified", ("has no flag --kv-unified",), "error"),
        ("llama-server -c 1", ("names no model",), "warning"),
        ("llama-server -m x --mlock", ("mlock needs",), "note"),
    ],
)
def test_what_can_be_wrong(command: str, words: tuple[str, ...], severity: str) -> None:
    assert said(read_command(command).findings, *words).severity == severity


@pytest.mark.parametrize(
    ("command", "word"),
    [
        (SERVER + "--host 0.0.0.0 --api-key secret", "all addresses"),
        ("podman run -p 127.0.0.1:8080:8080 img -m x --host 0.0.0.0", "all addresses"),
        ("podman run --ulimit memlock=-1 img -m x --mlock", "mlock"),
        (SERVER + "--fit off -ngl 20 -ot exps=CPU", "--fit on"),
        (SERVER + "-ngl 999 -ncmoe 20", "--n-cpu-moe 20"),  # nothing says there are several GPUs
        (SERVER + "-ngl 0 -ub 128", "-ub 128"),  # nothing crosses PCIe
        ("GGML_OP_OFFLOAD_MIN_BATCH=128 llama-server -m x -np 40 -ngl 999 -cmoe", "five times"),
        (SERVER + "-ngl 0 --no-repack", "resident twice"),
        ("llama-server -m x -c 16384 -np 4 --kv-unified", "tokens each"),
        (SERVER + "-ngl 999 -ctv q8_0", "needs flash attention"),  # on unless turned off
    ],
)
def test_what_is_right_is_not_criticised(command: str, word: str) -> None:
    assert silent(read_command(command).findings, word)


def test_errors_come_first() -> None:
    found = read_command("llama-server -m x --host 0.0.0.0 -ctv q8_0 -fa off --nonsense 3").findings
    assert [finding.severity for finding in found] == sorted(
        (finding.severity for finding in found), key=["error", "warning", "note"].index
    )


@pytest.mark.parametrize(
    ("command", "machine", "words", "severity"),
    [
        (SERVER + "-t 20", machine_with(cores=16), ("--threads 20", "16 CPUs"), "warning"),
        (SERVER + "-t 20", machine_with(cores=16, threads_per_core=2), ("--threads 20", "16 cores"), "warning"),
        (SERVER + "-t 16 -tb 32", machine_with(cores=16, threads_per_core=2), ("--threads-batch 32",), "note"),
        (SERVER + "-ngl 999 -ts 1,1,1", machine_with(2), ("3 GPUs", "has 2"), "error"),
        (SERVER + "-ngl 0", machine_with(nodes=2), ("2 NUMA nodes",), "warning"),
        ("llama-server -m x --mlock", Machine("m", limits=Limits(memlock_bytes=64 * MIB)), ("64.0 MiB",), "warning"),
        (SERVER + "-ngl 999 -ot blk.77.=CPU,exps=CPU", machine_with(1), ("blk.77.=CPU places no tensor",), "warning"),
        (
            SERVER + "-ngl 999 -ot exps=CPU,ffn_up_exps=CUDA0",
            machine_with(1),
            ("ffn_up_exps=CUDA0 places",),
            "warning",
        ),
        (SERVER + "-ngl 999 -ot exps=CUDA3", machine_with(1), ("puts tensors on CUDA3",), "error"),
        (SERVER + "-ngl 999 -ncmoe 10", machine_with(2), ("--n-cpu-moe 10", "gpu1 holds"), "warning"),
        (SERVER + "-c 65536", machine_with(), ("longer than the 32768",), "warning"),
    ],
)
def test_what_a_machine_and_a_model_tell(command: str, machine: Machine, words: tuple[str, ...], severity: str) -> None:
    found = findings_for(read_command(command), machine, small_profile(20))
    assert said(found, *words).severity == severity


def test_a_machine_takes_nothing_away() -> None:
    command = published("001-overrides")
    everything = findings_for(command, find("epyc-7532-8x3090"))
    assert set(command.findings) < set(everything)
    assert silent(findings_for(published("000-cpu-16-threads"), find("epyc-9175f")), "--threads ")
    assert said(findings_for(published("000-hybrid"), find("epyc-9175f")), "--threads-batch 26")


def test_order_of_overrides_is_the_order_of_the_command() -> None:
    command = read_command("llama-server -m x -ngl 9 -ot a=CUDA0 -ncmoe 2 -ot b=CUDA1,c=CPU -cmoe")
    moe = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
    assert command.overrides == (
        ("a", "CUDA0"),
        (rf"blk\.([01]){moe}", "CPU"),
        ("b", "CUDA1"),
        ("c", "CPU"),
        (moe, "CPU"),
    )


def test_ncmoe_keeps_the_first_layers() -> None:
    profile = small_profile(20, dense=0)
    placement = to_placement(read_command("llama-server -m x -ngl 999 -ncmoe 12 -ts 1,1"), profile, 2)
    homes = {row.layer: home for row, home in zip(profile.tensors, placement.homes, strict=True) if "_exps" in row.name}
    assert {layer for layer, home in homes.items() if home == "dram"} == set(range(12))
    assert {homes[layer] for layer in range(12, 20)} == {"gpu1"}


def test_free_memory_splits_where_nothing_else_does() -> None:
    placement = to_placement(read_command("llama-server -m x -ngl 999"), small_profile(11), 2, free_bytes=(3, 1))
    assert Counter(placement.layers) == {"gpu0": 9, "gpu1": 2}


def test_visible_devices_are_the_machines_own() -> None:
    command = read_command(
        "CUDA_VISIBLE_DEVICES=3,1 llama-server -m x -ngl 999 -ts 1,3 -ot ffn_up=CUDA0,ffn_gate_exps=CPU"
    )
    assert command.goal.gpus == (3, 1)
    placement = to_placement(command, small_profile(7), 2)
    assert placement.layers == ("gpu3",) * 2 + ("gpu1",) * 5
    assert set(placement.gpus) == {"gpu1", "gpu3"}


@pytest.mark.parametrize(
    ("command", "gpus"),
    [
        ("llama-server -m x -dev CUDA1,CUDA2", (1, 2)),
        ("CUDA_VISIBLE_DEVICES=4,5,6 llama-server -m x -dev CUDA2", (6,)),
        ("llama-server -m x -sm none -mg 1", (1,)),
        ("llama-server -m x", None),
    ],
)
def test_which_gpus(command: str, gpus: tuple[int, ...] | None) -> None:
    assert read_command(command).goal.gpus == gpus


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sudo -E nice -n 5 taskset -c 0-3 ./llama-server -m x", ("./llama-server", "-m", "x")),
        ("$ numactl -N 0 -m 0 -- llama-server -m x", ("llama-server", "-m", "x")),
        ("cd /srv && ./llama-server -m x > log 2>&1 &", ("./llama-server", "-m", "x")),
        ('M=a/b.gguf\nllama-server \\\n  -m "${M}"', ("llama-server", "-m", "a/b.gguf")),
        ("llama-server\n# the model\n-m x\n--port 1", ("llama-server", "-m", "x", "--port", "1")),
        ("llama-server \u2013m x \u2014threads 3", ("llama-server", "--m", "x", "--threads", "3")),
        ("llama-server -m \u201ca b\u201d", ("llama-server", "-m", "a b")),
        ("llama-server -m x \\ --port 3", ("llama-server", "-m", "x", "--port", "3")),
        ("env A=1 chrt --rr 99 llama-server -m x", ("llama-server", "-m", "x")),
    ],
)
def test_wrappers_come_off(text: str, words: tuple[str, ...]) -> None:
    assert unwrap(text).words == words


def test_what_the_wrappers_said_is_kept() -> None:
    found = unwrap("A=1 numactl --interleave=all docker run -it --gpus all -e B=2 -p 1:2 -v a:b img llama-server -m $X")
    assert found.env == {"A": "1", "B": "2"}
    assert found.numactl == ("--interleave=all",)
    assert found.container is not None
    assert (found.container.image, found.container.gpus, found.container.all_of("p")) == ("img", True, ("1:2",))
    assert found.unset == ("X",)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "empty"),
        ("# only a comment", "empty"),
        ("llama-server -m 'x", "quote"),
        ("ollama run llama3", "ollama"),
        ("podman run --rm", "podman run has no image"),
        ("llama-server -m x -c many", "--ctx-size many: not a number"),
        ("llama-server -m x -c --port 3", "-c needs a value"),
        ("llama-server -m x -c", "-c needs a value"),
        ("llama-server -m x -ot exps", "--override-tensor exps"),
        ("llama-server -m x --fit-target big", "fit margin big"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        read_command(text)


@pytest.mark.parametrize(
    ("command", "engine"),
    [
        ("llama-server -m x", "llama.cpp"),
        ("llama-server -m x --load-mode none", "llama.cpp"),
        ("llama-server -m x --no-mmap", "llama.cpp-2025"),
        ("llama-server -m x -mla 3", "ik_llama"),
        ("llama-server -m x -fmoe", "ik_llama"),
        ("~/ik_llama.cpp/build/bin/llama-server -m x", "ik_llama"),
        ("docker run --gpus all me/ik-llama:latest -m x", "ik_llama"),
        ("llama-bench -m x -mmp 0", "llama.cpp-2025"),
        ("docker run --gpus all vllm/vllm-openai --model x", "vllm"),
        ("python3 -m vllm.entrypoints.openai.api_server --model x", "vllm"),
    ],
)
def test_engines_are_told_apart(command: str, engine: str) -> None:
    assert read_command(command).engine == engine


def test_llama_bench_lists_and_separators() -> None:
    command = read_command(
        "llama-bench -m x -p 2048 -n 64 -t 8,16 -ub 512,2048 -ngl 99 -fa 1 -mmp 0 -ot 'a=CPU;b=CUDA0' -ts 3/1"
    )
    assert (command.goal.context, command.goal.threads, command.goal.ubatch, command.goal.mmap) == (2112, 8, 512, False)
    assert command.overrides == (("a", "CPU"), ("b", "CUDA0"))
    assert command.tensor_split == (3.0, 1.0)
    assert command.goal.cache_ram_bytes == 0
    assert read_command("llama-bench -m x").goal.context == 640


@pytest.mark.parametrize(
    ("command", "goal"),
    [
        ("vllm serve m --max-model-len 110k --tensor-parallel-size=2", {"context": 110_000, "tensor_parallel": 2}),
        ("vllm serve m --max-model-len 8K -tp 4 --kv-cache-dtype fp8", {"context": 8192, "cache_type_v": "fp8"}),
        ("vllm serve m --max-num-seqs 16 --max-num-batched-tokens 8192", {"sequences": 16, "batch": 8192}),
    ],
)
def test_vllm_numbers(command: str, goal: dict[str, Any]) -> None:
    found = read_command(command)
    assert found.model == "m"
    assert {key: getattr(found.goal, key) for key in goal} == goal


def test_switches_of_the_fork() -> None:
    assert published("001-fit-margins").goal.ik is None
    hybrid = published("000-hybrid").goal.ik
    assert hybrid is not None
    assert (hybrid.mla, hybrid.amb_mib, hybrid.muge) == (3, 512, False)
    older = read_command((COMMANDS / "001-fit.txt").read_text(), "ik_llama-2026-04").goal
    assert older.engine == "ik_llama-2026-04"
    assert older.ik == replace(IK_SPRING_2026, muge=True)
    with pytest.raises(UsageError, match="for vllm, not for ik_llama"):
        read_command("vllm serve m", "ik_llama")


@pytest.mark.parametrize(
    ("flags", "margins"),
    [
        ("--fit --fit-margin 12000,12000,12550", [12000]),
        ("--fit --fit-margin 2048 --gpu-fit-margin 0,3072,2,4096", [3072, 2048, 4096, *[2048] * 13]),
        ("--fit -gfm 1,3072", [1024, 3072, *[1024] * 14]),
        ("--fit", []),
    ],
)
def test_margins_are_those_the_fork_heeds(flags: str, margins: list[int]) -> None:
    assert [margin // MIB for margin in read_command(FORK + f"-ngl 999 {flags}").goal.fit_margin_bytes] == margins


def test_margins_of_llama_cpp_are_one_per_gpu() -> None:
    goal = read_command("llama-server -m x --fit on --fit-target 1024,2048").goal
    assert goal.own_fit
    assert goal.fit_margin_bytes == (GIB, 2 * GIB)


def test_unified_slots_share_the_cache() -> None:
    shared = read_command("llama-server -m x -c 16384 -np 4 --kv-unified")
    assert (shared.slot_tokens, shared.goal.context, shared.goal.sequences) == (16384, 4096, 4)
    auto = read_command("llama-server -m x -c 16384")
    assert (auto.slots, auto.slot_tokens, auto.goal.context, auto.goal.sequences) == (4, 16384, 16384, 1)


def test_our_own_scripts_are_read_back() -> None:
    profile = small_profile(30)
    placement = placed(profile, [f"gpu{layer // 5}" for layer in range(30)], "gpu5", range(1, 30, 5))
    plan = plan_of(profile, placement, machine_with(6), goal=Goal(reserve_cores=2), sequences=2, mlock=True)
    command = spell(plan, model="/m/x.gguf")
    for kind in ("shell", "podman"):
        again = read_command(write_as(kind, command, plan))
        assert again.unknown == ()
        assert (again.goal.context, again.goal.sequences, again.goal.mlock) == (8192, 2, True)
        assert to_placement(again, profile, 6) == placement
        assert {finding.severity for finding in again.findings} <= {"warning", "note"}
        assert silent(again.findings, "all addresses")
        assert silent(again.findings, "container")


def test_fewer_experts_per_token_are_read_and_keys_of_the_model_are_refused() -> None:
    found = read_command("llama-server -m kimi.gguf -ngl 99 -fmoe -ser 6,1")
    assert found.goal.ik is not None
    assert found.goal.ik.experts_used == 6
    with pytest.raises(UsageError):
        read_command("llama-server -m kimi.gguf --override-kv deepseek2.expert_used_count=int:4")
