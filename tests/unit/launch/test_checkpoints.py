"""Copies of recurrent states that llama-server keeps in host memory."""

from dataclasses import replace

import pytest

from tokenmill.hardware.catalog import find
from tokenmill.hardware.machine import Dram
from tokenmill.launch import spell
from tokenmill.model import catalog
from tokenmill.model.describe import describe
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make
from tokenmill.units import GIB


def words(name: str, dram_gib: int) -> str:
    profile = describe((catalog.header(name, words=False),), format="catalog")
    machine = replace(find("epyc-9175f"), dram=Dram(total_bytes=dram_gib * GIB), gpus=())
    plan = make(machine, profile, Goal(context=8192, sequences=8, repack=False))
    assert plan.fits
    return " ".join(spell(plan, model="/m/x.gguf").argv)


@pytest.mark.parametrize(("dram_gib", "limited"), [(36, True), (512, False)])
def test_checkpoints_are_limited_to_free_memory(dram_gib: int, limited: bool) -> None:
    assert ("--ctx-checkpoints" in words("qwen3.5-35b-a3b:Q4_K_M", dram_gib)) == limited


def test_models_without_recurrent_states_have_no_such_copies() -> None:
    assert "--ctx-checkpoints" not in words("qwen3-30b-a3b:Q4_K_M", 36)
