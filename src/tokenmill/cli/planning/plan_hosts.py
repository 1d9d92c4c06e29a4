"""`tokenmill plan` over several hosts: the layers and the command of each host, and the traffic between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Group, Parameter
from rich.text import Text

from tokenmill.api.planning.plan import file_name, locate
from tokenmill.cli.output import Common, show, show_json, show_text
from tokenmill.cli.views.plan import folded
from tokenmill.cli.views.plan_hosts import document, explained, render
from tokenmill.errors import DoesNotFit, UsageError
from tokenmill.hardware.fleet import LINK_EXAMPLE, Fleet, fleet_of
from tokenmill.launch import flags_of, rpc, vllm
from tokenmill.launch.flag_sets import family, stored
from tokenmill.launch.rpc import HostCommand
from tokenmill.launch.tensor_patterns import tiers_by_pattern
from tokenmill.model.read import read
from tokenmill.planner.goal import Goal
from tokenmill.planner.multi_host.hosts import HostsPlan
from tokenmill.planner.multi_host.make import make_over


@Parameter(name="*", group=Group.create_ordered("Several hosts", sort_key=1))
@dataclass(frozen=True, slots=True)
class HostsOptions:
    """Options of a plan over several hosts."""

    link: Annotated[str | None, Parameter(metavar="LINK")] = None
    """Bandwidth and round-trip time between the hosts, as measured by iperf3 and ping, such as 25Gbit:50us."""

    layers: Annotated[str | None, Parameter(metavar="LIST")] = None
    """Number of layers per host, the head node first, such as 20,20,21. [default: as many as fit on the fastest hosts
    first]"""

    pipeline_parallel: Annotated[int | None, Parameter(metavar="N")] = None
    """Pipeline stages of vLLM. [default: one per host]"""

    def fleet(self, machine: str) -> Fleet | None:
        """The fleet described by `machine` and --link; None for a single machine."""
        found = fleet_of(machine, self.link)
        for name, value in (("layers", self.layers), ("pipeline-parallel", self.pipeline_parallel)):
            if found is None and value is not None:
                raise UsageError(
                    f"--{name} requires several hosts", hint=f"--machine head,worker --link {LINK_EXAMPLE}"
                )
        return found

    def counts(self) -> tuple[int, ...] | None:
        """The numbers in --layers."""
        if self.layers is None:
            return None
        parts = [part.strip() for part in self.layers.split(",")]
        if not all(part.isdigit() for part in parts):
            raise UsageError(f"--layers must be comma-separated numbers (got {self.layers!r})")
        return tuple(int(part) for part in parts)


def plan_over(
    fleet: Fleet,
    model: str | None,
    goal: Goal,
    options: HostsOptions,
    others: Mapping[str, object],
    *,
    explain: bool,
    binary: str | None,
    common: Common,
) -> int:
    """Show the plan and the command of each host; return the exit code."""
    conflicting = next((name for name, value in others.items() if value), None)
    if conflicting is not None:
        raise UsageError(
            f"--{conflicting} cannot be combined with several machines",
            hint=f"give one machine, or omit --{conflicting}",
        )
    if model is None:
        raise UsageError("no model given", hint="for example: tokenmill plan kimi-k2.5:Q4_K_S --machine a.toml,b.toml")
    if options.pipeline_parallel is not None and options.pipeline_parallel < 1:
        raise UsageError(f"--pipeline-parallel must be at least 1 (got {options.pipeline_parallel})")
    model = locate(model, common.load_config(), remote=True)
    made = make_over(fleet, read(model), goal, layers=options.counts(), pipeline_parallel=options.pipeline_parallel)
    commands = spell_hosts(made, model=file_name(model), binary=binary) if made.fits else ()
    if common.json:
        patterns = tiers_by_pattern(made.placement(), made.profile)
        show_json(document(made, patterns, [_as_json(one) for one in commands]))
    else:
        show(*render(made), *(explained(made) if explain else ()))
        for one in commands:
            show(Text(), Text(f"on {one.host} ({one.role}):", style="bold"))
            show_text(folded(one.command))
        notes = dict.fromkeys(note for one in commands for note in one.command.notes)
        show(*(Text(f"note: {note}") for note in notes))
    return 0 if made.fits else DoesNotFit.exit_code


def spell_hosts(
    plan: HostsPlan, *, model: str, host: str = "127.0.0.1", port: int = 8080, binary: str | None = None
) -> tuple[HostCommand, ...]:
    """The command of every host, in order; with the flags of `binary`, or else those of the recorded build."""
    flags = flags_of(binary) if binary else stored(plan.settings.engine)
    write = vllm.spell_cluster if family(plan.settings.engine) == "vllm" else rpc.spell
    return write(plan, model=model, host=host, port=port, binary=binary, flags=flags)


def _as_json(one: HostCommand) -> dict[str, Any]:
    return {
        "host": one.host,
        "role": one.role,
        "argv": list(one.command.argv),
        "env": one.command.env,
        "notes": list(one.command.notes),
    }
