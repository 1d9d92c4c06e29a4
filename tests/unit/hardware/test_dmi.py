from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.hardware.dmi import Module, parse_dmidecode, parse_table, read_modules
from tokenmill.hardware.host import Host
from tokenmill.units import GIB, MIB

DATA = Path(__file__).parents[2] / "data" / "hardware"

RECORD = """Handle 0x0011, DMI type 17, 40 bytes
Memory Device
\tTotal Width: 72 bits
\tData Width: 64 bits
\tSize: {size}
\tLocator: DIMM_A1
\tBank Locator: Not Specified
\tType: {kind}
\tType Detail: Synchronous
\tSpeed: {speed}
\t{configured}
"""


def record(
    size: str = "16 GB",
    kind: str = "DDR4",
    speed: str = "3200 MT/s",
    configured: str = "Configured Memory Speed: 2933 MT/s",
) -> str:
    return RECORD.format(size=size, kind=kind, speed=speed, configured=configured)


@pytest.mark.parametrize("machine", ["epyc-dual", "optane-memory-mode"])
def test_raw_table_reads_as_dmidecode_prints_it(machine: str, captured: Callable[[str], Host]) -> None:
    """The text was printed by dmidecode from this very table."""
    answer = captured(machine).run("dmidecode", "-t", "17")
    assert answer is not None
    printed, raw = parse_dmidecode(answer.out), parse_table((DATA / machine / "DMI.bin").read_bytes())
    assert [module.is_pmem for module in raw] == [module.is_pmem for module in printed]
    # dmidecode 3.4 calls Optane "Intel Optane DC persistent memory"; later ones dropped the DC.
    assert [replace(module, technology=None) for module in raw] == [
        replace(module, technology=None) for module in printed
    ]


def test_raw_table_is_preferred(made: Callable[..., Host]) -> None:
    table = (DATA / "epyc-dual" / "DMI.bin").read_bytes()
    host = made(f"-- hex /sys/firmware/dmi/tables/DMI --\n{table.hex()}\n")
    modules, notes = read_modules(host)
    assert modules is not None
    assert len(modules) == 32
    assert notes == []


@pytest.mark.parametrize(
    ("text", "size", "rated", "configured"),
    [
        (record(), 16 * GIB, 3200, 2933),
        (record(size="16384 MB"), 16 * GIB, 3200, 2933),
        (record(size="32 GiB"), 32 * GIB, 3200, 2933),
        (record(size="512 kB"), MIB // 2, 3200, 2933),
        (
            record(size="No Module Installed", kind="Unknown", speed="Unknown", configured="Rank: Unknown"),
            0,
            None,
            None,
        ),
        (record(size="Unknown"), None, 3200, 2933),
        # dmidecode 3.1 and before
        (record(speed="1600 MHz", configured="Configured Clock Speed: 1333 MHz"), 16 * GIB, 1600, 1333),
    ],
)
def test_fields(text: str, size: int | None, rated: int | None, configured: int | None) -> None:
    (module,) = parse_dmidecode(f"# dmidecode 3.4\nSMBIOS 3.3.0 present.\n\n{text}")
    assert (module.size_bytes, module.rated_mts, module.configured_mts) == (size, rated, configured)
    assert module.bank is None


@pytest.mark.parametrize("kind", ["Flash", "ROM"])
def test_the_firmwares_own_chip_is_not_memory(kind: str) -> None:
    assert parse_dmidecode(record(kind=kind)) == ()


@pytest.mark.parametrize(
    ("kind", "technology", "is_pmem"),
    [
        ("DDR4", "DRAM", False),
        ("DDR4", None, False),
        ("Logical non-volatile device", None, True),
        ("Logical non-volatile device", "Intel Optane DC persistent memory", True),
        ("DDR4", "Intel Optane persistent memory", True),
        ("Logical non-volatile device", "Intel persistent memory", True),
        ("DDR4", "NVDIMM-N", True),
    ],
)
def test_what_is_persistent(kind: str, technology: str | None, is_pmem: bool) -> None:
    assert Module("DIMM_A2", size_bytes=GIB, kind=kind, technology=technology).is_pmem is is_pmem


@pytest.mark.parametrize(
    ("capture", "words"),
    [
        ("", "apt-get install dmidecode"),
        ("-- failed dmidecode -t 17 --\n/dev/mem: Permission denied\n", "only root"),
        (
            "-- run dmidecode -t 17 --\n# dmidecode 3.4\n# No SMBIOS nor DMI entry point found, sorry.\n",
            "no modules",
        ),
    ],
)
def test_why_the_modules_are_unknown(capture: str, words: str, made: Callable[..., Host]) -> None:
    modules, (note,) = read_modules(made(capture))
    assert modules is None
    assert note.about == "dram.dimms"
    assert words in note.text
    assert "sudo dmidecode -t 17" in note.text


@given(st.binary(max_size=400))
def test_reading_stops_at_damaged_entries(table: bytes) -> None:
    parse_table(table)


@given(st.data())
def test_truncated_tables_keep_what_came_before(data: st.DataObject) -> None:
    table = (DATA / "epyc-dual" / "DMI.bin").read_bytes()
    whole = parse_table(table)
    part = parse_table(table[: data.draw(st.integers(0, len(table)))])
    assert part == whole[: len(part)]
