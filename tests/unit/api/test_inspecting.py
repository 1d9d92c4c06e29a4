"""`tokenmill.probe`, `tokenmill.inspect`, and the names that `import tokenmill` exports."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tokenmill
from support.tiny_models import write_moe
from tokenmill.config import Config
from tokenmill.errors import TokenmillError, UnknownMachine, UsageError


def test_every_exported_name_exists() -> None:
    for name in tokenmill.__all__:
        assert getattr(tokenmill, name) is not None
    assert set(tokenmill.__all__) <= set(dir(tokenmill))


def test_importing_the_package_imports_nothing_else() -> None:
    script = "import sys, tokenmill; print([name for name in sys.modules if name.startswith('tokenmill.')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['tokenmill.version']"


def test_probe_reads_this_machine(tmp_path: Path) -> None:
    machine = tokenmill.probe(path=tmp_path)
    assert isinstance(machine, tokenmill.Machine)
    assert machine.dram.total_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert machine.disk is not None
    assert machine.disk.path == str(tmp_path)
    assert machine.measured is None


def test_probe_reads_a_catalogue_machine() -> None:
    assert tokenmill.probe(machine="epyc-9175f").name == "epyc-9175f"
    with pytest.raises(UsageError):
        tokenmill.probe(machine="epyc-9175f", measure=True)
    with pytest.raises(UsageError):
        tokenmill.probe(machine="epyc-9175f", path="/")
    with pytest.raises(UnknownMachine):
        tokenmill.probe(machine="nothing")


def test_inspect_reads_a_file_and_a_catalogue_name(tmp_path: Path) -> None:
    config = Config(state_dir=str(tmp_path))
    path = write_moe(tmp_path)
    profile = tokenmill.inspect(path, config=config)
    assert isinstance(profile, tokenmill.ModelProfile)
    assert [Path(file.path) for file in profile.files] == [path]
    assert profile.experts is not None
    big = tokenmill.inspect("kimi-k2.5:Q4_K_S", config=config)
    assert big.parameters > 1e12
    with pytest.raises(TokenmillError) as missing:
        tokenmill.inspect(tmp_path / "missing.gguf", config=config)
    assert missing.value.exit_code == 2
