import json
import re
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokenmill.hardware.cpu import cache_total, isa, parse_cpuinfo, parse_lscpu, read_cpu
from tokenmill.hardware.host import Host
from tokenmill.units import GIB, KIB, MIB

Made = Callable[..., Host]

ARM_CPUINFO = "\n\n".join(
    f"processor\t: {cpu}\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd asimddp sve i8mm bf16" for cpu in range(4)
)


@pytest.mark.parametrize(
    ("text", "total"),
    [
        ("32 MiB (1 instance)", 32 * MIB),
        ("512 MiB (16 instances)", 512 * MIB),
        ("24.8 MiB (1 instance)", round(24.8 * MIB)),
        ("1.1 GiB (2 instances)", round(1.1 * GIB)),
        ("512 KiB (2 instances)", 512 * KIB),
        ("16384K", None),  # util-linux 2.33 and before: one instance's size, whatever their number
        ("", None),
    ],
)
def test_cache_total(text: str, total: int | None) -> None:
    assert cache_total(text) == total


@pytest.mark.parametrize("text", ["", "not json", "[]", "{}", '{"lscpu": []}'])
def test_empty_output_of_lscpu(text: str) -> None:
    assert parse_lscpu(text) == {}


def test_lscpu_nested_and_dashes() -> None:
    text = '{"lscpu": [{"field": "CPU(s):", "data": "8", "children": [{"field": "Socket(s):", "data": "-"}]}]}'
    assert parse_lscpu(text) == {"CPU(s)": "8"}


def test_isa_uses_our_names_and_drops_the_rest() -> None:
    assert isa({"asimd", "asimddp", "sve2", "avx512vbmi", "avx512_vbmi2", "sse2"}) == (
        "avx512_vbmi",
        "neon",
        "dotprod",
        "sve2",
    )


def test_arm_without_package_numbers(made: Made) -> None:
    files = "".join(
        f"-- /sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list --\n{cpu}\n"
        f"-- /sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id --\n-1\n"
        for cpu in range(4)
    )
    cpu, virtual, notes = read_cpu(made(f"-- /proc/cpuinfo --\n{ARM_CPUINFO}\n{files}"))
    assert (cpu.sockets, cpu.cores, cpu.threads_per_core) == (None, 4, 1)
    assert cpu.isa == ("neon", "dotprod", "i8mm", "sve", "bf16")
    assert virtual is None
    assert notes == []


def test_hypervisor_is_seen_without_lscpu(made: Made) -> None:
    cpuinfo = "processor : 0\nphysical id : 0\ncore id : 0\nflags : avx2 hypervisor\n"
    _, virtual, _ = read_cpu(made(f"-- /proc/cpuinfo --\n{cpuinfo}"))
    assert virtual == "unnamed hypervisor"


def test_cores_of_two_kinds_get_a_note(made: Made) -> None:
    lscpu = ", ".join(
        f'{{"field": "{field}:", "data": "{data}"}}'
        for field, data in {"Socket(s)": 1, "Core(s) per socket": 16, "Thread(s) per core": 2}.items()
    )
    capture = f'-- run lscpu -J --\n{{"lscpu": [{lscpu}]}}\n-- /sys/devices/system/cpu/online --\n0-23\n'
    cpu, _, (note,) = read_cpu(made(capture))
    assert (cpu.cores, cpu.threads_per_core) == (16, 2)
    assert note.about == "cpu.threads_per_core"
    assert "24 logical CPUs" in note.text


@given(
    st.recursive(
        st.text() | st.integers() | st.none(),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["lscpu", "field", "data", "children"]), inner),
    )
)
def test_any_json_from_lscpu_is_survived(document: object) -> None:
    parse_lscpu(json.dumps(document))
    parse_lscpu(json.dumps({"lscpu": document}))


LINES = st.sampled_from(["processor : 0", "processor:", "model name : x", "flags", "", " ", ":"]) | st.text()


@given(st.lists(LINES).map("\n".join))
@example("processor : 0\n\nmodel name : x\n\nprocessor : 1")
def test_any_cpuinfo_is_survived(text: str) -> None:
    blocks = parse_cpuinfo(text)
    assert all("processor" in block for block in blocks)
    assert len(blocks) <= text.count("processor")
    assert len(blocks) > 0 or not re.search(r"^processor\s*:", text, re.MULTILINE)
