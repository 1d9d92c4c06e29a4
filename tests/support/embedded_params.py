"""Compares our parser of llama-server's flags with llama.cpp's own, in one process; prints the differences as JSON."""

import ctypes
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from support import llama_args

NESTED = ("cpuparams", "cpuparams_batch", "model", "sampling")


def differences(argv: list[str]) -> dict[str, list[Any]]:
    """Parameters that the two parsers set differently: llama.cpp's value, ours."""
    done = subprocess.run(
        [sys.executable, "-m", "support.embedded_params", *argv],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, list[Any]] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return found


def _fields(params: Any) -> dict[str, str]:
    plain = {name: getattr(params, name) for name in dir(params) if not name.startswith("_") and name not in NESTED}
    values = {name: value for name, value in plain.items() if isinstance(value, int | float | str | list | set)}
    for group in NESTED:
        inner = getattr(params, group)
        for name in dir(inner):
            value = None if name.startswith("_") else getattr(inner, name)
            if isinstance(value, int | float | str):
                values[f"{group}.{name}"] = value
    return {name: str(value) for name, value in values.items()}


def main() -> None:
    import xllamacpp

    from tokenmill.engine.server.embedded import parameters

    spec = find_spec("xllamacpp")
    assert spec is not None
    assert spec.origin is not None
    parser = getattr(ctypes.CDLL(str(Path(spec.origin).with_name("xllamacpp.abi3.so"))), llama_args._PARSE)
    parser.restype = ctypes.c_bool
    theirs = xllamacpp.CommonParams()
    words = [word.encode() for word in sys.argv[1:]]
    argv = (ctypes.c_char_p * (len(words) + 1))(*words, None)
    accepted = parser(
        ctypes.c_int(len(words)),
        argv,
        ctypes.c_void_p(id(theirs) + llama_args._OBJECT_HEADER),
        ctypes.c_int(llama_args._SERVER),
        None,
    )
    assert accepted
    one, other = _fields(theirs), _fields(parameters(sys.argv[2:], xllamacpp))
    print(json.dumps({name: [value, other[name]] for name, value in one.items() if value != other[name]}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
