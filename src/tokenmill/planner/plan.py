"""The one value that leaves this room: where everything goes, what that takes, how fast it will be, and why.

tiers of a machine               what a plan puts there
  gpu0 gpu1 ...   weights of whole layers, their KV, compute buffers, staging of host experts, runtime
  dram            experts that no GPU holds, embeddings, repack copies, prompt cache, host buffers, reserve
  pmem            the same where DRAM is only its cache, or experts beyond DRAM
  disk            experts beyond all memory, read through the page cache at every use
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tokenmill.hardware.machine import Machine
from tokenmill.model.profile import Profile, Tensor
from tokenmill.planner.compute_graph.ik_options import IkOptions
from tokenmill.planner.goal import DialectName, Goal
from tokenmill.planner.speed.calibration import Calibration

Item = Literal["weights", "kv", "compute", "staging", "repack", "prompt_cache", "runtime", "reserve"]
ITEMS: tuple[Item, ...] = ("weights", "kv", "compute", "staging", "repack", "prompt_cache", "runtime", "reserve")
Confidence = Literal["measured", "calibrated", "estimated"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Every knob with its value: a goal with nothing left open."""

    engine: DialectName
    context: int  # tokens of one sequence
    sequences: int
    ubatch: int
    batch: int
    cache_type_k: str
    cache_type_v: str
    threads: int
    threads_batch: int
    flash_attention: bool
    mmap: bool
    mlock: bool
    repack: bool
    cache_ram_bytes: int
    ik: IkOptions | None = None  # ik_llama.cpp only
    moe_cache_bytes: int = 0
    full_windows: bool = False
    unified: bool = True  # one cache for all sequences; llama-server's slots have one each
    offload_min_batch: int | None = None  # GGML_OP_OFFLOAD_MIN_BATCH where it is set; None: the engine's own
    output_rows: int | None = None
    gpu_memory_utilization: float = 0.9
    tensor_parallel: int = 1

    @property
    def cells(self) -> int:
        """KV cells for all sequences together."""
        return self.context * self.sequences


@dataclass(frozen=True, slots=True)
class Placement:
    """Which memory each tensor lives in, and which device computes each layer.

    A layer's cache lives where the layer is computed; its experts may live elsewhere.
    """

    homes: tuple[str, ...]  # tier of each tensor, in the profile's order
    layers: tuple[str, ...]  # tier of the device that computes each decoding layer: gpuN, or dram for the processors
    head: str  # tier of the device that computes the output

    @property
    def gpus(self) -> tuple[str, ...]:
        """GPU tiers in use, in order."""
        used = {tier for tier in {*self.homes, *self.layers, self.head} if tier.startswith("gpu")}
        return tuple(sorted(used, key=lambda tier: int(tier[3:])))

    def on(self, tier: str, profile: Profile) -> tuple[Tensor, ...]:
        """Tensors that live in one tier."""
        return tuple(tensor for tensor, home in zip(profile.tensors, self.homes, strict=True) if home == tier)

    def device_of(self, tensor: Tensor) -> str:
        """The tier of the device that computes with a tensor's layer."""
        return self.head if tensor.layer is None or tensor.layer >= len(self.layers) else self.layers[tensor.layer]


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """Bytes of one item in one tier."""

    tier: str
    item: Item
    bytes: int


@dataclass(frozen=True, slots=True)
class Ledger:
    """Bytes per tier and item at three moments."""

    load_peak: tuple[LedgerRow, ...]
    after_load: tuple[LedgerRow, ...]
    full_context: tuple[LedgerRow, ...]
    page_cache: tuple[LedgerRow, ...] = ()  # of these, what the system can drop and read again from the file

    def needed(self, tier: str, moment: Literal["load_peak", "full_context"] = "full_context") -> int:
        """Bytes that a tier must hold at one moment, without what can be dropped."""
        return self.total(tier, moment) - sum(row.bytes for row in self.page_cache if row.tier == tier)

    def total(self, tier: str, moment: Literal["load_peak", "after_load", "full_context"] = "full_context") -> int:
        """Bytes in one tier at one moment."""
        rows: tuple[LedgerRow, ...] = getattr(self, moment)
        return sum(row.bytes for row in rows if row.tier == tier)

    def of(self, tier: str, item: Item) -> int:
        """Bytes of one item in one tier at full context."""
        return sum(row.bytes for row in self.full_context if row.tier == tier and row.item == item)


@dataclass(frozen=True, slots=True)
class TierMemory:
    """Predicted use of one memory at full context."""

    used_bytes: int  # without mapped file pages that the system can drop
    capacity_bytes: int | None  # None: unknown
    items: Mapping[Item, int]
    load_peak_bytes: int


@dataclass(frozen=True, slots=True)
class Command:
    """A command line that starts an engine."""

    argv: tuple[str, ...]
    env: dict[str, str]
    notes: tuple[str, ...] = ()  # why some flags are there, or are not


@dataclass(frozen=True, slots=True)
class Term:
    """One share of the time a token takes: `dram weights`, `gpu0 attention`, `pcie experts`."""

    name: str
    seconds: float
    bytes: float | None = None  # moved
    gb_s: float | None = None  # at this effective rate


@dataclass(frozen=True, slots=True)
class Speed:
    """One forecast figure with what it is made of."""

    tok_s: float  # all sequences together
    depth: int  # tokens already in the context
    sequences: int
    terms: tuple[Term, ...]
    confidence: Confidence
    ubatch: int | None = None  # prefill only


@dataclass(frozen=True, slots=True)
class Forecast:
    """How fast it will be, and how long the load takes."""

    decode: tuple[Speed, ...]
    prefill: tuple[Speed, ...]
    load_cold_s: float | None
    load_warm_s: float | None
    load_bound_by: str | None
    notes: tuple[str, ...] = ()

    @property
    def decode_tok_s(self) -> float | None:
        """Predicted decode speed of one sequence with a short context; None: unknown."""
        return next((speed.tok_s for speed in self.decode if speed.sequences == 1), None)

    @property
    def prefill_tok_s(self) -> float | None:
        """Predicted prefill speed of a prompt with nothing before it; None: unknown."""
        return self.prefill[0].tok_s if self.prefill else None


@dataclass(frozen=True, slots=True)
class Decision:
    """A chosen value and why."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Bytes that are missing in one tier."""

    tier: str
    needed_bytes: int
    available_bytes: int
    moment: str  # load_peak or full_context

    @property
    def missing_bytes(self) -> int:
        """How much more the tier would have to hold."""
        return self.needed_bytes - self.available_bytes


@dataclass(frozen=True, slots=True)
class Change:
    """One change that would make a plan fit, and what it costs."""

    what: str  # in words: context 32768 -> 16384
    effect: str  # in words: saves 2.1 GiB on gpu0
    cost: float  # what it takes away, 0 nothing to 1 everything; the cheapest come first


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """Where everything goes and what that will cost."""

    machine: Machine
    profile: Profile
    goal: Goal
    settings: Settings
    placement: Placement
    ledger: Ledger
    forecast: Forecast
    decisions: tuple[Decision, ...]
    shortfalls: tuple[Shortfall, ...] = ()
    changes: tuple[Change, ...] = ()
    warnings: tuple[str, ...] = field(default_factory=tuple)
    calibration: Calibration | None = None  # that the forecast was corrected by
    command: Command | None = None  # starts its engine; None: it does not fit, or nobody asked

    @property
    def fits(self) -> bool:
        """Whether every memory holds what the plan puts there."""
        return not self.shortfalls

    @property
    def memory(self) -> Mapping[str, TierMemory]:
        """Predicted use of every memory that the plan uses, by its name: gpu0, dram, ..."""
        return {
            tier.name: TierMemory(
                self.ledger.needed(tier.name),
                tier.capacity_bytes,
                {item: size for item in ITEMS if (size := self.ledger.of(tier.name, item))},
                self.ledger.needed(tier.name, "load_peak"),
            )
            for tier in self.machine.tiers()
            if self.ledger.total(tier.name)
        }

    @property
    def batch_tok_s(self) -> float | None:
        """Predicted decode speed of all planned sequences together, with a short context; None: unknown."""
        together = (speed.tok_s for speed in self.forecast.decode if speed.sequences == self.settings.sequences)
        return next(together, None)

    def __repr__(self) -> str:
        from tokenmill.planner.render import as_text  # noqa: PLC0415  it imports this module

        return as_text(self)

    def _repr_html_(self) -> str:
        from tokenmill.planner.render import as_html  # noqa: PLC0415  it imports this module

        return as_html(self)


_KINDS = (
    (r"pcie", "copying experts over PCIe", "a wider PCIe link, or GPU memory that holds them"),
    (r"(dram|pmem|disk) ", "reading weights and cache from host memory", "GPU memory, or faster host memory"),
    (r"processors", "the processors' arithmetic", "more or newer cores, or GPU memory for what they compute"),
    (r"gpu\d+ (weights|experts|attention)", "the GPUs' own work", "a faster GPU, or a second for a larger share"),
    (r"", "hops, launches and other fixed costs", "fewer GPUs with more memory each"),
)
"""(start of a term's name, what that is, what makes it less)."""


def to_buy(name: str, speed: Speed) -> str | None:
    """The largest kind of cost and what would lower it; None where nothing was forecast."""
    total = sum(term.seconds for term in speed.terms)
    if total <= 0:
        return None
    shares = dict.fromkeys(_KINDS, 0.0)
    for term in speed.terms:
        kind = next(kind for kind in _KINDS if re.match(kind[0], term.name))
        shares[kind] += term.seconds / total
    (_, what, remedy), share = max(shares.items(), key=lambda item: item[1])
    return f"{share:.0%} of {name} is {what}: what helps most is {remedy}"
