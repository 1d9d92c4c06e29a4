"""The planner's result: placement, memory use, forecast and the reason for every choice.

tier            contents
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

Item = Literal["weights", "kv", "compute", "draft", "staging", "repack", "prompt_cache", "runtime", "reserve"]
ITEMS: tuple[Item, ...] = (
    "weights",
    "kv",
    "compute",
    "draft",
    "staging",
    "repack",
    "prompt_cache",
    "runtime",
    "reserve",
)
Confidence = Literal["measured", "calibrated", "estimated"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Engine settings: a goal without open choices."""

    engine: DialectName
    context: int  # tokens per sequence
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
    unified: bool = True  # one KV cache for all sequences; False: one per sequence, the default of llama-server
    offload_min_batch: int | None = None  # GGML_OP_OFFLOAD_MIN_BATCH; None: the engine's default
    output_rows: int | None = None
    state_ids: int | None = None  # recurrent states in memory; None: one per sequence
    gpu_memory_utilization: float = 0.9
    tensor_parallel: int = 1
    mtp: bool = False  # layers for multi-token prediction draft tokens
    draft_model: str | None = None  # the file of a model that drafts tokens
    draft_tokens: int | None = None  # drafted per step; None: no speculative decoding
    total_cells: int | None = None  # KV cells of all sequences; None: the full context for each
    shared_tokens: int = 0  # beginning that all sequences share, with `total_cells`

    @property
    def cells(self) -> int:
        """KV cells of all sequences together."""
        return self.context * self.sequences if self.total_cells is None else self.total_cells

    @property
    def per_slot(self) -> bool:
        """Whether each sequence has KV cells of its own."""
        return not self.unified and self.sequences > 1


@dataclass(frozen=True, slots=True)
class Placement:
    """The memory of each tensor and the device that computes each layer.

    A layer's cache lives where the layer is computed; its experts may live elsewhere.
    """

    homes: tuple[str, ...]  # tier of each tensor, in the profile's order
    layers: tuple[str, ...]  # tier of the device of each decoding layer: gpuN, or dram for the CPU
    head: str  # tier of the device that computes the output

    @property
    def gpus(self) -> tuple[str, ...]:
        """GPU tiers in use, sorted."""
        used = {tier for tier in {*self.homes, *self.layers, self.head} if tier.startswith("gpu")}
        return tuple(sorted(used, key=lambda tier: int(tier[3:])))

    def on(self, tier: str, profile: Profile) -> tuple[Tensor, ...]:
        """Tensors that live in one tier."""
        return tuple(tensor for tensor, home in zip(profile.tensors, self.homes, strict=True) if home == tier)

    def device_of(self, tensor: Tensor) -> str:
        """The tier of the device that computes a tensor's layer."""
        return self.head if tensor.layer is None or tensor.layer >= len(self.layers) else self.layers[tensor.layer]


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """Bytes of one item in one tier."""

    tier: str
    item: Item
    bytes: int


@dataclass(frozen=True, slots=True)
class Ledger:
    """Bytes per tier and item at the load peak, after loading and at full context."""

    load_peak: tuple[LedgerRow, ...]
    after_load: tuple[LedgerRow, ...]
    full_context: tuple[LedgerRow, ...]
    page_cache: tuple[LedgerRow, ...] = ()  # the part that the system can drop and read again from the file

    def needed(self, tier: str, moment: Literal["load_peak", "full_context"] = "full_context") -> int:
        """Bytes that a tier must hold at one moment, without droppable pages."""
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

    used_bytes: int  # without mapped file pages, which the system can drop
    capacity_bytes: int | None  # None: unknown
    items: Mapping[Item, int]
    load_peak_bytes: int


@dataclass(frozen=True, slots=True)
class Command:
    """A command line that starts an engine."""

    argv: tuple[str, ...]
    env: dict[str, str]
    notes: tuple[str, ...] = ()  # reasons why flags are set or omitted


@dataclass(frozen=True, slots=True)
class Term:
    """One part of the time per token: `dram weights`, `gpu0 attention`, `pcie experts`."""

    name: str
    seconds: float
    bytes: float | None = None  # bytes moved
    gb_s: float | None = None  # effective rate


@dataclass(frozen=True, slots=True)
class Speed:
    """A predicted speed and the terms it is the sum of."""

    tok_s: float  # total of all sequences
    depth: int  # tokens already in each sequence's context
    sequences: int
    terms: tuple[Term, ...]
    confidence: Confidence
    ubatch: int | None = None  # prefill only
    low_tok_s: float | None = None  # 80 % of published runs on machines of this class are between low and high
    high_tok_s: float | None = None


@dataclass(frozen=True, slots=True)
class JobTime:
    """Predicted time of one job that runs alone, with nothing of its prompt cached."""

    prompt_tokens: int
    answer_tokens: int
    prefill_s: float
    decode_s: float

    @property
    def prefill_tok_s(self) -> float:
        """Average over the whole prompt."""
        return self.prompt_tokens / self.prefill_s


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted speeds and load times."""

    decode: tuple[Speed, ...]
    prefill: tuple[Speed, ...]
    load_cold_s: float | None
    load_warm_s: float | None
    load_bound_by: str | None
    notes: tuple[str, ...] = ()
    jobs: tuple[JobTime, ...] = ()  # by length of the prompt; empty if a speed is unknown

    @property
    def decode_tok_s(self) -> float | None:
        """Predicted decode speed of one sequence with a short context; None: unknown."""
        return next((speed.tok_s for speed in self.decode if speed.sequences == 1), None)

    @property
    def prefill_tok_s(self) -> float | None:
        """Predicted prefill speed of a whole short prompt, or of one micro-batch without a decode forecast."""
        if self.jobs:
            return self.jobs[0].prefill_tok_s
        return self.prefill[0].tok_s if self.prefill else None


@dataclass(frozen=True, slots=True)
class Decision:
    """A chosen value and the reason."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Missing bytes in one tier."""

    tier: str
    needed_bytes: int
    available_bytes: int
    moment: str  # load_peak or full_context
    item: Item | None = None  # what the bytes are for, if not for everything in the tier

    @property
    def missing_bytes(self) -> int:
        """Bytes that the tier lacks."""
        return self.needed_bytes - self.available_bytes


@dataclass(frozen=True, slots=True)
class Change:
    """A change that makes a plan fit, and its effect."""

    what: str  # for example: --context 16384
    effect: str  # for example: weights 310 GiB, KV 2.1 GiB, 14.2 tok/s predicted
    cost: float  # loss of usefulness: 0 none, 1 everything; cheapest changes come first


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """The placement of a model, its memory use and its predicted speed."""

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
    longest_context: int | None = None  # that fits with otherwise equal settings, if the requested one does not
    warnings: tuple[str, ...] = field(default_factory=tuple)
    calibration: Calibration | None = None  # the corrections applied to the forecast
    command: Command | None = None  # starts the engine; None: the plan does not fit, or no command was requested

    @property
    def fits(self) -> bool:
        """Whether every tier holds its share."""
        return not self.shortfalls

    @property
    def memory(self) -> Mapping[str, TierMemory]:
        """Predicted use of every tier in the plan, by name: gpu0, dram, ..."""
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
        from tokenmill.planner.render import as_text  # noqa: PLC0415  import cycle

        return as_text(self)

    def _repr_html_(self) -> str:
        from tokenmill.planner.render import as_html  # noqa: PLC0415  import cycle

        return as_html(self)


_KINDS = (
    (r"pcie", "copying experts over PCIe", "a wider PCIe link, or GPU memory that holds them"),
    (r"(dram|pmem|disk) ", "reading weights and cache from host memory", "GPU memory, or faster host memory"),
    (r"processors", "arithmetic on the CPU", "more or newer cores, or GPU memory for the weights they compute with"),
    (r"gpu\d+ (weights|experts|attention)", "work on the GPUs", "a faster GPU, or one more to hold a larger share"),
    (r"", "transfers, launches and other fixed costs", "fewer GPUs with more memory each"),
)
"""(pattern of the term's name, its meaning, what reduces it)."""


def upgrade_advice(name: str, speed: Speed) -> str | None:
    """One sentence on the largest kind of cost and the upgrade that reduces it; None without a forecast."""
    total = sum(term.seconds for term in speed.terms)
    if total <= 0:
        return None
    shares = dict.fromkeys(_KINDS, 0.0)
    for term in speed.terms:
        kind = next(kind for kind in _KINDS if re.match(kind[0], term.name))
        shares[kind] += term.seconds / total
    (_, what, remedy), share = max(shares.items(), key=lambda item: item[1])
    return f"{share:.0%} of {name} time is {what}; the best upgrade is {remedy}"
