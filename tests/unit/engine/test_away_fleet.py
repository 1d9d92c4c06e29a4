"""One engine on every machine that can have one, while machines come and go."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest

from support.away_hosts import FakeHost, NearMachines, never
from tokenmill import __version__
from tokenmill.engine.engine import Request, answer
from tokenmill.engine.ray_cluster.faults import Fault, fault_of
from tokenmill.engine.ray_cluster.fleet import MOST_TRIES, RayFleet
from tokenmill.engine.ray_cluster.host import NodePlan
from tokenmill.engine.ray_cluster.line import Lost
from tokenmill.engine.ray_cluster.places import NodeEvent, Ready
from tokenmill.errors import EngineError, UnknownModel

LIMIT_S = 60.0


class Told:
    """What was said of machines."""

    def __init__(self) -> None:
        self.news: list[NodeEvent] = []
        self._more = asyncio.Event()

    def __call__(self, news: NodeEvent) -> None:
        self.news.append(news)
        self._more.set()

    async def until(self, name: str, what: str) -> NodeEvent:
        while True:
            found = [news for news in self.news if (news.name, news.what) == (name, what)]
            if found:
                return found[-1]
            self._more.clear()
            await self._more.wait()

    def left_out(self) -> dict[str, str]:
        return {news.name: news.words for news in self.news if news.what == "left out"}


def with_fleet(
    machines: Callable[[], NearMachines],
    work: Callable[[RayFleet, NearMachines, Told], Awaitable[None]],
    *,
    model_id: str | None = None,
) -> None:
    async def run() -> None:
        made, told = machines(), Told()
        fleet = RayFleet(made, never, tell=told, model_id=model_id, look_s=0.01, patience_s=0.05)
        async with asyncio.timeout(LIMIT_S):
            await work(fleet, made, told)
            await fleet.close()

    asyncio.run(run())


async def same(ready: Ready) -> Ready:
    return ready


def planned(model_id: str = "m", *, lacks: str | None = None, version: str = __version__) -> FakeHost:
    return FakeHost(NodePlan(version, "fake", model_id, lacks, False))


def test_every_machine_gets_an_engine() -> None:
    async def work(fleet: RayFleet, machines: NearMachines, told: Told) -> None:
        assert await fleet.survey() == "m"
        async with aclosing(fleet.engines(same)) as engines:
            ready = [await anext(engines), await anext(engines)]
            assert {each.name for each in ready} == {"alpha", "beta"}
            for each in ready:
                assert (await answer(each.engine, Request("river"))).text
        await fleet.close()
        assert all(line.ended for lines in machines.lines.values() for line in lines)
        assert all(host.closed for host in machines.hosts.values())

    with_fleet(lambda: NearMachines(alpha=FakeHost(), beta=FakeHost()), work)


def test_a_machine_of_no_use_is_left_out_and_named() -> None:
    async def work(fleet: RayFleet, machines: NearMachines, told: Told) -> None:
        assert await fleet.survey() == "m"
        async with aclosing(fleet.engines(same)) as engines:
            assert (await anext(engines)).name == "good"
        assert told.left_out() == {
            "small": "fake does not fit: dram lacks 5 GiB",
            "old": f"it has tokenmill 0.0.9, and here is {__version__}",
            "bare": "kimi is not here",
            "other": "its fake is another than the others'",
        }
        assert next(news.hint for news in told.news if news.name == "bare" and news.hint) == "pull it"

    with_fleet(
        lambda: NearMachines(
            good=planned(),
            small=planned(lacks="dram lacks 5 GiB"),
            old=planned(version="0.0.9"),
            other=planned("n"),
            bare=FakeHost(fault_of(UnknownModel("kimi is not here", hint="pull it"))),
        ),
        work,
        model_id="m",
    )


def test_the_model_that_most_machines_have_counts_where_none_is_here() -> None:
    async def work(fleet: RayFleet, machines: NearMachines, told: Told) -> None:
        assert await fleet.survey() == "n"
        assert set(told.left_out()) == {"alpha"}

    with_fleet(lambda: NearMachines(alpha=planned("m"), beta=planned("n"), gamma=planned("n")), work)


def test_without_any_machine_of_use_it_says_why_of_each() -> None:
    async def work(fleet: RayFleet, machines: NearMachines, told: Told) -> None:
        with pytest.raises(EngineError, match="no machine of the Ray cluster can be used") as caught:
            await fleet.survey()
        *why, way_out = (caught.value.hint or "").splitlines()
        assert why == ["small: fake does not fit: dram lacks 5 GiB", "bare: kimi is not here"]
        assert way_out.startswith("try a smaller --context")

    with_fleet(
        lambda: NearMachines(
            small=planned(lacks="dram lacks 5 GiB"), bare=FakeHost(fault_of(UnknownModel("kimi is not here")))
        ),
        work,
    )


class Gone(FakeHost):
    async def outlook(self) -> NodePlan | Fault:
        raise Lost("the power is out", for_good=True)


def test_a_machine_that_is_lost_while_it_plans_is_named() -> None:
    async def work(fleet: RayFleet, machines: NearMachines, told: Told) -> None:
        with pytest.raises(EngineError) as caught:
            await fleet.survey()
        assert caught.value.hint == "alpha: it was lost: the power is out"

    with_fleet(lambda: NearMachines(alpha=Gone()), work)


def test_without_any_machine_at_all_it_says_so() -> None:
    async def work(fleet: RayFleet, machines: NearMachines, told: Told) -> None:
        with pytest.raises(EngineError, match="no machine with processors"):
            await fleet.survey()

    with_fleet(NearMachines, work)


def test_an_engine_that_cannot_be_loaded_leaves_its_machine_out() -> None:
    async def work(fleet: RayFleet, machines: NearMachines, told: Told) -> None:
        await fleet.survey()
        async with aclosing(fleet.engines(same)) as engines:
            assert (await anext(engines)).name == "good"
            assert (await told.until("bad", "left out")).words == "while loading, it was killed"

    bad = fault_of(EngineError("while loading, it was killed"))
    with_fleet(lambda: NearMachines(good=FakeHost(), bad=FakeHost(start=bad)), work)


def test_a_machine_that_joins_later_is_used() -> None:
    async def work(fleet: RayFleet, machines: NearMachines, told: Told) -> None:
        await fleet.survey()
        async with aclosing(fleet.engines(same)) as engines:
            assert (await anext(engines)).name == "alpha"
            machines.add("beta", FakeHost())
            assert (await anext(engines)).name == "beta"

    with_fleet(lambda: NearMachines(alpha=FakeHost()), work)


def test_a_machine_that_is_lost_is_forgotten_and_the_end_comes_with_the_last() -> None:
    async def work(fleet: RayFleet, machines: NearMachines, told: Told) -> None:
        await fleet.survey()
        async with aclosing(fleet.engines(same)) as engines:
            names = {(ready := await anext(engines)).name: ready for _ in range(2)}
            for name, ready in names.items():
                machines.lose(name)
                assert (await ready.engine.status()).state == "failed"
                assert (await told.until(name, "lost")).words == "the power is out"
            with pytest.raises(StopAsyncIteration):
                await anext(engines)

    with_fleet(lambda: NearMachines(alpha=FakeHost(), beta=FakeHost()), work)


def test_a_host_that_is_lost_on_a_machine_that_lives_is_started_again_but_not_for_ever() -> None:
    async def work(fleet: RayFleet, machines: NearMachines, told: Told) -> None:
        await fleet.survey()
        async with aclosing(fleet.engines(same)) as engines:
            for _ in range(MOST_TRIES):
                ready = await anext(engines)
                assert ready.name == "alpha"
                machines.lose("alpha", machine=False)
                assert (await ready.engine.status()).state == "failed"
            with pytest.raises(StopAsyncIteration):
                await anext(engines)
        assert "lost 3 times" in told.left_out()["alpha"]
        assert len(machines.lines["alpha"]) == MOST_TRIES

    with_fleet(lambda: NearMachines(alpha=FakeHost()), work)


def test_machines_of_one_name_are_told_apart() -> None:
    class Twins(NearMachines):
        def __init__(self) -> None:
            super().__init__(mill=FakeHost())
            first = self.there[0]
            self.there.append(type(first)("id-twin", "mill", 4.0, 0.0))

    async def work(fleet: RayFleet, machines: NearMachines, told: Told) -> None:
        await fleet.survey()
        async with aclosing(fleet.engines(same)) as engines:
            assert {(await anext(engines)).name, (await anext(engines)).name} == {"mill", "mill-2"}

    with_fleet(Twins, work)


def test_what_is_being_loaded_is_expected_with_its_context() -> None:
    async def work(fleet: RayFleet, machines: NearMachines, told: Told) -> None:
        await fleet.survey()
        before = fleet.coming
        assert before == ()  # nothing is loaded yet
        expected = list[tuple[int | None, ...]]()

        async def made(ready: Ready) -> str:
            expected.append(fleet.coming)
            return ready.name

        async with aclosing(fleet.engines(made)) as engines:
            assert await anext(engines) == "alpha"
            while fleet.coming:  # it is handed out
                await asyncio.sleep(0.01)
        assert expected == [(2048,)]

    with_fleet(lambda: NearMachines(alpha=FakeHost(NodePlan(__version__, "fake", "m", None, False, 2048))), work)
