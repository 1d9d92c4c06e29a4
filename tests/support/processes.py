"""Finds processes for tests."""

import psutil


def command_lines(pid: int | None = None) -> dict[int, list[str]]:
    """The command lines of this process's children (or those of `pid`); children that end meanwhile are left out."""
    found = {}
    for child in psutil.Process(pid).children():
        try:
            found[child.pid] = child.cmdline()
        except psutil.Error:
            continue
    return found
