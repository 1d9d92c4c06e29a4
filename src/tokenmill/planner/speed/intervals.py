"""The range of a forecast: factors around it that held 80 % of the published runs of the same class.

The class of a machine under a placement decides, because forecasts for two sockets are much less certain than those for
one GPU. The factors are rows of rates.toml, computed by bench/forecast.py on machines that no constant was fitted on.
"""

from typing import Literal

from tokenmill.hardware.machine import Machine
from tokenmill.planner.plan import Placement

MachineClass = Literal["CPU only", "one GPU", "several GPUs", "two sockets"]


def machine_class(machine: Machine, placement: Placement) -> MachineClass:
    """The class of a machine under a placement; two sockets count only where their memory is read."""
    cards = len(placement.gpus)
    reads_host = any(not home.startswith("gpu") for home in placement.homes) and any(
        not tier.startswith("gpu") for tier in (*placement.layers, *placement.homes)
    )
    if (machine.cpu.sockets or 1) > 1 and reads_host:
        return "two sockets"
    return "CPU only" if cards == 0 else "one GPU" if cards == 1 else "several GPUs"
