"""Machine files: round trips, edits by hand, and errors."""

import dataclasses
import os
import re
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tokenmill.errors import ConfigError, UsageError
from tokenmill.hardware.machine import (
    Cpu,
    Dram,
    Gpu,
    Limits,
    Machine,
    Measurements,
    Note,
    NumaNode,
    NvLink,
    Pmem,
    Rate,
    Swap,
)
from tokenmill.hardware.machine_file import NEVER_ZERO, read, to_toml, write
from tokenmill.units import GIB

TEXT = st.text(max_size=20) | st.sampled_from(['"', "\\", "\x00", "\x7f", "a\r\nb", "#", "'''", "é\u2028\u0085", "[x]"])


def values(hint: Any, name: str = "") -> st.SearchStrategy[Any]:
    """Any value a field of this type and name may have; new fields of `Machine` are covered by themselves."""
    smallest = 1 if name in NEVER_ZERO else 0
    if dataclasses.is_dataclass(hint):
        fields = get_type_hints(hint, include_extras=True)
        return st.builds(hint, **{field: values(kind, field) for field, kind in fields.items()})  # type: ignore[arg-type]
    if hint is int:
        return st.integers(smallest, 2**62)
    if hint is float:
        return st.floats(0, 1e300, exclude_min=name.endswith("gb_s"), allow_subnormal=False)
    if hint is str:
        return TEXT
    if hint is type(None):
        return st.none()
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return values(arguments[0], name)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1], "gb_s"), max_size=3)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*(values(argument) for argument in arguments))
    assert origin in (types.UnionType, Union), hint
    return st.one_of(*(values(argument, name) for argument in arguments))


def consistent(machine: Machine) -> Machine:
    """Give GPUs and nodes unique indices, and link only existing GPUs."""
    gpus = tuple(dataclasses.replace(gpu, index=index) for index, gpu in enumerate(machine.gpus))
    numa = tuple(dataclasses.replace(node, index=index) for index, node in enumerate(machine.numa))
    nvlinks = tuple(dataclasses.replace(link, gpus=(0, len(gpus) - 1)) for link in machine.nvlinks if gpus)
    return dataclasses.replace(machine, gpus=gpus, numa=numa, nvlinks=nvlinks)


EVERYTHING = Machine(
    "all",
    cpu=Cpu("Xeon", 2, 32, 2, ("avx2",), 24 * GIB),
    numa=(NumaNode(0, tuple(range(200)), 3, 0, (10, 21)), NumaNode(1)),
    gpus=(Gpu(0, "a"), Gpu(1, "b", nominal_gb_s=1e-7)),
    nvlinks=(NvLink((0, 1)),),
    pmem=Pmem("mixed"),
    swap=Swap(0),
    limits=Limits(cpuset=()),
    measured=Measurements("2026-01-01", (Rate("dram", 229.5, 13, {1: 20.25, 13: 229.5}), Rate("disk", 3.0))),
    notes=(Note("dram.mts", "needs root"),),
)


@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(machine=values(Machine).map(consistent))
@example(machine=EVERYTHING)
@example(machine=Machine("bare"))
def test_what_is_written_reads_back_as_the_same_machine(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    write(machine, path)
    assert read(path) == machine


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(machine=values(Machine).map(consistent))
def test_every_field_is_in_the_file_as_a_line_or_a_comment(machine: Machine) -> None:
    text = to_toml(machine)
    assert [field.name for field in dataclasses.fields(Machine) if not _named(field.name, text)] == []
    assert [field.name for field in dataclasses.fields(Dram) if not _named(field.name, text, "dram.")] == []


def _named(field: str, text: str, section: str = "") -> bool:
    return re.search(rf"^(# )?(\[\[?{section}{field}\]|{field} =)", text, re.MULTILINE) is not None


def test_files_show_units_and_unknown_fields() -> None:
    machine = Machine("box", dram=Dram(total_bytes=755 * GIB), notes=(Note("dram.mts", "run it as root\nto see"),))
    lines = to_toml(machine).splitlines()
    assert lines[0].startswith("# ")
    assert "--machine FILE" in lines[0]
    assert "total_bytes = 810675077120  # 755.0 GiB" in lines
    assert lines[lines.index("# mts = unknown") - 1] == "# run it as root to see"
    assert "# container = none" in lines
    assert "# memlock_bytes = no limit" in lines
    assert "# [swap]" in lines
    assert tomllib.loads(to_toml(machine))["notes"] == [{"about": "dram.mts", "text": "run it as root\nto see"}]


def test_a_note_on_all_gpus_appears_once_at_the_first() -> None:
    machine = Machine(
        "box",
        gpus=(Gpu(0, "a"), Gpu(1, "b")),
        notes=(Note("gpus.pcie", "slots unknown"), Note("gpus[1]", "riser")),
    )
    text = to_toml(machine).partition("[[notes]]")[0]
    assert text.count("# slots unknown") == 1
    assert text.index("# slots unknown") < text.index('name = "b"')
    assert "# riser\n[[gpus]]\nindex = 1" in text


def test_long_lists_are_broken_into_lines() -> None:
    machine = Machine("box", numa=(NumaNode(0, tuple(range(192))),))
    assert max(map(len, to_toml(machine).splitlines())) <= 105


def test_a_hand_written_file_may_use_units_and_omit_fields(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\n[dram]\ntotal_bytes = "755 GiB"\n[[gpus]]\nindex = 0\nname = "RTX 3090"\n')
    assert read(path) == Machine("mine", dram=Dram(total_bytes=755 * GIB), gpus=(Gpu(0, "RTX 3090"),))


def test_uncommenting_an_unknown_fills_it_in(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    write(Machine("box"), path)
    path.write_text(path.read_text().replace("# mts = unknown", "mts = 6400"))
    assert read(path) == Machine("box", dram=Dram(mts=6400))


@pytest.mark.parametrize(
    ("text", "complaint", "hint"),
    [
        ('name = "x"\n[dram]\nchanels = 12\n', "unknown key 'dram.chanels'", "did you mean 'channels'?"),
        ('name = "x"\n[[gpus]]\nindex = 0\nname = "a"\nvram = 1\n', "unknown key 'gpus[0].vram'", "vram_bytes"),
        ('name = "x"\n[dram]\nmts = "fast"\n', "dram.mts: input should be a valid integer", "probe -o"),
        ('name = "x"\n[dram]\ntotal_bytes = "much"\n', "'much' is not a size", "probe -o"),
        ('name = "x"\n[pmem]\nmode = "ram"\n', "pmem.mode", "probe -o"),
        ('name = "x"\ngpus = 8\n', "gpus", "probe -o"),
        ('name = "x"\n[cpu]\ncores = -1\n', "cpu.cores: -1 ", "probe -o"),
        ('name = "x"\n[dram]\nchannels = 0\n', "dram.channels: 0 ", "probe -o"),
        ('name = "x"\n[dram]\nnominal_gb_s = nan\n', "dram.nominal_gb_s: nan ", "probe -o"),
        ('name = "x"\n[dram]\nnominal_gb_s = 0\n', "dram.nominal_gb_s: 0 ", "probe -o"),
        ('name = "x"\nnvlinks = [{ gpus = [0, 1] }]\n', "nvlinks[0].gpus: ", "probe -o"),
        ('name = "x"\ngpus = [{ index = 0, name = "a" }, { index = 0, name = "b" }]\n', "same index", "probe -o"),
        ("", "name: field required", "probe -o"),
        ("this is not TOML", "is not valid TOML", "fix the line"),
        ("\udcff", "is not valid TOML", "fix the line"),
    ],
)
def test_errors_of_wrong_files_name_file_and_key(tmp_path: Path, text: str, complaint: str, hint: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert str(path) in caught.value.message
    assert complaint in caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: None], ids=["folder", "missing"])
def test_a_path_without_a_file_is_an_error(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "machine.toml"
    make(path)
    with pytest.raises(ConfigError, match="machine.toml") as caught:
        read(path)
    assert isinstance(caught.value.__cause__.__cause__ if caught.value.__cause__ else None, OSError)
    assert caught.value.hint


def test_writing_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text("old")
    write(Machine("new"), path)
    assert read(path).name == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["machine.toml"]


def test_writing_goes_through_a_link(tmp_path: Path) -> None:
    link = tmp_path / "link.toml"
    link.symlink_to(tmp_path / "real.toml")
    write(Machine("box"), link)
    assert link.is_symlink()
    assert read(tmp_path / "real.toml").name == "box"


def test_a_write_that_fails_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "machine.toml"
    write(Machine("old"), path)

    def full(_file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="No space left on device"):
        write(Machine("new"), path)
    assert read(path).name == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["machine.toml"]


@pytest.mark.parametrize("where", ["no/such/folder/m.toml", "."])
def test_a_path_that_cannot_be_written_is_an_error(tmp_path: Path, where: str) -> None:
    with pytest.raises(UsageError) as caught:
        write(Machine("box"), tmp_path / where)
    assert str(tmp_path / where) in caught.value.message
    assert caught.value.hint


def test_a_device_is_written_to_and_not_replaced() -> None:
    write(Machine("box"), Path("/dev/null"))
    assert Path("/dev/null").is_char_device()


def test_a_name_that_is_not_unicode_does_not_stop_the_file(tmp_path: Path) -> None:
    write(Machine("bo\udcffx"), tmp_path / "machine.toml")
    assert read(tmp_path / "machine.toml").name == "bo?x"
