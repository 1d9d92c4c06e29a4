"""What a command line was found to say, and what is wrong with it."""

from dataclasses import dataclass, field
from typing import Literal

from tokenmill.launch.flagset import family
from tokenmill.launch.options import Options
from tokenmill.launch.shell_words import Container
from tokenmill.planner.goal import DialectName, Goal

Program = Literal["llama-server", "llama-cli", "llama-bench", "llama-batched-bench", "llama-sweep-bench", "vllm"]

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know about a command."""

    severity: Severity
    text: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class ReadCommand:
    """What a command line says."""

    program: Program
    engine: DialectName
    model: str | None
    alias: str | None
    goal: Goal  # own_fit where the engine is left to place the layers
    slots: int
    slot_tokens: int | None  # the most one slot can hold; None: the model's training context
    unified: bool  # slots share one cache
    gpu_layers: int | None  # None: not said
    tensor_split: tuple[float, ...]
    overrides: tuple[tuple[str, str], ...]  # (regex, device) in the order the engine tries them
    cpu_moe_layers: int | None  # --n-cpu-moe; ALL_LAYERS for --cpu-moe
    fit: bool | None  # asked for or refused; None: not said
    fit_margins_mib: tuple[int, ...]  # as written
    host: str | None
    port: int | None
    options: Options
    unknown: tuple[str, ...]  # flags that the engine does not have
    env: dict[str, str] = field(default_factory=dict)
    numactl: tuple[str, ...] = ()
    container: Container | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def fork(self) -> bool:
        """Whether the engine is ik_llama.cpp, of any date."""
        return family(self.engine) == "ik_llama"

    @property
    def explicit(self) -> bool:
        """Whether the command itself says where layers or tensors go, and the engine will heed it."""
        said = self.gpu_layers is not None or bool(self.tensor_split or self.overrides)
        return said and not self.goal.own_fit

    @property
    def hybrid(self) -> bool:
        """Whether a GPU computes while some experts are told to stay on the host."""
        on_host = any(device == "CPU" for _, device in self.overrides)
        return not self.goal.cpu_only and self.goal.engine != "vllm" and on_host

    @property
    def named_gpus(self) -> int | None:
        """How many GPUs the command itself speaks of; None: it does not say."""
        if self.goal.gpus is not None:
            return len(self.goal.gpus)
        named = {device for _, device in self.overrides if device != "CPU"}
        return max(len(self.tensor_split), len(named)) or None
