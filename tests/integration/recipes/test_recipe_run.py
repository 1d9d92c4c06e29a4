"""Running recipes on the real engine: forecasts that store nothing, budgets, signals."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tokenmill.api.planning.plan import EnginePlan
from tokenmill.cli.options import EngineFlags
from tokenmill.cli.output import Common
from tokenmill.cli.recipes.run import (
    RecipeOptions,
    RecipeResult,
    Tokens,
    run_recipe_command,
    spent_document,
    summary_rows,
)
from tokenmill.errors import DoesNotFit, UsageError
from tokenmill.hardware import machine_file
from tokenmill.hardware.catalog import find
from tokenmill.hardware.identity import machine_id
from tokenmill.hardware.machine import Measurements, Rate
from tokenmill.jobs.store.reader import StoreReader
from tokenmill.model.identity import identity_of
from tokenmill.recipes.runner import BatchRunner, Line, Prospect, StageProspect, chat_line, text_of
from tokenmill.tuner import history
from tokenmill.tuner.history import SpeedRecord
from tokenmill.tuner.point import Figures, TrialSettings

RULES = " ".join(f"Rule {number}: a report names its author, its date and mill {number}." for number in range(12))
ENOUGH_FOR_ONE = 245  # tokens: the rules, one question and its answer are 235, and another 20 each
SMALL = EngineFlags(context=1024, sequences=4, threads=1, threads_batch=1)
MEASURED = Measurements("2026-11-01T00:00:00+00:00", (Rate("dram", 20.0, 2), Rate("disk", 1.0, 1)))
Recipe = Callable[[BatchRunner, Callable[[str], None]], Any]


def asked(stage: str, jobs: int = 6) -> tuple[Line, ...]:
    return tuple(
        chat_line(
            f"{number}",
            [{"role": "system", "content": RULES}, {"role": "user", "content": f"{stage} {number}"}],
            max_tokens=10,
            temperature=0,
        )
        for number in range(jobs)
    )


async def recipe(runner: BatchRunner, tell: Callable[[str], None]) -> dict[str, int]:
    """Two stages; returns the number of answers of each."""
    found = {}
    for stage in ("write", "judge"):
        ran = await runner.run(stage, asked(stage))
        found[stage] = sum(text_of(answer) is not None for answer in ran.answers())
        tell(f"{stage} is over")
        if ran.end != "finished":
            break
    return found


def prospect(tokens: Tokens, planned: EnginePlan | None = None) -> Prospect:
    assert tokens is not None
    assert tokens("two words") == 2
    judge = StageProspect("judge", 6, prompt_bytes=6000, shared_bytes=900, output_tokens=10, assumed="as long as asked")
    return Prospect((StageProspect("write", 6, asked("write"), output_tokens=10), judge), rows=6)


class Here:
    """Runs recipes with a separate configuration and state folder."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model, self.state = folder, model, folder / "state"
        self.config = folder / "tokenmill.toml"
        self.machine = replace(find("this"), name="here", measured=MEASURED)
        machine_file.write(self.machine, folder / "here.toml")
        self.config.write_text(
            f'state_dir = "{self.state}"\nmachine = "{folder / "here.toml"}"\n[costs]\nper_hour = 3600000.0\n'
        )

    def __call__(
        self,
        recipe: Recipe = recipe,
        *,
        json: bool = False,
        options: EngineFlags = SMALL,
        prospect: Callable[[Tokens, EnginePlan | None], Prospect] = prospect,
        **limits: Any,
    ) -> RecipeResult[Any] | int:
        return run_recipe_command(
            recipe,
            prospect,
            called="expand things.csv",
            model=str(self.model),
            limits=RecipeOptions(**limits),
            options=options,
            common=Common(json=json, config=self.config),
        )

    def run(self, recipe: Recipe = recipe, **limits: Any) -> RecipeResult[Any]:
        found = self(recipe, **limits)
        assert isinstance(found, RecipeResult)
        return found


@pytest.fixture
def here(tmp_path: Path, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    monkeypatch.setenv("COLUMNS", "80")
    return Here(tmp_path, smollm2_path)


def test_forecast_budget_and_resumed_run(here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    assert here(dry_run=True) == 0
    first = capsys.readouterr().out
    assert not here.state.exists()

    one_slot = replace(
        SMALL, sequences=1
    )  # with more slots, all jobs may be in flight and none finished when the budget is used up
    cut = here.run(max_tokens_total=ENOUGH_FOR_ONE, options=one_slot)
    assert (cut.end, cut.code) == ("tokens", 0)
    assert 0 < cut.value["write"] == cut.spent.answers < 6
    assert f"--max-tokens-total {ENOUGH_FOR_ONE} " in capsys.readouterr().err

    whole = here.run()
    assert (whole.end, whole.code, whole.value) == ("finished", 0, {"write": 6, "judge": 6})
    assert whole.spent.reused == cut.spent.answers
    assert whole.load_s is not None
    rows = summary_rows(whole)
    assert rows["answers"] == f"{whole.spent.answers} computed, {whole.spent.reused} from earlier runs"
    assert whole.origin.build in rows["engine"]

    again = here.run()
    assert (again.value, again.load_s, again.spent.answers, again.spent.reused) == (whole.value, None, 0, 12)
    assert again.origin == whole.origin  # although no engine was started
    told = spent_document(again)
    assert (told["end"], told["reused"], told["load_seconds"], told["generated_tokens"]) == ("finished", 12, None, 0)
    assert summary_rows(again)["answers"] == "12 from earlier runs, nothing to compute"

    capsys.readouterr()
    assert here(dry_run=True) == 0
    later = capsys.readouterr().out
    assert "answered" not in first
    assert "6 more jobs" in later
    assert "as 12 answers of this model" in later  # fewer than eight of the stage
    assert "predicted (calibrated)" in " ".join(later.split())  # too few tokens were written for a rate of their own
    with StoreReader(here.state / "batches") as reader:
        assert [batch.source for batch in reader.batches()] == ["expand things.csv: write", "expand things.csv: judge"]


def test_a_signal_stops_the_recipe(here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    async def interrupted(runner: BatchRunner, _tell: Callable[[str], None]) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        ran = await runner.run("write", asked("write"))
        return f"{ran.end} with {ran.total} lines"

    ended = here.run(interrupted)
    assert (ended.value, ended.end, ended.code) == ("stopped with 6 lines", "stopped", 143)
    assert "stopped" in capsys.readouterr().err


def test_the_forecast_fits_80_columns(here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    assert here(dry_run=True, max_hours=1, max_tokens_total=300) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("forecast  expand things.csv (dry run")
    table = [line.split() for line in lines if line.startswith(("stage", "write", "judge", "all"))]
    assert table[0] == ["stage", "jobs", "prompts", "computed", "answers", "at", "most"]
    assert [row[:2] for row in table[1:]] == [["write", "6"], ["judge", "6"], ["all", "12"]]
    text = " ".join(" ".join(lines).split())
    for words in (
        "runs",
        "of 300 tokens and 1 h each",
        "predicted (calibrated)",
        "EUR",
        "counted with the model's vocabulary",
        "machine here",
        "assumed: judge: as long as asked",
    ):
        assert words in text


def test_the_forecast_as_json(here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    assert here(dry_run=True, json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert [stage["stage"] for stage in found["stages"]] == ["write", "judge"]
    assert found["total"]["answer_tokens_at_most"] == 120
    assert 0 < found["total"]["computed_prompt_tokens"] < found["total"]["prompt_tokens"]
    assert found["speed"]["measured"] is False
    assert found["cost_at_most"] == pytest.approx(found["seconds_at_most"] * 1000)
    assert (found["currency"], found["machine"], found["tokens_counted"], found["runs"]) == (
        "EUR",
        "here",
        True,
        None,
    )
    assert found["build"].startswith("llama.cpp")
    assert found["context"] == 1024


def test_measurements_of_this_machine_are_used(here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    machine = here.machine
    dials = TrialSettings(threads=1, threads_batch=1, sequences=4, ubatch=512, context=1024)
    speed = SpeedRecord(
        "2026-11-01T01:02:03+00:00",
        machine.name,
        machine_id(machine),
        "smollm2",
        identity_of(here.model),
        "native",
        "llama.cpp b1",
        "bench",
        dials,
        0,
        Figures(decode_tok_s=30.0, prefill_tok_s=200.0),
        Figures(),
    )
    history.append(here.state, replace(speed, dials=replace(dials, sequences=1), figures=Figures(decode_tok_s=12.0)))
    history.append(here.state, replace(speed, model_id="another", figures=Figures(decode_tok_s=1.0, prefill_tok_s=1.0)))
    history.append(here.state, speed)
    assert here(dry_run=True, json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["speed"] == {
        "measured": True,
        "confidence": "measured",
        "words": "measured 2026-11-01 with llama.cpp b1",
        "prefill_tok_s": 200.0,
        "decode_tok_s": 30.0,
        "sequences": 4,
    }
    total = found["total"]
    expected_s = total["computed_prompt_tokens"] / 200 + total["answer_tokens_at_most"] / 30
    assert total["seconds_at_most"] == pytest.approx(expected_s)


def test_speeds_of_earlier_recipes_are_used(here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    async def once(runner: BatchRunner, _tell: Callable[[str], None]) -> int:
        return (await runner.run("more", asked("write", 12))).total

    assert here.run(once).value == 12
    capsys.readouterr()
    assert here(dry_run=True, json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["stages"][0]["answered"] == 6  # the first lines of a longer batch
    assert found["speed"]["measured"] is True
    assert "12 answers" in found["speed"]["words"]
    assert found["speed"]["sequences"] > 1
    assert found["seconds_at_most"] > 0

    # The forecast of a finished recipe is one sentence.
    assert here(dry_run=True, prospect=lambda *_: Prospect((StageProspect("write", 6, asked("write")),))) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "",
        "Nothing to compute: all answers are in the store.",
    ]
    assert here(dry_run=True, prospect=lambda *_: Prospect((), 0, ("all is well",))) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["", "Nothing to compute.", "note: all is well"]


def test_without_a_speed_the_output_names_the_remedy(here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    bare = here.folder / "bare.toml"
    bare.write_text('name = "bare"\n[cpu]\ncores = 4\n[dram]\ntotal_bytes = 8000000000\n')
    options = replace(SMALL, machine=str(bare))
    assert here(dry_run=True, max_hours=8, options=options) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "tokenmill probe --measure -o machine.toml, then add --machine machine.toml" in said
    assert "runs unknown: --max-hours 8" in said
    assert "cost unknown" in said
    assert "3,600,000.00 EUR" in said


def test_a_plan_that_does_not_fit_is_refused_before_anything_is_stored(here: Here) -> None:
    huge = EngineFlags(context=1024, sequences=4, reserve_ram=10**14)
    with pytest.raises(DoesNotFit):
        here(options=huge)
    assert not here.state.exists()


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_tokens_total": 0}, "--max-tokens-total"),
        ({"max_hours": 0.0}, "--max-hours"),
        ({"max_hours": float("inf")}, "--max-hours"),
        ({"priority": 10**9}, "--priority"),
    ],
)
def test_invalid_limits(here: Here, limits: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        here(**limits)
