"""Recorded measurements that the simulation uses, each with its source file.

Two engines. The small one was measured completely: speeds by number of slots, and the seconds of job files. For the
large one, a user published prefill and decode of one sequence; its decode speed by slots is that of a slice with the
same dimensions, and its load time is assumed.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.simulation.store import StoreCosts

from tokenmill.jobs.scheduler.estimates import MeasuredRates

ROOT = Path(__file__).parents[2]
LANES = 16
GIANT_BYTES = 538.8 * 2**30
ASSUMED_DISK_BYTES_S = 2e9
HARSH_HOURS = 24.0  # assumed: machines that may be reclaimed, such as spot instances

# Tokens generated for the first 100 requests of a public trace of conversations; only their spread is used.
GENERATED = (
    44,
    109,
    55,
    16,
    16,
    84,
    142,
    84,
    14,
    152,
    124,
    59,
    174,
    15,
    90,
    106,
    12,
    74,
    162,
    142,
    152,
    154,
    54,
    62,
    170,
    147,
    194,
    87,
    116,
    16,
    74,
    123,
    217,
    183,
    217,
    81,
    172,
    181,
    181,
    175,
    88,
    104,
    138,
    177,
    58,
    16,
    401,
    64,
    102,
    217,
    217,
    217,
    174,
    123,
    158,
    404,
    58,
    16,
    50,
    89,
    183,
    394,
    131,
    82,
    399,
    399,
    217,
    94,
    253,
    18,
    414,
    157,
    179,
    383,
    102,
    424,
    162,
    216,
    93,
    409,
    60,
    82,
    394,
    415,
    37,
    372,
    426,
    102,
    385,
    167,
    50,
    377,
    203,
    84,
    421,
    179,
    91,
    396,
    379,
    422,
)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A measured engine."""

    name: str
    rates: MeasuredRates
    load_s: float


@dataclass(frozen=True, slots=True)
class Night:
    """A job file that was really run: minimum and total prompt tokens, and its duration."""

    load: str
    jobs: int
    least_tokens: float
    prompt_tokens: float
    written_tokens: int
    seconds: tuple[float, ...]  # seconds by round


def _read(path: str) -> Any:
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


def nights() -> list[Night]:
    """The four loads of the batch benchmark on 16 cores, native engine."""
    (model,) = _read("docs/validation/batch-16-cores.json")["models"]
    return [
        Night(
            load["name"],
            load["jobs"],
            sum(load["least_tokens"]) / len(load["least_tokens"]),
            sum(load["prompt_tokens"]) / len(load["prompt_tokens"]),
            load["passes"]["native"][0]["written_tokens"],
            tuple(each["seconds"] for each in load["passes"]["native"]),
        )
        for load in model["loads"]
    ]


def small() -> Recorded:
    """A mixture of experts of 270 MB on 16 cores.

    Decode by slots as measured. The seconds of a job file are assumed to be computed / prefill + generated / decode;
    prefill is chosen so that the total of all seconds is correct, because these files give no more than one figure.
    """
    (model,) = _read("docs/validation/batch-16-cores.json")["models"]
    decode = tuple((point["width"], point["tok_s"]) for point in model["points"])
    passes = [each for load in model["loads"] for each in load["passes"]["native"]]
    prefill_s = sum(each["seconds"] - each["written_tokens"] / decode[-1][1] for each in passes)
    prefill_tok_s = sum(each["computed_tokens"] for each in passes) / prefill_s
    return Recorded(
        "small",
        MeasuredRates(prefill_tok_s, decode),
        _read("docs/validation/h200-native.json")["back_after_kill_s"],
    )


def giant() -> Recorded:
    """Kimi-K2.5 Q4_K_S on an EPYC 9175F, 16 threads."""
    one = _read("tests/data/surfaces/epyc-9175f-kimi-threads.json")
    lanes = _read("tests/data/surfaces/h200-experts-on-cpu.json")["by_sequences"]
    decode = tuple(
        (int(count), one["by_threads"]["16"] * tok_s / lanes["1"])
        for count, tok_s in lanes.items()
        if int(count) <= LANES
    )
    load_s = GIANT_BYTES / ASSUMED_DISK_BYTES_S
    return Recorded("giant", MeasuredRates(one["prefill_by_threads"]["16"], decode), load_s)


def store(writers: int = 1) -> StoreCosts:
    """PostgreSQL on the disk of the same machine."""
    turns = _read("bench/simulation/turns.json")["turns"]
    return StoreCosts(
        _cost_s("start 16 jobs") / 16,
        _cost_s("commit 16 answers") / 16,
        tuple((each["others"], sorted(each["choose_s"])[len(each["choose_s"]) // 2]) for each in turns),
        writers,
    )


def _cost_s(what: str) -> float:
    """A figure from the last column of the table in docs/postgres.md."""
    text = (ROOT / "docs/postgres.md").read_text(encoding="utf-8")
    (cell,) = re.findall(rf"^\| {what}.*\| ([0-9.]+) ms \|$", text, re.MULTILINE)
    return float(cell) / 1000
