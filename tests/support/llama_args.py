"""The real argument parser of the llama.cpp in the xllamacpp wheel, in a separate process.

It uses the `common_params` that xllamacpp's CommonParams stores directly after the object's header; its offset and the
number of the server among llama.cpp's programs are those of the pinned wheel.
"""

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_PARSE = "_Z19common_params_parseiPPcR13common_params13llama_examplePFviS0_E"
_OBJECT_HEADER = 16
_SERVER = 12  # LLAMA_EXAMPLE_SERVER in common/common.h


@dataclass(frozen=True, slots=True)
class Parsed:
    """The arguments as parsed by llama-server."""

    accepted: bool
    said: str  # stderr
    values: dict[str, Any]


def server_help() -> str:
    """llama-server --help."""
    return _child(["llama-server", "--help"]).stdout


def parse(argv: list[str]) -> Parsed:
    """Parse a llama-server command; buffer names of GPUs are unknown to a build without them."""
    done = _child(argv)
    last = done.stdout.strip().rpartition("\n")[2]
    values: dict[str, Any] = json.loads(last)
    return Parsed(values.pop("accepted"), done.stderr, values)


def _child(argv: list[str]) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run([sys.executable, __file__, *argv], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, f"the parser failed ({done.returncode}):\n{done.stderr[-4000:]}"
    return done


def main() -> None:
    import xllamacpp

    spec = find_spec("xllamacpp")
    assert spec is not None
    assert spec.origin is not None
    parser = getattr(ctypes.CDLL(str(Path(spec.origin).with_name("xllamacpp.abi3.so"))), _PARSE)
    parser.restype = ctypes.c_bool
    params = xllamacpp.CommonParams()
    words = [word.encode() for word in sys.argv[1:]]
    argv = (ctypes.c_char_p * (len(words) + 1))(*words, None)
    accepted = parser(
        ctypes.c_int(len(words)), argv, ctypes.c_void_p(id(params) + _OBJECT_HEADER), ctypes.c_int(_SERVER), None
    )
    names = ("n_ctx", "n_parallel", "n_batch", "n_ubatch", "n_gpu_layers", "port", "hostnames")
    answer = {name: getattr(params, name) for name in names}
    answer |= {"accepted": bool(accepted), "tensor_split": list(params.tensor_split)[:8], "model": params.model.path}
    print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
