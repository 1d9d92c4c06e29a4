"""Flags for prediction layers and draft models in every dialect, and commands that use them."""

from dataclasses import replace
from typing import Any

import pytest

from support.dialect_plans import machine_with, placed, plan_of, small_profile
from tokenmill.errors import FlagUnknown
from tokenmill.launch import FlagSet, possible_versions, read_command, spell
from tokenmill.planner.goal import DialectName, Goal, Speculation
from tokenmill.planner.plan import Plan

MTP: dict[str, Any] = {"mtp": True, "draft_tokens": 2}
MODEL: dict[str, Any] = {"draft_model": "/m/small.gguf", "draft_tokens": 5}


def planned(engine: DialectName, gpus: int = 0, **draft: Any) -> Plan:
    profile = small_profile(4)
    tier = "gpu0" if gpus else "dram"
    placement = placed(profile, [tier] * 4, tier, range(4))
    made = plan_of(profile, placement, machine_with(gpus), goal=Goal(engine=engine, cpu_only=not gpus))
    return replace(made, settings=replace(made.settings, **draft))


def words(plan: Plan, flags: FlagSet | None = None) -> str:
    return " ".join(spell(plan, model="/m/x.gguf", flags=flags).argv)


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ("llama.cpp", "--spec-type draft-mtp --spec-draft-n-max 2"),
        ("ik_llama", "--spec-type mtp:n_max=2"),
        ("ik_llama-2026-04", "-mtp --draft-max 2"),
    ],
)
def test_prediction_layers(engine: DialectName, expected: str) -> None:
    assert expected in words(planned(engine, **MTP))


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ("llama.cpp", "--spec-type draft-simple --spec-draft-model /m/small.gguf --spec-draft-n-max 5 -ngld 999"),
        ("llama.cpp-2025", "--model-draft /m/small.gguf --draft-max 5 -ngld 999"),
        ("ik_llama", "--model-draft /m/small.gguf --draft-max 5 -ngld 999"),
    ],
)
def test_draft_models(engine: DialectName, expected: str) -> None:
    assert expected in words(planned(engine, 1, **MODEL))
    assert expected.replace("999", "0") in words(planned(engine, **MODEL))


def test_without_speculation_no_flag_is_added() -> None:
    assert not {"spec", "draft", "mtp"} & set(words(planned("llama.cpp", 1)).replace("-", " ").split())


def test_a_version_without_the_flags_is_refused() -> None:
    with pytest.raises(FlagUnknown):
        words(planned("llama.cpp-2025", **MTP))


@pytest.mark.parametrize(
    ("command", "tokens"),
    [
        ("llama-server -m x.gguf --spec-type draft-mtp", 3),
        ("llama-server -m x.gguf --spec-type ngram-mod,draft-mtp --spec-draft-n-max 6", 6),
        ("/opt/ik_llama.cpp/llama-server -m x.gguf --spec-type mtp:n_max=2,p_min=0.1", 2),
        ("/opt/ik_llama.cpp/llama-server -m x.gguf -mtp --draft-max 4", 4),
    ],
)
def test_commands_with_prediction_layers(command: str, tokens: int) -> None:
    assert read_command(command).goal.speculation == Speculation(tokens)


def test_commands_with_prediction_layers_are_not_of_2025() -> None:
    assert possible_versions(read_command("llama-server -m x.gguf -ngl 9 --spec-type draft-mtp")) == ("llama.cpp",)


@pytest.mark.parametrize("flag", ["-md", "--model-draft", "--spec-draft-model"])
def test_a_draft_model_in_a_command_is_named(flag: str) -> None:
    found = read_command(f"llama-server -m x.gguf {flag} /m/small.gguf")
    assert found.goal.speculation is None
    assert any(finding.severity == "warning" and "/m/small.gguf" in finding.text for finding in found.findings)


def test_other_kinds_of_drafts_take_no_memory() -> None:
    assert read_command("llama-server -m x.gguf --spec-type ngram-mod").goal.speculation is None
