"""Finds the scope of measurements (machine, model, engine build) without starting an engine."""

from pathlib import Path

from tokenmill.config import EngineConfig
from tokenmill.engine.server import embedded
from tokenmill.engine.server.launch import vllm_program
from tokenmill.errors import TokenmillError
from tokenmill.hardware.identity import machine_id
from tokenmill.hardware.machine import Machine
from tokenmill.launch import flags_of
from tokenmill.model.identity import identity_of
from tokenmill.native.builds import finished as builds
from tokenmill.tuner.point import PointScope


def place_here(machine: Machine, model: str, model_path: Path, config: EngineConfig) -> PointScope | None:
    """The scope of a model on a machine with the configured engine; None if its build is unknown.

    `model` is the name in the file. Reads some of the model's bytes, and may run the engine to get its version.
    """
    try:
        build = build_of(config)
    except TokenmillError:  # not installed or unknown: starting the engine gives a better error
        return None
    if build is None:
        return None
    return PointScope(machine.name, machine_id(machine), model, identity_of(model_path), config.kind, build)


def build_of(config: EngineConfig) -> str | None:
    """The build of the engine that would be started; None if it is unknown before the start."""
    if config.kind == "native":
        if made := builds.build_of(config):
            return made.engine_build
        from tokenmill.native.llama.library import open_library  # noqa: PLC0415  its packages are an extra

        found = open_library(_path(config.library), header=_path(config.header))
        return f"llama.cpp {found.version} ({found.build})"
    if config.container is not None:
        return f"{config.kind} in {config.container}"
    if config.kind == "llama-server" and config.binary is None:
        return embedded.version()
    if config.kind == "vllm":
        version = vllm_program(config.binary or "vllm")[1]
        return None if version is None else f"vLLM {version}"
    return flags_of(config.binary or "llama-server").version


def _path(given: str | None) -> Path | None:
    return None if given is None else Path(given).expanduser()
