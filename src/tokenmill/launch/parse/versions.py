"""The versions of an engine that may be meant by a command, newest first.

Evidence, in this order: the flags of the installed program, the build number in the tag of a container image, and flags
that only some versions have.
"""

import re

from tokenmill.launch.flag_sets import NEWER, STORED, EngineFamily, FlagSet, family, stored
from tokenmill.launch.parse.parsed import ReadCommand
from tokenmill.planner.goal import DialectName

_VERSIONS: dict[EngineFamily, tuple[DialectName, ...]] = {
    "llama.cpp": ("llama.cpp", "llama.cpp-2025"),
    "ik_llama": ("ik_llama", "ik_llama-2026-04", "ik_llama-2026-03", "ik_llama-2025"),
    "vllm": ("vllm",),
}


def possible_versions(read: ReadCommand, installed: FlagSet | None = None) -> tuple[DialectName, ...]:
    """Versions of the command's engine that agree with all evidence; at least one."""
    versions = _VERSIONS[family(read.engine)]
    if installed is not None and family(installed.dialect) == family(read.engine):
        return _with_flags_of(installed, versions)
    tagged = None if read.container is None else _by_build(read.container.image)
    if tagged in versions:
        return (tagged,)
    found = tuple(version for version in versions if _has_all(version, versions, read.options.spelled))
    if read.goal.speculation is not None:  # prediction layers can draft tokens since 2026
        found = tuple(version for version in found if version != "llama.cpp-2025")
    return found or (read.engine,)


def _with_flags_of(installed: FlagSet, versions: tuple[DialectName, ...]) -> tuple[DialectName, ...]:
    """Versions that have and lack the same of the flags that were added over time."""
    added = {flag for version in versions for flag in NEWER.get(version, ())}
    has = {flag for flag in added if installed.has(flag)}
    found = tuple(version for version in versions if added - NEWER.get(version, set()) == has)
    return found if added and found else (installed.dialect,)


def _by_build(image: str) -> DialectName | None:
    """The version of a llama.cpp image such as `llama.cpp:server-b8156`; None if builds in between are unknown."""
    match = re.search(r"llama\.cpp[^:]*:(?:.*-)?b(\d{3,})$", image)
    if match is None or "ik" in image.lower():
        return None
    old, new = (int(STORED[version].rpartition("-b")[2]) for version in ("llama.cpp-2025", "llama.cpp"))
    build = int(match[1])
    return "llama.cpp-2025" if build <= old else "llama.cpp" if build >= new else None


def _has_all(version: DialectName, versions: tuple[DialectName, ...], used: tuple[str, ...]) -> bool:
    """Whether a version has every flag in use that any version has."""
    known = [flag for flag in used if any(stored(other).has(flag) for other in versions)]
    return stored(version).has(*known)
