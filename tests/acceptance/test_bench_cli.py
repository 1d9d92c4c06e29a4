"""`tokenmill bench`: its own engine, a running server, output formats and errors."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.run_cli import said, tokenmill
from tokenmill.engine.process import registry
from tokenmill.model.synthetic import generate
from tokenmill.tuner import history

SMALL = ("--context", "256", "--sequences", "2", "--ubatch", "64", "--threads", "1", "--threads-batch", "1")
SHORT = ("--depth", "128", "--tokens", "4", "--repeat", "1", "--thread-counts", "1")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "moe.gguf"
    generate.write("moe", generate.sizes("moe", {"layers": 2, "embed": 256}), path)
    return path


@pytest.fixture(scope="module")
def serving(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The state folder of a running llama-server."""
    folder = tmp_path_factory.mktemp("home")
    words = ("serve", "--engine-only", moe, *SMALL, "--engine", "llama-server", "--port", "0", "--no-warm", "--detach")
    done = tokenmill(folder, *words, "--name", "night")
    assert done.returncode == 0, done.stderr
    yield folder
    assert said(folder, "engines", "stop", "night").returncode == 0


def test_every_part_at_eighty_columns_and_in_the_history(moe: Path, tmp_path: Path) -> None:
    done = tokenmill(tmp_path, "bench", moe, *SMALL, *SHORT, "--watts", "80", "--price", "0.30 EUR/kWh")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "PP TG N_KV T_PP s S_PP t/s" in done.stdout
    for words in ("first request", "prompt cache", "by threads", "by concurrent sequences", "80 W", "EUR"):
        assert words in done.stdout
    assert "no forecast of decode" in done.stdout or "predicted" in done.stdout
    assert "sweep: depth 128 of 128" in done.stderr
    marked = sum("%*" in line for line in lines)  # disturbed by others' load: not kept
    kept = history.read(tmp_path / "tokenmill")
    assert len(kept) <= 8  # three requests, two depths, one number of threads, two of sequences
    assert len(kept) >= 8 - marked
    assert {speed.source for speed in kept} <= {"bench"}
    assert registry.listed(tmp_path / "tokenmill") == ()  # nothing is left running


def test_json_has_the_same_figures_with_their_names(moe: Path, tmp_path: Path) -> None:
    done = said(tmp_path, "bench", moe, *SMALL, *SHORT, "--what", "sweep", "--step", "64", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kind"] == "measured"
    assert found["model"] == "tokenmill moe 2x256 seed 0"
    assert [row["what"] for row in found["rows"]] == ["sweep", "sweep"]
    assert found["settings"]["ubatch"] == 64
    assert found["rows"][1]["n_kv"] == pytest.approx(64, abs=2)
    assert {"predicted_pp_tok_s", "predicted_tg_tok_s", "s_pp_tok_s", "s_tg_tok_s"} <= found["rows"][0].keys()
    assert found["energy"] is None


def test_a_server_that_runs_is_measured_as_it_is(serving: Path, moe: Path) -> None:
    done = said(serving, "bench", moe, "--engine", "night", *SHORT, "--step", "64", "--format", "csv")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["what"] for row in rows] == ["cold", "again", "tail", "sweep", "sweep", "sequences", "sequences"]
    assert {row["engine"] for row in rows} == {"llama-server"}
    assert {row["kind"] for row in rows} == {"measured"}
    assert int(rows[1]["n_kv"]) == int(rows[1]["prompt_tokens"]) - 1
    assert "not added to the history" in done.stderr
    assert history.read(serving / "tokenmill") == ()
    told = said(serving, "bench", moe, "--engine", "night", *SHORT, "--what", "threads,first", "--format", "markdown")
    assert told.returncode == 0
    assert "skipping part 'first'" in told.stderr
    assert told.stdout.startswith("Measured on ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("no-such-model",), "no model 'no-such-model'"),
        (("kimi-k2.5:Q4_K_S",), "kimi-k2.5:Q4_K_S"),
        (("{moe}", "--what", "sweep,speed"), "unknown part 'speed'"),
        (("{moe}", "--price", "cheap"), "'cheap'"),
        (("{moe}", "--watts", "0"), "--watts"),
        (("{moe}", "--thread-counts", "1,x"), "(got '1,x')"),
        (("{moe}", "--repeat", "0"), "at least 1"),
        (("{moe}", "--format", "xml"), "xml"),
        (("--engine", "http://127.0.0.1:9"), "http://127.0.0.1:9"),
        (
            ("{moe}", "--context", "128", "--depth", "4096", "--what", "sweep", "--no-warm", "--threads", "1"),
            "needs a context of 4,",
        ),
    ],
)
def test_what_is_wrong_is_said_and_what_to_do(moe: Path, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = said(tmp_path, "bench", *(word.format(moe=moe) for word in words))
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "hint: " in done.stderr
    assert done.stdout == ""


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a model")
    done = said(tmp_path, "bench", path)
    assert done.returncode in (1, 2)
    assert "is not a GGUF file" in done.stderr or "no model" in done.stderr
