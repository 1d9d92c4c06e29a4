"""Supervised engine processes.

process      start, watch and stop a process
supervisor   the parent of one engine process
preparation  kernel settings of a process: priority, cores, NUMA nodes, locked memory
identity     processes identified by pid, start time and boot
registry     records of running engines on disk
exit_status  how a process exited; detects the OOM killer
ports        free ports, and the processes that listen on others
"""
