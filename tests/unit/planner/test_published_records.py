"""The records of published runs: complete, consistent, and written as the others are."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from datetime import date
from typing import Any

import pytest

from support.runs import CASES
from tokenmill.launch.tensor_patterns import resolve

Record = Mapping[str, Any]
FILES = ("public_runs.json", "public_runs_2.json", "public_runs_3.json")
RECORDS: dict[str, list[Record]] = {
    name: json.loads((CASES / name).read_text(encoding="utf-8"))["runs"] for name in FILES
}
NEW = RECORDS["public_runs_3.json"]
NUMBERS = ("sockets", "cores_physical_total", "mem_mts", "channels_total", "ram_gb")
WHOLE_NUMBER_FLAGS = ("ctx", "b", "ub", "threads", "threads_batch", "ngl", "mla", "amb")


def _named(records: list[Record]) -> list[Any]:
    return [pytest.param(record, id=record["id"]) for record in records]


def test_ids_are_unique() -> None:
    ids = Counter(record["id"] for name in FILES for record in RECORDS[name])
    assert [name for name, count in ids.items() if count > 1] == []


def test_new_records_name_enough_machines_and_runs() -> None:
    assert len(NEW) >= 100
    known = {record["machine_group"] for name in FILES[:2] for record in RECORDS[name]}
    assert len({record["machine_group"] for record in NEW} - known) >= 50


@pytest.mark.parametrize("record", _named(NEW))
def test_record_has_the_keys_of_the_others(record: Record) -> None:
    model = RECORDS["public_runs_2.json"][0]
    assert record.keys() == model.keys()
    for part in ("source", "machine", "engine", "quant"):
        assert record[part].keys() == model[part].keys(), part
    assert all(gpu.keys() == model["machine"]["gpus"][0].keys() for gpu in record["machine"]["gpus"])


@pytest.mark.parametrize("record", _named(NEW))
def test_record_states_its_source(record: Record) -> None:
    source = record["source"]
    assert re.match(r"https://[\w.-]+/.+", source["url"])
    assert date.fromisoformat(source["date"]) >= date(2024, 1, 1)
    assert source["ref"]
    assert record["tier"] in ("A", "B", "C")


@pytest.mark.parametrize("record", _named(NEW))
def test_figures_are_numbers_with_a_depth(record: Record) -> None:
    assert record["tg"] or record["pp"]
    for row in record["tg"]:
        assert row.keys() == {"tok_s", "depth", "note"}
    for row in record["pp"]:
        assert row.keys() == {"tok_s", "prompt_tokens", "depth", "note"}
        assert row["prompt_tokens"] is None or row["prompt_tokens"] > 0
    for row in (*record["tg"], *record["pp"]):
        assert 0 < row["tok_s"] < 100_000
        assert row["depth"] is None or isinstance(row["depth"], int)
        assert isinstance(row["note"], str | None)


@pytest.mark.parametrize("record", _named(NEW))
def test_machine_facts_are_consistent(record: Record) -> None:
    facts = record["machine"]
    assert all(facts[key] is None or facts[key] > 0 for key in NUMBERS)
    if (facts["mem_bw_theoretical_origin"] or "").startswith("computed ="):
        assert facts["mem_bw_theoretical_gbs"] == round(facts["channels_total"] * facts["mem_mts"] * 8 / 1000, 1)
    assert (facts["mem_bw_measured_gbs"] is None) == (facts["mem_bw_measured_how"] is None)
    known = facts["mem_bw_theoretical_gbs"] is not None or facts["mem_bw_measured_gbs"] is not None
    assert record["bandwidth_known"] is known
    threads, cores = facts["threads_tg"], facts["cores_physical_total"]
    assert threads is None or cores is None or threads <= 2 * cores


@pytest.mark.parametrize("record", _named(NEW))
def test_flags_are_of_the_engines_types(record: Record) -> None:
    flags = record["flags"]
    assert all(isinstance(flags[name], int) for name in WHOLE_NUMBER_FLAGS if name in flags)
    placed = {f"CUDA{index}" for index in range(sum(gpu["count"] for gpu in record["machine"]["gpus"]))} | {"CPU"}
    clauses = [tuple(clause.rsplit("=", 1)) for clause in flags.get("ot", ())]
    assert {device for _, device in clauses} <= placed
    assert resolve("blk.93.no_such_tensor", [(regex, device) for regex, device in clauses]) in (None, *placed)


def test_runs_of_one_machine_agree_on_it() -> None:
    by_group: defaultdict[tuple[str, int | None], list[Record]] = defaultdict(list)
    for record in NEW:
        by_group[record["machine_group"], record["machine"]["sockets"]].append(record["machine"])
    for group, machines in by_group.items():
        for key in ("cpu", "cores_physical_total", "mem_type", "mem_mts", "channels_total", "ram_gb"):
            assert len({machine[key] for machine in machines}) == 1, (group, key)
