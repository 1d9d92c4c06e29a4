"""`tokenmill.tune` with the real engine: the point it returns is saved, and `tokenmill.plan` applies it."""

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

import tokenmill
from tokenmill import measurements
from tokenmill.config import Config
from tokenmill.engine import load_history
from tokenmill.engine.process import registry
from tokenmill.errors import UsageError

SMALL: dict[str, Any] = {
    "threads": 1,
    "threads_batch": 1,
    "context": 512,
    "ubatch": 128,
    "cache_type": "f16",
    "warm": False,
    "prefix_tokens": 32,
    "own_tokens": 4,
    "answer_tokens": 8,
    "trial_seconds": 0.1,
    "busy": True,
}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(state_dir=str(tmp_path))


def test_a_plan_applies_the_point_and_the_same_call_measures_nothing_again(
    smollm2_path: Path,
    config: Config,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("tokenmill"), "propagate", True)  # the command line switches it off
    caplog.set_level(logging.INFO, logger="tokenmill")
    threads: set[int] = set()
    point = tokenmill.tune(
        "smollm2", trials=2, config=config, on_progress=lambda _event: threads.add(threading.get_ident()), **SMALL
    )
    assert threads == {threading.get_ident()}
    assert isinstance(point, tokenmill.OperatingPoint)
    assert len(point.trials) == 2
    assert point.figures.jobs_tok_s
    assert (point.dials.threads, point.dials.context, point.dials.ubatch) == (1, 512, 128), (
        "given settings are not varied"
    )
    assert any("2 trials" in record.getMessage() for record in caplog.records)
    plan = tokenmill.plan("smollm2", config=config, context=512)  # the context of the search does not apply by itself
    assert (plan.settings.sequences, plan.settings.context) == (point.dials.sequences, 512)
    loads = len(load_history.read(tmp_path))

    async def cell() -> tokenmill.OperatingPoint:
        return tokenmill.tune("smollm2", trials=2, config=config, **SMALL)

    again = asyncio.run(cell())
    assert again.dials == point.dials
    assert again.trials == point.trials
    assert len(load_history.read(tmp_path)) == loads
    assert registry.listed(tmp_path) == ()


def test_an_interrupted_tuning_keeps_its_trials(smollm2_path: Path, config: Config, tmp_path: Path) -> None:
    first = tokenmill.tune("smollm2", trials=1, config=config, **SMALL)

    def interrupt(_event: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenmill.tune("smollm2", trials=2, config=config, on_progress=interrupt, **SMALL)
    assert registry.listed(tmp_path) == ()
    assert len(measurements.read_json(tmp_path, "trial")) == 1
    again = tokenmill.tune("smollm2", trials=1, config=config, **SMALL)
    assert again.trials == first.trials


@pytest.mark.parametrize(
    "options",
    [
        {"aim": "latency"},
        {"aim": "nothing"},
        {"first_token": 2.0},
        {"aim": "latency", "first_token": "soon"},
        {"aim": "cores", "within": 1.5},
        {"trials": 0},
        {"trial_seconds": 0},
        {"context": 128, "prefix_tokens": 128},
        {"jobs": "/dev/null"},
        {"engine": "http://localhost:1"},
        {"sequence": 4},
    ],
)
def test_wrong_options_are_refused_before_a_load(
    smollm2_path: Path, config: Config, tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(UsageError):
        tokenmill.tune("smollm2", config=config, **{**SMALL, **options})
    assert not (tmp_path / "engines").exists()
