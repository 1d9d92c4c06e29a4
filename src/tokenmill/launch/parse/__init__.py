"""Parses command lines into a goal, a placement and findings.

command_line      the entry point: `read_command`
shell_words       removes the shell, containers and numactl from a command
parsed            flags and values under canonical names; the result
versions          the versions of the engine that a command may be meant for
placement         a command's placement of tensors, by the engine's own rules
findings          problems of a command
machine_findings  problems of a command on a given machine
"""
