"""The catalogue: found by name, every figure with its source, figures that agree with each other.

The rule for sources: every fact in a catalogue file is covered by a note about the field itself or about something
that holds it (`cpu` covers `cpu.cores`; a path without an index covers every entry). A bandwidth needs a note of its
own, and so does each planning fact that is missing. seeds.json holds what published reports say of three machines.
"""

import dataclasses
import json
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenmill.errors import ConfigError, UnknownMachine
from tokenmill.hardware import catalog, machine_file
from tokenmill.hardware.machine import ISA_THAT_MATTERS, Machine
from tokenmill.units import GIB, MIB

MACHINES = catalog.load_all()
SEEDS = json.loads((Path(__file__).parents[2] / "data/cases/seeds.json").read_text())["machines"]
# names need no source
NAMES = re.compile(r"name|virtual|os|notes\b.*|(gpus|numa)\[\d+\]\.(index|name|vendor)|nvlinks\[\d+\]\.gpus.*")
MUST_BE_KNOWN_OR_EXPLAINED = (
    "cpu.threads_per_core",
    "cpu.l3_bytes",
    "dram.total_bytes",
    "dram.kind",
    "dram.channels",
    "dram.mts",
    "dram.nominal_gb_s",
    "gpus.pcie.max_width",
    "numa",
)
each_machine = pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)


def facts(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of all known facts."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from facts(getattr(value, field.name), f"{path}.{field.name}".lstrip("."))
    elif isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        for index, item in enumerate(value):
            yield from facts(item, f"{path}[{index}]")
    elif value not in (None, (), {}):
        yield path, value


def without_indices(path: str) -> str:
    return re.sub(r"\[\d+\]", "", path)


def covering(path: str) -> set[str]:
    """All values of `Note.about` that cover `path`."""
    parts = path.split(".")
    holders = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return holders | {without_indices(holder) for holder in holders}


def test_the_module_name_does_not_collide_with_the_folder() -> None:
    assert isinstance(catalog, types.ModuleType)
    assert Path(catalog.__file__ or "").name == "catalog.py"


def test_the_catalogue_has_the_seeds_and_the_common_machines() -> None:
    assert {*SEEDS} < {*catalog.names()}
    assert len(catalog.names()) >= len(SEEDS) + 10
    families = (
        "desktop-ddr5",
        "threadripper-",
        "epyc-73",
        "epyc-77",
        "epyc-95",
        "epyc-96",
        "xeon-84",
        "hgx-h100",
        "h200",
    )
    for family in families:
        assert any(name.startswith(family) for name in catalog.names()), family
    assert any(name.startswith("epyc-9") and name.endswith("-dual") for name in catalog.names())


@each_machine
def test_files_are_named_like_their_machines(machine: Machine) -> None:
    assert catalog.find(machine.name) == machine


@each_machine
def test_every_fact_has_its_source(machine: Machine) -> None:
    about = {note.about for note in machine.notes}
    bare = [path for path, _ in facts(machine) if not NAMES.fullmatch(path) and not covering(path) & about]
    assert bare == []


@each_machine
def test_every_bandwidth_has_a_source_of_its_own(machine: Machine) -> None:
    about = {note.about for note in machine.notes}
    rates = {without_indices(path) for path, _ in facts(machine) if path.endswith("nominal_gb_s")}
    assert rates <= about


@each_machine
def test_what_is_missing_is_explained(machine: Machine) -> None:
    known = {without_indices(path) for path, _ in facts(machine)}
    about = {note.about for note in machine.notes}
    wanted = [path for path in MUST_BE_KNOWN_OR_EXPLAINED if machine.gpus or not path.startswith("gpus")]
    silent = [path for path in wanted if not any(name == path or name.startswith(f"{path}.") for name in known | about)]
    assert silent == []


@each_machine
def test_notes_refer_to_fields_and_have_text(machine: Machine) -> None:
    fields = {without_indices(path) for path, _ in facts(machine)} | {
        *MUST_BE_KNOWN_OR_EXPLAINED,
        "nvlinks.links",
    }
    for note in machine.notes:
        name = without_indices(note.about)
        assert any(field == name or field.startswith(f"{name}.") for field in fields), note
        assert note.text.endswith("."), note
    assert len({note.about for note in machine.notes}) == len(machine.notes)


@each_machine
def test_memory_bandwidth_is_channels_times_speed(machine: Machine) -> None:
    dram = machine.dram
    expected = round(dram.channels * dram.mts * 8 / 1000, 1) if dram.channels and dram.mts else None
    assert dram.nominal_gb_s == expected


@each_machine
def test_cpus_are_plausible(machine: Machine) -> None:
    cpu = machine.cpu
    assert cpu.sockets
    assert cpu.cores
    assert cpu.cores % cpu.sockets == 0
    assert {*cpu.isa} <= {*ISA_THAT_MATTERS}
    if machine.dram.channels:
        assert machine.dram.channels % cpu.sockets == 0


@each_machine
def test_numa_nodes_divide_cores_and_memory(machine: Machine) -> None:
    if not machine.numa:
        assert machine.cpu.sockets == 1
        return
    cpus = [cpu for node in machine.numa for cpu in node.cpus]
    assert machine.cpu.sockets
    assert machine.cpu.cores
    assert len(machine.numa) % machine.cpu.sockets == 0
    assert sorted(cpus) == list(range(machine.cpu.cores * (machine.cpu.threads_per_core or 1)))
    memory = [node.memory_bytes for node in machine.numa if node.memory_bytes is not None]
    assert not memory or sum(memory) == machine.dram.total_bytes


def test_the_same_card_is_the_same_in_every_machine() -> None:
    cards: dict[str, set[tuple[object, ...]]] = {}
    for machine in MACHINES:
        for gpu in machine.gpus:
            cards.setdefault(gpu.name, set()).add(
                (gpu.vram_bytes, gpu.nominal_gb_s, gpu.compute_capability, gpu.vendor)
            )
    assert {name: len(variants) for name, variants in cards.items()} == dict.fromkeys(cards, 1)


def test_the_same_processor_is_the_same_in_every_machine() -> None:
    models: dict[str | None, set[tuple[object, ...]]] = {}
    for machine in MACHINES:
        cpu = machine.cpu
        assert cpu.sockets
        assert cpu.cores
        assert cpu.l3_bytes
        models.setdefault(cpu.model, set()).add((cpu.cores // cpu.sockets, cpu.l3_bytes // cpu.sockets, cpu.isa))
    assert {model: len(variants) for model, variants in models.items()} == dict.fromkeys(models, 1)


@pytest.mark.parametrize("name", SEEDS)
def test_seed_machines_are_as_reported(name: str) -> None:
    seed, machine = SEEDS[name], catalog.find(name)
    assert machine.cpu.model == seed["cpu"]
    assert machine.cpu.cores == seed["cores"]
    assert machine.cpu.threads_per_core == seed.get("threads_per_core", machine.cpu.threads_per_core)
    assert machine.os == seed.get("os")
    reported = {"avx512": "avx512f"}
    assert {reported.get(flag, flag) for flag in seed.get("isa", ())} <= {*machine.cpu.isa}
    if "l3_mib" in seed:
        assert machine.cpu.l3_bytes == seed["l3_mib"] * MIB


@pytest.mark.parametrize("name", SEEDS)
def test_seed_memory_is_as_reported(name: str) -> None:
    seed, machine = SEEDS[name], catalog.find(name)
    dram = seed["dram"]
    kind, _, speed = dram["type"].partition("-")
    assert machine.dram.kind == kind
    assert machine.dram.mts == (int(speed) if speed else None)
    assert machine.dram.channels == dram.get("channels")
    assert machine.dram.nominal_gb_s == dram.get("nominal_gb_s")
    assert machine.dram.total_bytes == (dram["visible_gib"] * GIB if "visible_gib" in dram else None)
    assert (machine.swap.total_bytes if machine.swap else None) == (
        seed["swap_gb"] * 10**9 if "swap_gb" in seed else None
    )
    if "pmem" in seed:
        assert machine.pmem is not None
        assert (machine.pmem.mode, machine.pmem.dimms) == (seed["pmem"]["mode"], seed["pmem"]["dimms"])
        assert machine.pmem.total_bytes
        assert machine.pmem.total_bytes == seed["pmem"]["total_gb"] * GIB  # modules are sold in binary sizes
        assert 0.97 * machine.pmem.total_bytes < (machine.pmem.memory_mode_bytes or 0) < machine.pmem.total_bytes
        assert machine.tiers()[-1].cached_by == "dram"


@pytest.mark.parametrize("name", SEEDS)
def test_seed_cards_are_as_reported(name: str) -> None:
    seed, machine = SEEDS[name], catalog.find(name)
    expected = [
        (card["name"], card.get("vram_mib", 0) * MIB or card["vram_gib"] * GIB, card["nominal_gb_s"])
        for card in seed["gpus"]
        for _ in range(card["count"])
    ]
    assert [(gpu.name, gpu.vram_bytes, gpu.nominal_gb_s) for gpu in machine.gpus] == expected
    assert [list(link.gpus) for link in machine.nvlinks] == seed.get("nvlink_pairs", [])


def test_a_path_is_read_as_a_machine_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_file.write(Machine("mine"), tmp_path / "epyc-9175f.toml")
    machine_file.write(Machine("plain"), tmp_path / "box")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (
        str(tmp_path / "epyc-9175f.toml"),
        "epyc-9175f.toml",
        "./epyc-9175f.toml",
        "~/epyc-9175f.toml",
    ):
        assert catalog.find(name).name == "mine"
    assert catalog.find("epyc-9175f").name == "epyc-9175f"
    assert catalog.find("./box").name == "plain"


def test_this_is_the_local_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.hardware.probe.probe", lambda: Machine("here"))
    assert catalog.find("this").name == "here"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("epyc-9175", "did you mean epyc-9175f"),
        ("EPYC-9175F", "did you mean epyc-9175f"),
        ("9654", "did you mean epyc-9654-dual"),
        ("xeon-6246-optain", "did you mean xeon-6246-optane"),
        ("thiss", "did you mean this"),
        ("zzzz", "tokenmill machines lists"),
        ("", "tokenmill machines lists"),
        ("x" * 300, "tokenmill machines lists"),
    ],
)
def test_an_unknown_name_leads_to_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(UnknownMachine) as caught:
        catalog.find(name)
    assert repr(name) in caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    "name",
    [
        "nowhere/machine.toml",
        "nowhere.toml",
        "~nobody-at-all/machine.toml",
        "/dev/null/m.toml",
        "a\x00b.toml",
    ],
)
def test_a_missing_machine_file_has_a_hint(name: str) -> None:
    with pytest.raises(UnknownMachine, match="no machine file at") as caught:
        catalog.find(name)
    assert "tokenmill probe -o" in (caught.value.hint or "")


@pytest.mark.parametrize("name", ["./", "./" + "x" * 300])
def test_an_unreadable_path_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        catalog.find(name)
