"""Plans that no engine is started from: of other machines, of headers without weights, for unusable GPUs."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from support.tiny_models import write_moe
from tokenmill.api.options import EngineOptions
from tokenmill.api.planning import loadable
from tokenmill.api.planning import plan as planning
from tokenmill.api.planning.plan import plan_engine
from tokenmill.config import Config
from tokenmill.errors import UsageError
from tokenmill.hardware import catalog as machines
from tokenmill.hardware import machine_file
from tokenmill.hardware.identity import differences
from tokenmill.hardware.machine import Dram, Gpu, Machine
from tokenmill.model.synthetic import ghost
from tokenmill.native.builds import gpu_support
from tokenmill.native.builds.finished import BuildMachine
from tokenmill.native.builds.gpu_support import BUILD_COMMAND
from tokenmill.native.builds.toolchain import Processor
from tokenmill.units import GIB

CARD = Gpu(0, "RTX 3090", "nvidia", 24 * GIB, 24 * GIB)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(state_dir=str(tmp_path))


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """This machine with a card, and a library without GPU support."""
    found = replace(machines.find("this"), gpus=(CARD,))

    def find(name: str) -> Machine:
        return found if name == "this" else machines.find(name)

    monkeypatch.setattr(planning, "find", find)
    monkeypatch.setattr(loadable, "find", find)
    monkeypatch.setattr(
        gpu_support, "this_host", lambda: BuildMachine(Processor(found.cpu.model, found.cpu.isa), (), gpu_wheel=False)
    )
    return found


def test_another_machine_is_planned_but_not_loaded(model: Path, config: Config) -> None:
    elsewhere = EngineOptions(machine="epyc-9175f")
    assert plan_engine(str(model), elsewhere, config, files=False).plan.fits
    with pytest.raises(UsageError) as refused:
        plan_engine(str(model), elsewhere, config)
    assert refused.value.code == "other_machine"
    assert refused.value.hint


def test_a_file_of_this_machine_with_less_memory_is_loaded(model: Path, config: Config, tmp_path: Path) -> None:
    this = machines.find("this")
    assert this.dram.total_bytes is not None
    machine_file.write(
        replace(this, dram=replace(this.dram, total_bytes=this.dram.total_bytes // 2)), tmp_path / "box.toml"
    )
    assert plan_engine(str(model), EngineOptions(machine=str(tmp_path / "box.toml")), config).plan.fits


def test_a_machine_lacks_what_its_description_claims() -> None:
    here = Machine("here", dram=Dram(total_bytes=100 * GIB))
    assert differences(here, here) == []
    assert differences(replace(here, dram=Dram(total_bytes=101 * GIB)), here) == []
    assert len(differences(replace(here, dram=Dram(total_bytes=128 * GIB)), here)) == 1
    assert len(differences(replace(here, gpus=(CARD,)), here)) == 1
    assert differences(here, replace(here, gpus=(CARD,))) == []


def test_a_header_without_weights_is_planned_but_not_loaded(model: Path, config: Config, tmp_path: Path) -> None:
    ghost.write(str(model), tmp_path / "ghost.gguf")
    assert plan_engine(str(tmp_path / "ghost.gguf"), EngineOptions(), config, files=False).plan.profile.ghost
    with pytest.raises(UsageError) as refused:
        plan_engine(str(tmp_path / "ghost.gguf"), EngineOptions(), config)
    assert refused.value.code == "model_without_weights"


@pytest.mark.parametrize("files", [True, False])
def test_a_plan_leaves_out_gpus_that_the_library_cannot_use(
    files: bool, box: Machine, model: Path, config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="tokenmill"):
        made = plan_engine(str(model), EngineOptions(), config, files=files).plan
    assert made.placement.gpus == ()
    assert BUILD_COMMAND in made.warnings[0]
    assert [BUILD_COMMAND in record.message for record in caplog.records] == ([True] if files else [])


def test_a_file_of_this_machine_gets_the_same_warning(
    box: Machine, model: Path, config: Config, tmp_path: Path
) -> None:
    machine_file.write(box, tmp_path / "box.toml")
    made = plan_engine(str(model), EngineOptions(machine=str(tmp_path / "box.toml")), config, files=False).plan
    assert BUILD_COMMAND in made.warnings[0]


def test_a_gpu_that_is_asked_for_and_cannot_be_used_is_refused(box: Machine, model: Path, config: Config) -> None:
    with pytest.raises(UsageError) as refused:
        plan_engine(str(model), EngineOptions(gpus="0"), config)
    assert refused.value.code == "gpu_not_supported"
    assert BUILD_COMMAND in (refused.value.hint or "")


def test_cpu_only_needs_no_warning(box: Machine, model: Path, config: Config) -> None:
    assert plan_engine(str(model), EngineOptions(cpu_only=True), config).plan.warnings == ()
