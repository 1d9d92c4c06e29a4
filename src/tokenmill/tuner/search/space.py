"""The search space of a tuning: the values of each setting.

`space_for` is the entry point. Combinations that no engine accepts, or that do not fit in memory according to the
ledger, are excluded; the forecast only decides whether settings that need a reload are included. Uses no measurements.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import log
from typing import Any

from tokenmill.model.tensor_types import BY_NAME
from tokenmill.planner.placement import fingerprint
from tokenmill.planner.plan import Plan, Settings
from tokenmill.planner.speed.offload import effective_min_batch, offloaded_decode
from tokenmill.tuner.point import Aim, TrialSettings
from tokenmill.tuner.search.forecasts import fits, forecaster, settings_at
from tokenmill.units import format_tok_s

ORDERED = ("sequences", "threads", "ubatch", "threads_batch", "context")
KINDS = ("cache_types", "flash_attention")
FREE = (*ORDERED, *KINDS)  # changed without a reload, in order of importance
RELOAD = ("mmap", "repack", "offload_min_batch", "placement")

SEQUENCES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
MANY = (
    96,
    128,
    160,
    192,
    224,
)  # for plans that copy experts over PCIe in every step, whose cost does not depend on the number of sequences
UBATCHES = (128, 256, 512, 1024, 2048)
FEW_CORES = 4  # up to this number of cores, hyper-threads may help
NOISE = 0.03

CacheTypes = tuple[str, str]  # of K and V, chosen together because engines reject some pairs


@dataclass(frozen=True, slots=True)
class Space:
    """The possible values of each setting."""

    threads: tuple[int, ...]
    sequences: tuple[int, ...]
    ubatch: tuple[int, ...]
    context: tuple[int, ...]
    threads_batch: tuple[int, ...] = ()  # empty: same as threads
    cache_types: tuple[CacheTypes, ...] = (("f16", "f16"),)
    flash_attention: tuple[bool, ...] = (True,)
    mmap: tuple[bool, ...] = (True,)
    repack: tuple[bool, ...] = (True,)
    offload_min_batch: tuple[int | None, ...] = (None,)
    placement: tuple[str, ...] = ("plan",)
    max_sequences: tuple[tuple[CacheTypes, int, int], ...] = ()  # (cache types, context, maximum); unlisted: unknown
    reasons: tuple[str, ...] = ()  # why settings that need a reload are included

    @property
    def free(self) -> tuple[str, ...]:
        """Settings with several values that need no reload."""
        return tuple(name for name in FREE if len(self.values(name)) > 1)

    @property
    def reload(self) -> tuple[str, ...]:
        """Settings with several values that need a reload."""
        return tuple(name for name in RELOAD if len(self.values(name)) > 1)

    def values(self, name: str) -> tuple[Any, ...]:
        """The values of a setting; empty if another setting determines it."""
        found: tuple[Any, ...] = getattr(self, name)
        return found

    def all(self) -> int:
        """Number of combinations."""
        count = len(self.threads) * max(1, len(self.threads_batch))
        for name in RELOAD:
            count *= len(self.values(name))
        triples = product(self.cache_types, self.flash_attention, self.context, self.sequences)
        return count * sum(
            sum(1 for size in self.ubatch if size <= context)
            for types, flash, context, sequences in triples
            if _takes(types, flash=flash) and sequences <= self.most(types, context)
        )

    def combinations(self) -> Iterator[TrialSettings]:
        """All combinations."""
        for types, flash, *rest in product(
            self.cache_types,
            self.flash_attention,
            self.threads,
            self.sequences,
            self.ubatch,
            self.context,
            self.threads_batch or (None,),
            *(self.values(name) for name in RELOAD),
        ):
            threads, sequences, ubatch, context, batch, *reload = rest
            key, value = types
            settings = TrialSettings(
                threads,
                batch or threads,
                sequences,
                ubatch,
                context,
                key,
                value,
                flash,
                **dict(zip(RELOAD, reload, strict=True)),
            )
            if self.holds(settings):
                yield settings

    def holds(self, settings: TrialSettings) -> bool:
        """Whether the space contains these settings."""
        tied = not self.threads_batch and settings.threads_batch == settings.threads
        types = (settings.cache_type_k, settings.cache_type_v)
        return (
            all(setting(settings, name) in self.values(name) for name in (*FREE, *RELOAD) if name != "threads_batch")
            and (tied or settings.threads_batch in self.threads_batch)
            and settings.ubatch <= settings.context
            and _takes(types, flash=settings.flash_attention)
            and settings.sequences <= self.most(types, settings.context)
        )

    def turned(self, settings: TrialSettings, name: str, value: Any) -> TrialSettings:
        """The settings with one of them changed; threads for prefill follow threads if they are not varied."""
        if name == "cache_types":
            return replace(settings, cache_type_k=value[0], cache_type_v=value[1])
        if name == "threads" and not self.threads_batch:
            return replace(settings, threads=value, threads_batch=value)
        return replace(settings, **{name: value})

    def nearest(self, settings: TrialSettings) -> TrialSettings:
        """The closest combination in the space."""
        for name in (*RELOAD, *KINDS):
            values = self.values(name)
            if setting(settings, name) not in values:
                settings = self.turned(settings, name, values[0])
        for name in ORDERED:
            if values := self.values(name):
                at = setting(settings, name)
                near = min(values, key=lambda value: (abs(log(value / at)), value))
                settings = self.turned(settings, name, near)
        kinds = [types for types in self.cache_types if self.most(types, settings.context) >= self.sequences[0]]
        if kinds and setting(settings, "cache_types") not in kinds:
            settings = self.turned(settings, "cache_types", kinds[0])
        if not _takes(setting(settings, "cache_types"), flash=settings.flash_attention):
            settings = replace(settings, flash_attention=True)
        most = self.most(setting(settings, "cache_types"), settings.context)
        fitting = [count for count in self.sequences if count <= most] or [self.sequences[0]]
        sizes = [size for size in self.ubatch if size <= settings.context] or [self.ubatch[0]]
        return replace(settings, sequences=min(settings.sequences, fitting[-1]), ubatch=min(settings.ubatch, sizes[-1]))

    def most(self, types: CacheTypes, context: int) -> int:
        """Maximum sequences that fit in memory; unlimited if it was not computed."""
        known = {(held, length): most for held, length, most in self.max_sequences}
        return known.get((types, context), self.sequences[-1])


def setting(settings: TrialSettings, name: str) -> Any:
    """The value of a setting."""
    return (settings.cache_type_k, settings.cache_type_v) if name == "cache_types" else getattr(settings, name)


def _takes(types: CacheTypes, *, flash: bool) -> bool:
    """Whether llama.cpp accepts these types: a quantized V needs flash attention."""
    return flash or types[1] in ("f16", "bf16", "f32")


def space_for(
    plan: Plan, aim: Aim, *, cores: int, max_sequences: int, contexts: tuple[int, ...] | None = None
) -> Space:
    """The search space for a plan. Settings that its goal specifies are fixed, except sequences.

    `cores` are the usable physical ones; `max_sequences` is the maximum that the engine decodes concurrently.
    """
    goal = plan.goal
    now = plan.settings
    vllm = goal.engine == "vllm"
    lengths = _contexts(plan, aim, contexts)
    types = _cache_types(plan, aim)
    threads = (goal.threads,) if goal.threads is not None else _threads(plan, cores)
    own_batch = aim.kind == "cores" or vllm or len(threads) == 1  # freed cores must also be free during prefill
    flash = (True, False) if goal.flash_attention and not vllm else (goal.flash_attention,)
    counts = tuple(sorted(c for c in {*SEQUENCES, now.sequences} if aim.least_sequences <= c <= max_sequences))
    plain = Space(
        threads=threads,
        threads_batch=_threads_batch(plan, cores, own_batch=own_batch),
        sequences=counts or (max(1, min(aim.least_sequences, max_sequences)),),
        ubatch=(now.ubatch,) if goal.ubatch is not None or vllm else _ubatches(lengths, now.ubatch),
        context=lengths,
        cache_types=types,
        flash_attention=flash if any(_takes(each, flash=False) for each in types) else (True,),
        mmap=(now.mmap,),
        repack=(now.repack,),
        placement=(fingerprint(plan.profile, plan.placement),),
    )
    held = _within_memory(plan, plain)
    wide = tuple(sorted({*plain.sequences, *_many(plan, max_sequences)}))
    many = _within_memory(plan, replace(plain, sequences=wide))
    if many.sequences != held.sequences and _moves(plan, many):
        held = many
    return _with_reloads(plan, aim, replace(held, offload_min_batch=(_rows(plan, held),)))


def _rows(plan: Plan, space: Space) -> int | None:
    """The offload threshold of all trials, which is that of an engine loaded for the most sequences."""
    return effective_min_batch(plan.profile, _widest(plan, space), plan.placement)


def _widest(plan: Plan, space: Space) -> Settings:
    start = start_for(plan, space)
    asked = plan.goal.offload_min_batch
    return settings_at(plan, replace(start, sequences=max(space.sequences), offload_min_batch=asked))


def _many(plan: Plan, most: int) -> tuple[int, ...]:
    """Large numbers of sequences, which are useful only if experts are copied in every step."""
    return tuple(count for count in MANY if count <= most) if plan.placement.gpus else ()


def _moves(plan: Plan, space: Space) -> bool:
    """Whether decoding the most sequences is fastest with experts copied to the GPU."""
    return offloaded_decode(plan.machine, plan.profile, _widest(plan, space), plan.placement) is not None


def start_for(plan: Plan, space: Space) -> TrialSettings:
    """The plan's own settings, or the closest ones in the space."""
    now = plan.settings
    return space.nearest(
        TrialSettings(
            now.threads,
            now.threads_batch,
            now.sequences,
            now.ubatch,
            now.context,
            now.cache_type_k,
            now.cache_type_v,
            now.flash_attention,
            now.mmap,
            now.repack,
        )
    )


def _threads(plan: Plan, cores: int) -> tuple[int, ...]:
    usable = max(1, cores - plan.goal.reserve_cores)
    each = plan.machine.cpu.threads_per_core or 1
    return tuple(range(1, (usable * each if cores <= FEW_CORES else usable) + 1))


def _threads_batch(plan: Plan, cores: int, *, own_batch: bool) -> tuple[int, ...]:
    """Values for prefill: half of the cores, all of them, all hyper-threads, which can help compute-bound work."""
    if plan.goal.threads_batch is not None:
        return (plan.goal.threads_batch,)
    if own_batch:
        return ()
    usable = max(1, cores - plan.goal.reserve_cores)
    each = plan.machine.cpu.threads_per_core or 1
    return tuple(sorted({max(1, usable // 2), usable, usable * each, plan.settings.threads_batch}))


def _ubatches(contexts: tuple[int, ...], own: int) -> tuple[int, ...]:
    return tuple(sorted(size for size in {*UBATCHES, own} if size <= max(contexts))) or (max(contexts),)


def _contexts(plan: Plan, aim: Aim, given: tuple[int, ...] | None) -> tuple[int, ...]:
    least = aim.least_context or 1
    longest = plan.profile.training_context
    if given is None and aim.kind == "context":
        first = aim.least_context or min(4096, plan.settings.context)
        end = longest or 4 * plan.settings.context
        doubled = [first << step for step in range(20) if first << step <= end]
        given = (*doubled, plan.settings.context, *((longest,) if longest is not None else ()))
    wanted = given or (plan.settings.context,)
    return tuple(sorted({max(each, least) for each in wanted if longest is None or max(each, least) <= longest})) or (
        plan.settings.context,
    )


def _cache_types(plan: Plan, aim: Aim) -> tuple[CacheTypes, ...]:
    goal = plan.goal
    now = plan.settings
    if goal.cache_type_k is not None or goal.cache_type_v is not None or goal.engine == "vllm":
        return ((now.cache_type_k, now.cache_type_v),)
    names = ["f16", "q8_0", "q4_0"] if aim.kind == "context" else ["f16", "q8_0"]
    return tuple((name, name) for name in names if goal.flash_attention or _takes((name, name), flash=False))


def cache_bytes(types: CacheTypes) -> float | None:
    """Bytes of one element of K plus one of V; None for an unknown type."""
    known = [BY_NAME.get(name.upper()) for name in types]
    return sum(kind.block_bytes / kind.block for kind in known if kind is not None) if all(known) else None


def _within_memory(plan: Plan, space: Space) -> Space:
    """Limit sequences by the ledger for each cache type and context; combinations that never fit are removed."""
    start = start_for(plan, space)
    found = []
    for types, context in product(space.cache_types, space.context):
        settings = replace(
            space.turned(start, "cache_types", types), context=context, ubatch=min(start.ubatch, context)
        )
        most = 0
        for count in space.sequences:  # memory grows with sequences, so stop at the first that does not fit
            if not fits(plan, replace(settings, sequences=count)):
                break
            most = count
        found.append((types, context, most))
    most = max(count for _, _, count in found)
    if most == 0:
        return space  # the ledger rejects everything: let the engine decide
    return replace(
        space, sequences=tuple(count for count in space.sequences if count <= most), max_sequences=tuple(found)
    )


def _with_reloads(plan: Plan, aim: Aim, space: Space) -> Space:
    """Add settings that need a reload if the forecast predicts a gain beyond noise."""
    forecast = forecaster(plan, aim)
    start = start_for(plan, space)
    most = space.most((start.cache_type_k, start.cache_type_v), start.context)

    def best(settings: TrialSettings) -> float | None:
        rates = [forecast(replace(settings, sequences=count)) for count in space.sequences if count <= most]
        return max((rate for rate in rates if rate is not None), default=None)

    own = best(start)
    reasons = []
    options: dict[str, Any] = {"mmap": not start.mmap, "repack": not start.repack}
    for name, value in options.items():
        if getattr(plan.goal, name, None) is not None:
            continue  # set by the user
        turned = space.turned(start, name, value)
        other = best(turned)
        if own is not None and other is not None and other > own * (1 + NOISE) and fits(plan, turned):
            space = replace(space, **{name: (setting(start, name), value)})
            reasons.append(f"{name} {value}: forecast of {format_tok_s(other)} tok/s instead of {format_tok_s(own)}")
    return replace(space, reasons=tuple(reasons))
