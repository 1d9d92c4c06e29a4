"""`tokenmill plan`: plans a model on a machine and predicts memory and speed, without loading anything."""

from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter
from rich.table import Table
from rich.text import Text

from tokenmill.api.options import EngineOptions
from tokenmill.api.planning.plan import EnginePlan, command_for, does_not_fit, plan_engine
from tokenmill.cli.options import GoalOptions, ModelArgument
from tokenmill.cli.output import Common, show, show_json, show_text
from tokenmill.cli.planning.plan_batch import BatchOptions
from tokenmill.cli.planning.plan_compare import compare as show_comparison
from tokenmill.cli.planning.plan_config import show_config_plan
from tokenmill.cli.planning.plan_from_command import ShownCommand, server_dialect, show_command_plan
from tokenmill.cli.planning.plan_hosts import HostsOptions, plan_over
from tokenmill.cli.views.plan import document, explained, folded, render
from tokenmill.cli.views.regimes import regimes_document, render_regimes
from tokenmill.errors import DoesNotFit, UsageError
from tokenmill.hardware.catalog import THIS, find
from tokenmill.launch import flags_of
from tokenmill.launch.files import write_as
from tokenmill.launch.tensor_patterns import tiers_by_pattern
from tokenmill.model import derived
from tokenmill.model.synthetic import ghost
from tokenmill.native.verify import Verification, verify_by_binary
from tokenmill.native.verify import verify as verify_plan
from tokenmill.planner.plan import Command, Plan
from tokenmill.units import format_bytes

Written = Literal["shell", "podman", "quadlet", "systemd", "compose"]
_MODE = Parameter(group=Group.create_ordered("Modes", sort_key=0))


def plan(
    model: ModelArgument = None,
    *,
    machine: Annotated[str | None, Parameter(metavar="NAME")] = None,
    options: GoalOptions = GoalOptions(),  # noqa: B008  frozen
    hosts: HostsOptions = HostsOptions(),  # noqa: B008  frozen
    batch: BatchOptions = BatchOptions(),  # noqa: B008  frozen
    explain: bool = False,
    compare: Annotated[str | None, _MODE, Parameter(metavar="LIST")] = None,
    written: Annotated[Written | None, _MODE, Parameter(name="--as")] = None,
    verify: Annotated[bool, _MODE] = False,
    from_command: Annotated[str | None, _MODE, Parameter(metavar="COMMAND", allow_leading_hyphen=True)] = None,
    binary: Annotated[str | None, Parameter(metavar="FILE")] = None,
    point: Annotated[bool, Parameter(negative="--no-point")] = True,
    common: Common = Common(),  # noqa: B008  frozen
) -> int:
    """Plan a model on a machine: whether it fits, where every tensor goes, how fast it runs, and the command to run.

    Loads nothing and needs no weights. Memory is computed as the engine computes it; speeds are forecasts, marked
    measured, calibrated or estimated. Exit code 0: it fits; 3: it does not, and the smallest changes that would make
    it fit are shown. Without MODEL, the [[engines]] of the configuration are planned together on one machine.

        tokenmill plan kimi-k2.5:Q4_K_S --machine epyc-9175f --context 32k
        tokenmill plan kimi.gguf --explain
        tokenmill plan kimi-k2.5:Q4_K_S --as systemd
        tokenmill plan kimi.gguf --jobs jobs.jsonl
        tokenmill plan kimi.gguf --compare threads=12,14,16

    Parameters
    ----------
    model:
        GGUF file (any split), its http(s) URL, safetensors folder, config.json with a quantization such as
        config.json:Q4_K_M, hf:OWNER/REPO:QUANT, catalogue name such as kimi-k2.5:Q4_K_S or
        deepseek-r1@219GiB, or name of a downloaded model such as smollm2. Nothing is downloaded.
    machine:
        Machine to plan for: this, a name from `tokenmill machines`, or a machine file; several, separated by commas
        with the head node first, or a fleet file, to split the model over them. [default: from the configuration, or
        this]
    explain:
        Also show the reason for each choice and a breakdown of the time per token.
    compare:
        Compare several plans in one table: comma-separated quantizations, context lengths, machines or cache types,
        or the values of a setting, such as threads=12,14,16.
    written:
        Print only a file or command that starts the engine; plans llama-server unless --engine is given.
    verify:
        Compare the plan with a dry run of the real llama.cpp, or of the program given by --binary.
    from_command:
        Plan an existing llama-server, ik_llama.cpp or vLLM command line, and list its mistakes: the command itself, a
        file that contains it, or - for stdin. --binary names the program, to recognize its version.
    binary:
        The engine's executable, whose --help determines how flags are spelled. [default: the flags of the bundled
        build]
    point:
        Use the operating point found by `tokenmill tune` for settings that are not given.
    """
    config = common.load_config()
    named = machine or config.machine
    fleet = hosts.fleet(named)
    if fleet is not None:
        others = {"compare": compare, "as": written, "verify": verify, "from-command": from_command}
        goal = options.goal_for(server_dialect(options.engine))
        return plan_over(fleet, model, goal, hosts, others, explain=explain, binary=binary, common=common)
    _check_together(compare=compare, written=written, verify=verify, from_command=from_command, binary=binary)
    if from_command is not None:
        options = options.reserving(config.reserve) if named == THIS else options
        return show_command_plan(from_command, model, find(named), options, ShownCommand(binary, explain, common))
    if model is None and config.engines:
        return show_config_plan(config, machine, common)
    if model is None:
        raise UsageError("no model given", hint="for example: tokenmill plan kimi-k2.5:Q4_K_S --machine epyc-9175f")
    engine = options.engine or ("llama-server" if written is not None or binary is not None else None)
    asked = EngineOptions(**_fields(options) | {"engine": engine, "machine": machine, "binary": binary, "point": point})
    if compare is not None:
        return show_comparison(model, asked, compare, config, json=common.json)
    made = plan_engine(model, asked, config, files=False, batch=batch.profile(model, config))
    flags = flags_of(binary) if binary else None
    command = command_for(made, model, asked, binary=binary, flags=flags) if made.plan.fits else None
    if written is not None:
        return _write(written, command, made.plan, common)
    checked = _verified(made, command, binary) if verify else None
    _show(made, command, checked, explain=explain, common=common)
    agrees = checked is None or checked.agrees
    return 1 if not agrees else 0 if made.plan.fits else DoesNotFit.exit_code


def _show(
    made: EnginePlan, command: Command | None, checked: Verification | None, *, explain: bool, common: Common
) -> None:
    plan = made.plan
    if common.json:
        patterns = tiers_by_pattern(plan.placement, plan.profile)
        batch = {} if made.regimes is None else {"batch": regimes_document(made.regimes)}
        show_json(document(plan, patterns, _command(command)) | _verification(checked) | batch)
        return
    show(*render(plan), *(explained(plan) if explain else ()))
    if made.regimes is not None:
        show(Text(), *render_regimes(made.regimes, every=explain))
    if command is not None:
        show(Text(), Text("run:", style="bold"))
        show_text(folded(command))
    if checked is not None:
        show(Text(), _verification_table(checked))


def _fields(options: GoalOptions) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in fields(options)}


def _check_together(**values: object) -> None:
    """UsageError for options that cannot be combined."""
    exclusive = {
        "compare": ("as", "verify", "from-command", "binary"),
        "as": ("verify", "from-command"),
        "verify": ("from-command",),
    }
    given = {"as" if name == "written" else name.replace("_", "-") for name, value in values.items() if value}
    for name, others in exclusive.items():
        other = next((other for other in others if {name, other} <= given), None)
        if other is not None:
            raise UsageError(f"--{name} and --{other} cannot be combined", hint="run tokenmill plan once for each")


def _write(kind: Written, command: Command | None, made: Plan, common: Common) -> int:
    if command is None:
        raise does_not_fit(made)
    text = write_as(kind, command, made)
    if common.json:
        show_json({"kind": kind, "text": text})
    else:
        show_text(text)
    return 0


def _verified(made: EnginePlan, command: Command | None, binary: str | None) -> Verification:
    """Compare the plan with a dry run of `binary` or of the installed llama.cpp, on the file or a header-only copy."""
    path = made.model_path
    if binary is not None and command is not None:
        if not path.is_file():
            raise UsageError(
                f"{binary} requires a model file, but {path} does not exist",
                hint="tokenmill models ghost writes a header-only file",
            )
        return verify_by_binary(made.plan, command.argv, binary)
    library = None if made.config.library is None else Path(made.config.library).expanduser()
    header = None if made.config.header is None else Path(made.config.header).expanduser()
    if path.is_file() and derived.reference(str(path)) is None:
        return verify_plan(made.plan, path, library=library, header=header)
    if str(path).startswith(("hf:", "http:", "https:")):
        raise UsageError(
            f"{path} is not on this machine, so llama.cpp cannot read its header",
            hint="tokenmill models ghost --from URL -o FILE copies the header of a GGUF; then plan FILE",
        )
    with TemporaryDirectory(prefix="tokenmill-") as folder:
        target = Path(folder) / "ghost.gguf"
        ghost.write(str(path), target)
        return verify_plan(made.plan, target, library=library, header=header)


def _verification(checked: Verification | None) -> dict[str, Any]:
    if checked is None:
        return {}
    rows = [
        {
            "tier": row.tier,
            "item": row.item,
            "predicted_bytes": row.predicted_bytes,
            "projected_bytes": row.projected_bytes,
            "agrees": row.agrees,
        }
        for row in checked.rows
    ]
    return {
        "verification": {
            "engine": checked.version,
            "agrees": checked.agrees,
            "rows": rows,
            "notes": list(checked.notes),
        }
    }


def _verification_table(checked: Verification) -> Table:
    title = f"predicted, compared with a dry run of {checked.version}"
    table = Table("memory", "item", title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("predicted", "projected", "difference"):
        table.add_column(column, justify="right")
    for row in checked.rows:
        difference = "" if row.difference is None else f"{100 * row.difference:+.2f} %"
        table.add_row(
            row.tier,
            row.item,
            format_bytes(row.predicted_bytes),
            format_bytes(row.projected_bytes),
            difference + ("" if row.agrees else " !"),
        )
    for note in checked.notes:
        table.add_row("", note)
    return table


def _command(command: Command | None) -> dict[str, Any] | None:
    return None if command is None else {"argv": list(command.argv), "env": command.env, "notes": list(command.notes)}
