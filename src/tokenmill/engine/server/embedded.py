"""llama-server out of the xllamacpp wheel, as a program: `python -m tokenmill.engine.server.embedded --model ...`.

Accepts the flags of llama-server that plans use, and sets each on the wheel's parameters by name; any other flag is an
error. Listens on loopback only. Logs to stderr, as llama.cpp does. SIGTERM stops it cleanly once the model is loaded,
and immediately before that.
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

WHEEL = "xllamacpp"
_INSTALL = "pip install 'tokenmill[native]'"
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
"""Takes the wheel's module, its parameters and the flag's value."""


def version() -> str:
    """Return the version; the build of llama.cpp is the last number of the wheel's version."""
    try:
        wheel = metadata.version(WHEEL)
    except metadata.PackageNotFoundError as error:
        raise EngineError("the embedded llama-server is not installed", hint=_INSTALL) from error
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
        raise UsageError(f"the embedded server listens on loopback alone, not on {value}", hint="--host 127.0.0.1")
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
        raise UsageError(f"--device {value}: the embedded server uses all GPUs that it sees", hint="--device none")
    # the wheel's parameters have no list of devices; main() hides them from llama.cpp before it looks


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
"""Flags with a value, and what each sets."""

SWITCHES: dict[str, tuple[str, bool]] = {
    "--no-repack": ("no_extra_bufts", True),
    "--jinja": ("use_jinja", True),
    "--metrics": ("endpoint_metrics", True),
    "--embeddings": ("embedding", True),
}
"""Flags without one."""


def parameters(words: list[str], wheel: Any) -> Any:
    """The wheel's parameters for a command line; UsageError names what is wrong."""
    params = wheel.CommonParams()
    left = list(words)
    while left:
        flag = left.pop(0)
        if flag in SWITCHES:
            name, value = SWITCHES[flag]
            setattr(params, name, value)
            continue
        if flag not in VALUES:
            raise UsageError(f"the embedded server cannot be told {flag}", hint="give a llama-server as engine.binary")
        if not left:
            raise UsageError(f"{flag} has no value behind it")
        _set(flag, left.pop(0), params, wheel)
    if not params.model.path:
        raise UsageError("--model is missing")
    params.port = params.port or free_port(params.hostnames[0], 0)
    return params


def _set(flag: str, value: str, params: Any, wheel: Any) -> None:
    try:
        VALUES[flag](wheel, params, value)
    except (ValueError, KeyError, AttributeError, OverflowError) as error:
        raise UsageError(f"the embedded server cannot be told {flag} {value}: {error}") from error


def main() -> int:
    """Serve until SIGTERM or SIGINT."""
    words = sys.argv[1:]
    try:
        if words == ["--version"]:
            print(f"version: {version()}")
            return 0
        if "none" in words[words.index("--device") + 1 :][:1] if "--device" in words else False:
            os.environ.update(dict.fromkeys(_NO_GPU, ""))
        said = version()
        import xllamacpp  # noqa: PLC0415  a hundred megabytes, and the environment must be right before

        params = parameters(words, xllamacpp)
    except TokenmillError as error:
        print(f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return 2
    print(f"tokenmill: {said}", file=sys.stderr, flush=True)
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    _wait()
    del server  # ends its threads
    return 0


def _wait() -> None:
    """Until SIGTERM or SIGINT, which any of the server's threads may get."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.fileno())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    reading.recv(1)


if __name__ == "__main__":
    sys.exit(main())
