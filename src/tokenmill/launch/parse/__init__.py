"""Command lines read back into a goal, a placement and findings.

command_line      the entry point: `read_command`
shell_words       takes the shell, containers and numactl off a command
parsed            flags and their values under one name each; the result
placement         where a command puts every tensor, by the engine's own rules
findings, machine_findings  what is wrong with a command, alone and on a given machine
"""
