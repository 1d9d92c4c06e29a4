"""Values of a plan over several hosts, and the partial profile of a model that each host gets.

A host's memories are tiers named HOST/TIER. Each host has one contiguous run of layers; embeddings and output stay
on the head host, which reads the files and serves requests.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from tokenmill.hardware.fleet import Fleet, FleetHost
from tokenmill.model.profile import Profile, Tensor, TensorClass
from tokenmill.planner.draft import capacity
from tokenmill.planner.goal import Goal
from tokenmill.planner.plan import Decision, Forecast, Ledger, LedgerRow, Placement, Plan, Settings, Shortfall

Moment = Literal["load_peak", "full_context"]


@dataclass(frozen=True, slots=True)
class HostShare:
    """One host's run of layers, their placement and memory use."""

    host: FleetHost
    first: int  # index of its first layer
    count: int
    part: Profile  # the host's layers, numbered from 0; the head host's with embeddings and output
    settings: Settings
    placement: Placement  # of `part`, in this host's own tiers
    ledger: Ledger  # in this host's own tiers
    hops: int = 0  # transfers of a token's state between this worker's own devices
    takes: int = 1  # states per token sent to it: two if the head host's CPU computed the previous layer

    @property
    def weights_bytes(self) -> int:
        """Bytes of all tensors of its part."""
        return self.part.bytes


@dataclass(frozen=True, slots=True)
class HostsPlan:
    """A plan over several hosts."""

    fleet: Fleet
    profile: Profile
    goal: Goal
    settings: Settings  # those of the head host
    shares: tuple[HostShare, ...]  # hosts with layers, in the order in which a token passes through them
    ledger: Ledger  # tiers are named HOST/TIER
    forecast: Forecast
    decisions: tuple[Decision, ...]
    shortfalls: tuple[Shortfall, ...]
    warnings: tuple[str, ...] = ()
    pipeline_parallel: int = 1  # vLLM

    @property
    def fits(self) -> bool:
        """Whether every tier of every host holds its share."""
        return not self.shortfalls

    @property
    def head(self) -> HostShare:
        """The head host's share."""
        return next(share for share in self.shares if share.host == self.fleet.head)

    @property
    def workers(self) -> tuple[HostShare, ...]:
        """Shares of the other hosts in the fleet's order, in which the engines number them."""
        order = [host.name for host in self.fleet.hosts]
        others = [share for share in self.shares if share.host != self.fleet.head]
        return tuple(sorted(others, key=lambda share: order.index(share.host.name)))

    @property
    def head_plan(self) -> Plan:
        """The head host's share as a single-machine plan."""
        head = self.head
        return Plan(
            head.host.machine,
            head.part,
            self.goal,
            head.settings,
            head.placement,
            head.ledger,
            self.forecast,
            self.decisions,
            self.shortfalls,
        )

    def placement(self) -> Placement:
        """The placement of the whole model in HOST/TIER tiers."""
        homes: dict[str, str] = {}
        layers: list[str] = [""] * self.profile.layers
        for share in self.shares:
            name = share.host.name
            for tensor, home in zip(share.part.tensors, share.placement.homes, strict=True):
                homes[_shifted(tensor, share.first).name] = f"{name}/{home}"
            for index, tier in enumerate(share.placement.layers):
                layers[share.first + index] = f"{name}/{tier}"
        head = f"{self.fleet.head.name}/{self.head.placement.head}"
        return Placement(tuple(homes.get(tensor.name, head) for tensor in self.profile.tensors), tuple(layers), head)


def part_of(profile: Profile, first: int, count: int, *, embeddings: bool = False, output: bool = False) -> Profile:
    """Layers `first` to `first + count`, numbered from 0, with embeddings and output on request."""
    embeddings = embeddings or (output and profile.tied_output)
    tensors = []
    for tensor in profile.tensors:
        if tensor.layer is None:
            if embeddings if tensor.cls is TensorClass.EMBEDDING else output:
                tensors.append(tensor)
        elif first <= tensor.layer < first + count and tensor.cls is not TensorClass.MTP:
            tensors.append(_shifted(tensor, -first))
    return replace(profile, tensors=tuple(tensors), layers=count, cache=profile.cache[first : first + count])


def _shifted(tensor: Tensor, by: int) -> Tensor:
    """The same tensor with its layer, and the number in its name, changed by `by`."""
    if tensor.layer is None or by == 0:
        return tensor
    layer = tensor.layer + by
    return replace(tensor, layer=layer, name=tensor.name.replace(f".{tensor.layer}.", f".{layer}.", 1))


def merged_ledger(shares: Iterable[HostShare]) -> Ledger:
    """Merge all hosts' ledgers, with tiers renamed to HOST/TIER."""
    found = tuple(shares)

    def joined(moment: Literal["load_peak", "after_load", "full_context", "page_cache"]) -> tuple[LedgerRow, ...]:
        return tuple(
            replace(row, tier=f"{share.host.name}/{row.tier}")
            for share in found
            for row in getattr(share.ledger, moment)
        )

    return Ledger(joined("load_peak"), joined("after_load"), joined("full_context"), joined("page_cache"))


def shortfalls_of(share: HostShare) -> Iterator[Shortfall]:
    """Yield the shortfalls of a host's memories for its share, with tiers named HOST/TIER."""
    machine = share.host.machine
    moments: tuple[Moment, ...] = ("load_peak", "full_context")
    for tier in machine.tiers():
        available = capacity(machine, tier.name)
        for moment in moments:
            needed = share.ledger.needed(tier.name, moment)
            if needed > available:
                yield Shortfall(f"{share.host.name}/{tier.name}", needed, available, moment)
                break


def layer_ranges(shares: Iterable[HostShare]) -> str:
    """The layers of each host: `a: layers 0-29; b: layers 30-60`."""
    return "; ".join(f"{share.host.name}: layers {share.first}-{share.first + share.count - 1}" for share in shares)
