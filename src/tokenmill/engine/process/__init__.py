"""Processes of ours.

process: started, watched and ended from here.  supervisor: the parent of one engine process.
preparation: priority, cores and memory nodes, which the child asks the kernel for.
identity: a process known for sure by number, start time and boot.  registry: running engines on disk.
exit_status: how a process ended, and whether the kernel killed it for memory.  ports: who listens where.
"""
