"""What engines leave to other programs: cores and memory, enforced by affinity, scheduling and control groups.

reserve decides and applies; start starts a process under the limits; scheduling, cores and cgroup are the means.
"""
