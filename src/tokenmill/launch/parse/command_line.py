"""Parses a llama-server, ik_llama.cpp or vLLM command line into a goal, a placement and findings.

Entry point: `read_command`. Omitted flags get the engine's defaults, not the planner's. Only problems of the command
itself are reported; `machine_findings` checks it against a machine and a model.
"""

import re
from dataclasses import replace

from tokenmill.errors import UsageError
from tokenmill.launch.flag_sets import FlagSet, captured, family, normal, stored
from tokenmill.launch.layers import ALL_LAYERS
from tokenmill.launch.parse.findings import findings_in
from tokenmill.launch.parse.parsed import Program, ProgramOptions, ReadCommand, is_flag, parse
from tokenmill.launch.parse.shell_words import Unwrapped, unwrap
from tokenmill.launch.speculation import read_speculation
from tokenmill.launch.tensor_patterns import layers_regex
from tokenmill.planner.compute_graph.engines import TRAITS
from tokenmill.planner.compute_graph.ik_options import IkOptions
from tokenmill.planner.goal import DialectName, Goal
from tokenmill.units import MIB

DEFAULT_CACHE_RAM_MIB = 8192  # of llama.cpp and ik_llama.cpp alike
DEFAULT_MARGIN_MIB = 1024
MAX_GPUS = 16
AUTO_SLOTS = 4  # slots of llama-server without -np, which share one cache
_PROGRAMS: dict[str, Program] = {
    "llama-server": "llama-server",
    "server": "llama-server",
    "llama-cli": "llama-cli",
    "main": "llama-cli",
    "llama-completion": "llama-cli",
    "llama-bench": "llama-bench",
    "llama-batched-bench": "llama-batched-bench",
    "llama-sweep-bench": "llama-sweep-bench",
    "sweep-bench": "llama-sweep-bench",
    "vllm": "vllm",
}
_BENCH_TOKENS = ("-p", "--n-prompt", "--predict", "--n-gen", "-d", "--n-depth")
_GONE_FROM_IK = {"-fmoe", "--fused-moe", "-ooae", "--offload-only-active-experts"}
_ALL_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"


def read_command(text: str, engine: DialectName | None = None) -> ReadCommand:
    """Parse a pasted command; raises UsageError if it starts no known engine.

    `engine` is the version that will run it; by default the newest one that has all the flags used.
    """
    found = unwrap(text)
    program, words = _program(found)
    detected = _engine(found, program, words)
    if engine is not None and family(engine) != family(detected):
        raise UsageError(f"the command is for {detected}, not for {engine}", hint="omit --engine")
    engine = engine or detected
    flags = captured("llama-bench-b11549") if program == "llama-bench" else stored(engine)
    options = parse(words, _lenient(flags, engine))
    read = _read_vllm(found, options) if engine == "vllm" else _read_llama(found, program, engine, options)
    unknown = tuple(dict.fromkeys(flag for flag in options.spelled if not flags.has(flag)))
    if read.model is not None and any(f"${name}" in read.model.replace("{", "") for name in found.unset):
        read = replace(read, model=None)
    read = replace(read, unknown=unknown)
    return replace(read, findings=findings_in(read, flags, found.unset))


def _program(found: Unwrapped) -> tuple[Program, list[str]]:
    """The program and its arguments."""
    words = list(found.words)
    if found.container and (not words or is_flag(words[0])):
        return ("vllm" if "vllm" in found.container.image.lower() else "llama-server"), words
    program = words[0].rsplit("/", 1)[-1].removesuffix(".exe")
    if re.fullmatch(r"python[\d.]*", program) and words[1:2] == ["-m"] and words[2:3] and "vllm" in words[2]:
        return "vllm", words[3:]
    if program == "vllm":
        return "vllm", words[2:] if words[1:2] == ["serve"] else words[1:]
    if program in _PROGRAMS:
        return _PROGRAMS[program], words[1:]
    raise UsageError(
        f"the command does not start a supported engine: {words[0]}",
        hint="use a command of llama-server, llama-bench, llama-sweep-bench or vllm serve",
    )


def _engine(found: Unwrapped, program: Program, words: list[str]) -> DialectName:
    """The engine, from the path, the image, or flags that only one engine has."""
    if program == "vllm":
        return "vllm"
    where = f"{found.words[0] if found.words else ''} {found.container.image if found.container else ''}".lower()
    used = {normal(word.partition("=")[0]) for word in words if is_flag(word)}
    today = stored("llama.cpp")
    before = stored("llama.cpp-2025")
    fork = stored("ik_llama")
    only_fork = {flag for flag in used if fork.has(flag) or flag in _GONE_FROM_IK} - {
        flag for flag in used if today.has(flag) or before.has(flag)
    }
    if program == "llama-sweep-bench" or re.search(r"ik[_-]llama", where) or only_fork:
        return "ik_llama"
    if program == "llama-bench":
        return "llama.cpp-2025" if used & {"-mmp", "--mmap"} else "llama.cpp"
    return "llama.cpp-2025" if any(before.has(flag) and not today.has(flag) for flag in used) else "llama.cpp"


def _lenient(flags: FlagSet, engine: DialectName) -> FlagSet:
    """Add the flags of related versions, so that the values of their flags are not parsed as arguments."""
    sisters: tuple[DialectName, ...] = () if engine == "vllm" else ("llama.cpp", "llama.cpp-2025", "ik_llama")
    for sister in sisters:
        flags = flags.union(stored(sister))
    return flags


def _read_llama(found: Unwrapped, program: Program, engine: DialectName, options: ProgramOptions) -> ReadCommand:
    context, slots, unified = _slots(program, engine, options)
    if options.has("--override-kv"):
        raise UsageError(
            "--override-kv changes keys of the model, which a plan does not apply",
            hint="leave it out; for fewer experts per token, plan ik_llama.cpp's -ser N,1",
        )
    overrides = _overrides(options, program)
    margins = _margins(options)
    fit = options.switched_on("--fit", default=False) if options.has("--fit") else None
    ngl = _gpu_layers(options)
    split = tuple(
        _share(part, "--tensor-split") for part in re.split(r"[,/]+", options.last("--tensor-split") or "") if part
    )
    cpu_only = ngl == 0 or options.last("--device") == "none" or bool(found.container and not found.container.gpus)
    placed = ngl is not None or bool(split or overrides)
    fork = family(engine) == "ik_llama"
    refused = fork and (fit is not True or bool(overrides))
    own_fit = not cpu_only and not refused and fit is not False and (fork or not placed)
    threads = _at_least_one(options, "--threads")
    ubatch = _at_least_one(options, "--ubatch-size") or 512
    batch = _at_least_one(options, "--batch-size") or 2048
    shared = 1 if unified and not options.has("--parallel") else slots
    goal = Goal(
        context=None if context is None else max(1, context // shared),
        sequences=shared,
        engine=engine,
        cache_type_k=(options.last("--cache-type-k") or "f16").split(",")[0],
        cache_type_v=(options.last("--cache-type-v") or "f16").split(",")[0],
        ubatch=min(batch, ubatch),
        batch=batch,
        threads=threads,
        threads_batch=_at_least_one(options, "--threads-batch") or threads,
        cpu_only=cpu_only,
        gpus=_gpus(found, options),
        cache_ram_bytes=_cache_ram(options, program),
        mmap=_mmap(options, engine),
        mlock=options.has("--mlock") or "mlock" in (options.last("--load-mode") or ""),
        repack=_repack(options, engine),
        flash_attention=options.switched_on("--flash-attn", default=True) and not options.has("--no-flash-attn"),
        own_fit=own_fit,
        fit_margin_bytes=_applied_margins(options, margins, fork=fork) if own_fit else (),
        ik=_ik_options(options, engine) if fork else None,
        moe_cache_bytes=(options.number("--moe-cache-mib") or 0) * MIB,
        unified=unified or shared == 1,
        speculation=read_speculation(options),
        offload_min_batch=_offload_rows(found),
    )
    return ReadCommand(
        program=program,
        engine=engine,
        model=options.last("--model") or options.last("--hf-repo"),
        alias=options.last("--alias"),
        goal=goal,
        slots=slots,
        slot_tokens=None if context is None else context if unified else context // slots,
        unified=unified,
        gpu_layers=ngl,
        tensor_split=split,
        overrides=overrides,
        cpu_moe_layers=ALL_LAYERS if options.has("--cpu-moe") else options.number("--n-cpu-moe"),
        fit=fit,
        fit_margins_mib=margins,
        host=options.last("--host"),
        port=options.number("--port"),
        options=options,
        unknown=(),
        env=found.env,
        numactl=found.numactl,
        container=found.container,
    )


def _slots(program: Program, engine: DialectName, options: ProgramOptions) -> tuple[int | None, int, bool]:
    """Total cache tokens, number of slots, and whether they share the cache."""
    if program == "llama-bench":
        tokens = sum(options.number(name) or 0 for name in _BENCH_TOKENS)
        return tokens or 640, 1, False  # defaults of llama-bench: pp512 and tg128
    context = options.number("--ctx-size") or None
    if context is not None and context < 0:
        raise UsageError(f"--ctx-size must not be negative (got {context})", hint="check the command")
    slots = options.number("--parallel")
    auto = program == "llama-server" and family(engine) != "ik_llama" and (slots is None or slots < 0)
    unified = auto or (options.has("--kv-unified") and not options.has("--no-kv-unified"))
    return context, AUTO_SLOTS if auto else max(1, slots or 1), unified


def _offload_rows(found: Unwrapped) -> int | None:
    """The threshold that the command sets; None: the engine's default."""
    rows = found.env.get("GGML_OP_OFFLOAD_MIN_BATCH", "")
    return int(rows) if rows.isdigit() else None


def _at_least_one(options: ProgramOptions, name: str) -> int | None:
    """A flag's number; None if it is absent or below 1, which engines treat as the default."""
    value = options.number(name)
    return None if value is None or value < 1 else value


def _share(text: str, flag: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(f"{flag} {text}: not a number", hint="check the command") from error


def _gpu_layers(options: ProgramOptions) -> int | None:
    text = options.last("--n-gpu-layers")
    if text in (None, "auto", "-1"):
        return None
    return ALL_LAYERS if text == "all" else options.number("--n-gpu-layers")


def _overrides(options: ProgramOptions, program: Program) -> tuple[tuple[str, str], ...]:
    """-ot, -cmoe and -ncmoe in the given order; all append to one list."""
    clauses: list[tuple[str, str]] = []
    for name, value in options.given:
        if name == "--override-tensor" and value is not None:
            for clause in re.split(r"[;,]" if program == "llama-bench" else ",", value):
                regex, equals, device = clause.partition("=")
                if not equals:
                    raise UsageError(
                        f"--override-tensor {clause}: the device is missing", hint="use PATTERN=CPU or PATTERN=CUDA0"
                    )
                clauses.append((regex, device))
        elif name == "--cpu-moe":
            clauses.append((_ALL_EXPERTS, "CPU"))
        elif name == "--n-cpu-moe" and value is not None and (options.number(name) or 0) > 0:
            clauses.append((rf"blk\.({layers_regex(range(options.number(name) or 0))}){_ALL_EXPERTS}", "CPU"))
    return tuple(clauses)


def _margins(options: ProgramOptions) -> tuple[int, ...]:
    text = options.last("--fit-margin") or options.last("--fit-target") or ""
    if not re.fullmatch(r"[\d,/]*", text):
        raise UsageError(f"fit margin {text}: not a number of MiB", hint="check the command")
    return tuple(int(part) for part in re.split(r"[,/]+", text) if part)


def _applied_margins(options: ProgramOptions, written: tuple[int, ...], *, fork: bool) -> tuple[int, ...]:
    """Margins that the engine applies: ik_llama.cpp reads one number, and others per GPU from a separate flag."""
    if not fork:
        return tuple(margin * MIB for margin in written)
    per_gpu = [int(number) for number in re.findall(r"\d+", options.last("--gpu-fit-margin") or "")]
    if not per_gpu:
        return tuple(margin * MIB for margin in written[:1])
    each = [written[0] if written else DEFAULT_MARGIN_MIB] * MAX_GPUS
    for gpu, margin in zip(per_gpu[::2], per_gpu[1::2], strict=False):
        each[min(gpu, MAX_GPUS - 1)] = margin
    return tuple(margin * MIB for margin in each)


def _ik_options(options: ProgramOptions, engine: DialectName) -> IkOptions | None:
    """ik_llama.cpp's options if the command sets any; None: the defaults of its version."""
    set_flags = (
        "--mla-use",
        "--attention-max-batch",
        "--fused-moe",
        "--no-fused-moe",
        "-no-fmoe",
        "--run-time-repack",
        "--merge-up-gate-experts",
        "--smart-expert-reduction",
    )
    if not options.has(*set_flags):
        return None
    base = TRAITS[engine].ik or IkOptions()
    mla = options.number("--mla-use")
    amb = options.number("--attention-max-batch")
    return replace(
        base,
        mla=base.mla if mla is None else mla,
        amb_mib=base.amb_mib if amb is None else amb,
        fmoe=base.fmoe and not options.has("--no-fused-moe", "-no-fmoe"),
        muge=options.has("--merge-up-gate-experts"),
        rtr=options.has("--run-time-repack"),
        experts_used=_experts_used(options),
    )


def _experts_used(options: ProgramOptions) -> int | None:
    """The first number of -ser: experts per token."""
    text = options.last("--smart-expert-reduction")
    return None if text is None or not text.split(",")[0].isdigit() else int(text.split(",")[0])


def _gpus(found: Unwrapped, options: ProgramOptions) -> tuple[int, ...] | None:
    """Indices of the visible GPUs; None if neither environment nor command restricts them."""
    visible = found.env.get("CUDA_VISIBLE_DEVICES") or found.env.get("HIP_VISIBLE_DEVICES")
    seen = tuple(map(int, visible.split(","))) if visible and re.fullmatch(r"\d+(,\d+)*", visible) else None
    chosen = [int(number) for number in re.findall(r"(?:CUDA|ROCm)(\d+)", options.last("--device") or "")]
    if options.last("--split-mode") == "none":
        chosen = [options.number("--main-gpu") or 0]
    if not chosen:
        return seen
    return tuple(seen[index] for index in chosen if index < len(seen)) if seen else tuple(chosen)


def _cache_ram(options: ProgramOptions, program: Program) -> int:
    if program != "llama-server":
        return 0
    asked = options.number("--cache-ram")
    return (DEFAULT_CACHE_RAM_MIB if asked is None or asked < 0 else asked) * MIB


def _mmap(options: ProgramOptions, engine: DialectName) -> bool:
    mode = options.last("--load-mode")
    if mode is not None:
        return mode.startswith(("mmap", "auto"))
    if family(engine) == "ik_llama" and options.has("--run-time-repack", "--merge-qkv", "--merge-up-gate-experts"):
        return False
    return not options.has("--no-mmap", "--direct-io") and options.switched_on("--mmap", default=True)


def _repack(options: ProgramOptions, engine: DialectName) -> bool:
    if family(engine) == "ik_llama":
        return options.has("--run-time-repack")
    return not options.has("--no-repack") and options.switched_on("--repack", default=True)


def _read_vllm(found: Unwrapped, options: ProgramOptions) -> ReadCommand:
    cache = options.last("--kv-cache-dtype") or "auto"
    context = _at_least_one(options, "--max-model-len")
    sequences = _at_least_one(options, "--max-num-seqs")
    goal = Goal(
        context=context,
        sequences=sequences,
        engine="vllm",
        cache_type_k=None if cache == "auto" else cache,
        cache_type_v=None if cache == "auto" else cache,
        batch=_at_least_one(options, "--max-num-batched-tokens"),
        cpu_only=options.last("--device") == "cpu" or bool(found.container and not found.container.gpus),
        gpus=_gpus(found, options),
        gpu_memory_utilization=_share(options.last("--gpu-memory-utilization") or "0.9", "--gpu-memory-utilization"),
        tensor_parallel=_at_least_one(options, "--tensor-parallel-size") or 1,
    )
    model = options.last("--model") or next(iter(options.positional), None)
    return ReadCommand(
        program="vllm",
        engine="vllm",
        model=model,
        alias=options.last("--served-model-name"),
        goal=goal,
        slots=sequences or 1,
        slot_tokens=context,
        unified=True,
        gpu_layers=None,
        tensor_split=(),
        overrides=(),
        cpu_moe_layers=None,
        fit=None,
        fit_margins_mib=(),
        host=options.last("--host"),
        port=options.number("--port"),
        options=options,
        unknown=(),
        env=found.env,
        numactl=found.numactl,
        container=found.container,
    )
