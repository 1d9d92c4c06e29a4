"""Projects what llama.cpp would allocate for a model, without allocating it.

`project` starts `python -m tokenmill.native.llama.dry_run`, which loads the model with no_alloc (every allocation is
only counted) and never maps or reads its weights, so that a ghost of a trillion parameters is planned in a second.
It speaks JSON on stdin and stdout; the library's abort, crash or endless loop ends that process and is an EngineError
here, with the last lines of its log.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tokenmill.decode import decode
from tokenmill.engine import fit_params
from tokenmill.engine.fit_params import Buffer, last_lines
from tokenmill.errors import EngineError, TokenmillError
from tokenmill.native.llama import breakdown, cdefs
from tokenmill.native.llama.library import Library, open_library
from tokenmill.native.llama.log import LOG_CONTINUED, LOG_DEBUG
from tokenmill.native.llama.settings import LOAD_MODE_NONE, cache_type, place
from tokenmill.planner.memory.kv_cells import KvContext
from tokenmill.units import GIB, MIB

TIME_LIMIT_S = 120.0
MOST_BYTES = 16 * GIB  # address space of the child, in case the library allocates after all


@dataclass(frozen=True, slots=True)
class DryRun:
    """What to project: one model with its placement, under any number of contexts."""

    contexts: tuple[KvContext, ...]
    repack: bool = True
    gpus: tuple[int, ...] = ()  # cards to use, which llama.cpp then counts from 0
    gpu_layers: int = 0  # counted from the last, with the output as one more
    tensor_split: tuple[float, ...] = ()  # share of each GPU
    mtp: bool = False  # load the layers for multi-token prediction
    overrides: tuple[tuple[str, str], ...] = ()  # tensor name pattern -> what holds it: CPU, GPU0, ...


@dataclass(frozen=True, slots=True)
class ContextProjection:
    """The memory of one context, including the model's."""

    buffers: tuple[Buffer, ...]
    output_bytes: int  # logits, in host memory
    source: Literal["breakdown", "log"]  # exact bytes, or sizes from the log with the weights as one sum


@dataclass(frozen=True, slots=True)
class Projection:
    """The result of a dry run."""

    library: str
    version: str
    devices: tuple[str, ...]
    contexts: tuple[ContextProjection, ...]


@dataclass(frozen=True, slots=True)
class _Order:
    """The child's input."""

    model: str
    run: DryRun
    library: str | None = None
    header: str | None = None


def project(
    path: Path,
    request: DryRun,
    *,
    library: Path | None = None,
    header: Path | None = None,
    time_limit_s: float = TIME_LIMIT_S,
) -> Projection:
    """Run llama.cpp dry in a child process: the wheel's, or a libllama.so with the llama.h it was built from.

    Without contexts nothing is loaded: the answer only says what library it is and which devices it has.
    """
    if request.contexts and not path.is_file():
        raise EngineError(f"no model file at {path}", hint="tokenmill models ghost writes one from a catalogue name")
    order = _Order(str(path), request, str(library) if library else None, str(header) if header else None)
    environment = os.environ | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # as nvidia-smi and tokenmill number them
    if request.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, request.gpus))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tokenmill.native.llama.dry_run"],
            input=json.dumps(asdict(order)),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=time_limit_s,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired as error:
        raise EngineError(
            f"llama.cpp did not plan {path.name} in {time_limit_s:.0f} s", hint=last_lines(_text(error.stderr))
        ) from error
    return _answer(path, done.returncode, done.stdout, done.stderr)


def _answer(path: Path, code: int, stdout: str, stderr: str) -> Projection:
    """The child's answer; EngineError if there is no answer."""
    if code < 0:
        name = signal.Signals(-code).name
        raise EngineError(f"llama.cpp stopped with {name} while it planned {path.name}", hint=last_lines(stderr))
    try:
        answer = json.loads(stdout)
    except json.JSONDecodeError as error:
        raise EngineError(f"llama.cpp gave no answer for {path.name} (exit {code})", hint=last_lines(stderr)) from error
    if "error" in answer:
        raise EngineError(answer["error"], hint=answer["hint"])
    return decode(Projection, answer, where="the dry run")


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


class _Llama:
    """llama.cpp in this process; one model at a time."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.ffi = library.ffi
        self.lib = library.lib
        self.log: list[str] = []
        self._level = LOG_DEBUG
        self._callback = self.ffi.callback("void(int, const char *, void *)")(self._logged)
        self.lib.llama_log_set(self._callback, self.ffi.NULL)
        self.lib.llama_backend_init()

    def _logged(self, level: int, message: Any, _data: Any) -> None:
        text = self.library.text(message)
        self._level = self._level if level == LOG_CONTINUED else level
        self.log.append(text)
        if self._level != LOG_DEBUG:
            os.write(2, text.encode())  # the parent needs the last lines after a crash

    def project(self, path: str, run: DryRun) -> tuple[ContextProjection, ...]:
        """Plan the model under every context."""
        model = self._load(path, run)
        weights = int(self.lib.llama_model_size(model))
        projected = tuple(self._context(model, weights, context) for context in run.contexts)
        self.lib.llama_model_free(model)
        return projected

    def _load(self, path: str, run: DryRun) -> Any:
        params = self.lib.llama_model_default_params()
        # Mapping a file reads all of it: a header-only model would fill the memory with zeros.
        params.load_mode = LOAD_MODE_NONE
        params.no_alloc = True
        params.use_extra_bufts = run.repack
        params.load_mtp = run.mtp
        _kept = place(  # the parameters point to these objects until the model is loaded
            self.library,
            params,
            gpu_layers=run.gpu_layers,
            tensor_split=run.tensor_split,
            overrides=run.overrides,
        )
        model = self.lib.llama_model_load_from_file(path.encode(), params)
        if model == self.ffi.NULL:
            raise EngineError(f"llama.cpp cannot load {Path(path).name}", hint=last_lines("".join(self.log)))
        return model

    def _context(self, model: Any, weights: int, wanted: KvContext) -> ContextProjection:
        params = self.lib.llama_context_default_params()
        params.n_ctx = wanted.size
        params.n_seq_max = wanted.ids
        params.n_batch = wanted.batch
        params.n_ubatch = wanted.ubatch
        params.n_outputs_max = wanted.outputs or 0
        params.type_k, params.type_v = (cache_type(name) for name in (wanted.type_k, wanted.type_v))
        params.flash_attn_type = int(wanted.flash_attention)
        params.kv_unified = wanted.unified
        params.swa_full = wanted.full_windows
        params.ctx_type = int(wanted.drafts)  # LLAMA_CONTEXT_TYPE_MTP
        params.n_rs_seq = wanted.snapshots
        self.log.clear()
        context = self.lib.llama_init_from_model(model, params)
        log = "".join(self.log)
        if context == self.ffi.NULL:
            raise EngineError(f"llama.cpp refuses a context of {wanted.size} tokens", hint=last_lines(log))
        exact = breakdown.read(self.library, context)
        self.lib.llama_free(context)
        return assemble(exact, log, weights)


def _limit_addresses() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    least = MOST_BYTES if hard == resource.RLIM_INFINITY else min(MOST_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (least, hard))


def assemble(exact: tuple[Buffer, ...] | None, log: str, weights: int) -> ContextProjection:
    """Exact sizes if they agree with the log on the compute buffers, else the log's."""
    logged = fit_params.parse_log(log)
    compute = sum(buffer.compute_bytes for buffer in logged)
    output = fit_params.parse_output(log)
    # The log rounds each buffer to hundredths of a MiB.
    if (
        exact is not None
        and abs(sum(buffer.compute_bytes for buffer in exact) - compute) < MIB * (1 + len(logged)) / 50
    ):
        return ContextProjection(exact, output, "breakdown")
    whole = Buffer("Host", weights, fit_params.parse_cache(log), compute)
    return ContextProjection((whole,), output, "log")


def main() -> None:
    """Answer one order from stdin on stdout; everything the library prints goes to stderr."""
    answer_to = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    answer: dict[str, Any]
    try:
        order = decode(_Order, json.load(sys.stdin), where="the order")
        library = open_library(
            Path(order.library) if order.library else None,
            header=Path(order.header) if order.header else None,
            more=cdefs.BREAKDOWN if cdefs.breakdown_readable() else "",
        )
        devices = tuple(library.devices())
        if devices == ("CPU",):  # drivers of GPUs reserve terabytes of addresses
            _limit_addresses()
        contexts = _Llama(library).project(order.model, order.run) if order.run.contexts else ()
        answer = asdict(Projection(str(library.path), library.version, devices, contexts))
    except TokenmillError as error:
        answer = {"error": error.message, "hint": error.hint}
    json.dump(answer, answer_to)
    answer_to.close()


if __name__ == "__main__":
    main()
