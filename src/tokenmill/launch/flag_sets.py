"""The flags of an engine version, parsed from its --help or from a list captured from a known build.

`FlagSet.require` raises FlagUnknown with the replacement of a missing flag. Covers the names of flags and the number of
their values, not their meaning.
"""

import difflib
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Literal

from tokenmill.errors import FlagUnknown, UsageError
from tokenmill.planner.goal import DialectName

STORED: dict[DialectName, str] = {
    "llama.cpp": "llama.cpp-b11549",
    "llama.cpp-2025": "llama.cpp-b8156",
    "ik_llama": "ik_llama-007d640",
    "ik_llama-2026-04": "ik_llama-007d640",
    "ik_llama-2026-03": "ik_llama-007d640",
    "ik_llama-2025": "ik_llama-007d640",
    "vllm": "vllm-0.32.0",
}
"""The captured list of each dialect, used if the engine is not installed."""

_MARGINS = {"-gfm", "--gpu-fit-margin"}  # ik#1872, May 2026
_FIT = {"--fit", "--fit-margin"}  # ik#1501, March 2026
NEWER: dict[DialectName, set[str]] = {
    "ik_llama-2026-04": _MARGINS,
    "ik_llama-2026-03": _MARGINS,
    "ik_llama-2025": _MARGINS | _FIT,
}
"""Flags in the captured list that a dialect does not have yet."""

REMOVED: dict[DialectName, dict[str, int]] = {
    "ik_llama-2026-04": {"-fmoe": 0, "--fused-moe": 0, "-mtp": 0},
    "ik_llama-2026-03": {"-fmoe": 0, "--fused-moe": 0, "-mtp": 0},
    "ik_llama-2025": {"-fmoe": 0, "--fused-moe": 0},
}
"""Flags of a dialect that were removed before the captured build, with the number of their values."""

EngineFamily = Literal["llama.cpp", "ik_llama", "vllm"]

REPLACEMENTS: dict[str, tuple[tuple[str, str], ...]] = {
    "--mmap": (("--load-mode", "--load-mode mmap"),),
    "--no-mmap": (("--load-mode", "--load-mode none"),),
    "--mlock": (("--load-mode", "--load-mode mlock, or mmap+mlock"),),
    "--direct-io": (("--load-mode", "--load-mode dio"),),
    "--load-mode": (("--no-mmap", "--no-mmap for none, --no-mmap --mlock for mlock"),),
    "--fit-margin": (("--fit-target", "--fit on --fit-target MiB"),),
    "--gpu-fit-margin": (("--fit-target", "--fit-target with one value per GPU"), ("--fit-margin", "--fit-margin")),
    "--fit-target": (("--fit-margin", "--fit --fit-margin MiB"),),
    "--kv-unified": (("--mla-use", "no flag: every slot has its own share of --ctx-size"),),
    "--no-repack": (("--run-time-repack", "no flag: it repacks only with --run-time-repack"),),
    "--run-time-repack": (("--no-repack", "no flag: it repacks unless --no-repack is given"),),
    "--no-op-offload": (("--offload-policy", "--offload-policy -1,0"),),
    "--offload-policy": (("--no-op-offload", "--no-op-offload"),),
    "--fused-moe": (("--no-fused-moe", "no flag: it is on unless --no-fused-moe is given"),),
    "-fmoe": (("-no-fmoe", "no flag: it is on unless -no-fmoe is given"),),
    "--cpu-moe": (("--override-tensor", "--override-tensor exps=CPU"),),
    "--n-cpu-moe": (("--override-tensor", "--override-tensor for the experts of the first layers"),),
    "--override-tensor": (("--cpu-offload-gb", "--cpu-offload-gb: tensors cannot be placed one by one"),),
    "--swap-space": (("--kv-offloading-size", "--kv-offloading-size"),),
}
"""Replacements of missing flags, in order of preference: (a flag that the version must have, what to use)."""

_FLAG = re.compile(r"--?[A-Za-z][\w-]*(\(s\))?")
_MAX_INDENT = 12  # of flags in help texts; descriptions are indented further
_HELP_TIMEOUT_S = 120.0  # vLLM imports torch before it prints its help


@dataclass(frozen=True, slots=True)
class FlagSet:
    """The flags of one engine version and the number of values of each."""

    version: str  # display name: llama.cpp b11549
    values: MappingProxyType[str, int]

    @staticmethod
    def from_help(text: str, version: str | None = None) -> "FlagSet":
        """Parse an engine's --help (llama.cpp, ik_llama.cpp, argparse) or a captured list."""
        captured_from = re.search(r"^# engine: (.+)$", text, re.MULTILINE)
        found: dict[str, int] = {}
        for line in text.splitlines():
            if len(line) - len(line.lstrip()) <= _MAX_INDENT and line.lstrip().startswith("-"):
                found.update(_spelled(line.strip()))
        if not found:
            raise UsageError("the help of the engine lists no flags", hint="use a llama-server or vllm")
        return FlagSet(version or (captured_from[1] if captured_from else "this engine"), MappingProxyType(found))

    def has(self, *names: str) -> bool:
        """Whether the version has all of these flags."""
        return all(normal(name) in self.values for name in names)

    def require(self, name: str) -> str:
        """Return the flag; raises FlagUnknown if the version lacks it."""
        if self.has(name):
            return name
        raise FlagUnknown(f"{self.version} has no flag {name}", hint=self.instead_of(name))

    def takes_value(self, name: str) -> bool:
        """Whether the flag has a value; False for unknown flags."""
        return self.values.get(normal(name), 0) > 0

    def instead_of(self, name: str) -> str | None:
        """A replacement for a missing flag: a known one, or a similar name."""
        for needed, words in REPLACEMENTS.get(normal(name), ()):
            if self.has(needed):
                return f"instead of {name}, use {words}"
        near = difflib.get_close_matches(normal(name), list(self.values), n=1, cutoff=0.8)
        return f"did you mean {near[0]}?" if near else None

    def union(self, other: "FlagSet") -> "FlagSet":
        """Flags of both sets; on conflict, those of this set."""
        return FlagSet(self.version, MappingProxyType({**other.values, **self.values}))

    @property
    def dialect(self) -> DialectName:
        """The dialect of these flags; versions within 2026 are not distinguished."""
        if self.has("--mla-use"):
            return "ik_llama" if self.has("--fit") else "ik_llama-2025"
        if self.has("--max-model-len"):
            return "vllm"
        return "llama.cpp" if self.has("--load-mode") else "llama.cpp-2025"


def normal(name: str) -> str:
    """Canonical form of a flag: engines accept `--ctx_size` for `--ctx-size`; short flags are unchanged."""
    return "--" + name[2:].replace("_", "-") if name.startswith("--") else name


@cache
def stored(engine: DialectName) -> FlagSet:
    """The captured flags of a dialect, including those that its help omits."""
    flags = captured(STORED[engine])
    if engine not in NEWER:
        return flags
    then = {name: count for name, count in flags.values.items() if name not in NEWER[engine]}
    return FlagSet(f"ik_llama.cpp of {engine[9:]}", MappingProxyType(then | REMOVED[engine]))


def family(engine: DialectName) -> EngineFamily:
    """The engine without the date of its dialect."""
    if engine.startswith("ik_llama"):
        return "ik_llama"
    return "vllm" if engine == "vllm" else "llama.cpp"


@cache
def captured(name: str) -> FlagSet:
    """Load one list of `flags/`."""
    text = files("tokenmill.launch").joinpath("flags", f"{name}.txt").read_text(encoding="utf-8")
    return FlagSet.from_help(text)


def flags_of(binary: str) -> FlagSet:
    """Run an installed engine with --help and --version to get its flags and version."""
    command = [binary, "serve"] if binary.rsplit("/", 1)[-1] == "vllm" else [binary]
    helped = _printed([*command, "--help=all"]) if len(command) > 1 else _printed([*command, "--help"])
    flags = FlagSet.from_help(helped)
    named = re.search(r"\d\S*(?: \([^)]*\))?", _printed([binary, "--version"]).partition("ersion:")[2] or "")
    flags = FlagSet(f"{binary} {named[0]}" if named else binary, flags.values)
    return flags.union(_unlisted(flags.dialect))


def _unlisted(engine: DialectName) -> FlagSet:
    """Flags that an engine accepts but its help does not list."""
    text = files("tokenmill.launch").joinpath("flags", f"{STORED[engine]}.txt").read_text(encoding="utf-8")
    unlisted = text.partition("# not in its --help")[2]
    return FlagSet.from_help(unlisted) if unlisted else FlagSet("", MappingProxyType({}))


def _printed(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_HELP_TIMEOUT_S, check=False, errors="replace"
        )
    except FileNotFoundError as error:
        raise UsageError(f"program not found: {command[0]}", hint="use its full path") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"cannot run {' '.join(command)} for its flags: {error}") from error
    return done.stdout + done.stderr  # llama.cpp prints its version on stderr


def _spelled(line: str) -> Iterable[tuple[str, int]]:
    """`-t,    --threads N      number of ...` as (-t, 1), (--threads, 1)."""
    names_part = re.split(r"\s{2,}", re.sub(r",\s+", ", ", line), maxsplit=1)[0]
    names: list[str] = []
    hints = 0
    for part in names_part.split(", "):
        words = part.split()
        while words and _FLAG.fullmatch(words[0]):
            names.append(words.pop(0))
        if not names or (part and not part.startswith("-")):
            break  # a description after a comma
        hints = max(hints, _value_count(words))
    for name in names:
        for spelling in (name.removesuffix("(s)"), name.replace("(s)", "s")):
            yield normal(spelling), hints


def _value_count(words: list[str]) -> int:
    if not words or words[0].startswith(("#", ":")):
        return 0
    two = len(words) == 2 and all(re.fullmatch(r"[A-Z]+", word) for word in words)
    return 2 if two else 1
