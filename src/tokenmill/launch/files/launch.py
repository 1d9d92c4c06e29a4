"""Contents of launch files: names, addresses, mounts, binding and load time."""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from tokenmill.launch.binding import Binding, binding, host_bytes
from tokenmill.launch.flag_sets import family
from tokenmill.planner.plan import Command, Plan
from tokenmill.units import format_bytes

SHARED_MEMORY = "16g"  # /dev/shm in a container; NCCL and worker queues need more than the default 64 MiB
MIN_LOAD_S = 600
UNKNOWN_LOAD_S = 3600
PORT = 8080

IMAGES = {
    "llama.cpp": "localhost/llama.cpp:server",
    "ik_llama": "localhost/ik_llama.cpp:server",
    "vllm": "localhost/vllm-openai:latest",
}
"""Default image names of local builds; the user chooses a registry."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A host folder mounted into the container."""

    source: str  # `~/` stands for the user's home
    inside: str
    model: str  # the model's path inside the container
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """A command with everything that a launch file contains."""

    name: str
    title: str
    comments: tuple[str, ...]
    command: Command
    binding: Binding
    port: int
    image: str
    gpus: bool
    mlock: bool
    load_s: int
    vllm: bool

    @staticmethod
    def of(command: Command, plan: Plan, *, name: str | None, image: str | None) -> "Launch":
        """Derive the contents from a command and its plan."""
        settings = plan.settings
        cold = plan.forecast.load_cold_s
        what = " ".join(filter(None, (plan.profile.name, plan.profile.quantisation)))
        load = f"{settings.engine}, {settings.sequences} x {settings.context} tokens"
        return Launch(
            name=name or slug(plan.profile.name),
            title=f"{what} on {plan.machine.name}: {load}",
            comments=(f"peak host memory: {format_bytes(host_bytes(plan))}", *command.notes),
            command=command,
            binding=binding(plan),
            port=int(value_of(command.argv, "--port") or PORT),
            image=image or IMAGES[family(settings.engine)],
            gpus=bool(plan.placement.gpus) or (plan.goal.own_fit and not plan.goal.cpu_only),
            mlock=settings.mlock,
            load_s=UNKNOWN_LOAD_S if cold is None else max(MIN_LOAD_S, round(2 * cold)),
            vllm=settings.engine == "vllm",
        )

    @property
    def health_url(self) -> str:
        """URL that answers 200 once the model is loaded; the same in every engine."""
        return f"http://127.0.0.1:{self.port}/health"

    @property
    def model(self) -> str:
        """The model argument of the command."""
        return value_of(self.command.argv, "--model") or self.command.argv[self.command.argv.index("serve") + 1]

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Capabilities of the container: for NUMA policies, and for pinned memory if the plan uses it."""
        return ("SYS_NICE", "IPC_LOCK") if self.mlock else ("SYS_NICE",)

    @property
    def mount(self) -> Mount:
        """The folder to mount, and the model's path in it."""
        path = PurePosixPath(self.model)
        if self.vllm and re.fullmatch(r"[\w.-]+/[\w.-]+", self.model):
            return Mount("~/.cache/huggingface", "/root/.cache/huggingface", self.model)
        if "/" not in self.model and path.suffix != ".gguf":
            inside = f"/models/{slug(self.model)}" + ("" if self.vllm else ".gguf")
            return Mount(
                "/path/to/models",
                "/models",
                inside,
                f"replace /path/to/models with the folder that contains {self.model}",
            )
        root = path if self.vllm else path.parent
        if "snapshots" in path.parts:
            # the Hugging Face cache links from snapshots/ to blobs/, so mount their common parent
            root = PurePosixPath(*path.parts[: path.parts.index("snapshots")])
        source = str(root) if str(root).startswith(("/", "~")) else f"./{root}".removesuffix("/.")
        return Mount(source, "/models", str(PurePosixPath("/models") / path.relative_to(root)))

    def arguments(self) -> list[list[str]]:
        """Arguments inside a container: listens on all interfaces, with the mounted model path."""
        argv = list(self.command.argv)
        start = argv.index("serve") + 1 if "serve" in argv else 1
        for flag, value in (("--host", "0.0.0.0"), ("--model", self.mount.model)):  # noqa: S104  published on loopback
            if flag in argv:
                argv[argv.index(flag) + 1] = value
        if self.vllm and "--model" not in argv:
            argv[start] = self.mount.model
        return grouped(argv[start:])


def value_of(argv: tuple[str, ...], flag: str) -> str | None:
    """The value of a flag; None if it is not set."""
    return argv[argv.index(flag) + 1] if flag in argv else None


def grouped(argv: list[str]) -> list[list[str]]:
    """Group each flag with its values; arguments before the first flag form a group each."""
    groups: list[list[str]] = []
    for word in argv:
        if re.match(r"--?[A-Za-z]", word) or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    return groups


def slug(name: str) -> str:
    """A name that is safe for services, containers and files."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "model"
