"""Prepares the command of a server for a plan: the embedded llama-server, a program, or a container.

May run a program with --help to get its flags. Does not start the server. Entry point: `prepare`.
"""

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from tokenmill.config import EngineConfig
from tokenmill.engine.engine import EngineKind
from tokenmill.engine.process.ports import is_loopback
from tokenmill.engine.server import embedded
from tokenmill.errors import EngineError, UsageError
from tokenmill.launch import Command, FlagSet, flags_of, spell
from tokenmill.launch.files.launch import SHARED_MEMORY, Launch
from tokenmill.launch.flag_sets import family, stored
from tokenmill.planner.plan import Plan
from tokenmill.units import GIB

SERVERS = ("llama-server", "ik_llama", "vllm")
RUNTIMES = ("podman", "docker")
_FAMILIES = {"llama-server": "llama.cpp", "ik_llama": "ik_llama", "vllm": "vllm"}
_VLLM_MODULE = "vllm.entrypoints.openai.api_server"
_VERBOSITY = 4  # the lowest level at which llama.cpp logs buffer sizes
_HELP_TIMEOUT_S = 120.0  # vLLM imports torch before it prints its help


@dataclass(frozen=True, slots=True)
class PreparedServer:
    """The command of a server, and facts about it."""

    kind: EngineKind
    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    build: str | None = None  # None: discovered from the running server
    cleanup_command: tuple[str, ...] = ()  # command to run after it has exited
    contained: bool = False  # runs in a container, so its processes are not children of its supervisor
    notes: tuple[str, ...] = ()

    @property
    def priorities(self) -> bool:
        """Whether the command enables request priorities (vLLM)."""
        return "--scheduling-policy" in self.argv

    @property
    def tools(self) -> bool:
        """Whether the server will parse tool calls."""
        return self.kind != "vllm" or "--enable-auto-tool-choice" in self.argv


def prepare(
    plan: Plan, *, model: Path, config: EngineConfig, port: int, name: str, slots: Path | None
) -> PreparedServer:
    """Build the server command for a plan. Blocks while it runs a program for its flags."""
    kind = _kind(config, plan)
    if not is_loopback(config.host):
        raise UsageError(
            f"engine.host must be a loopback address, because engines have no API key (got {config.host})",
            hint="use 127.0.0.1, and let clients connect to tokenmill serve",
        )
    if config.container is not None:
        return _container(plan, kind, model, config, port, name)
    if kind == "vllm":
        return _vllm(plan, model, config, port)
    if kind == "llama-server" and config.binary is None:
        return _embedded(plan, model, config, port, slots)
    binary = _program(config.binary or "llama-server")
    flags = flags_of(binary)
    _same_family(kind, flags, binary)
    command = _spell(plan, model, config, port, binary, flags)
    more = llama_extras(flags, slots)
    return PreparedServer(kind, (*command.argv, *more), command.env, flags.version, notes=command.notes)


def llama_extras(flags: FlagSet, slots: Path | None) -> tuple[str, ...]:
    """Flags of llama.cpp's server that no plan has: the slot folder, and the verbosity that logs buffer sizes."""
    words: list[str] = []
    if slots is not None and flags.has("--slot-save-path"):
        words += ["--slot-save-path", str(slots)]
    if flags.dialect == "llama.cpp" and flags.has("--log-verbosity"):
        words += ["--log-verbosity", str(_VERBOSITY)]
    return tuple(words)


def vllm_program(binary: str) -> tuple[str, str | None]:
    """Return the command that runs the vLLM of an environment, and its version if its files contain it.

    `vllm serve` looks up the version of a distribution called vllm, and fails if it is installed under another name;
    its module does not. This is decided from the installed files, because running vLLM takes half a minute.
    """
    path = Path(_program(binary)).absolute()
    packages = [
        folder for folder in path.parent.parent.glob("lib/python3*/site-packages") if (folder / "vllm").is_dir()
    ]
    versions = [match for folder in packages for match in map(_version, folder.glob("vllm*.dist-info")) if match]
    named = any(distribution == "vllm" for distribution, _ in versions)
    version = next((number for _, number in versions), None)
    python = path if path.name.startswith("python") else path.with_name("python")
    script = path if path.name == "vllm" else path.with_name("vllm")
    if (named or not packages) and script.exists():
        return shlex.quote(str(script)), version
    if packages and python.exists():
        return f"{shlex.quote(str(python))} -m {_VLLM_MODULE}", version
    raise EngineError(
        f"no vLLM in the environment of {path}", hint="set engine.binary to vllm or to the python of its environment"
    )


def container_argv(launch: Launch, runtime: str) -> tuple[str, ...]:
    """Build a `podman run` or `docker run` command in the foreground, with its port published on loopback only."""
    if runtime not in RUNTIMES:
        raise UsageError(
            f"engine.container_runtime: unknown runtime {runtime}", hint=f"use one of {', '.join(RUNTIMES)}"
        )
    bound = launch.binding
    mount = launch.mount
    gpus = ["--device", "nvidia.com/gpu=all"] if runtime == "podman" else ["--gpus", "all"]
    home = mount.source.startswith("~/")
    source = str(Path(mount.source).expanduser()) if home else str(Path(mount.source).absolute())
    words = [
        runtime,
        "run",
        "--rm",
        "--name",
        launch.name,
        *(gpus if launch.gpus else []),
        "--publish",
        f"127.0.0.1:{launch.port}:{launch.port}",
        "--shm-size",
        SHARED_MEMORY,
        *(f"--cap-add={right}" for right in launch.capabilities),
        *(["--ulimit", "memlock=-1:-1"] if launch.mlock else []),
        *(["--cpuset-cpus", bound.cpu_list or ""] if bound.cpus else []),
        *(["--cpuset-mems", bound.node_list or ""] if bound.nodes else []),
        "--memory",
        f"{bound.memory_max_bytes // GIB}g",
        *(word for key, value in launch.command.env.items() for word in ("--env", f"{key}={value}")),
        "--volume",
        f"{source}:{mount.inside}" + (":Z" if home else ":ro,Z"),
        *(["--entrypoint", "vllm"] if launch.vllm else []),
        launch.image,
        *(["serve"] if launch.vllm else []),
        *(word for group in launch.arguments() for word in group),
    ]
    # podman has no daemon, so the container inherits the memory policy of the command that starts it
    interleave = ["numactl", "--interleave=all"] if bound.interleave and runtime == "podman" else []
    return (*interleave, *words)


def _kind(config: EngineConfig, plan: Plan) -> EngineKind:
    if config.kind not in SERVERS:
        raise UsageError(f"engine.kind: {config.kind} is not a server", hint=f"use one of {', '.join(SERVERS)}")
    if family(plan.settings.engine) != _FAMILIES[config.kind]:
        raise UsageError(
            f"the plan is for {plan.settings.engine}, but engine.kind is {config.kind}",
            hint=f"plan with --engine {_FAMILIES[config.kind]}",
        )
    return cast(EngineKind, config.kind)


def _embedded(plan: Plan, model: Path, config: EngineConfig, port: int, slots: Path | None) -> PreparedServer:
    flags = stored("llama.cpp")
    command = _spell(plan, model, config, port, None, flags)
    program = (sys.executable, "-m", "tokenmill.engine.server.embedded")
    argv = (*program, *command.argv[1:], *llama_extras(flags, slots))
    return PreparedServer("llama-server", argv, command.env, embedded.version(), notes=command.notes)


def _vllm(plan: Plan, model: Path, config: EngineConfig, port: int) -> PreparedServer:
    program, version = vllm_program(config.binary or "vllm")
    known = stored("vllm")
    flags = known if version is not None and known.version.endswith(version) else _vllm_flags(program)
    command = _spell(plan, model, config, port, program, flags)
    first = ("--scheduling-policy", "priority") if flags.has("--scheduling-policy") else ()
    return PreparedServer("vllm", (*command.argv, *first), command.env, None, notes=command.notes)


def _vllm_flags(program: str) -> FlagSet:
    words = shlex.split(program)
    command = [*words, *(["serve"] if Path(words[-1]).name == "vllm" else []), "--help=all"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_HELP_TIMEOUT_S, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"cannot get the flags of {program}: {error}") from error
    return FlagSet.from_help(done.stdout, f"vLLM at {words[0]}")


def _container(plan: Plan, kind: EngineKind, model: Path, config: EngineConfig, port: int, name: str) -> PreparedServer:
    command = _spell(plan, model.absolute(), config, port, None, None)
    if kind == "vllm":
        command = replace(command, argv=(*command.argv, "--scheduling-policy", "priority"))
    launch = Launch.of(command, plan, name=f"tokenmill-{name}", image=config.container)
    runtime = config.container_runtime
    argv = container_argv(launch, runtime)
    cleanup_command = (runtime, "rm", "--force", launch.name)
    return PreparedServer(kind, argv, {}, None, cleanup_command, contained=True, notes=launch.comments)


def _spell(
    plan: Plan, model: Path, config: EngineConfig, port: int, binary: str | None, flags: FlagSet | None
) -> Command:
    return spell(plan, model=str(model), host=config.host, port=port, binary=binary, flags=flags)


def _same_family(kind: EngineKind, flags: FlagSet, binary: str) -> None:
    if family(flags.dialect) != _FAMILIES[kind]:
        other = next(name for name, group in _FAMILIES.items() if group == family(flags.dialect))
        raise UsageError(
            f"{binary} is {family(flags.dialect)}, but engine.kind is {kind}", hint=f'set engine.kind = "{other}"'
        )


def _program(given: str) -> str:
    found = shutil.which(str(Path(given).expanduser()))
    if found is None:
        raise EngineError(
            f"program not found: {given}", hint="install it, or set engine.binary or --binary to its full path"
        )
    return found


def _version(folder: Path) -> tuple[str, str] | None:
    match = re.fullmatch(r"(vllm(?:_\w+)?)-(.+)\.dist-info", folder.name)
    return (match[1], match[2]) if match else None
