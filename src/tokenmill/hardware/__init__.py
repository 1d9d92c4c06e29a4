"""Machine facts: `probe()` reads this machine into one frozen `Machine`.

probe                     reads cpu, memory (dmi, pmem), disk, gpu and limits in turn
host                      all outside access goes through a `Host`
machine_file, catalog     machines as TOML files, and those that ship with tokenmill
fleet                     several hosts and their network
bandwidth                 measures memories, disks and links
"""

from tokenmill.hardware.machine import Machine
from tokenmill.hardware.probe import probe

__all__ = ["Machine", "probe"]
