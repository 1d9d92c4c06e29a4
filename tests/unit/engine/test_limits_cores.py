"""Dividing cores between an engine and others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.written_host import WrittenHost
from tokenmill.engine.limits.cores import Core, cores_here, cores_of, divide
from tokenmill.hardware.machine import Cpu, Machine, NumaNode

SIXTEEN = cores_of(Machine("one", cpu=Cpu(cores=16, threads_per_core=2)))
NODES = (NumaNode(0, tuple(range(8))), NumaNode(1, tuple(range(8, 16))))
TWO_NODES = cores_of(Machine("two", cpu=Cpu(cores=16, threads_per_core=1), numa=NODES))


def test_whole_cores_are_left_with_their_siblings() -> None:
    divided = divide(SIXTEEN, 3)
    assert divided is not None
    assert divided.left == (13, 14, 15, 29, 30, 31)
    assert divided.cpus == (*range(13), *range(16, 29))
    assert divided.first_cpus == tuple(range(13))


def test_nodes_give_evenly() -> None:
    divided = divide(TWO_NODES, 3)
    assert divided is not None
    assert divided.left == (7, 14, 15)


def test_the_node_with_the_engines_memory_gives_last() -> None:
    near = divide(TWO_NODES, 3, home=1)
    assert near is not None
    assert near.left == (5, 6, 7)
    more = divide(TWO_NODES, 10, home=1)
    assert more is not None
    assert more.left == (*range(8), 14, 15)


def test_cores_that_are_not_ours_count_as_left() -> None:
    divided = divide(TWO_NODES, 3, allowed=range(13))
    assert divided is not None
    assert divided.left == (13, 14, 15)
    one_more = divide(TWO_NODES, 4, allowed=range(13))
    assert one_more is not None
    assert one_more.left == (7, 13, 14, 15)
    half = divide(SIXTEEN, 1, allowed=range(16))  # a sibling of each core is another's, but no core is
    assert half is not None
    assert half.cpus == tuple(range(15))


@pytest.mark.parametrize("reserve", [16, 17])
def test_an_engine_without_cores_is_none(reserve: int) -> None:
    assert divide(SIXTEEN, reserve) is None
    assert divide((), 1) is None
    assert divide(SIXTEEN, 1, allowed=()) is None


@st.composite
def machines(draw: st.DrawFn) -> tuple[Core, ...]:
    cores, siblings = draw(st.integers(1, 24)), draw(st.integers(1, 2))
    nodes = draw(st.integers(1, 4))
    return tuple(Core(tuple(core + cores * n for n in range(siblings)), core * nodes // cores) for core in range(cores))


@given(machines(), st.integers(1, 24), st.data())
def test_nothing_is_lost_and_dividing_again_changes_nothing(
    cores: tuple[Core, ...], reserve: int, data: st.DataObject
) -> None:
    every = {cpu for core in cores for cpu in core.cpus}
    allowed = set(data.draw(st.lists(st.sampled_from(sorted(every)), unique=True)))
    divided = divide(cores, reserve, allowed=allowed)
    if divided is None:
        return
    assert {*divided.cpus} | {*divided.left} == every
    assert {*divided.cpus} <= allowed
    assert len(cores) - len(divided.kept) >= reserve
    assert divide(cores, reserve, allowed=divided.cpus) == divided
    counts = [sum(core.node == node for core in divided.kept) for node in {core.node for core in cores}]
    if allowed == every and len(cores) % len(counts) == 0:
        assert max(counts) - min(counts) <= 1


def test_the_kernel_says_which_cpus_share_a_core() -> None:
    cpus, nodes = "/sys/devices/system/cpu", "/sys/devices/system/node"
    host = WrittenHost(
        {
            f"{cpus}/cpu0/topology/core_cpus_list": "0-1\n",
            f"{cpus}/cpu1/topology/core_cpus_list": "0-1\n",
            f"{cpus}/cpu2/topology/thread_siblings_list": "2,10\n",
            f"{cpus}/cpu10/topology/thread_siblings_list": "2,10\n",
            f"{nodes}/node0/cpulist": "0-1\n",
            f"{nodes}/node1/cpulist": "2,10\n",
        }
    )
    assert cores_here(host) == (Core((0, 1), 0), Core((2, 10), 1))
    assert cores_here(WrittenHost()) == ()
