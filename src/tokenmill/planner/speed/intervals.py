"""The range of a forecast: factors around it between which 80 % of the published runs of the same class lie.

The class of a machine under a placement decides, because forecasts for two sockets are much less certain than those for
one GPU. The factors are rows of rates.toml, written by bench/forecast.py.
"""

from typing import Literal

from tokenmill.hardware.machine import Machine
from tokenmill.planner.plan import Placement
from tokenmill.planner.speed.calibration import Correction
from tokenmill.planner.speed.rates import RangeRow, table

MachineClass = Literal["CPU only", "one GPU", "several GPUs", "two sockets"]
Kind = Literal["decode", "prefill"]
LEAST_SPREAD = 0.05  # of a corrected forecast, however well the recorded runs agree


def machine_class(machine: Machine, placement: Placement) -> MachineClass:
    """The class of a machine under a placement; two sockets count only where their memory is read."""
    cards = len(placement.gpus)
    reads_host = any(not home.startswith("gpu") for home in placement.homes) and any(
        not tier.startswith("gpu") for tier in (*placement.layers, *placement.homes)
    )
    if (machine.cpu.sockets or 1) > 1 and reads_host:
        return "two sockets"
    return "CPU only" if cards == 0 else "one GPU" if cards == 1 else "several GPUs"


def factors(kind: Kind, found: MachineClass, correction: Correction | None = None) -> RangeRow:
    """Factors from a forecast to the ends of its range; recorded runs of this machine replace those of its class."""
    if correction is not None:
        spread = max(correction.spread, LEAST_SPREAD)
        return RangeRow(1 / (1 + spread), 1 + spread)
    return table().ranges[found][kind]
