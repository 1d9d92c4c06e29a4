"""Records of published runs as figures, read from the record alone.

`public_runs.py` does the same for the first file with facts of its own for each run; here whatever a record does not
state has the engine's default. Rows whose note describes a placement that the record does not explain are left out.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from support.published_machines import machine_of
from support.published_models import model_of
from support.runs import CASES, Figure, all_on_cards, on_cards, on_processors, settings
from tokenmill.hardware.machine import Machine
from tokenmill.launch import read_command, to_placement
from tokenmill.model.profile import Profile, TensorClass
from tokenmill.planner.compute_graph.ik_options import IkOptions
from tokenmill.planner.plan import Placement, Settings

_SKIPPED = {
    "lc14642-createthis-K2-UDQ4KXL-6L": "its tool feeds equal tokens, which use the same experts",
}
_STRANGE = re.compile(r"spec|draft|MTP|-ser|batch(ed)? of|parallel|concurren", re.IGNORECASE)


def published() -> Iterator[Figure]:
    """Every figure of public_runs_*.json that its record explains."""
    for path in sorted(CASES.glob("public_runs_*.json")):
        for run in json.loads(path.read_text(encoding="utf-8"))["runs"]:
            if run["id"] not in _SKIPPED and (run["tg"] or run["pp"]):
                yield from figures_of(run)


def figures_of(run: Mapping[str, Any]) -> Iterator[Figure]:
    """The figures of one record."""
    machine = machine_of(run)
    profile = model_of(run)
    engine = str(run["engine"]["name"])
    if machine is None or profile is None or "llama" not in engine.lower():
        return
    rows: tuple[tuple[Literal["decode", "prefill"], list[dict[str, Any]]], ...] = (
        ("decode", run["tg"]),
        ("prefill", run["pp"]),
    )
    for kind, stated in rows:
        for row in stated:
            note = row.get("note") or ""
            placement = _placement(run, machine, profile, note)
            if placement is None or not row["tok_s"] or _STRANGE.search(note) or _doubtful(run, row):
                continue
            if kind == "prefill" and placement.gpus and not (row.get("prompt_tokens") or run["flags"].get("ub")):
                continue  # the micro-batch decides how often host weights are copied to the GPU
            yield Figure(
                case=run["id"],
                group=run["machine_group"],
                tier=run["tier"],
                kind=kind,
                low=row["tok_s"],
                high=row["tok_s"],
                machine=machine,
                profile=profile,
                settings=_settings(run, note, machine, placement),
                placement=placement,
                depth=row["depth"] if isinstance(row.get("depth"), int) else 512,
                prompt=(row.get("prompt_tokens") or 512) if kind == "prefill" else None,
                note=note,
            )


def _doubtful(run: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    return "depth 0 only" in (run["notes"] or "") and bool(row.get("depth"))


def _settings(run: Mapping[str, Any], note: str, machine: Machine, placement: Placement) -> Settings:
    flags = run["flags"]
    facts = run["machine"]
    stated = re.search(r"(\d+) (?:SMT |HT )?threads", note)
    named = [_number(facts.get(key)) for key in ("threads_tg", "threads_pp")]
    cores = (machine.cpu.cores or 8) // (machine.cpu.sockets or 1)
    decode = int(stated[1]) if stated else named[0] or _number(flags.get("threads")) or cores
    batch = decode if stated else named[1] or _number(flags.get("threads_batch")) or decode
    ik = "ik" in str(run["engine"]["name"]).lower()
    ubatch = re.search(r"ub (\d+)", note)
    type_k = str(flags.get("ctk") or "f16").split()[0].lower()
    type_v = str(flags.get("ctv") or type_k).split()[0].lower()
    repack = str(flags.get("rtr", "")).startswith("1") or "-rtr" in note if ik else True
    return settings(
        "ik_llama" if ik else "llama.cpp-2025",
        decode,
        threads_batch=batch,
        ubatch=int(ubatch[1]) if ubatch else _number(flags.get("ub")) or 512,
        batch=_number(flags.get("b")) or 2048,
        context=_number(flags.get("ctx")) or 8192,
        cache_type_k=type_k if type_k in ("f16", "q8_0", "q4_0", "bf16", "q6_0", "q5_0", "q5_1", "q4_1") else "f16",
        cache_type_v=type_v if type_v in ("f16", "q8_0", "q4_0", "bf16", "q6_0", "q5_0", "q5_1", "q4_1") else "f16",
        mmap=flags.get("mmap") != 0 and not (ik and repack),  # mapped by default; ik_llama.cpp's -rtr reads the file
        repack=repack,
        ik=IkOptions(experts_used=_number(flags.get("ser"))) if ik else None,
    )


def _number(value: Any) -> int | None:
    if isinstance(value, int):
        return value
    found = re.match(r"\d+", str(value or ""))
    return int(found[0]) if found else None


def _by_command(run: Mapping[str, Any], profile: Profile, cards: int) -> Placement:
    """The placement of a record that states its --override-tensor clauses, as the engine reads them."""
    flags = run["flags"]
    words = ["llama-server", "-ngl", str(flags.get("ngl") or 99)]
    for clause in flags["ot"]:
        words += ["-ot", clause]
    if flags.get("ts"):
        words += ["-ts", str(flags["ts"])]
    return to_placement(read_command(shlex.join(words)), profile, cards)


def _placement(run: Mapping[str, Any], machine: Machine, profile: Profile, note: str) -> Placement | None:
    text = f"{run['placement'] or ''}"
    ngl = _number(run["flags"].get("ngl"))
    if re.search(r"CPU only|GPU hidden", note, re.IGNORECASE) or not machine.gpus:
        return on_processors(profile)
    counted = re.search(r"(\d+)\s*(?:x\s*\S+|GPUs?)\b", note)
    cards = min(len(machine.gpus), int(counted[1])) if counted else len(machine.gpus)
    if re.search(r"^CPU[- ]?only", text, re.IGNORECASE) or (ngl == 0):
        return on_processors(profile)
    if run["flags"].get("ot") and "layers" not in note:
        return _by_command(run, profile, cards)
    routed = [
        layer
        for layer in range(profile.layers)
        if any(t.layer == layer and t.cls is TensorClass.ROUTED_EXPERTS for t in profile.tensors)
    ]
    if re.search(
        r"all (?:layers )?(?:\w+ )?on (?:the )?(?:GPU|card)|fully (?:on|offload)|full offload",
        f"{text} {note}",
        re.IGNORECASE,
    ):
        return all_on_cards(profile, cards)
    if not routed:
        if ngl is None or ngl > profile.layers:
            return all_on_cards(profile, cards)
        return _last_layers(profile, cards, ngl)
    layers = re.search(r"(\d+) (?:expert |MoE )?layers", note)
    count = int(layers[1]) if layers else run["expert_layers_on_gpu"]
    if count is None and "layers" in text:
        return None
    chosen = routed[: count or 0]
    if chosen and len(chosen) == len(routed):
        return all_on_cards(profile, cards)
    # the cards hold equal numbers of the layers with experts, and all compute
    return on_cards(
        profile, cards, expert_layers={layer: place * cards // len(chosen) for place, layer in enumerate(chosen)}
    )


def _last_layers(profile: Profile, cards: int, count: int) -> Placement:
    """The last `count` layers on cards, as llama.cpp's --n-gpu-layers does; the output too if all layers fit."""
    first = profile.layers - count
    devices = tuple(
        "dram" if layer < first else f"gpu{(layer - first) * cards // max(count, 1)}" for layer in range(profile.layers)
    )
    head = "dram" if count <= profile.layers else devices[-1]

    def home(layer: int | None, cls: TensorClass) -> str:
        if cls is TensorClass.EMBEDDING:
            return "dram"
        return head if layer is None or layer >= profile.layers else devices[layer]

    return Placement(tuple(home(t.layer, t.cls) for t in profile.tensors), devices, head)
