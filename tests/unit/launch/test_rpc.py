"""Commands for every host: llama.cpp's RPC servers and main server, and vLLM on Ray."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tokenmill.cli import run
from tokenmill.cli.planning.plan_hosts import spell_hosts
from tokenmill.errors import UsageError
from tokenmill.hardware.fleet import Fleet, FleetHost, NetworkLink
from tokenmill.hardware.machine import Cpu, Dram, Gpu, Machine, Measurements, Rate
from tokenmill.launch.layers import devices
from tokenmill.launch.rpc import HostCommand
from tokenmill.launch.tensor_patterns import resolve
from tokenmill.model.profile import TensorClass
from tokenmill.model.read import read as read_model
from tokenmill.planner.goal import Goal
from tokenmill.planner.multi_host.hosts import HostsPlan
from tokenmill.planner.multi_host.make import make_over
from tokenmill.units import GIB

read = cache(read_model)
DENSE, MIXTURE = "llama-3.3-70b:Q4_K_M", "gpt-oss-120b:MXFP4"


def box(dram_gib: float, *vram_gib: float) -> Machine:
    cards = tuple(
        Gpu(i, "NVIDIA H100 80GB HBM3", "nvidia", round(size * GIB), nominal_gb_s=3350.0)
        for i, size in enumerate(vram_gib)
    )
    rates = Measurements("2026-11-15T00:00:00Z", (Rate("dram", 200.0, 16, {1: 20.0, 16: 200.0}),))
    return Machine(
        "box",
        Cpu(sockets=1, cores=16, isa=("avx2",)),
        dram=Dram(total_bytes=round(dram_gib * GIB)),
        gpus=cards,
        measured=rates,
    )


def planned(model: str, *machines: Machine, layers: tuple[int, ...] | None = None, **goal: Any) -> HostsPlan:
    hosts = tuple(FleetHost(f"h{i}", one, f"10.0.0.{i + 1}") for i, one in enumerate(machines))
    fleet = Fleet(hosts, NetworkLink(3.125, 50e-6))
    plan = make_over(fleet, read(model), Goal(**{"context": 8192, **goal}), layers=layers)
    assert plan.fits
    return plan


def spelled(plan: HostsPlan) -> tuple[HostCommand, ...]:
    return spell_hosts(plan, model="/m/model.gguf")


def value(command: HostCommand, flag: str) -> str:
    argv = command.command.argv
    return argv[argv.index(flag) + 1]


def homes_by_llama_cpp(plan: HostsPlan, head: HostCommand) -> list[str]:
    """The placement of every tensor by llama.cpp's rule for -ngl, -ts and -ot, as HOST/TIER."""
    servers = value(head, "--rpc").split(",")
    names: dict[str, str] = {}
    buffers = {"CPU": f"{plan.fleet.head.name}/dram"}
    for endpoint, share in zip(servers, plan.workers, strict=True):
        assert endpoint == share.host.endpoint
        tiers = [
            *share.placement.gpus,
            *sorted({*share.placement.homes, *share.placement.layers} - {*share.placement.gpus}),
        ]
        for index, tier in enumerate(tiers):
            names[f"RPC{len(names)}"] = buffers[f"RPC{index}[{endpoint}]"] = f"{share.host.name}/{tier}"
    shown = head.command.env.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")
    for index, card in enumerate(shown):
        names[f"CUDA{index}"] = buffers[f"CUDA{index}"] = f"{plan.fleet.head.name}/gpu{card}"
    seen = [names[name] for name in value(head, "--device").split(",")]
    argv = head.command.argv
    split = [float(part) for part in value(head, "--tensor-split").split(",")] if "--tensor-split" in argv else []
    by_layer = devices(plan.profile.layers, int(value(head, "--n-gpu-layers")), split, len(seen))
    tiers = [buffers["CPU"] if index is None else seen[index] for index in by_layer]
    clauses = []
    if "--override-tensor" in argv:
        clauses = [
            (part.rpartition("=")[0], part.rpartition("=")[2]) for part in value(head, "--override-tensor").split(",")
        ]
    found = []
    for tensor in plan.profile.tensors:
        buffer = resolve(tensor.name, clauses)
        if buffer is not None:
            found.append(buffers[buffer])
        elif tensor.cls is TensorClass.EMBEDDING:
            found.append(buffers["CPU"])
        else:
            found.append(tiers[-1] if tensor.layer is None else tiers[tensor.layer])
    return found


@pytest.mark.parametrize(
    ("model", "machines", "layers"),
    [
        (DENSE, (box(64), box(64)), (40, 40)),
        (DENSE, (box(64), box(64), box(64)), (20, 30, 30)),
        (DENSE, (box(32, 24), box(64)), (60, 20)),
        (DENSE, (box(32, 24, 24), box(32, 24, 24)), (30, 50)),
        (MIXTURE, (box(48), box(48)), None),
        (MIXTURE, (box(24, 12), box(64, 12)), None),
        (MIXTURE, (box(8, 32), box(64, 12)), None),
        (MIXTURE, (box(24), box(24, 16), box(32)), None),
    ],
)
def test_llama_cpp_would_put_every_tensor_where_the_plan_has_it(
    model: str, machines: tuple[Machine, ...], layers: tuple[int, ...] | None
) -> None:
    plan = planned(model, *machines, layers=layers)
    assert plan.workers
    assert homes_by_llama_cpp(plan, spelled(plan)[-1]) == list(plan.placement().homes)


def test_workers_listen_on_their_own_private_address_only() -> None:
    worker, head = spelled(planned(DENSE, box(64), box(64), layers=(40, 40)))
    assert (worker.host, worker.role, worker.command.argv[0]) == ("h1", "worker", "ggml-rpc-server")
    assert (value(worker, "--host"), value(worker, "--port")) == ("10.0.0.2", "50052")
    assert any("no authentication" in note for note in worker.command.notes)
    assert (head.host, head.role) == ("h0", "head")
    assert value(head, "--host") == "127.0.0.1"
    argv = head.command.argv
    assert argv.index("--rpc") < argv.index("--device") < argv.index("--override-tensor")


def test_a_name_is_no_address_for_the_server_and_ipv6_is_refused() -> None:
    plan = planned(DENSE, box(64), box(64), layers=(40, 40))
    head, worker = plan.fleet.hosts
    for address, said in (("rack2", "numeric IPv4"), ("10.0.0.2", None)):
        other = replace(worker, address=address)
        shares = tuple(replace(share, host=other) if share.host == worker else share for share in plan.shares)
        notes = spelled(replace(plan, fleet=replace(plan.fleet, hosts=(head, other)), shares=shares))[0].command.notes
        assert any("numeric IPv4" in note for note in notes) == (said is not None)
    other = replace(worker, address="fd00::2")
    shares = tuple(replace(share, host=other) if share.host == worker else share for share in plan.shares)
    with pytest.raises(UsageError, match="IPv6"):
        spelled(replace(plan, fleet=replace(plan.fleet, hosts=(head, other)), shares=shares))


def test_a_worker_shows_its_processors_only_where_the_plan_uses_them() -> None:
    hybrid = spelled(planned(MIXTURE, box(24, 12), box(64, 12)))[0]
    assert value(hybrid, "--device") == "CUDA0,CPU"
    bare = spelled(planned(DENSE, box(64), box(64), layers=(40, 40)))[0]
    assert "--device" not in bare.command.argv  # without GPUs it has nothing but processors


def test_a_tied_output_is_kept_from_the_last_worker(smollm2_path: Path) -> None:
    plan = planned(str(smollm2_path), box(8), box(8), layers=(15, 15), context=2048)
    head = spelled(plan)[-1]
    assert plan.profile.tied_output
    assert r"^token_embd\.weight$=CPU" in value(head, "--override-tensor").split(",")


def test_vllm_starts_ray_on_every_host_and_then_serves() -> None:
    plan = planned(DENSE, box(256, 80, 80), box(256, 80, 80), engine="vllm")
    first, second, serve = spelled(plan)
    assert (first.host, first.role) == ("h0", "ray head")
    assert first.command.argv[:3] == ("ray", "start", "--head")
    assert value(second, "--address") == "10.0.0.1:6379"
    assert (value(serve, "--tensor-parallel-size"), value(serve, "--pipeline-parallel-size")) == ("2", "2")
    assert value(serve, "--distributed-executor-backend") == "ray"
    for one in (first, second, serve):
        assert one.command.env["RAY_AUTH_MODE"] == "token"
    assert [one.command.env["VLLM_HOST_IP"] for one in (first, second)] == ["10.0.0.1", "10.0.0.2"]


def test_the_command_says_it_all_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        MIXTURE,
        "--machine",
        "desktop-ddr5,desktop-ddr5",
        "--link",
        "25Gbit:50us",
        "--context",
        "8192",
        "--layers",
        "18,18",
    ]
    assert run([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    contract = {"ledger", "ledger_at_load_peak", "forecast", "placement", "command", "decisions", "fits", "settings"}
    assert contract | {"hosts", "link", "commands"} <= set(said)
    assert said["link"] == {"gb_s": 3.125, "round_trip_s": pytest.approx(50e-6)}
    assert all(re.match(r"desktop-ddr5(-2)?/", row["tier"]) for row in said["ledger"])
    assert said["command"]["argv"] == said["commands"][-1]["argv"]
    assert {host["host"] for host in said["hosts"]} == {one["host"] for one in said["commands"]}


def test_the_command_shows_every_host(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ["plan", DENSE, "--machine", "epyc-7302p,epyc-7763", "--link", "10Gbit:100us", "--layers", "40,40"]
    assert run([*words, "--explain"]) == 0
    said = capsys.readouterr().out
    for part in ("epyc-7302p, head", "epyc-7763, worker", "layers 40-79", "link round trips", "on epyc-7763 (worker):"):
        assert part in said
    assert max(len(line) for line in said.partition("on epyc-7763")[0].splitlines()) <= 80


@pytest.mark.parametrize(
    "words",
    [
        ["--machine", "epyc-7302p,epyc-7763"],
        ["--machine", "epyc-7302p", "--link", "10Gbit:100us"],
        ["--machine", "epyc-7302p", "--layers", "40,40"],
        ["--machine", "epyc-7302p,epyc-7763", "--link", "10Gbit:100us", "--layers", "40,41"],
        ["--machine", "epyc-7302p,epyc-7763", "--link", "10Gbit:100us", "--verify"],
        ["--machine", "epyc-7302p,epyc-7763", "--link", "10Gbit:100us", "--pipeline-parallel", "2"],
    ],
)
def test_what_does_not_go_together_is_wrong_use(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", DENSE, *words]) == 2
    assert "hint:" in capsys.readouterr().err


def test_what_no_fleet_holds_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "kimi-k2.5:Q4_K_S", "--machine", "desktop-ddr5,desktop-ddr5", "--link", "1Gbit:1ms"]
    assert run(words) == 3
    assert "does not fit: desktop-ddr5" in capsys.readouterr().out
