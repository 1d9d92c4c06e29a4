"""Plans all engines of the configuration on one machine, as `tokenmill serve` would start them."""

from dataclasses import replace

from tokenmill.api.engines.choose import DEFAULT_MODEL
from tokenmill.api.options import EngineOptions
from tokenmill.api.planning.plan import plan_engine
from tokenmill.config import Config
from tokenmill.errors import UsageError
from tokenmill.hardware.catalog import find
from tokenmill.planner.shared_machine import SharedMachine, share_machine


def plan_config(config: Config, machine: str | None = None) -> SharedMachine:
    """The sum of the engines in `[[engines]]`; those at a URL are left out, because they run elsewhere.

    `machine`: instead of the configured one. UsageError if no engine is left.
    """
    named = machine or config.machine
    plans = {}
    for entry in config.engines:
        kind = entry.url or entry.kind or config.engine.kind
        if "://" in kind:
            continue
        options = EngineOptions.of_entry(entry, kind)
        plans[entry.name] = plan_engine(
            entry.model or DEFAULT_MODEL, replace(options, machine=machine), config, files=False
        ).plan
    if not plans:
        raise UsageError(
            "the configuration has no engine to plan", hint="give a model, or add [[engines]] that are not at a URL"
        )
    return share_machine(find(named), plans, reserve_cores=config.reserve.cores)
