"""The plans of the validation, the points at which each is measured, and the predictions there. Pure.

With a GPU: everything on it, experts in host memory, half of them, and the planner's choice for GPUs of 24 and 12 GB,
simulated by a reserve. Without a GPU: two CPU plans.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tokenmill.hardware.machine import Machine
from tokenmill.model.profile import Profile, TensorClass
from tokenmill.native.start import environment_of
from tokenmill.native.worker_config import goal_for
from tokenmill.planner.draft import capacity, make_draft
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make
from tokenmill.planner.placement import assemble, fingerprint, host_tier
from tokenmill.planner.plan import Ledger, Placement, Plan
from tokenmill.planner.speed.calibration import Calibration
from tokenmill.planner.speed.forecast import decode_speed, prefill_speed
from tokenmill.tuner.calibrate import calibration
from tokenmill.tuner.history import SpeedRecord
from tokenmill.tuner.point import Figures, TrialSettings
from tokenmill.tuner.search.forecasts import settings_with
from tokenmill.units import GIB, MIB

ALL = "all on the GPU"
EXPERTS = "experts on the CPU"
HALF = "half the experts on the GPU"
CARD_24 = "a 24 GB card"
CARD_12 = "a 12 GB card"
READ = "read into memory"
MAPPED = "mapped, not repacked"
CARDS = {CARD_24: 24 * GIB, CARD_12: 12 * GIB}
MARGIN = 512 * MIB
TAIL, OUT = 16, 32  # tokens of a job in addition to the prefix: its own prompt, and its answer
SPARE = 64
STEPS = 30  # generated tokens of all slots in the measurement of a slow point


@dataclass(frozen=True, slots=True)
class Case:
    """A plan to validate."""

    name: str
    plan: Plan
    card_bytes: int | None = None  # limit of the GPU's memory while it runs; None: no limit

    @property
    def slug(self) -> str:
        """Its name in file names."""
        return "-".join(self.name.replace(",", "").split())


@dataclass(frozen=True, slots=True)
class Point:
    """A point at which speed is measured; `axis` names the difference from the first one."""

    axis: str  # first, threads, ubatch, depth, sequences
    threads: int
    sequences: int
    ubatch: int
    head: int  # tokens in the context before a job's own

    @property
    def name(self) -> str:
        """Name of the point in a row's key."""
        return f"{self.threads}t {self.sequences}s ub{self.ubatch} d{self.head}"

    def dials(self, plan: Plan) -> TrialSettings:
        """The point as trial settings."""
        now = plan.settings
        context = max(self.head + TAIL + 8 * OUT + SPARE, self.ubatch)
        return TrialSettings(
            self.threads,
            self.threads,
            self.sequences,
            self.ubatch,
            context,
            now.cache_type_k,
            now.cache_type_v,
            now.flash_attention,
            now.mmap,
            now.repack,
        )


def cases(machine: Machine, profile: Profile, *, tiny: bool = False) -> list[Case]:
    """All plans, the most important first, in case the time runs out."""
    return list(_on_processors(machine, profile)) if tiny else list(_on_card(machine, profile))


def _on_processors(machine: Machine, profile: Profile) -> Iterator[Case]:
    for name, goal in ((READ, Goal(mmap=False)), (MAPPED, Goal(mmap=True, repack=False))):
        wanted = replace(goal, context=2048, sequences=4, ubatch=256, threads=1, threads_batch=1, cpu_only=True)
        yield Case(name, make(machine, profile, goal_for(wanted)))


def _on_card(machine: Machine, profile: Profile) -> Iterator[Case]:
    layers = [layer for layer in range(profile.layers) if _has_experts(profile, layer)]
    wanted = Goal(context=16384, sequences=8, gpu_margin_bytes=MARGIN)
    for name, resident in ((EXPERTS, []), (ALL, layers)):
        yield Case(name, make(machine, profile, goal_for(wanted), placement=placed(machine, profile, resident)))
    for name, context, sequences in ((CARD_24, 32768, 4), (CARD_12, 131072, 1)):
        left = capacity(machine, "gpu0") - CARDS[name] + MARGIN
        goal = Goal(context=context, sequences=sequences, gpu_margin_bytes=max(MARGIN, left))
        yield Case(name, make(machine, profile, goal_for(goal)), CARDS[name])
    half = placed(machine, profile, layers[len(layers) // 2 :])
    yield Case(HALF, make(machine, profile, goal_for(wanted), placement=half))


def placed(machine: Machine, profile: Profile, resident: list[int]) -> Placement:
    """Every layer on the first GPU, with the experts of some."""
    return assemble(profile, host_tier(machine), ["gpu0"] * profile.layers, "gpu0", frozenset(resident))


def _has_experts(profile: Profile, layer: int) -> bool:
    return any(t.layer == layer and t.cls is TensorClass.ROUTED_EXPERTS for t in profile.tensors)


def points(case: Case, cores: int, *, tiny: bool = False) -> list[Point]:
    """The points of a plan, the most informative first; the first one calibrates the forecast."""
    threads = min(case.plan.settings.threads, cores)
    if tiny:
        first = Point("first", threads, 1, 256, 128)
        more = [
            replace(first, axis="sequences", sequences=4),
            replace(first, axis="depth", head=512),
            replace(first, axis="ubatch", ubatch=64),
            replace(first, axis="threads", threads=2),
        ]
        return _distinct([first, *more])
    first = Point("first", threads, 1, 512, 512)
    on_host = any(
        tensor.cls is TensorClass.ROUTED_EXPERTS and not home.startswith("gpu")
        for tensor, home in zip(case.plan.profile.tensors, case.plan.placement.homes, strict=True)
    )
    rarely = case.name not in (EXPERTS, ALL)
    widths = (16, 8) if rarely else (16, 224, 32, 8, 4, 2, 64) if on_host else (16, 32, 8, 4, 2, 64)
    cut = () if rarely else (4, 8, 12, 14, 16) if on_host else (1,)
    sizes = (2048,) if rarely else (2048, 512, 256)
    depths = (8192,) if on_host else (8192, 32768)
    return _distinct(
        [
            first,
            *(replace(first, axis="ubatch", ubatch=size, head=2048) for size in sizes[:1]),
            *(replace(first, axis="sequences", sequences=count) for count in widths[:2]),
            *(replace(first, axis="threads", threads=count) for count in cut if count <= cores),
            *(replace(first, axis="depth", ubatch=2048, head=depth) for depth in depths),
            *(replace(first, axis="ubatch", ubatch=size, head=2048) for size in sizes[1:]),
            *(replace(first, axis="sequences", sequences=count) for count in widths[2:]),
        ]
    )


def _distinct(found: list[Point]) -> list[Point]:
    return list({point.name: point for point in reversed(found)}.values())[::-1]


def forecast(plan: Plan, point: Point, known: Calibration | None = None) -> Figures:
    """The predicted speeds at a point, with the offload threshold of the plan's engine."""
    dials = point.dials(plan)
    rows = environment_of(plan).get("GGML_OP_OFFLOAD_MIN_BATCH")
    given = (plan.machine, plan.profile, settings_with(plan.settings, dials), plan.placement)
    least = None if rows is None else int(rows)
    write = decode_speed(
        *given, depth=point.head + TAIL + OUT // 2, sequences=point.sequences, calibration=known, min_batch=least
    )
    read = prefill_speed(*given, depth=0, prompt=point.head, calibration=known, min_batch=least)
    return Figures(None if write is None else write.tok_s, None if read is None else read.tok_s)


def ledger_at(plan: Plan, point: Point) -> Ledger:
    """The predicted memory of the plan's placement at a point."""
    dials = point.dials(plan)
    goal = replace(
        plan.goal,
        threads=dials.threads,
        threads_batch=dials.threads,
        sequences=dials.sequences,
        ubatch=dials.ubatch,
        context=dials.context,
        cache_type_k=dials.cache_type_k,
        cache_type_v=dials.cache_type_v,
        mmap=dials.mmap,
        repack=dials.repack,
    )
    return make_draft(plan.machine, plan.profile, goal_for(goal), plan.placement).ledger


def calibrated(
    case: Case, first: Point, figures: Figures, *, machine_id: str, model_id: str, when: str
) -> Calibration | None:
    """The calibration by one run at the first point, with the product's own rule."""
    plan = case.plan
    dials = replace(first.dials(plan), placement=fingerprint(plan.profile, plan.placement))
    speed = SpeedRecord(
        when,
        plan.machine.name,
        machine_id,
        plan.profile.name,
        model_id,
        "native",
        "this",
        "tune",
        dials,
        first.head,
        figures,
        Figures(),
    )
    return calibration([speed], plan, machine_id=machine_id, model_id=model_id, engines=("native",))


def seconds_for(point: Point, said: Figures) -> float:
    """Estimated duration of measuring a point; a default if there is no prediction."""
    read_s = point.head / said.prefill_tok_s if said.prefill_tok_s else 5.0
    step_s = point.sequences / said.decode_tok_s if said.decode_tok_s else 0.2
    return 3.0 + 1.5 * read_s + max(2.5, STEPS * step_s)
