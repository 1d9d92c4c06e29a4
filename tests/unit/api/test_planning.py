"""`plan` shows the plan that engines are started with."""

from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

import pytest

from support.tiny_models import write_moe
from tokenmill.api.engines.choose import EngineChoice, plan_for
from tokenmill.api.options import ENGINES, EngineArguments, EngineOptions, engine_options
from tokenmill.api.planning.plan import command_for, plan, plan_engine
from tokenmill.config import Config
from tokenmill.errors import DoesNotFit, UnknownModel, UsageError
from tokenmill.hardware import catalog as machines
from tokenmill.hardware import machine_file
from tokenmill.planner.goal import DialectName


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(state_dir=str(tmp_path))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [{}, {"context": 512}, {"sequences": 2, "ubatch": 128, "threads": 3}])
def test_plan_shows_what_run_starts(
    engine: str, options: dict[str, object], model: Path, config: Config, here: str
) -> None:
    shown = plan(model, config=config, engine=engine, machine=here, **options)  # type: ignore[arg-type]
    asked = engine_options({**options, "engine": engine, "machine": here})
    choice = EngineChoice("id", str(model), asked.engine_config(config), config.state_path, path=model)
    started = plan_for(choice, asked, config).plan
    assert replace(shown, command=None) == started
    assert shown.command is not None


@pytest.fixture
def here(tmp_path: Path) -> str:
    """A machine file of this machine, so that two plans see the same free memory."""
    machine_file.write(replace(machines.find("this"), gpus=()), tmp_path / "here.toml")
    return str(tmp_path / "here.toml")


def test_native_is_the_default_with_eight_sequences(model: Path, config: Config) -> None:
    made = plan(model, config=config, machine="epyc-9175f")
    assert made.command is not None
    assert made.command.argv[:2] == ("tokenmill", "serve")
    assert made.settings.sequences == 8
    assert made.settings.full_windows


def test_fewer_sequences_where_eight_do_not_fit(config: Config) -> None:
    asked = {"config": config, "machine": "epyc-7532-8x3090", "context": 262144, "cache_type": "f16"}
    made = plan("kimi-k2.5:Q4_X", **asked)  # type: ignore[arg-type]
    assert made.fits
    assert made.settings.sequences < 8
    assert not plan("kimi-k2.5:Q4_X", sequences=2 * made.settings.sequences, **asked).fits  # type: ignore[arg-type]


def test_the_native_command_repeats_the_options(model: Path, config: Config) -> None:
    made = plan(model, config=config, machine="epyc-9175f", cpu_only=True, mmap=False, context=2048)
    assert made.command is not None
    words = made.command.argv
    assert {"--cpu-only", "--no-mmap", "--engine-only"} <= set(words)
    assert words[words.index("--context") + 1] == "2048"
    assert words[words.index("--sequences") + 1] == "8"


@pytest.mark.parametrize("engine", [name for name in get_args(DialectName) if "-20" in name])
def test_older_engines_can_be_planned_but_not_started(engine: str, model: Path, config: Config) -> None:
    assert plan(model, config=config, engine=engine, machine="epyc-9175f").settings.engine == engine
    with pytest.raises(UsageError):
        plan_engine(str(model), EngineOptions(engine=engine), config)


def test_llama_cpp_is_llama_server(model: Path, config: Config) -> None:
    common = {"config": config, "machine": "epyc-9175f"}
    assert plan(model, engine="llama.cpp", **common) == plan(model, engine="llama-server", **common)  # type: ignore[arg-type]


def test_an_engine_needs_files(config: Config) -> None:
    with pytest.raises(UnknownModel):
        plan_engine("kimi-k2.5:Q4_K_S", EngineOptions(machine="epyc-9175f"), config)


def test_a_plan_that_does_not_fit_is_an_error_only_when_started(model: Path, config: Config) -> None:
    made = plan("kimi-k2.5:Q8_0", config=config, machine="desktop-ddr5-5090", context=4096)
    assert not made.fits
    assert made.command is None
    asked = EngineOptions(machine="desktop-ddr5-5090", context=4096)
    with pytest.raises(DoesNotFit) as caught:
        plan_engine("kimi-k2.5:Q8_0", asked, config, files=False).require_fit()
    assert (caught.value.code, caught.value.exit_code) == ("does_not_fit", 3)
    assert caught.value.plan.shortfalls


def test_memory_sums_to_the_ledger(config: Config) -> None:
    made = plan("kimi-k2.5:Q4_K_S", config=config, machine="epyc-9175f", context=32768)
    for name, tier in made.memory.items():
        assert tier.used_bytes == made.ledger.needed(name)
        assert sum(tier.items.values()) == made.ledger.total(name)
    assert made.forecast.decode_tok_s is not None
    assert made.batch_tok_s is not None


def test_a_plan_is_a_table_in_a_terminal_and_in_a_notebook(config: Config) -> None:
    made = plan("kimi-k2.5:Q4_K_S", config=config, machine="epyc-9175f", context=32768)
    text, page = repr(made), made._repr_html_()
    assert max(map(len, text.splitlines())) <= 80
    for name in made.memory:
        assert f"\n{name}" in text
        assert f"<td>{name}</td>" in page
    hostile = replace(made, warnings=("<script>",))
    assert "<script>" not in hostile._repr_html_()


def test_keyword_arguments_are_the_options() -> None:
    assert set(EngineArguments.__annotations__) == {field.name for field in fields(EngineOptions)}


def test_sizes_and_lists_are_understood() -> None:
    found = engine_options({"reserve_ram": "64 GiB", "gpus": [0, 2]})
    assert (found.reserve_ram, found.gpus) == (64 << 30, "0,2")
    assert engine_options({"gpus": 1}).gpus == "1"


def test_numpy_integers_and_paths_are_converted() -> None:
    numpy = pytest.importorskip("numpy")
    found = engine_options({"context": numpy.int64(512), "machine": Path("box.toml"), "gpu_memory_utilization": 1})
    assert (found.context, type(found.context), found.machine) == (512, int, "box.toml")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"contxt": 1}, "contxt"),
        ({"margin": "much"}, "margin"),
        ({"context": "4096"}, "context"),
        ({"context": True}, "context"),
        ({"context": 4096.0}, "context"),
        ({"mmap": "yes"}, "mmap"),
        ({"gpus": 1.5}, "gpus"),
        ({"cpu_only": None}, "cpu_only"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError) as caught:
        engine_options(arguments)
    assert named in caught.value.message


def test_a_misspelt_option_has_a_suggestion() -> None:
    with pytest.raises(UsageError) as caught:
        engine_options({"contxt": 1})
    assert "'context'" in (caught.value.hint or "")


def test_negative_sizes_are_refused() -> None:
    with pytest.raises(UsageError):
        engine_options({"margin": -1}).goal_for("llama.cpp")


def test_the_native_command_names_a_pulled_model(model: Path, config: Config) -> None:
    made = plan_engine(str(model), EngineOptions(machine="epyc-9175f"), config, files=False)
    assert command_for(made, "smollm2", EngineOptions()).argv[2] == "smollm2"
    missing = plan_engine("kimi-k2.5:Q4_K_S", EngineOptions(machine="epyc-9175f"), config, files=False)
    assert command_for(missing, "kimi-k2.5:Q4_K_S", EngineOptions()).argv[2].endswith("kimi-k2.5-Q4_K_S.gguf")
