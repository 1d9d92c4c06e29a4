"""What the hardware is: `probe()` reads this machine into one frozen `Machine`."""

from tokenmill.hardware.machine import Machine
from tokenmill.hardware.probe import probe

__all__ = ["Machine", "probe"]
