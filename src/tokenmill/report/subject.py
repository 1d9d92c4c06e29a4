"""Makes the subject of a report from a model's name and options: machine, model, plan, and commands to run."""

import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields

from tokenmill.api.engines.choose import DEFAULT_MODEL
from tokenmill.api.options import ENGINES, EngineOptions
from tokenmill.api.planning.plan import DescribedModel, describe_or_plan, file_name
from tokenmill.config import Config
from tokenmill.engine import load_history
from tokenmill.errors import FlagUnknown, ModelError, NotSpellable
from tokenmill.hardware.catalog import THIS, find, names
from tokenmill.hardware.identity import differences
from tokenmill.launch import spell
from tokenmill.launch.files.launch import grouped
from tokenmill.launch.files.services import joined, words
from tokenmill.model import catalog
from tokenmill.model.identity import identity_of
from tokenmill.model.pull.store import pulled
from tokenmill.report.collect import Subject
from tokenmill.report.report import CommandText
from tokenmill.tuner import history

_NOT_REPEATED = ("engine", "binary", "port", "warm", "point", "machine")


def subject(model: str | None, options: EngineOptions, config: Config) -> Subject:
    """The machine, model and plan to report on; without a model, the machine only."""
    machine = options.machine or config.machine
    if model is None:
        return Subject(find(machine), elsewhere=_elsewhere(machine))
    found = describe_or_plan(model, options, config)
    return Subject(
        found.machine,
        model,
        identity_of(found.path) if found.here else None,
        found.profile,
        found.plan,
        elsewhere=_elsewhere(machine),
        commands=tuple(_commands(model, found, options)),
    )


def _elsewhere(machine: str) -> bool:
    """Whether a machine is described by a name or a file rather than being this one."""
    return machine in names() or (machine != THIS and bool(differences(find(machine), find(THIS))))


def usual_model(config: Config) -> str | None:
    """The pulled model that was measured last, else the default model; None if neither is on this machine."""
    here: dict[str, str] = {}
    for each in pulled(config.models_path):
        with suppress(ModelError):  # damaged models are skipped
            here |= {identity_of(each.path): each.name} if each.complete else {}
    state = config.state_path
    seen = sorted(
        [(load.when, load.model_id) for load in load_history.read(state)]
        + [(speed.when, speed.model_id) for speed in history.read(state)],
        reverse=True,
    )
    last = next((here[model_id] for _, model_id in seen if model_id in here), None)
    return last or next((name for name in here.values() if name == DEFAULT_MODEL), None)


def _commands(model: str, found: DescribedModel, options: EngineOptions) -> Iterator[CommandText]:
    """Commands to plan, download, run and serve the model; those that load it name it as it is after the download."""
    plan = found.plan
    name = shlex.quote(model)
    pull = None if found.here or not catalog.looks_like_name(model) else catalog.pull_hint(model)
    loaded = name if pull is None else shlex.quote(pull.rpartition(" ")[2])
    given = shlex.join(_flags(options))
    machine = f" --machine {shlex.quote(options.machine)}" if options.machine else ""
    dialect = ENGINES.get(options.engine or "", "llama.cpp")
    engine = "" if dialect == "llama.cpp" else f" --engine {dialect}"
    own = f" --engine {shlex.quote(options.engine)}" if options.engine else ""
    tail = f" {given}" if given else ""
    yield CommandText("Plan it", f"tokenmill plan {name}{machine}{engine}{tail} --explain")
    if pull is not None:
        yield CommandText("Download it", pull)
    yield CommandText("Run a batch", f"tokenmill run jobs.jsonl --output results.jsonl --model {loaded}{own}{tail}")
    yield CommandText("Serve it", f"tokenmill serve {loaded}{own}{tail}")
    if plan is not None and plan.fits:
        try:
            command = spell(plan, model=file_name(found.path))
        except (NotSpellable, FlagUnknown) as error:
            yield CommandText("The plan's command", f"# {error.message}")
            return
        program, *flags = grouped(list(command.argv))
        lines = [f"{key}={shlex.quote(value)} " for key, value in command.env.items()]
        text = "".join(lines) + joined([shlex.join(program), *map(words, flags)])
        yield CommandText("The plan as an engine command", text, command.notes)


def _flags(options: EngineOptions) -> list[str]:
    """The options as command-line flags."""
    flags: list[str] = []
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name in _NOT_REPEATED or value == field.default:
            continue
        flag = field.name.replace("_", "-")
        flags += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return flags
