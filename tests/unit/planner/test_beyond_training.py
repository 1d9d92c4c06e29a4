"""Contexts longer than the model was trained for are planned, with a warning."""

from tokenmill.hardware.catalog import find
from tokenmill.model.read import read
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make


def test_a_longer_context_is_planned_with_a_warning() -> None:
    profile = read("qwen3-32b:Q4_K_M")
    trained = profile.training_context
    assert trained is not None
    beyond = make(find("epyc-9175f"), profile, Goal(context=trained + 1024, sequences=1, cpu_only=True))
    within = make(find("epyc-9175f"), profile, Goal(context=trained, sequences=1, cpu_only=True))
    assert beyond.fits
    assert beyond.settings.context == trained + 1024
    assert len(beyond.warnings) == len(within.warnings) + 1
