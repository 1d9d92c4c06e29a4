"""A plan for llama-server's slots predicts the memory that llama.cpp projects for separate caches."""

from dataclasses import replace
from pathlib import Path

import pytest

from tokenmill.hardware.catalog import find
from tokenmill.model.read import read
from tokenmill.model.synthetic import generate, ghost
from tokenmill.native.verify import request, verify
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    generate.write("moe", generate.sizes("moe", {}), folder / "moe.gguf")
    ghost.write(
        "gpt-oss-120b:MXFP4_MOE", folder / "windows.gguf"
    )  # sliding windows, with a separate cache in each slot
    return {"moe": folder / "moe.gguf", "windows": folder / "windows.gguf"}


@pytest.mark.parametrize("name", ["moe", "windows"])
@pytest.mark.parametrize("sequences", [1, 8, 32])
def test_slots_use_the_memory_of_the_ledger(models: dict[str, Path], name: str, sequences: int) -> None:
    goal = Goal(context=1024, sequences=sequences, cpu_only=True, ubatch=512)
    for asked, together in ((goal, sequences == 1), (replace(goal, unified=True), True)):
        plan = make(find("epyc-9175f"), read(models[name]), asked)
        assert request(plan).contexts[0].unified is together
        found = {row.item: row.difference for row in verify(plan, models[name]).rows}
        assert (found["kv"], found["compute"]) == pytest.approx((0, 0), abs=1e-3)
