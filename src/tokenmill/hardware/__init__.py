"""What the hardware is: `probe()` reads this machine into one frozen `Machine`.

probe                     asks cpu, memory (dmi, pmem), disk, gpu and limits in turn
host                      everything that is read from outside goes through a `Host`
machine_file, catalog     machines as TOML files, and those that ship with tokenmill
fleet                     several hosts and their network
bandwidth                 measures what the parts really move
"""

from tokenmill.hardware.machine import Machine
from tokenmill.hardware.probe import probe

__all__ = ["Machine", "probe"]
