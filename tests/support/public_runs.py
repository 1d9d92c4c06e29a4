"""public_runs.json as figures: machine of the catalogue, tensor types, placement of layers."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from support.run_models import model
from support.runs import CASES, Figure, all_on_cards, on_cards, on_processors, settings
from tokenmill.hardware.catalog import find
from tokenmill.model.profile import Profile, Tensor
from tokenmill.planner.plan import Placement


@dataclass(frozen=True, slots=True)
class _How:
    """Facts of a run that are not in its record."""

    machine: str
    model: str
    cards: int = 0
    layers: Mapping[int, int] = field(default_factory=dict)  # experts of a layer -> card
    threads: int | None = None  # where the record leaves it open


_R1 = "deepseek-v3:Q4_K_M"
_TR1, _TR2 = "threadripper-pro-7965wx", "threadripper-pro-7965wx-2gpu"
_HOW: dict[str, _How] = {
    "ik258-ubergarm-R1-UDQ2KXL": _How(_TR1, f"{_R1}/UD-Q2_K_XL", 1),
    "ik258-ubergarm-R1-Q2KR4": _How(_TR1, f"{_R1}/Q2_K_R4", 1),
    "ik477-ubergarm-R1-0528-IQ2KR4": _How(_TR1, f"{_R1}/IQ2_K_R4", 1),
    "ik534-ubergarm-R1-0528-IQ3KR4-14L": _How(
        _TR2, f"{_R1}/IQ3_K_R4", 2, {layer: int(layer > 9) for layer in range(3, 17)}
    ),
    "ik477-ubergarm-R1T2-IQ2XXS-26L": _How(
        _TR2, f"{_R1}/IQ2_XXS", 2, {layer: int(layer > 15) for layer in range(3, 29)}
    ),
    "ik357-ubergarm-Q235-Q8-14L": _How(_TR1, "qwen3-235b-a22b:Q8_0", 1, dict.fromkeys(range(14), 0)),
    "ik259-ubergarm-6980P-R1-Q4KM": _How("xeon-6980p-one-of-two", _R1),
    "ik259-ubergarm-6980P-R1-Q80": _How("xeon-6980p-one-of-two", "deepseek-v3:Q8_0"),
    "ik259-ubergarm-6980P-R1-UD-Q2KXL": _How("xeon-6980p-one-of-two", f"{_R1}/UD-Q2_K_XL"),
    "ik287-ubergarm-6980P-R1-Q4KR4-depth": _How("xeon-6980p-one-of-two", _R1, threads=64),
    "ik258-magik-64C-R1-IQ2KR4-54k": _How("threadripper-pro-3995wx-2933", f"{_R1}/IQ2_K_R4", 3),
    "ik818-magik-64C-GLM46-IQ5K": _How("threadripper-pro-3995wx", "glm-4.5:Q8_0/IQ5_K", 3),
    "ik715-magik-64C-V31T-IQ5K": _How("threadripper-pro-3995wx", f"{_R1}/IQ5_K", 2),
    "ik715-magik-64C-R1-5.06bpw": _How("threadripper-pro-3995wx", f"{_R1}/5.06bpw", 2),
    "ik718-magik-64C-R1-6.25bpw": _How("threadripper-pro-3995wx", f"{_R1}/6.25bpw", 3),
    "ik816-RedDragonGecko-GLM46": _How("epyc-7402p-4x3090", "glm-4.5:Q8_0/IQ5_K", 5),
    "ik829-mpetruc-gptoss120-13900K-11L": _How(
        "i9-13900k-4090", "gpt-oss-120b:MXFP4_MOE/F16", 1, dict.fromkeys(range(25, 36), 0)
    ),
    "loft-MiniMax25-IQ5K": _How("epyc-9175f", "minimax-m2.5/IQ5_K", 1),
    "loft-GLM51-IQ3KS-cpumoe": _How("epyc-9175f-2gpu", "glm-5.1/IQ3_KS", 2, threads=13),
    "loft-Qwen35-397B-IQ4NL": _How("epyc-9175f", "qwen3.5-397b/IQ4_NL", 1, threads=13),
    "loft-QwenCoderNext-BF16-cpu": _How("epyc-9175f", "qwen3-coder-next/BF16"),
    "loft-QwenCoderNext-IQ4NL-hybrid": _How("epyc-9175f", "qwen3-coder-next/IQ4_NL", 1),
    "loft-GLM47Flash-IQ5K": _How("epyc-9175f", "glm-4.7-flash/IQ5_K", 1),
}


def public(tiers: str = "AB") -> Iterator[Figure]:
    """Every speed of public_runs.json whose case is of one of these tiers."""
    record = json.loads((CASES / "public_runs.json").read_text(encoding="utf-8"))
    for run in record["runs"]:
        if run["tier"] in tiers and run["id"] in _HOW:
            yield from _figures(run, _HOW[run["id"]])
            yield from _asides(run)


def _figures(run: Mapping[str, Any], how: _How) -> Iterator[Figure]:
    for kind, rows in (("decode", run["tg"]), ("prefill", run["pp"])):
        for row in rows:
            note = row.get("note") or ""
            if note in ("max", "min"):
                continue  # the mean is there
            profile = model(_model_of(run, how, note))
            yield Figure(
                case=run["id"],
                group=run["machine_group"],
                tier=run["tier"],
                kind=kind,  # type: ignore[arg-type]
                low=row["tok_s"],
                high=_upper(row["tok_s"], note),
                machine=find(how.machine),
                profile=profile,
                settings=_settings(run, how, note),
                placement=_placement(profile, how, note),
                depth=_depth(row),
                prompt=(row.get("prompt_tokens") or 512) if kind == "prefill" else None,
                note=note,
            )


def _depth(row: Mapping[str, Any]) -> int:
    depth = row.get("depth")
    return depth if isinstance(depth, int) else 8000 if "mixed" in str(depth) else 512


def _upper(value: float, note: str) -> float:
    span = re.match(r"[\d.]+-([\d.]+) ", note)
    return float(span[1]) if span else value


def _model_of(run: Mapping[str, Any], how: _How, note: str) -> str:
    if "UD-Q5_K_XL" in note or (run["id"].startswith("ik816") and note.startswith("llama.cpp")):
        return "glm-4.5:Q8_0/UD-Q5_K_XL"
    return how.model


def _settings(run: Mapping[str, Any], how: _How, note: str) -> Any:
    flags, machine = run["flags"], run["machine"]
    stated = re.match(r"(\d+) threads", note)
    named = [count if isinstance(count, int) else None for count in (machine["threads_tg"], machine["threads_pp"])]
    decode = int(stated[1]) if stated else named[0] or how.threads
    batch = decode if stated else named[1] or decode
    mainline = run["engine"]["name"] == "llama.cpp" or re.match(r"(mainline|llama\.cpp)", note) is not None
    kind_k = "q8_0" if "q8_0" in note else "f16" if "f16" in note else str(flags.get("ctk", "f16")).split()[0]
    kind_v = str(flags.get("ctv", kind_k)).split()[0]
    # the records state no-mmap only where the report does; the owners of these machines write it in all their commands
    mapped = flags.get("mmap") != 0 and machine["cpu"].startswith(("Intel i9", "Intel Xeon"))
    return settings(
        "llama.cpp-2025" if mainline else "ik_llama",
        decode or 1,
        threads_batch=batch or decode or 1,
        ubatch=flags.get("ub", 512),
        batch=flags.get("b", 2048),
        context=flags.get("ctx", 8192),
        cache_type_k=kind_k,
        cache_type_v=kind_v,
        mmap=mapped,
        repack=_repacked(flags, note, mainline),
    )


def _repacked(flags: Mapping[str, Any], note: str, mainline: bool) -> bool:
    if mainline:
        return True
    return "rtr 0" not in note and "rtr0" not in note and str(flags.get("rtr", "")).startswith("1")


def _placement(profile: Profile, how: _How, note: str) -> Placement:
    if how.cards == 0 or "CPU only" in note or note == "CPU max":
        return on_processors(profile)
    if "all on GPU" in note or "all GPU" in note or note == "GPU max":
        return all_on_cards(profile)
    layers = dict(how.layers)
    if "7 expert layers" in note or note == "7 layers":
        layers = dict.fromkeys(range(3, 10), 0)
    if "22 expert layers" in note:
        layers = {**dict.fromkeys(range(3, 15), 0), **dict.fromkeys(range(68, 78), 1)}
    if "gate experts of layers >=11" in note or "gate on GPU" in note:
        return on_cards(profile, how.cards, expert_home=_on_card("ffn_gate_exps", 11, profile, how.cards))
    if "down experts" in note or "same split" in note:
        return on_cards(profile, how.cards, expert_home=_on_card("ffn_down_exps", 20, profile, how.cards))
    return on_cards(profile, how.cards, expert_layers=layers)


def _on_card(pattern: str, first: int, profile: Profile, cards: int) -> Any:
    def home(tensor: Tensor) -> str | None:
        layer = tensor.layer or 0
        return f"gpu{layer * cards // profile.layers}" if pattern in tensor.name and layer >= first else None

    return home


def _asides(run: Mapping[str, Any]) -> Iterator[Figure]:
    """Figures stated in a case's notes instead of its tables."""
    name, how = run["id"], _HOW[run["id"]]
    beside = {
        "ik534-ubergarm-R1-0528-IQ3KR4-14L": ("IQ3_KT", {0: 8.61, 4096: 8.42, 8192: 8.18}),
        "ik477-ubergarm-R1T2-IQ2XXS-26L": ("IQ2_KT", {0: 13.31, 4096: 12.99, 8192: 12.35}),
    }
    if name in beside:
        mix, table = beside[name]
        profile = model(f"{_R1}/{mix}")
        for depth, value in table.items():
            yield Figure(
                name,
                run["machine_group"],
                run["tier"],
                "decode",
                value,
                value,
                find(how.machine),
                profile,
                _settings(run, how, ""),
                _placement(profile, how, ""),
                depth,
                note=mix,
            )
