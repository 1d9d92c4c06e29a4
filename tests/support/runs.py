"""Published runs as machine, profile, settings and placement, to compare forecasts with them.

Settings that a report does not state have the engine's default. If a missing fact matters, the run says so.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from support.run_models import first_layers, model
from tokenmill.hardware.catalog import find
from tokenmill.hardware.machine import Machine, Measurements, Rate
from tokenmill.model.profile import Profile, Tensor, TensorClass
from tokenmill.planner.plan import Placement, Settings
from tokenmill.planner.speed.forecast import decode_speed, prefill_speed

CASES = Path(__file__).parents[1] / "data" / "cases"


@dataclass(frozen=True, slots=True)
class Figure:
    """One published figure and everything needed to forecast it."""

    case: str
    group: str  # of runs on one machine: left out together
    tier: str  # A, B as public_runs.json has it; seed; h200
    kind: Literal["decode", "prefill"]
    low: float
    high: float
    machine: Machine
    profile: Profile
    settings: Settings
    placement: Placement
    depth: int = 0
    sequences: int = 1
    prompt: int | None = None
    min_batch: int | None = None
    note: str = ""

    def error(self, tok_s: float) -> float:
        """Distance to the nearest end of the published range, as a share of it; negative: the forecast is too slow."""
        if tok_s > self.high:
            return tok_s / self.high - 1
        return tok_s / self.low - 1 if tok_s < self.low else 0.0


# --- placements and settings ------------------------------------------------------------------------------------


def on_processors(profile: Profile, tier: str = "dram") -> Placement:
    """Everything in host memory, computed by the processors."""
    return Placement((tier,) * len(profile.tensors), ("dram",) * profile.layers, "dram")


def on_cards(
    profile: Profile,
    cards: int,
    *,
    expert_layers: Mapping[int, int] | None = None,
    host: str = "dram",
    expert_home: Callable[[Tensor], str | None] = lambda tensor: None,
) -> Placement:
    """Layers split evenly over the cards, routed experts in `host` but for the layers that `expert_layers` maps to a
    card and the tensors that `expert_home` finds one for."""
    devices = tuple(f"gpu{layer * cards // profile.layers}" for layer in range(profile.layers))
    head = f"gpu{cards - 1}"

    def home(tensor: Tensor) -> str:
        if tensor.cls is TensorClass.EMBEDDING:
            return host
        if tensor.cls is TensorClass.ROUTED_EXPERTS:
            card = (expert_layers or {}).get(tensor.layer if tensor.layer is not None else -1)
            return f"gpu{card}" if card is not None else expert_home(tensor) or host
        return head if tensor.layer is None or tensor.layer >= profile.layers else devices[tensor.layer]

    return Placement(tuple(home(tensor) for tensor in profile.tensors), devices, head)


def all_on_cards(profile: Profile, cards: int = 1) -> Placement:
    """Everything on the cards."""
    return on_cards(
        profile, cards, expert_layers={layer: layer * cards // profile.layers for layer in range(profile.layers)}
    )


def settings(engine: Any, threads: int, **given: Any) -> Settings:
    """An engine's defaults with what a report states."""
    base = Settings(
        engine=engine,
        context=8192,
        sequences=1,
        ubatch=512,
        batch=2048,
        cache_type_k="f16",
        cache_type_v="f16",
        threads=threads,
        threads_batch=threads,
        flash_attention=True,
        mmap=True,
        mlock=False,
        repack=engine != "ik_llama",
        cache_ram_bytes=0,
    )
    return replace(base, **given)


# --- the seeds --------------------------------------------------------------------------------------------------


def seeds() -> Iterator[Figure]:
    """Every speed of seeds.json."""
    measured = {
        case["id"]: case["measured"]
        for case in json.loads((CASES / "seeds.json").read_text(encoding="utf-8"))["speed_cases"]
    }
    yield from _epyc_cpu(measured)
    yield from _epyc_others(measured)
    yield from _eight_cards(measured)
    optane = find("xeon-6246-optane")
    profile = model("kimi-k2.5:Q4_K_S")  # the article names no quantization; this one fills 768 GB best
    placement = on_cards(profile, 1, host="pmem")
    yield _figure(
        "kimi-optane",
        "optane",
        "decode",
        measured["kimi-optane"]["tg"],
        optane,
        profile,
        settings("llama.cpp", 12, context=4096),
        placement,
    )


def _figure(
    case: str,
    group: str,
    kind: Literal["decode", "prefill"],
    value: Any,
    machine: Machine,
    profile: Profile,
    chosen: Settings,
    placement: Placement,
    **more: Any,
) -> Figure:
    low, high = (min(value), max(value)) if isinstance(value, list) else (value, value)
    more = {"tier": "seed", **more}
    return Figure(
        case=case,
        group=group,
        kind=kind,
        low=low,
        high=high,
        machine=machine,
        profile=profile,
        settings=chosen,
        placement=placement,
        **more,
    )


def _epyc_cpu(measured: Mapping[str, Any]) -> Iterator[Figure]:
    machine = find("epyc-9175f")
    kimi, kimi_m = model("kimi-k2.5:Q4_K_S"), model("kimi-k2.5:Q4_K_M")
    case = "kimi-q4ks-cpu-8k-threads"
    for threads, row in measured[case]["by_threads"].items():
        chosen = settings("llama.cpp-2025", int(threads), cache_type_k="q8_0", cache_type_v="q8_0")
        common = (machine, kimi, chosen, on_processors(kimi))
        yield _figure(case, "EPYC9175F", "decode", row["tg"], *common, depth=256, note=f"{threads} threads")
        yield _figure(case, "EPYC9175F", "prefill", row["pp"], *common, prompt=512, note=f"{threads} threads")
    case = "kimi-q4ks-cpu-16k"
    for row in measured[case]["requests"]:
        common = (machine, kimi, settings("llama.cpp-2025", 14, context=16384), on_processors(kimi))
        middle = row["prompt"] + row["generated"] // 2
        yield _figure(case, "EPYC9175F", "decode", row["tg"], *common, depth=middle, note=f"prompt {row['prompt']}")
        yield _figure(case, "EPYC9175F", "prefill", row["pp"], *common, prompt=row["prompt"])
    case, there = "kimi-q4km-cpu-32k", 0
    for row in measured[case]["requests"]:
        common = (machine, kimi_m, settings("llama.cpp-2025", 13, context=32768), on_processors(kimi_m))
        prompt = row["prompt"]
        middle = there + prompt + row["generated"] // 2
        yield _figure(case, "EPYC9175F", "decode", row["tg"], *common, depth=middle, note=f"at {middle}")
        yield _figure(case, "EPYC9175F", "prefill", row["pp"], *common, depth=there, prompt=prompt, note=f"at {there}")
        there = round((there + prompt + row["generated"]) * row.get("lcp", 1.0)) if there == 0 else there + prompt


def _epyc_others(measured: Mapping[str, Any]) -> Iterator[Figure]:
    machine = find("epyc-9175f")
    kimi = model("kimi-k2.5:Q4_K_S")
    case, row = "kimi-q4ks-hybrid", measured["kimi-q4ks-hybrid"]
    chosen = settings("ik_llama", 13, threads_batch=26, context=131072, mmap=False)
    common = (machine, kimi, chosen, on_cards(kimi, 1))
    for value in (row["tg_avg"], *row["tg_later"]):
        yield _figure(case, "EPYC9175F", "decode", value, *common, depth=7000)
    yield _figure(case, "EPYC9175F", "prefill", [min(row["pp_later"]), max(row["pp_later"])], *common, prompt=5330)
    yield _figure(case, "EPYC9175F", "prefill", row["pp_avg"], *common, prompt=1041, note="average of short and long")
    for case, name, threads, depth in (
        ("scout-q6k-cpu", "llama-4-scout:Q6_K", 16, 3000),
        ("maverick-q4km-cpu", "llama-4-maverick:Q4_K_M", 16, 1000),
        ("maverick-q8-cpu", "llama-4-maverick:Q8_0", 16, 1000),
    ):
        profile = model(name)
        common = (machine, profile, settings("llama.cpp-2025", threads), on_processors(profile))
        yield _figure(case, "EPYC9175F", "decode", measured[case]["tg"], *common, depth=depth)
        yield _figure(case, "EPYC9175F", "prefill", measured[case]["pp"], *common, prompt=depth)
    case, profile = "scout-nvfp4-gpu", model("llama-4-scout:nvfp4")
    chosen = settings("vllm", 16, context=110000, ubatch=2048, cache_type_k="bf16", cache_type_v="bf16")
    common = (machine, profile, chosen, all_on_cards(profile))
    yield _figure(case, "EPYC9175F", "decode", measured[case]["tg"], *common, depth=8000)
    yield _figure(case, "EPYC9175F", "prefill", measured[case]["pp"], *common, prompt=8000)


def _eight_cards(measured: Mapping[str, Any]) -> Iterator[Figure]:
    machine, profile = find("epyc-7532-8x3090"), model("kimi-k2.5:Q4_X")
    chosen = settings(
        "ik_llama",
        32,
        threads_batch=64,
        ubatch=256,
        batch=256,
        context=102400,
        cache_type_k="q6_0",
        cache_type_v="q4_0",
        mmap=False,
    )
    case, row = "kimi-q4x-8x3090-manual", measured["kimi-q4x-8x3090-manual"]
    manual = on_cards(profile, 8, expert_layers={1: 0, **{8 * card: card for card in range(1, 8)}})
    common = (machine, profile, chosen, manual)
    yield _figure(case, "7532", "decode", row["tg_at_211"], *common, depth=211)
    yield _figure(case, "7532", "decode", row["tg_at_15k"], *common, depth=15061)
    yield _figure(case, "7532", "prefill", row["pp_at_15k"], *common, prompt=15061)
    # 98 % of 503 GiB in use leaves room for about 54 layers' experts there, so six are on the cards
    case, row = "kimi-q4x-8x3090-fit", measured["kimi-q4x-8x3090-fit"]
    fitted = on_cards(profile, 8, expert_layers={1 + 8 * card: card for card in range(6)})
    common = (machine, profile, chosen, fitted)
    yield _figure(case, "7532", "decode", row["tg"], *common, depth=15000)
    yield _figure(case, "7532", "prefill", row["pp"], *common, prompt=15000)


# --- the H200 machine -------------------------------------------------------------------------------------------

H200_READ = {1: 10.864, 2: 21.653, 4: 42.815, 8: 79.747, 12: 105.826, 14: 101.377, 16: 99.317}
"""GB/s read by so many threads, bench/bandwidth_peer.c on a machine of that kind, November 2026; the guest does not
see its memory modules, so there is no nominal figure."""


def h200() -> Iterator[Figure]:
    """Curves measured with llama.cpp b11549 on a slice of Kimi-K2.5: 1 dense and 4 MoE layers, Q4_0 experts."""
    machine = replace(find("h200-1x"), measured=Measurements("2026-11-15", (Rate("dram", 105.826, 12, H200_READ),)))
    profile = first_layers(model("kimi-k2.5:Q4_X"), 5)
    hybrid, card = on_cards(profile, 1), all_on_cards(profile)
    common = (machine, profile)
    for threads, value in {4: 22.8, 8: 38.7, 12: 51.6, 14: 58.4, 16: 54.3}.items():
        chosen = settings("llama.cpp", threads)
        yield _figure(
            "h200-threads",
            "H200",
            "decode",
            value,
            *common,
            chosen,
            hybrid,
            tier="h200",
            depth=64,
            note=f"{threads} threads",
        )
    rows: dict[str, tuple[dict[int, float], int, Placement, int | None]] = {
        "h200-sequences": ({1: 46.9, 2: 75.6, 4: 76.9, 8: 84.1, 16: 91.2, 32: 19.2, 64: 25.8}, 16, hybrid, None),
        "h200-sequences-128": ({1: 47.2, 8: 76.6, 16: 78.3, 32: 88.7, 64: 90.1}, 14, hybrid, 128),
        "h200-all-on-card": ({1: 375, 2: 845, 4: 1252, 8: 1584, 16: 1866, 32: 1833, 64: 1983}, 16, card, None),
    }
    for case, (values, threads, placement, least) in rows.items():
        for sequences, value in values.items():
            yield _figure(
                case,
                "H200",
                "decode",
                value,
                *common,
                settings("llama.cpp", threads),
                placement,
                tier="h200",
                sequences=sequences,
                depth=128,
                min_batch=least,
                note=f"{sequences} sequences",
            )
    for ubatch, value in {256: 98, 512: 194, 2048: 530}.items():
        chosen = settings("llama.cpp", 14, ubatch=ubatch)
        yield _figure(
            "h200-prefill",
            "H200",
            "prefill",
            value,
            *common,
            chosen,
            hybrid,
            tier="h200",
            prompt=2048,
            note=f"ub {ubatch}",
        )


def predicted(figure: Figure) -> float | None:
    """What the forecast says, through the room's own verbs."""
    common = (figure.machine, figure.profile, figure.settings, figure.placement)
    if figure.kind == "decode":
        speed = decode_speed(*common, depth=figure.depth, sequences=figure.sequences, min_batch=figure.min_batch)
    else:
        speed = prefill_speed(*common, depth=figure.depth, prompt=figure.prompt, min_batch=figure.min_batch)
    return None if speed is None else speed.tok_s
