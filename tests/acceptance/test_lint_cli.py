"""`tokenmill lint`: text, JSON, --fix, exit codes and errors."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from tokenmill.cli import run
from tokenmill.hardware.catalog import find
from tokenmill.hardware.identity import machine_id
from tokenmill.model.identity import identity_of
from tokenmill.tuner import history
from tokenmill.tuner.history import SpeedRecord
from tokenmill.tuner.point import Figures, TrialSettings

DIGEST = " ".join(
    f"Rule {word} of the house is that the {word} comes first and {word}s are never late."
    for word in (
        "river",
        "mountain",
        "engine",
        "letter",
        "window",
        "garden",
        "silver",
        "copper",
        "needle",
        "anchor",
        "basket",
        "candle",
        "feather",
        "harbour",
        "island",
        "jungle",
        "kernel",
        "ladder",
    )
)
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": DIGEST, "parameters": {"type": "object"}}}]


def job(number: int, system: str, **more: Any) -> str:
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": f"Summarize the report of {number}."},
    ]
    return json.dumps(
        {"custom_id": f"job-{number}", "max_tokens": 64, **more, "messages": messages}, ensure_ascii=False
    )


def write(path: Path, lines: list[str]) -> str:
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


@pytest.fixture
def timed(tmp_path: Path) -> str:
    return write(tmp_path / "timed.jsonl", [job(n, f"It is 2026-01-03 04:{n:02d}.\n{DIGEST}") for n in range(20)])


@pytest.fixture
def mixed(tmp_path: Path) -> str:
    """Jobs with two key orders and two kinds of line ends, one of them twice as frequent."""
    turned = [{"function": dict(reversed(TOOLS[0]["function"].items())), "type": "function"}]  # type: ignore[attr-defined]
    lines = [
        job(n, DIGEST.replace(". ", ".\r\n" if n % 3 == 2 else ".\n"), tools=turned if n % 3 == 1 else TOOLS)
        for n in range(24)
    ]
    return write(tmp_path / "mixed.jsonl", lines)


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    out, _ = capsys.readouterr()
    return out.splitlines()


def test_a_timestamp_is_shown_and_priced_at_eighty_columns(
    timed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["lint", timed]) == 1
    shown = lines_of(capsys)
    assert max(map(len, shown)) <= 80
    start = next(at for at, line in enumerate(shown) if "date or time" in line)
    assert shown[start].strip().startswith("9")  # more than 90 % of the prompts
    assert "19 jobs, " in shown[start + 1]
    assert shown[start + 2].strip() == "in message 1 (system), byte 6"
    one, other, mark = shown[start + 3 : start + 6]
    assert one.strip().startswith("line 1: It is 2026-01-03 04:00.\\nRule")
    assert other.strip().startswith("line 2: It is 2026-01-03 04:01.\\nRule")
    assert one.index("2026") == mark.index("^")
    assert "4 bytes per token" in " ".join(shown)


def test_a_clean_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lint", write(tmp_path / "clean.jsonl", [job(n, DIGEST) for n in range(20)])]) == 0
    assert lines_of(capsys)[-1].startswith("no problem costs more than 1 %")


def test_json_says_the_same(timed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lint", timed, "--json", "--context", "200"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["jobs"], said["clean"], said["tokens_counted"]) == (20, False, False)
    costly, fatal = said["findings"][0], next(found for found in said["findings"] if found["fatal"])
    assert costly["kind"] == "timestamp"
    assert costly["cost_share"] > 0.8
    assert costly["example"]["first"]["byte"] == 6
    assert costly["cost_s"] is None
    assert fatal["kind"] == "too_long"


def test_a_forecast_gives_hours(timed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lint", timed, "--model", "kimi-k2.5:Q4_K_S", "--machine", "epyc-9175f", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    found = said["findings"][0]
    assert found["cost_s"] == pytest.approx(found["cost_tokens"] / said["prefill_tok_s"])
    assert run(["lint", timed, "--model", "kimi-k2.5:Q4_K_S", "--machine", "epyc-9175f"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "tok/s, forecast (estimated) for Kimi-K2.5 on epyc-9175f" in out
    assert "estimated at 4 bytes per token; kimi-k2.5:Q4_K_S" in out


def test_a_model_file_counts_tokens(timed: str, smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lint", timed, "--model", str(smollm2_path), "--machine", "epyc-9175f", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["tokens_counted"]
    assert 3 < said["bytes_per_token"] < 6
    assert said["bytes_per_token"] != 4


def test_packed_files_and_pipes(
    timed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = Path(timed).read_bytes()
    (tmp_path / "timed.gz").write_bytes(gzip.compress(content))
    assert run(["lint", timed, "--json"]) == 1
    expected = capsys.readouterr().out
    assert run(["lint", str(tmp_path / "timed.gz"), "--json"]) == 1
    assert capsys.readouterr().out == expected
    with (tmp_path / "timed.jsonl").open("rb") as file:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(file))
        assert run(["lint", "-", "--json"]) == 1
    assert capsys.readouterr().out == expected


def test_fix_makes_alike_what_means_the_same_and_nothing_else(
    mixed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["lint", mixed, "--json"]) == 1
    kinds = {found["kind"] for found in json.loads(capsys.readouterr().out)["findings"]}
    assert {"key_order", "whitespace"} <= kinds
    target = tmp_path / "fixed.jsonl"
    assert run(["lint", mixed, "--fix", "-o", str(target)]) == 0
    out, err = capsys.readouterr()
    assert "no problem costs more than 1 %" in out
    assert "16 of 24 lines changed; key order of tools in 8, line ends of system messages in 8" in err
    before, after = (Path(path).read_text().splitlines() for path in (mixed, target))
    for number, (one, other) in enumerate(zip(before, after, strict=True)):
        assert (one == other) == (number % 3 == 0)
        old, new = json.loads(one), json.loads(other)
        assert old["tools"] == new["tools"]
        assert old["messages"][0]["content"].replace("\r\n", "\n") == new["messages"][0]["content"]
        assert {key: old[key] for key in ("custom_id", "max_tokens")} == {
            key: new[key] for key in ("custom_id", "max_tokens")
        }


def test_fix_keeps_bad_lines_blank_lines_and_line_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = b'{"prompt": "a", "max_tokens": 1}\r\n\n  {"prompt":"b","max_tokens":1}  \nnonsense\n{"prompt": "\xff"}\n'
    (tmp_path / "odd.jsonl").write_bytes(raw)
    target = tmp_path / "fixed.jsonl"
    assert run(["lint", str(tmp_path / "odd.jsonl"), "--fix", "-o", str(target)]) == 1
    assert target.read_bytes() == raw
    assert f"nothing to correct: {target}" in capsys.readouterr().err


def test_a_table_of_jobs_is_fixed_into_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    systems = ["a\r\n" + DIGEST, "a\n" + DIGEST, "a\n" + DIGEST]
    messages = [json.dumps([{"role": "system", "content": one}, {"role": "user", "content": "u"}]) for one in systems]
    parquet.write_table(pa.table({"messages": messages, "seed": [1, 2, 3]}), tmp_path / "jobs.parquet")
    assert run(["lint", str(tmp_path / "jobs.parquet"), "--fix", "-o", str(tmp_path / "fixed.jsonl"), "--json"]) == 0
    fixed = json.loads(capsys.readouterr().out)["fixed"]
    assert (fixed["lines"], fixed["changed_lines"], fixed["system_lines"]) == (3, 1, 1)
    lines = [json.loads(line) for line in (tmp_path / "fixed.jsonl").read_text().splitlines()]
    assert [line["messages"][0]["content"] for line in lines] == [systems[1]] * 3


def test_what_fix_leaves_is_not_promised_to_it_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    systems = [DIGEST.replace(" ", "  ", 1) if number % 2 else DIGEST for number in range(24)]
    lines = [
        {"max_tokens": 1, "messages": [{"role": "system", "content": one}, {"role": "user", "content": f"u {at}"}]}
        for at, one in enumerate(systems)
    ]
    (tmp_path / "blanks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(["lint", str(tmp_path / "blanks.jsonl")]) == 1
    assert "--fix -o FILE" in capsys.readouterr().out
    assert run(["lint", str(tmp_path / "blanks.jsonl"), "--fix", "-o", str(tmp_path / "fixed.jsonl")]) == 1
    out, err = capsys.readouterr()
    assert "fix these problems" in out
    assert "--fix -o FILE" not in out
    assert "nothing to correct" in err


def test_dates_are_never_touched(timed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "fixed.jsonl"
    assert run(["lint", timed, "--fix", "-o", str(target)]) == 1
    assert target.read_bytes() == Path(timed).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.jsonl"], "cannot read absent.jsonl"),
        (["--bogus"], "unknown option: --bogus"),
        (["timed.jsonl", "--bogus"], "--bogus"),
        (["timed.jsonl", "--fix"], "--fix and --output require each other"),
        (["timed.jsonl", "-o", "x"], "--fix and --output require each other"),
        (["-", "--fix", "-o", "x"], "--fix cannot read stdin"),
        (["timed.jsonl", "--fix", "-o", "timed.jsonl"], "--output timed.jsonl is the job file itself"),
        (["timed.jsonl", "--fix", "-o", "there"], "there already exists"),
        (["timed.jsonl", "--machine", "epyc-9175f"], "--machine requires --model"),
        (["timed.jsonl", "--context", "0"], "--context must be at least 1"),
        (["timed.jsonl", "--model", "no-such:Q4_K_M"], "no-such"),
    ],
)
def test_wrong_use(
    timed: str,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").write_text("")
    assert run(["lint", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "hint: " in err


def test_an_empty_file_and_one_of_bad_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lint", write(tmp_path / "empty.jsonl", [])]) == 0
    assert "no jobs" in capsys.readouterr().out
    assert run(["lint", write(tmp_path / "bad.jsonl", ["{", '{"promt": "a"}'])]) == 1
    assert "error lines cannot be run: 2 lines line 1: not JSON" in " ".join(capsys.readouterr().out.split())


def test_a_speed_that_was_measured_here_gives_hours_before_any_forecast(
    timed: str,
    smollm2_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    here, model = find("this"), identity_of(smollm2_path)
    dials = TrialSettings(1, 1, 1, 512, 1024)
    for model_id, tok_s in ((model, 500.0), (model, 250.0), ("another", 9.0)):
        speed = SpeedRecord(
            "2026-11-15T10:00:00+00:00",
            here.name,
            machine_id(here),
            "smollm2",
            model_id,
            "native",
            "llama.cpp 1",
            "bench",
            dials,
            0,
            Figures(prefill_tok_s=tok_s),
            Figures(),
        )
        history.append(tmp_path / "tokenmill", speed)
    assert run(["lint", timed, "--model", str(smollm2_path), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["prefill_tok_s"] == 250.0  # the newest
    assert said["findings"][0]["cost_s"] == said["findings"][0]["cost_tokens"] / 250.0
    assert run(["lint", timed, "--model", str(smollm2_path)]) == 1
    assert "250 tok/s, measured 2026-11-15 with llama.cpp 1" in " ".join(capsys.readouterr().out.split())


def test_without_a_model_it_is_said_why_there_are_no_hours(timed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lint", timed]) == 1
    assert "no time estimate: add --model FILE.gguf" in " ".join(capsys.readouterr().out.split())
