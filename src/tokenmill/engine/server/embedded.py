"""llama-server from the xllamacpp wheel, as a program: `python -m tokenmill.engine.server.embedded --model ...`.

Accepts the llama-server flags that plans use and sets the wheel's parameters from them; any other flag is an error.
Listens only on loopback and logs to stderr. SIGTERM kills it while the model is loading, and stops it cleanly after.
"""

import os
import signal
import socket
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

from tokenmill.engine.process.ports import free_port, is_loopback
from tokenmill.errors import EngineError, TokenmillError, UsageError
from tokenmill.units import MIB
from tokenmill.version import INSTALL_HINT, WHEEL

_LOAD_MODES = {
    "auto": "AUTO",
    "none": "NONE",
    "mmap": "MMAP",
    "mlock": "MLOCK",
    "mmap+mlock": "MMAP_MLOCK",
    "dio": "DIRECT_IO",
}
_POOLINGS = {name: name.upper() for name in ("none", "mean", "cls", "last", "rank")}
_SWITCH = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}
_NO_GPU = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES")

Setter = Callable[[Any, Any, str], None]
"""Called with the wheel's module, its parameters and the flag's value."""


def version() -> str:
    """Return the version; the build of llama.cpp is the last number of the wheel's version."""
    try:
        wheel = metadata.version(WHEEL)
    except metadata.PackageNotFoundError as error:
        raise EngineError(f"{WHEEL} is not installed", hint=INSTALL_HINT) from error
    return f"llama.cpp b{wheel.rpartition('.')[2]} ({WHEEL} {wheel})"


def _number(name: str, scale: int = 1) -> Setter:
    return lambda _wheel, params, value: setattr(params, name, int(value) * scale)


def _one_of(name: str, kind: str, prefix: str, names: dict[str, str]) -> Setter:
    def put(wheel: Any, params: Any, value: str) -> None:
        setattr(params, name, getattr(getattr(wheel, kind), prefix + names[value]))

    return put


def _cache_type(name: str) -> Setter:
    return lambda wheel, params, value: setattr(params, name, getattr(wheel.ggml_type, f"GGML_TYPE_{value.upper()}"))


def _threads(name: str) -> Setter:
    return lambda _wheel, params, value: setattr(getattr(params, name), "n_threads", int(value))


def _host(_wheel: Any, params: Any, value: str) -> None:
    if not is_loopback(value):
        raise UsageError(f"--host {value}: the embedded server listens only on loopback", hint="use --host 127.0.0.1")
    params.hostnames = [value]


def _model(_wheel: Any, params: Any, value: str) -> None:
    params.model.path = value


def _alias(_wheel: Any, params: Any, value: str) -> None:
    params.model_alias = {value}


def _split(_wheel: Any, params: Any, value: str) -> None:
    shares = [float(share) for share in value.split(",")]
    params.tensor_split = shares + [0.0] * (len(params.tensor_split) - len(shares))


def _margins(_wheel: Any, params: Any, value: str) -> None:
    sizes = [int(size) * MIB for size in value.split(",")]
    devices = len(params.fit_params_target)
    params.fit_params_target = sizes * devices if len(sizes) == 1 else sizes + params.fit_params_target[len(sizes) :]


def _device(_wheel: Any, _params: Any, value: str) -> None:
    if value != "none":
        raise UsageError(
            f"--device {value}: the embedded server uses all visible GPUs", hint="use --device none to use none"
        )
    # The wheel has no parameter for devices; main() hides the GPUs through the environment instead.


def _folder(_wheel: Any, params: Any, value: str) -> None:
    params.slot_save_path = value.rstrip("/") + "/"


VALUES: dict[str, Setter] = {
    "--model": _model,
    "--alias": _alias,
    "--host": _host,
    "--port": _number("port"),
    "--ctx-size": _number("n_ctx"),
    "--parallel": _number("n_parallel"),
    "--batch-size": _number("n_batch"),
    "--ubatch-size": _number("n_ubatch"),
    "--threads": _threads("cpuparams"),
    "--threads-batch": _threads("cpuparams_batch"),
    "--cache-type-k": _cache_type("cache_type_k"),
    "--cache-type-v": _cache_type("cache_type_v"),
    "--flash-attn": _one_of("flash_attn_type", "llama_flash_attn_type", "LLAMA_FLASH_ATTN_TYPE_", _SWITCH),
    "--cache-ram": _number("cache_ram_mib"),
    "--load-mode": _one_of("load_mode", "llama_load_mode", "LLAMA_LOAD_MODE_", _LOAD_MODES),
    "--moe-cache-mib": _number("moe_cache_size", MIB),
    "--fit": lambda _wheel, params, value: setattr(params, "fit_params", {"on": True, "off": False}[value]),
    "--fit-target": _margins,
    "--device": _device,
    "--n-gpu-layers": _number("n_gpu_layers"),
    "--tensor-split": _split,
    "--override-tensor": lambda _wheel, params, value: setattr(params, "tensor_buft_overrides", value),
    "--numa": _one_of("numa", "ggml_numa_strategy", "GGML_NUMA_STRATEGY_", {"numactl": "NUMACTL"}),
    "--pooling": _one_of("pooling_type", "llama_pooling_type", "LLAMA_POOLING_TYPE_", _POOLINGS),
    "--slot-save-path": _folder,
    "--log-verbosity": _number("verbosity"),
}
"""Flags with a value, and the function that sets it."""

SWITCHES: dict[str, tuple[str, bool]] = {
    "--no-repack": ("no_extra_bufts", True),
    "--jinja": ("use_jinja", True),
    "--metrics": ("endpoint_metrics", True),
    "--embeddings": ("embedding", True),
}
"""Flags without a value: the parameter and its value."""


def parameters(arguments: list[str], wheel: Any) -> Any:
    """Convert arguments to the wheel's parameters; UsageError for unknown flags and invalid values."""
    params = wheel.CommonParams()
    left = list(arguments)
    while left:
        flag = left.pop(0)
        if flag in SWITCHES:
            name, value = SWITCHES[flag]
            setattr(params, name, value)
            continue
        if flag not in VALUES:
            raise UsageError(f"the embedded server does not support {flag}", hint="set engine.binary to a llama-server")
        if not left:
            raise UsageError(f"{flag} needs a value")
        _set(flag, left.pop(0), params, wheel)
    if not params.model.path:
        raise UsageError("--model is missing")
    params.port = params.port or free_port(params.hostnames[0], 0)
    return params


def _set(flag: str, value: str, params: Any, wheel: Any) -> None:
    try:
        VALUES[flag](wheel, params, value)
    except (ValueError, KeyError, AttributeError, OverflowError) as error:
        raise UsageError(f"the embedded server does not support {flag} {value}: {error}") from error


def main() -> int:
    """Serve until SIGTERM or SIGINT."""
    arguments = sys.argv[1:]
    try:
        if arguments == ["--version"]:
            print(f"version: {version()}")
            return 0
        if "--device" in arguments and arguments[arguments.index("--device") + 1 :][:1] == ["none"]:
            os.environ.update(dict.fromkeys(_NO_GPU, ""))
        build = version()
        import xllamacpp  # noqa: PLC0415  100 MB, and it reads the environment

        params = parameters(arguments, xllamacpp)
    except TokenmillError as error:
        print(f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return 2
    print(f"tokenmill: {build}", file=sys.stderr, flush=True)
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    _wait_for_signal()
    del server  # stops its threads
    return 0


def _wait_for_signal() -> None:
    """Wait for SIGTERM or SIGINT, which the kernel may deliver to any thread."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.fileno())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    reading.recv(1)


if __name__ == "__main__":
    sys.exit(main())
