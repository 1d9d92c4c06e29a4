"""Servers are started as rarely as possible."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from support.plans import placed, settings
from support.run_models import model
from tokenmill.engine.engine import Engine
from tokenmill.errors import EngineError
from tokenmill.planner.plan import Plan
from tokenmill.tuner.engine_rig import ServerRig, Starter, max_starts, needs_load, plan_at, serves, thinned
from tokenmill.tuner.point import Aim, TrialSettings
from tokenmill.tuner.search.space import Space, space_for

DIALS = TrialSettings(8, 8, 4, 512, 1024)
SPACE = Space(
    threads=tuple(range(1, 17)),
    sequences=(1, 2, 4, 8, 16),
    ubatch=(128, 256, 512, 1024, 2048),
    context=(4096,),
    threads_batch=(8, 16),
    cache_types=(("f16", "f16"), ("q8_0", "q8_0")),
    flash_attention=(True, False),
)


def a_plan() -> Plan:
    return placed(model("llama-3.3-70b:Q4_K_M"), settings(context=4096))


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"sequences": 4}, True),
        ({"sequences": 1}, True),
        ({"sequences": 8}, False),
        ({"threads": 7}, False),
        ({"ubatch": 128}, False),
        ({"context": 2048}, False),
        ({"flash_attention": False}, False),
    ],
)
def test_only_a_narrower_width_needs_no_start(change: dict[str, Any], same: bool) -> None:
    assert serves(DIALS, replace(DIALS, **change)) is same


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    ("sequences", "asked", "rows"), [(12, 128, 128), (12, None, None), (64, None, 128), (64, 32, 32)]
)
def test_an_engine_is_started_with_the_threshold_of_its_dials(
    native: bool, sequences: int, asked: int | None, rows: int | None
) -> None:
    hybrid = placed(model("kimi-k2.5:Q4_K_S"), settings(context=1024), cards=1)
    started = plan_at(hybrid, replace(DIALS, sequences=sequences, offload_min_batch=asked), native=native)
    assert started.settings.offload_min_batch == rows
    assert started.settings.unified is native  # slots of a server are apart


@pytest.mark.parametrize(
    ("change", "load"),
    [
        ({"sequences": 8}, False),
        ({"threads": 7}, False),
        ({"context": 2048}, False),
        ({"cache_type_k": "q8_0"}, False),
        ({"flash_attention": False}, False),
        ({"mmap": False}, True),
        ({"repack": False}, True),
        ({"placement": "x"}, True),
    ],
)
def test_the_native_engine_loads_again_only_for_its_weights(change: dict[str, Any], load: bool) -> None:
    assert needs_load(DIALS, replace(DIALS, **change)) is load


def test_few_values_are_tried_of_what_costs_a_start() -> None:
    found = thinned(a_plan(), SPACE)
    assert found.sequences == SPACE.sequences, "widths cost nothing"
    assert len(found.threads) <= 5
    assert set(found.threads) <= set(SPACE.threads)
    assert max(found.threads) == 16
    assert (len(found.cache_types), len(found.flash_attention), len(found.threads_batch)) == (1, 1, 1)
    assert max_starts(found) <= len(found.threads) * len(found.ubatch)
    assert max_starts(found) < max_starts(SPACE) / 10


def test_a_plan_s_own_space_can_be_thinned() -> None:
    plan = a_plan()
    whole = space_for(plan, Aim(), cores=16, max_sequences=16)
    assert thinned(plan, whole).all() < whole.all()


@dataclass
class FakeStarter:
    """Counts starts; those wider than memory holds fail."""

    most: int = 64
    loads: int = 0
    widths: list[int] = field(default_factory=list)

    async def started(self, plan: Plan) -> Engine:
        self.loads += 1
        self.widths.append(plan.settings.sequences)
        if plan.settings.sequences > self.most:
            raise EngineError("while loading, the engine was killed by the OOM killer")
        return cast(Engine, self)

    async def close(self) -> None:
        pass


def rig(starter: FakeStarter) -> ServerRig:
    return ServerRig(a_plan(), cast(Starter, starter), max_sequences=16)


def test_one_start_serves_every_width() -> None:
    starter = FakeStarter()

    async def work() -> None:
        on = rig(starter)
        narrow, wide, few = (replace(DIALS, sequences=count) for count in (2, 16, 1))
        slow = replace(DIALS, threads=4)
        for dials in (narrow, wide, few, slow, slow):
            await on.ready(dials)
            await on.turn(dials)
        await on.lost()
        with pytest.raises(EngineError):
            await on.turn(DIALS)

    asyncio.run(work())
    assert starter.widths == [16, 16]


def test_settings_without_memory_for_more_slots_are_started_as_requested() -> None:
    starter = FakeStarter(most=8)
    asyncio.run(rig(starter).ready(DIALS))
    assert starter.widths == [16, 4]
    with pytest.raises(EngineError):
        asyncio.run(rig(FakeStarter(most=2)).ready(DIALS))
