"""kill -9 of random processes at random moments: every line has one result, the one of an undisturbed run.

`TOKENMILL_STORM_SEED` repeats the choices of a storm. `bench/storm.py` is the long version.
"""

import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.postgres import cluster
from support.storm import POSTGRES_TARGETS, SQLITE_TARGETS, Storm, StormOrder, Tally
from support.storm_reference import Reference, make_reference, output_damage

JOBS = 320


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Jobs and the answers of an undisturbed run."""
    return make_reference(tmp_path_factory.mktemp("reference"), JOBS)


@pytest.fixture
def seed() -> int:
    chosen = int(os.environ.get("TOKENMILL_STORM_SEED") or random.randrange(1 << 32))
    print(f"TOKENMILL_STORM_SEED={chosen}")
    return chosen


def test_a_storm_on_sqlite_loses_doubles_and_changes_nothing(reference: Reference, seed: int, tmp_path: Path) -> None:
    _check(Storm(tmp_path, reference, StormOrder(len(SQLITE_TARGETS), seed)).run(), SQLITE_TARGETS)


def test_a_storm_on_postgresql_loses_doubles_and_changes_nothing(
    reference: Reference, seed: int, tmp_path: Path
) -> None:
    with cluster(safe=True) as server:
        tally = Storm(tmp_path, reference, StormOrder(len(POSTGRES_TARGETS), seed), server).run()
    _check(tally, POSTGRES_TARGETS)


def _check(tally: Tally, targets: Sequence[str]) -> None:
    assert tally.damage == {}, tally
    assert tally.kills == Counter(targets)


def test_the_comparison_sees_every_kind_of_damage(reference: Reference) -> None:
    good = [
        {
            "custom_id": name,
            "response": {
                "body": {"choices": [{"text": text, "finish_reason": reason}], "usage": {"completion_tokens": tokens}}
            },
        }
        for name, (text, reason, tokens) in reference.answers.items()
    ]
    assert output_damage(reference, good) == {}
    assert output_damage(reference, good[:-1]) == {"lost": 1}
    assert output_damage(reference, [{**good[0], "response": None}, *good[1:]]) == {"lost": 1}
    assert output_damage(reference, [*good, good[0]]) == {"doubled": 1}
    assert output_damage(reference, [good[1], good[0], *good[2:]]) == {"misplaced": 1}
    other = next(line for line in good if line["response"] != good[0]["response"])
    assert output_damage(reference, [{**good[0], "response": other["response"]}, *good[1:]]) == {"changed": 1}
