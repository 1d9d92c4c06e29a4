"""The facts that the doctor reads: versions of nvidia-smi, limits, control groups, registered engines, the model."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from support.doctor_machines import DOCTOR, MACHINE, captured, looked_at
from tokenmill.config import Config, EngineConfig
from tokenmill.doctor import nvidia_smi
from tokenmill.doctor.facts import CgroupFacts, MemoryHolder, Pool
from tokenmill.doctor.gather import engine_states, gather, parse_open_files
from tokenmill.doctor.model import model_facts
from tokenmill.engine.process import registry
from tokenmill.engine.process.identity import Pid
from tokenmill.hardware.machine import Measurements, Rate
from tokenmill.model.read import read
from tokenmill.model.synthetic import ghost
from tokenmill.planner.goal import Goal
from tokenmill.units import GIB, MIB


def xml(name: str) -> str:
    return (DOCTOR / f"{name}.txt").read_text().partition("-- run nvidia-smi -q -x --\n")[2]


def test_drivers_before_and_after_the_renaming_are_read_alike() -> None:
    new, old = nvidia_smi.parse(xml("h200-vm")), nvidia_smi.parse(xml("eight-3090-loading"))
    assert new is not None
    assert old is not None
    assert [state.index for state in old] == list(range(8))
    assert old[0].slowed_by == ("sw_power_cap",)
    assert old[3].slowed_by == ("sw_thermal_slowdown",)
    assert (old[0].power_limit_w, old[0].default_power_limit_w) == (250.0, 350.0)
    assert old[0].utilization == pytest.approx(0.61)
    # the largest first; command lines are reduced to the program, and unknown sizes are None
    assert old[1].holders == (MemoryHolder("llama-server", 4711, 21962 * MIB), MemoryHolder("gnome-shell", 2001, None))
    assert new[0].slowed_s == {}


@pytest.mark.parametrize(
    "text", ["", "NVIDIA-SMI has failed because it couldn't communicate", "<html></html>", "<nvidia_smi_log>"]
)
def test_anything_else_is_no_answer(text: str) -> None:
    assert nvidia_smi.parse(text) is None


def test_a_card_that_says_nothing_is_unknown() -> None:
    states = nvidia_smi.parse(
        "<nvidia_smi_log><gpu><processes><process_info><pid>7</pid></process_info></processes></gpu></nvidia_smi_log>"
    )
    assert states is not None
    assert (states[0].persistent, states[0].power_limit_w, states[0].utilization) == (None, None, None)
    assert states[0].holders == (MemoryHolder("a process", 7, None),)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Max open files            1024                 524288               files\n", (1024, 524288)),
        ("Max open files            unlimited            unlimited            files\n", (None, None)),
        ("", (None, None)),
    ],
)
def test_open_files(text: str, expected: tuple[int | None, int | None]) -> None:
    assert parse_open_files(text) == expected


def test_groups_are_read_up_to_the_top(tmp_path: Path) -> None:
    found = looked_at(captured(tmp_path, "epyc-dual", "epyc-dual-untuned"))
    assert found.groups[0] == CgroupFacts("/mill.slice/tokenmill.service/worker", oom_kills=1)
    assert found.groups[1].high_bytes == 850 * GIB
    assert found.groups[1].cpus == 120.0
    assert found.groups[2].max_bytes == 900 * GIB
    assert [group.unit for group in found.groups] == ["tokenmill.service", "tokenmill.service", "mill.slice"]
    assert found.groups_seen
    assert found.pools == (Pool(GIB, 16, 16),)


def test_the_board_tells_its_channels_only_where_slots_are_named(tmp_path: Path) -> None:
    assert looked_at(captured(tmp_path, "eight-3090")).board_channels == 8
    assert looked_at(captured(tmp_path, "this-vm")).board_channels is None


def test_the_configuration_decides_what_engine_is_meant(tmp_path: Path) -> None:
    host = captured(tmp_path, "this-vm")
    config = Config(state_dir=str(tmp_path), engine=EngineConfig(kind="vllm", container="localhost/vllm"))
    found = gather(host=host, config=config, pause=lambda _: None)
    assert (found.engine_kind, found.own_build, found.started_by_us) == ("vllm", True, False)


def record(name: str, pid: Pid) -> registry.Record:
    return registry.Record(
        name, "native", pid, pid, "socket", "model", "id", "build", ("x",), 0.0, "log", detached=False
    )


def test_records_are_looked_at_and_left_alone(tmp_path: Path) -> None:
    here = Pid.of(os.getpid())
    assert here is not None
    gone = replace(here, ticks=here.ticks + 1)
    registry.write(tmp_path, record("alive", here))
    registry.write(tmp_path, record("gone", gone))
    (tmp_path / "engines" / "not a name!").mkdir()
    (tmp_path / "engines" / "broken").mkdir()
    (tmp_path / "engines" / "broken" / "engine.json").write_text(json.dumps(asdict(here)))
    assert [(state.record.name, state.alive, state.supervised) for state in engine_states(tmp_path)] == [
        ("alive", True, True),
        ("gone", False, False),
    ]
    assert registry.read(tmp_path, "gone") is not None
    assert engine_states(tmp_path / "absent") == ()


def test_a_model_without_files_is_only_planned() -> None:
    found = model_facts("llama-4-scout:Q4_K_M", MACHINE, read("llama-4-scout:Q4_K_M"), Goal(context=4096))
    assert (found.paths, found.cached_bytes, found.disk_gb_s) == ((), None, None)
    assert found.plan.fits


def test_what_the_machine_file_measured_counts() -> None:
    measured = Measurements("2026-11-15T00:00:00Z", (Rate("disk", 6.5),))
    found = model_facts("x", MACHINE, read("llama-4-scout:Q4_K_M"), Goal(context=4096), measured=measured)
    assert (found.disk_gb_s, found.disk_measured) == (6.5, True)


def test_a_ghost_is_not_taken_for_a_model_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "ghost.gguf"
    ghost.write("qwen3-32b:Q4_K_M", path)
    found = model_facts(str(path), MACHINE, read(path), Goal(context=4096))
    assert found.paths == (path,)
    assert found.file_bytes is not None
    assert found.file_bytes < 64 * MIB
    assert found.disk_gb_s is None  # holes are not read from disk
