"""Progress of a loading engine, and diagnosis of slow loads.

watch      samples the engine's processes
process    memory, reads and page faults of a process, from /proc
system     swapping, pressure, disk and NUMA counters of the machine
progress   bytes loaded, rate and remaining time, from samples
diagnosis  why a load is slow
"""
