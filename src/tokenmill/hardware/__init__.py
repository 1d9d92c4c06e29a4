"""Machine facts: `probe.probe()` reads this machine into one frozen `Machine`.

machine                values of a machine
probe                  reads this machine with cpu, memory, dmi, pmem, disk, gpu and limits
host                   access to files and commands, which tests replace
machine_file, catalog  machines as TOML files, and those that ship with tokenmill
fleet                  several hosts and their network
bandwidth              measures memories, disks and links
"""
