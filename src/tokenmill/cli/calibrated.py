"""Plans whose forecast is corrected by what was measured on this machine before."""

from collections.abc import Mapping
from pathlib import Path

from tokenmill.engine import measured
from tokenmill.model.identity import identity_of
from tokenmill.plan.goal import DialectName
from tokenmill.plan.make import make
from tokenmill.plan.plan import Plan
from tokenmill.plan.rates import Family
from tokenmill.tune import history
from tokenmill.tune.calibrate import calibration, main_family

_ENGINES: dict[DialectName, tuple[str, ...]] = {"llama.cpp": ("native", "llama-server"), "vllm": ("vllm",)}


def corrected(plan: Plan, state: Path, model: str, *, engine: str | None = None) -> Plan:
    """The same plan made again with what recorded runs say; itself where they say nothing.

    `engine` is the kind that will run; without one, all kinds that the plan's dialect stands for.
    """
    if not plan.fits:
        return plan
    here, speeds = measured.machine_id(plan.machine), history.read(state)
    if not any(speed.machine_id == here for speed in speeds):
        return plan  # most are; and a model's identity takes a look into its files
    engines = (engine,) if engine is not None else _ENGINES.get(plan.settings.engine, ("ik_llama",))
    found = calibration(
        speeds, plan, machine_id=here, model_id=_identity(model), engines=engines, families=_families(state)
    )
    return plan if found is None else make(plan.machine, plan.profile, plan.goal, calibration=found)


def _identity(model: str) -> str | None:
    return identity_of(model) if Path(model).exists() else None


def _families(state: Path) -> Mapping[str, Family]:
    """What kind of weights the models have that were loaded here."""
    found = ((load.model_id, main_family(load.types)) for load in measured.read(state))
    return {model_id: kind for model_id, kind in found if kind is not None}
