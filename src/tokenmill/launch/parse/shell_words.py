"""Removes the shell from a command: continuations, variables, sudo, numactl, taskset, podman and docker run.

Knows the options of such wrappers, not the program's own flags. Tolerates pasted text: lines without backslashes,
typographic quotes and dashes, prompts, comments.
"""

import re
import shlex
from dataclasses import dataclass, field

from tokenmill.errors import UsageError

_TYPOGRAPHY = str.maketrans({"\u00a0": " ", "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"'})
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ENGINE = re.compile(r"(^|/)(llama-[a-z-]+|server|main|sweep-bench|vllm|podman|docker|nerdctl)(\.exe)?$|vllm\.")
_REDIRECTION = re.compile(r"\d?>>?|&>")
_SEPARATORS = {"&&", "||", ";", "|", "&"}
_PLAIN_WRAPPERS = {"exec", "nohup", "time", "command", "sudo", "doas", "stdbuf", "setsid", "env"}
_NUMACTL_VALUES = frozenset(
    {"-N", "-m", "-i", "-C", "-p", "--cpunodebind", "--membind", "--interleave", "--physcpubind", "--preferred"}
)
_RUN_SWITCHES = {
    "rm",
    "rmi",
    "detach",
    "interactive",
    "tty",
    "privileged",
    "init",
    "read-only",
    "replace",
    "no-healthcheck",
    "publish-all",
    "quiet",
    "oom-kill-disable",
    "no-hosts",
    "sig-proxy",
    "tls-verify",
    "d",
    "i",
    "t",
    "q",
    "P",
}
"""Options of podman and docker run without a value; all others have one."""


@dataclass(frozen=True, slots=True)
class Container:
    """Options of a container."""

    tool: str
    image: str
    options: tuple[tuple[str, str], ...]  # long or short name without dashes, value

    def all_of(self, *names: str) -> tuple[str, ...]:
        """Values of options by any of their names."""
        return tuple(value for name, value in self.options if name in names)

    @property
    def gpus(self) -> bool:
        """Whether a GPU is passed to the container."""
        devices = " ".join(self.all_of("device", "gpus", "runtime"))
        return bool(re.search(r"nvidia|all|gpu|kfd|dri", devices)) or "privileged" in dict(self.options)


@dataclass(frozen=True, slots=True)
class Unwrapped:
    """A program, its arguments and the wrappers around it."""

    words: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    numactl: tuple[str, ...] = ()
    cpus: str | None = None  # taskset's list
    container: Container | None = None
    unset: tuple[str, ...] = ()  # shell variables that the text uses but does not set


def unwrap(text: str) -> Unwrapped:
    """Find the program in a pasted command; UsageError if there is none."""
    segments = [segment for line in _lines(text) for segment in _segments(line)]
    variables = {name: value for segment in segments for name, value in _assignments(segment)}
    commands = [[_expanded(word, variables) for word in _without_assignments(segment)] for segment in segments]
    words = max(commands, key=lambda words: (any(map(_ENGINE.search, words)), len(words)), default=[])
    if not words:
        raise UsageError("the command is empty", hint="paste the whole command that starts llama-server or vllm")
    return _peel(words, variables)


def _lines(text: str) -> list[list[str]]:
    """Words of each command; lines that start with a flag or inside quotes continue the previous one."""
    text = re.sub(r"\\\n", "", re.sub(r"\\[ \t]+\n", "\\\n", text.translate(_TYPOGRAPHY)))
    text = re.sub(r"(?<=\s)[\u2013\u2014](?=[A-Za-z])", "--", text)
    lines: list[list[str]] = []
    pending = ""
    for line in text.splitlines():
        bare = re.sub(r"^\s*[$>] (?=\S)", "", line).strip()
        if not pending and (not bare or bare.startswith("#")):
            continue
        pending = f"{pending}\n{bare}" if pending else bare
        try:
            words = [_unescaped(word) for word in shlex.split(pending) if word.strip()]
        except ValueError:
            continue  # inside an open quote
        if lines and bare == pending and bare.startswith("-"):
            lines[-1] += words
        else:
            lines.append(words)
        pending = ""
    if pending:
        raise UsageError("unclosed quote in the command", hint="check its quotes")
    return lines


def _unescaped(word: str) -> str:
    """Remove the backslash that remains in front of a flag when a line break was pasted as a space."""
    return word.lstrip() if word.lstrip().startswith("-") else word


def _segments(words: list[str]) -> list[list[str]]:
    """Parts between &&, ; and |, without redirections."""
    segments: list[list[str]] = [[]]
    before = ""
    for word in words:
        if word in _SEPARATORS:
            segments.append([])
        elif word != "export" and not _REDIRECTION.match(word) and not _REDIRECTION.fullmatch(before):
            segments[-1].append(word.removesuffix(";"))
        before = word
    return segments


def _assignments(words: list[str]) -> list[tuple[str, str]]:
    found = []
    for word in words:
        match = _ASSIGNMENT.fullmatch(word)
        if match is None:
            break
        found.append((match[1], match[2]))
    return found


def _without_assignments(words: list[str]) -> list[str]:
    return words[len(_assignments(words)) :]


def _expanded(word: str, variables: dict[str, str]) -> str:
    return re.sub(r"\$\{?([A-Za-z_]\w*)\}?", lambda found: variables.get(found[1], found[0]), word)


def _peel(words: list[str], variables: dict[str, str]) -> Unwrapped:
    env = dict(variables)
    numactl: tuple[str, ...] = ()
    cpus = None
    container = None
    while words:
        head = words[0].rsplit("/", 1)[-1]
        assigned = _ASSIGNMENT.fullmatch(words[0])
        if assigned:
            env[assigned[1]] = assigned[2]
            words = words[1:]
        elif head in _PLAIN_WRAPPERS or head == "systemd-run":
            words = _skip_options(words[1:], frozenset({"-u", "--user"}))
        elif head == "nice":
            words = _skip_options(words[1:], frozenset({"-n", "--adjustment"}))
        elif head == "chrt":
            words = _skip_options(words[1:], frozenset())[1:]
        elif head == "taskset":
            rest = _skip_options(words[1:], frozenset())
            cpus = rest[0] if rest else None
            words = rest[1:]
        elif head == "numactl":
            rest = _skip_options(words[1:], _NUMACTL_VALUES)
            numactl = tuple(words[1 : len(words) - len(rest)])
            words = rest
        elif head in ("podman", "docker", "nerdctl") and "run" in words[1:3]:
            container, words = _container(head, words[words.index("run") + 1 :])
            env |= dict(pair.partition("=")[::2] for pair in container.all_of("env", "e") if "=" in pair)
            if not words or words[0].startswith("-"):
                break  # the image's entry point is the program
        else:
            break
    unset = {name for word in words for name in re.findall(r"\$\{?([A-Za-z_]\w*)\}?", word) if name not in variables}
    return Unwrapped(tuple(words), env, numactl, cpus, container, tuple(sorted(unset)))


def _skip_options(words: list[str], with_value: frozenset[str]) -> list[str]:
    while words and words[0].startswith("-"):
        words = words[2:] if words[0] in with_value else words[1:]
    return words


def _container(tool: str, words: list[str]) -> tuple[Container, list[str]]:
    options: list[tuple[str, str]] = []
    while words and words[0].startswith("-"):
        name, equals, value = words[0].partition("=")
        name = name.lstrip("-")
        words = words[1:]
        short_switches = len(name) <= 3 and set(name) <= set("ditqP")
        if equals:
            options.append((name, value))
        elif name in _RUN_SWITCHES or short_switches:
            options.append((name, ""))
        elif words:
            options.append((name, words[0]))
            words = words[1:]
    if not words:
        raise UsageError(f"{tool} run has no image", hint="paste the whole command")
    return Container(tool, words[0], tuple(options)), words[1:]
