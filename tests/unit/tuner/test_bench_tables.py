"""A benchmark as CSV and Markdown, in the columns of llama-sweep-bench, with the forecast of a plan."""

import csv
import io
import re
from dataclasses import replace

from rich.console import Console

from tokenmill.cli.views.bench import document, render
from tokenmill.hardware.catalog import find
from tokenmill.model.read import read
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make
from tokenmill.tuner.bench.cache import CacheEffect, state_bytes
from tokenmill.tuner.bench.energy import Energy, Price
from tokenmill.tuner.bench.rows import BenchRow, Stat
from tokenmill.tuner.bench.run import Bench, predicted, speed_of, trial_settings_of
from tokenmill.tuner.bench.tables import as_csv, as_markdown
from tokenmill.tuner.point import PointScope

PLACE = PointScope("box | one", "m", "model", "id", "native", "build 1")
WHEN = "2026-11-15T10:00:00+00:00"


def one(value: float) -> Stat:
    return Stat(value, value * 0.9, value * 1.05, 3)


ROW = BenchRow("sweep", 512, 128, 1024, 1536, one(12.5), one(40.96), one(10.0), one(12.7), one(22.5))
BENCH = Bench(
    PLACE,
    WHEN,
    (
        replace(ROW, what="first", n_kv=0),
        replace(ROW, what="cold", n_kv=0),
        ROW,
        replace(ROW, disturbed="a compiler ran", predicted_pp_tok_s=41.0, predicted_tg_tok_s=13.0),
        replace(ROW, what="threads", threads=13, threads_batch=13),
        replace(ROW, what="sequences", sequences=8),
    ),
    CacheEffect(1260, 1259, one(0.062), one(56.0), 167_000_000, 165_000_000),
    Energy(one(30.0), one(2.0), "the machine's counters"),
)


def shown(bench: Bench, price: Price | None = None) -> str:
    console = Console(width=80, file=io.StringIO(), highlight=False)
    with console.capture() as capture:
        for part in render(bench, price):
            console.print(part, markup=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def test_csv_has_a_line_for_each_point_and_says_where_it_holds() -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(BENCH))))
    assert [row["what"] for row in rows] == ["first", "cold", "sweep", "sweep", "threads", "sequences"]
    sweep = rows[3]
    assert (sweep["pp"], sweep["tg"], sweep["n_kv"], sweep["t_pp_s"], sweep["s_pp_t_s"]) == (
        "512",
        "128",
        "1024",
        "12.5",
        "40.96",
    )
    assert (sweep["kind"], sweep["machine"], sweep["build"], sweep["when"]) == (
        "measured",
        "box | one",
        "build 1",
        WHEN,
    )
    assert (sweep["predicted_s_tg_t_s"], rows[2]["predicted_s_tg_t_s"]) == ("13", "")
    assert (sweep["disturbed"], rows[4]["threads"], rows[5]["sequences"]) == ("a compiler ran", "13", "8")


def test_markdown_keeps_its_cells_apart() -> None:
    text = as_markdown(BENCH)
    assert (
        "| PP | TG | N_KV | T_PP s | S_PP t/s | ± | T_TG s | S_TG t/s | ± | predicted S_PP | predicted S_TG |" in text
    )
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert any("| 512 | 128 | 1024 | 12.500 | 40.96 | 10% | 10.000 | 12.70 | 10% | - | - |" in line for line in lines)
    assert {line.count(" | ") for line in lines if "N_KV" in line or "1024 | 12.500" in line} == {10}


def test_markdown_has_the_sentences_of_the_terminal() -> None:
    text = as_markdown(replace(BENCH, notes=("a word",)), Price(0.30, "EUR"))
    assert "1,259 of 1,260 tokens saved" in text
    assert "159.3 MiB saved to a file, 157.4 MiB predicted" in text
    assert "2.5 EUR per million" in text
    assert "10%*" in text
    assert re.search(r"^\\\* .*a compiler ran", text, re.MULTILINE), "a bare star would make a list"
    assert "note: a word" in text
    bare = as_markdown(replace(BENCH, rows=(ROW,), cache=None, energy=None))
    assert bare.rstrip().endswith("|"), "nothing is said where there is nothing to say"


def test_eighty_columns_show_everything_with_predicted_under_its_own_name() -> None:
    text = shown(BENCH, Price(0.30, "EUR"))
    assert max(map(len, text.splitlines())) <= 80
    assert "PP  TG N_KV T_PP s S_PP t/s   ± T_TG s S_TG t/s    ±      S_PP      S_TG" in text
    assert "predicted predicted" in text
    assert "1,259 of 1,260 tokens saved" in text
    assert "62 ms" in text
    assert "159.3 MiB saved to a file, 157.4 MiB predicted" in text
    assert "30 J ±10%; 2.5 EUR per million" in text
    assert "electricity alone" in text
    assert "10%*" in text
    assert "a compiler ran" in text


def test_columns_without_a_figure_are_left_out() -> None:
    text = shown(replace(BENCH, rows=(ROW,), cache=None, energy=Energy(why_not="root alone")))
    assert "predicted" not in text
    assert re.search(r"^energy: .*root alone", text, re.MULTILINE)


def test_json_says_measured_and_keeps_runs() -> None:
    found = document(BENCH, Price(0.30))
    assert found["kind"] == "measured"
    assert found["rows"][2]["t_pp_s"] == {"median": 12.5, "low": 11.25, "high": 13.125, "runs": 3}
    assert found["cost_per_million"]["written"] == 2.5
    assert document(replace(BENCH, energy=Energy(why_not="x")), Price(0.30))["cost_per_million"] is None


def test_forecast_and_measurement_are_stored_together() -> None:
    machine = find("epyc-9175f")
    plan = make(machine, read("kimi-k2.5:Q4_K_S"), Goal(context=16384, sequences=1, threads=13, cpu_only=True))
    row = predicted(plan, ROW)
    assert row.predicted_tg_tok_s is not None
    assert row.predicted_pp_tok_s is not None
    assert 5 < row.predicted_tg_tok_s < 30
    slower = predicted(plan, replace(ROW, what="threads", threads=2, threads_batch=2))
    assert slower.predicted_pp_tok_s is not None
    assert slower.predicted_pp_tok_s < row.predicted_pp_tok_s
    speed = speed_of(row, PLACE, plan.settings, WHEN)
    assert (speed.source, speed.depth, speed.dials.threads, speed.dials.sequences) == ("bench", 1536, 13, 1)
    assert speed.figures.decode_tok_s == 12.7
    assert speed.predicted.decode_tok_s == row.predicted_tg_tok_s
    turned = speed_of(replace(row, threads=8, threads_batch=8), PLACE, plan.settings, WHEN)
    assert turned.dials == replace(trial_settings_of(plan.settings), threads=8, threads_batch=8, sequences=1)
    many = speed_of(replace(row, sequences=8), PLACE, plan.settings, WHEN)
    assert (many.dials.sequences, many.figures.prefill_tok_s, many.predicted.prefill_tok_s) == (8, None, None)
    kv = sum(each.bytes for each in plan.ledger.full_context if each.item == "kv")
    assert state_bytes(plan, 16384) == kv
