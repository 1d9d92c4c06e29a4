"""Commands of published runs: the engine has their options, and the placement is the one that the record states."""

import json
import shlex
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from support.run_models import drawn
from support.runs import CASES
from tokenmill.launch import ReadCommand, read_command, to_placement
from tokenmill.model.profile import Experts, LayerCache, Profile, TensorClass
from tokenmill.model.read import read

Record = Mapping[str, Any]
PROGRAMS = {"llama.cpp": "llama-server", "ik_llama.cpp": "llama-sweep-bench"}  # the second only the fork has
RECORDS: list[Record] = [
    record
    for record in json.loads((CASES / "public_runs_3.json").read_text(encoding="utf-8"))["runs"]
    if record["engine"]["name"] in PROGRAMS
]
GONE = {"-fmoe"}  # on by default since, and no longer an option
VALUES = {
    "ctx": "-c",
    "b": "-b",
    "ub": "-ub",
    "threads": "-t",
    "threads_batch": "-tb",
    "ngl": "-ngl",
    "ctk": "-ctk",
    "ctv": "-ctv",
    "amb": "-amb",
    "mla": "-mla",
    "ser": "-ser",
    "sm": "-sm",
    "numa": "--numa",
}
SWITCHES = {"fmoe": "-fmoe", "rtr": "-rtr", "khad": "-khad", "vhad": "-vhad", "muge": "-muge"}
CATALOGUE = {
    "DeepSeek-R1": "deepseek-v3:Q8_0",
    "DeepSeek-V3": "deepseek-v3:Q8_0",
    "Qwen3-235B": "qwen3-235b-a22b:Q8_0",
    "Llama-4-Maverick": "llama-4-maverick:Q8_0",
    "Llama-4-Scout": "llama-4-scout:Q8_0",
}


def _command(record: Record) -> ReadCommand:
    flags = record["flags"]
    words = [PROGRAMS[record["engine"]["name"]], "-m", "model.gguf"]
    for name, option in VALUES.items():
        if name in flags:
            words += [option, str(flags[name])]
    words += [option for name, option in SWITCHES.items() if flags.get(name)]
    words += ["-fa"] if flags.get("fa") else []
    words += ["--no-mmap"] if flags.get("mmap") == 0 else []
    for clause in flags.get("ot", ()):
        words += ["-ot", clause]
    return read_command(shlex.join(words))


@cache
def _qwen3_30b() -> Profile:
    return drawn(
        "qwen3-30b-a3b",
        layers=48,
        embed=2048,
        experts=Experts(128, 8),
        expert_ff=768,
        attention={"attn_q": (2048, 4096), "attn_k": (2048, 512), "attn_v": (2048, 512), "attn_output": (4096, 2048)},
        vocabulary=151936,
        heads=32,
        kv_heads=4,
        cache=(LayerCache("full", 512, 512),) * 48,
        expert_types=("Q8_0", "Q8_0"),
        rest_type="Q8_0",
    )


@cache
def _catalogue(name: str) -> Profile:
    return read(name)


def _profile(record: Record) -> Profile | None:
    if record["model"].startswith("Qwen3-30B"):
        return _qwen3_30b()
    found = next((name for start, name in CATALOGUE.items() if record["model"].startswith(start)), None)
    return None if found is None else _catalogue(found)


def _named(records: list[Record]) -> list[Any]:
    return [pytest.param(record, id=record["id"]) for record in records]


@pytest.mark.parametrize("record", _named(RECORDS))
def test_engine_has_the_options_of_the_run(record: Record) -> None:
    command = _command(record)
    assert set(command.unknown) <= GONE
    assert command.fork is (record["engine"]["name"] == "ik_llama.cpp")
    flags, goal = record["flags"], command.goal
    understood = {"ctx": goal.context, "b": goal.batch, "threads": goal.threads, "ngl": command.gpu_layers}
    for name, value in understood.items():
        assert name not in flags or value == flags[name], name
    assert "ub" not in flags or goal.ubatch == min(flags["ub"], flags.get("b", 2048))


PLACED = [r for r in RECORDS if r["flags"].get("ot") and r["machine"]["gpus"] and _profile(r) is not None]


@pytest.mark.parametrize("record", _named(PLACED))
def test_placement_is_the_stated_one(record: Record) -> None:
    profile = _profile(record)
    assert profile is not None
    cards = sum(gpu["count"] for gpu in record["machine"]["gpus"])
    placement = to_placement(_command(record), profile, cards)
    homes: dict[int, set[str]] = {}
    for tensor, home in zip(profile.tensors, placement.homes, strict=True):
        if tensor.cls is TensorClass.ROUTED_EXPERTS and tensor.layer is not None:
            homes.setdefault(tensor.layer, set()).add("card" if home.startswith("gpu") else "host")
    on_cards = sum(tiers == {"card"} for tiers in homes.values())
    split = sum(tiers == {"card", "host"} for tiers in homes.values())
    if record["expert_layers_on_gpu"] is None:
        assert split > 0
    else:
        assert (on_cards, split) == (record["expert_layers_on_gpu"], 0)
