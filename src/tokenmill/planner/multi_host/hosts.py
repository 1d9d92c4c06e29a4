"""One model over several hosts: the values of such a plan, and the parts of a model that hosts get.

A host's memories are tiers of their own, HOST/TIER. Layers go to hosts as runs, one after the other; embeddings and
output stay with the head, which has the files and answers.
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
    """What one host does: a run of layers, where they live there, and what that takes."""

    host: FleetHost
    first: int  # layer
    count: int
    part: Profile  # its layers numbered from 0; the head's with embeddings and output
    settings: Settings
    placement: Placement  # of the part, in this host's own tiers
    ledger: Ledger  # in this host's own tiers
    hops: int = 0  # how often a token's state passes between this worker's own devices
    takes: int = 1  # states of a token that it is sent: two where the head's processors computed the layer before

    @property
    def weights_bytes(self) -> int:
        """All tensors of its part."""
        return self.part.bytes


@dataclass(frozen=True, slots=True)
class HostsPlan:
    """Where everything goes over several hosts, and what that will cost."""

    fleet: Fleet
    profile: Profile
    goal: Goal
    settings: Settings  # the head's
    shares: tuple[HostShare, ...]  # in the order that a token passes through them; hosts without layers left out
    ledger: Ledger  # tiers are HOST/TIER
    forecast: Forecast
    decisions: tuple[Decision, ...]
    shortfalls: tuple[Shortfall, ...]
    warnings: tuple[str, ...] = ()
    pipeline_parallel: int = 1  # vLLM

    @property
    def fits(self) -> bool:
        """Whether nothing is missing anywhere."""
        return not self.shortfalls

    @property
    def head(self) -> HostShare:
        """The head's share."""
        return next(share for share in self.shares if share.host == self.fleet.head)

    @property
    def workers(self) -> tuple[HostShare, ...]:
        """All others, in the fleet's order: engines number them by it."""
        order = [host.name for host in self.fleet.hosts]
        others = [share for share in self.shares if share.host != self.fleet.head]
        return tuple(sorted(others, key=lambda share: order.index(share.host.name)))

    @property
    def head_plan(self) -> Plan:
        """The head's share as a plan of its own: for what depends on one machine only."""
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
        """The whole model's, in tiers of the fleet."""
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
    """Layers `first` to `first + count`, numbered from 0, and what of the rest is asked for."""
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
    """The same tensor of another layer; names carry the layer's number too."""
    if tensor.layer is None or by == 0:
        return tensor
    layer = tensor.layer + by
    return replace(tensor, layer=layer, name=tensor.name.replace(f".{tensor.layer}.", f".{layer}.", 1))


def of_fleet(shares: Iterable[HostShare]) -> Ledger:
    """All hosts' ledgers in one, each tier under its host's name."""
    found = tuple(shares)

    def joined(moment: Literal["load_peak", "after_load", "full_context", "page_cache"]) -> tuple[LedgerRow, ...]:
        return tuple(
            replace(row, tier=f"{share.host.name}/{row.tier}")
            for share in found
            for row in getattr(share.ledger, moment)
        )

    return Ledger(joined("load_peak"), joined("after_load"), joined("full_context"), joined("page_cache"))


def lacking(share: HostShare) -> Iterator[Shortfall]:
    """What a host's memories lack for its share; tiers under the host's name."""
    machine = share.host.machine
    moments: tuple[Moment, ...] = ("load_peak", "full_context")
    for tier in machine.tiers():
        room = capacity(machine, tier.name)
        for moment in moments:
            needed = share.ledger.needed(tier.name, moment)
            if needed > room:
                yield Shortfall(f"{share.host.name}/{tier.name}", needed, room, moment)
                break


def in_words(shares: Iterable[HostShare]) -> str:
    """`a: layers 0-29; b: layers 30-60`."""
    return "; ".join(f"{share.host.name}: layers {share.first}-{share.first + share.count - 1}" for share in shares)
