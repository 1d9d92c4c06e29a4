"""`tokenmill history`, and plans that are corrected by it."""

import csv
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tokenmill.cli import run
from tokenmill.cli.views.history import curve
from tokenmill.hardware.catalog import find
from tokenmill.hardware.identity import machine_id
from tokenmill.model.identity import identity_of
from tokenmill.model.synthetic import generate
from tokenmill.tuner.history import Source, SpeedRecord, append
from tokenmill.tuner.point import Figures, TrialSettings

DIALS = TrialSettings(threads=1, threads_batch=1, sequences=1, ubatch=512, context=1024)


class Mill:
    """The command line with a state folder of its own."""

    def __init__(self, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.state, self._capsys = home / "tokenmill", capsys

    def says(self, *words: object, code: int = 0) -> str:
        """What a command prints; what it says besides is in `talk`."""
        assert run(list(map(str, words))) == code
        said = self._capsys.readouterr()
        self.talk = said.err
        return said.out

    def knows(self, *words: object) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.says(*words, "--json"))
        return found

    def measured(self, model: Path, figures: Figures, told: Figures, *, day: int = 1, source: Source = "tune") -> None:
        machine = find("this")
        when = (datetime(2026, 11, 1, 12, tzinfo=UTC) + timedelta(days=day)).isoformat(timespec="seconds")
        append(
            self.state,
            SpeedRecord(
                when,
                machine.name,
                machine_id(machine),
                model.stem,
                identity_of(model),
                "native",
                "b1",
                source,
                DIALS,
                256,
                figures,
                told,
            ),
        )


@pytest.fixture
def mill(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Mill:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    return Mill(tmp_path, capsys)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    generate.write("dense", generate.sizes("dense", {"layers": 2, "embed": 128, "heads": 2, "dense_ff": 256}), path)
    return path


@pytest.fixture
def busy(mill: Mill, model: Path) -> Mill:
    """Twelve days of measuring, with forecasts that became better."""
    for day in range(12):
        off = 2.0 if day < 6 else 1.1
        mill.measured(
            model,
            Figures(50.0 + day, 400.0),
            Figures((50.0 + day) * off, 400.0 * off),
            day=day,
            source="bench" if day % 2 else "tune",
        )
    return mill


def test_nothing_was_measured_yet(mill: Mill) -> None:
    assert mill.says("history") == ""
    assert "no measurements yet" in mill.talk
    assert mill.knows("history") == {
        "measurements": [],
        "trends": [],
        "count": 0,
        "predictions": 0,
        "median_error_first": None,
        "median_error_last": None,
    }


def test_a_person_sees_curves_and_errors(busy: Mill) -> None:
    shown = busy.says("history", "--last", "3")
    assert "tiny on " in shown
    assert curve([50.0 + day for day in range(12)]) in shown
    assert "100% → 10%" in shown
    assert "24 speed predictions, median error 100% of the first ten, 10% of the last" in " ".join(shown.split())
    assert shown.count("1 thread, 1 slot") == 3
    assert max(map(len, shown.splitlines())) <= 80


def test_what_is_asked_for_alone(busy: Mill, model: Path) -> None:
    assert busy.knows("history", "--source", "bench")["count"] == 12
    assert busy.knows("history", "--model", "TIN")["count"] == 24
    assert busy.knows("history", "--model", model)["count"] == 24
    busy.says("history", "--model", "another")
    assert "no matching measurements" in busy.talk
    assert len(busy.knows("history", "--last", "5")["measurements"]) == 5
    busy.says("history", "--last", "-1", code=2)
    assert "--last must be at least 0" in busy.talk


def test_export_to_csv(busy: Mill, tmp_path: Path) -> None:
    target = tmp_path / "history.csv"
    assert busy.says("history", "--export", target) == ""
    with target.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 24
    decode = [row for row in rows if row["quantity"] == "decode"]
    assert [float(row["measured"]) for row in decode] == [50.0 + day for day in range(12)]
    assert float(decode[0]["error"]) == pytest.approx(1.0)
    busy.says("history", "--export", target, code=2)
    assert "use --force to overwrite it" in busy.talk
    busy.says("history", "--export", target, "--force")


def test_a_plan_is_corrected_by_what_was_measured(mill: Mill, model: Path) -> None:
    asked = ("plan", model, "--context", 1024, "--sequences", 1, "--threads", 1, "--threads-batch", 1)
    plain = mill.knows(*asked)
    assert not any("forecast" in decision["name"] for decision in plain["decisions"])
    mill.measured(model, Figures(decode_tok_s=77.0, prefill_tok_s=333.0), Figures())
    corrected = mill.knows(*asked)
    (decode,) = (
        speed for speed in corrected["forecast"]["decode_tok_s"] if (speed["depth"], speed["sequences"]) == (256, 1)
    )
    assert decode["confidence"] == "calibrated"
    assert decode["tok_s"] == pytest.approx(77.0, rel=0.02)
    reasons = {decision["name"]: decision["reason"] for decision in corrected["decisions"]}
    assert reasons["decode forecast"].startswith("1 measurement")
    assert "2026-11-02" in reasons["decode forecast"]
    elsewhere = mill.knows(*asked, "--machine", "epyc-9175f")
    assert {speed["confidence"] for speed in elsewhere["forecast"]["decode_tok_s"]} == {"estimated"}
