"""Reserves cores and memory for other programs, by limiting engines with affinity and control groups.

reserve     chooses and applies the limits of an engine
start       starts an engine process with these limits
cores       the CPUs that are reserved
cgroup      control groups and systemd scopes
scheduling  kernel settings of the engine process
"""
