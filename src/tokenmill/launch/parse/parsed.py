"""Result of parsing a command line: options under canonical names, the goal they state, and findings."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tokenmill.errors import UsageError
from tokenmill.launch.flag_sets import FlagSet, family, normal
from tokenmill.launch.parse.shell_words import Container
from tokenmill.planner.goal import DialectName, Goal

ALIASES = {
    "-m": "--model",
    "-a": "--alias",
    "-c": "--ctx-size",
    "-np": "--parallel",
    "-b": "--batch-size",
    "-ub": "--ubatch-size",
    "-t": "--threads",
    "-tb": "--threads-batch",
    "-ctk": "--cache-type-k",
    "-ctv": "--cache-type-v",
    "-fa": "--flash-attn",
    "-no-fa": "--no-flash-attn",
    "-ngl": "--n-gpu-layers",
    "--gpu-layers": "--n-gpu-layers",
    "-ts": "--tensor-split",
    "-ot": "--override-tensor",
    "-cmoe": "--cpu-moe",
    "-ncmoe": "--n-cpu-moe",
    "-sm": "--split-mode",
    "-mg": "--main-gpu",
    "-dev": "--device",
    "-fit": "--fit",
    "-fitt": "--fit-target",
    "-fitc": "--fit-ctx",
    "-gfm": "--gpu-fit-margin",
    "-lm": "--load-mode",
    "-nr": "--no-repack",
    "-rtr": "--run-time-repack",
    "-cram": "--cache-ram",
    "-kvu": "--kv-unified",
    "-no-kvu": "--no-kv-unified",
    "-n": "--predict",
    "--n-predict": "--predict",
    "-nkvo": "--no-kv-offload",
    "-mla": "--mla-use",
    "-amb": "--attention-max-batch",
    "-fmoe": "--fused-moe",
    "-muge": "--merge-up-gate-experts",
    "-ser": "--smart-expert-reduction",
    "-mqkv": "--merge-qkv",
    "-khad": "--k-cache-hadamard",
    "-hf": "--hf-repo",
    "-hfr": "--hf-repo",
    "-mmp": "--mmap",
    "-nopo": "--no-op-offload",
    "-tp": "--tensor-parallel-size",
    "--device-memory-utilization": "--gpu-memory-utilization",
    "-dio": "--direct-io",
    "-md": "--model-draft",
    "-hfd": "--hf-repo-draft",
    "--draft": "--draft-max",
    "--draft-n": "--draft-max",
}
_SWITCH_WORDS = {"on", "off", "auto", "0", "1", "true", "false", "enabled", "disabled"}
_OPTIONAL = {"--flash-attn", "--fit"}  # no value in some versions, a value in others


@dataclass(frozen=True, slots=True)
class ProgramOptions:
    """The options of a program, in order."""

    given: tuple[tuple[str, str | None], ...]  # canonical name and value; None: a switch
    spelled: tuple[str, ...]  # flags as written
    positional: tuple[str, ...]

    def has(self, *names: str) -> bool:
        """Whether any of these flags was given."""
        return any(name in names for name, _ in self.given)

    def last(self, name: str) -> str | None:
        """The value of a flag; if repeated, the last one, as in every engine."""
        return next((value for given, value in reversed(self.given) if given == name), None)

    def number(self, name: str) -> int | None:
        """A flag's value as a number (`16384`, `110k`); the first of llama-bench's lists."""
        text = self.last(name)
        if text is None:
            return None
        match = re.fullmatch(r"(-?\d+)([kKmM]?)(?:[,+*-].*)?", text)
        if match is None:
            raise UsageError(f"{name} {text}: not a number", hint="check the command")
        # vLLM: 1k is 1000, 1K is 1024
        return int(match[1]) * {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 1 << 20}[match[2]]

    def switched_on(self, name: str, default: bool) -> bool:
        """Whether `--name on`, `--name 1` or a bare `--name` was given."""
        if not self.has(name):
            return default
        value = self.last(name)
        return value is None or value.lower() not in ("off", "0", "false", "disabled")


def parse(words: Sequence[str], flags: FlagSet) -> ProgramOptions:
    """Pair flags with their values according to the engine version; unknown flags take the next word as value."""
    given: list[tuple[str, str | None]] = []
    spelled: list[str] = []
    positional: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if not is_flag(word):
            positional.append(word)
            continue
        name, equals, value = word.partition("=")
        if equals and not flags.has(word):
            spelled.append(name)
            given.append((canonical(name), value))
            continue
        spelled.append(word)
        values = _take(left, canonical(word), flags, word)
        given.append((canonical(word), " ".join(values) if values else None))
    return ProgramOptions(tuple(given), tuple(spelled), tuple(positional))


def is_flag(word: str) -> bool:
    """Whether a word is a flag: `-c` and `--ctx-size` are, `-1` and `-` are not."""
    return bool(re.match(r"--?[A-Za-z]", word))


def canonical(name: str) -> str:
    """The canonical name of a flag."""
    name = normal(name)
    return ALIASES.get(name, name)


def _take(left: list[str], name: str, flags: FlagSet, word: str) -> list[str]:
    nothing_follows = not left or is_flag(left[0])
    if name in _OPTIONAL:
        return [] if nothing_follows or left[0].lower() not in _SWITCH_WORDS else [left.pop(0)]
    count = flags.values.get(normal(word), 0 if nothing_follows else 1)
    if count and nothing_follows and (not left or flags.has(left[0])):
        raise UsageError(f"{word} needs a value", hint="check the command")
    return [left.pop(0) for _ in range(min(count, len(left)))]


Program = Literal["llama-server", "llama-cli", "llama-bench", "llama-batched-bench", "llama-sweep-bench", "vllm"]

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem or remark about a command."""

    severity: Severity
    text: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class ReadCommand:
    """The parsed meaning of a command line."""

    program: Program
    engine: DialectName
    model: str | None
    alias: str | None
    goal: Goal  # own_fit if the engine places the layers
    slots: int
    slot_tokens: int | None  # maximum tokens per slot; None: the model's training context
    unified: bool  # slots share one cache
    gpu_layers: int | None  # None: not set
    tensor_split: tuple[float, ...]
    overrides: tuple[tuple[str, str], ...]  # (regex, device) in the order the engine tries them
    cpu_moe_layers: int | None  # --n-cpu-moe; ALL_LAYERS for --cpu-moe
    fit: bool | None  # on or off; None: not set
    fit_margins_mib: tuple[int, ...]  # as written
    host: str | None
    port: int | None
    options: ProgramOptions
    unknown: tuple[str, ...]  # flags that the engine lacks
    env: dict[str, str] = field(default_factory=dict)
    numactl: tuple[str, ...] = ()
    container: Container | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def fork(self) -> bool:
        """Whether the engine is any version of ik_llama.cpp."""
        return family(self.engine) == "ik_llama"

    @property
    def explicit(self) -> bool:
        """Whether the command places layers or tensors and the engine applies that."""
        placed = self.gpu_layers is not None or bool(self.tensor_split or self.overrides)
        return placed and not self.goal.own_fit

    @property
    def hybrid(self) -> bool:
        """Whether a GPU computes while the command keeps some experts on the host."""
        on_host = any(device == "CPU" for _, device in self.overrides)
        return not self.goal.cpu_only and self.goal.engine != "vllm" and on_host

    @property
    def named_gpus(self) -> int | None:
        """Number of GPUs that the command mentions; None: none."""
        if self.goal.gpus is not None:
            return len(self.goal.gpus)
        named = {device for _, device in self.overrides if device != "CPU"}
        return max(len(self.tensor_split), len(named)) or None
