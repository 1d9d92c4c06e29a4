"""Finds problems in a command before the model is loaded.

Uses the command alone; `machine_findings` adds checks against a machine and a model. Each check is a small function
that yields findings.
"""

import re
from collections.abc import Iterable, Iterator

from tokenmill.launch.flag_sets import FlagSet
from tokenmill.launch.parse.parsed import Finding, ReadCommand
from tokenmill.launch.speculation import draft_model
from tokenmill.units import format_bytes

SMALL_UBATCH = 512
GOOD_UBATCH = 2048
CLIFF_SEQUENCES = 32
_ORDER = {"error": 0, "warning": 1, "note": 2}


def by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort by severity and remove duplicates."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: _ORDER[finding.severity]))


def findings_in(read: ReadCommand, flags: FlagSet, unset: tuple[str, ...]) -> tuple[Finding, ...]:
    """All findings from the command alone, sorted."""
    return by_severity(_all(read, flags, unset))


def _all(read: ReadCommand, flags: FlagSet, unset: tuple[str, ...]) -> Iterator[Finding]:
    yield from _words(read, flags, unset)
    yield from _exposed(read)
    yield from _locked(read)
    if read.engine == "vllm":
        return
    yield from _fit(read)
    yield from _uneven_experts(read)
    yield from _batches(read)
    yield from _slots(read)
    yield from _cache(read)
    yield from _loading(read)
    yield from _drafts(read)


def _drafts(read: ReadCommand) -> Iterator[Finding]:
    model = draft_model(read.options)
    if model is not None:
        yield Finding(
            "warning",
            f"the memory of the draft model {model} is not counted",
            "plan it with tokenmill plan MODEL --draft-model FILE",
        )


def _words(read: ReadCommand, flags: FlagSet, unset: tuple[str, ...]) -> Iterator[Finding]:
    for flag in read.unknown:
        yield Finding("error", f"{flags.version} has no flag {flag}", flags.instead_of(flag))
    for name in unset:
        yield Finding("note", f"the command uses ${name}, which it does not set", f"add {name}=... in front of it")
    if read.model is None and not unset:
        yield Finding("warning", "the command names no model", "pass the model in addition to the command")


def _exposed(read: ReadCommand) -> Iterator[Finding]:
    if read.options.has("--api-key", "--api-key-file") or read.program not in ("llama-server", "vllm"):
        return
    if read.container is not None:
        published = read.container.all_of("publish", "p")
        open_ports = [port for port in published if not re.match(r"(127\.|\[?::1|localhost)", port)]
        if open_ports:
            yield Finding(
                "warning",
                f"-p {open_ports[0]} publishes the server on all addresses without an API key",
                f"use -p 127.0.0.1:{open_ports[0]} or --api-key",
            )
        return
    # vLLM listens on every address by default
    everywhere = read.host in ("0.0.0.0", "::") or (read.engine == "vllm" and read.host is None)  # noqa: S104
    if everywhere:
        yield Finding(
            "warning",
            "the server listens on all addresses without an API key: anyone who can reach the machine can use it",
            "use --host 127.0.0.1 or --api-key",
        )


def _locked(read: ReadCommand) -> Iterator[Finding]:
    if not read.goal.mlock:
        return
    if read.container is not None:
        limits = " ".join(read.container.all_of("ulimit"))
        if "memlock" not in limits and "privileged" not in dict(read.container.options):
            yield Finding(
                "warning",
                "mlock in a container without --ulimit memlock: locking fails after loading, reported only in the log",
                "add --ulimit memlock=-1:-1 --cap-add=IPC_LOCK",
            )
    else:
        yield Finding(
            "note", "mlock needs an unlimited memlock limit", "set ulimit -l unlimited or LimitMEMLOCK=infinity"
        )


def _fit(read: ReadCommand) -> Iterator[Finding]:
    if read.fork and read.gpu_layers is None and not read.goal.cpu_only:
        yield Finding("warning", "without -ngl, ik_llama.cpp before August 2026 does not use the GPU", "add -ngl 999")
    if read.fit:
        yield from _fit_with_placement(read)
    if not read.fit_margins_mib:
        return
    if read.fit is None and read.fork:
        yield Finding("warning", "--fit-margin does nothing without --fit", "add --fit")
    if len(read.fit_margins_mib) > 1 and read.fork:
        first = read.fit_margins_mib[0]
        others = len(read.fit_margins_mib) - 1
        per_gpu = ",".join(f"{gpu},{mib}" for gpu, mib in enumerate(read.fit_margins_mib) if mib != first)
        yield Finding(
            "warning",
            f"--fit-margin takes one number: {first} MiB applies to every GPU, the other {others} are ignored",
            f"use --fit-margin {first}"
            + (f" --gpu-fit-margin {per_gpu} (GPU, MiB; since May 2026)" if per_gpu else ""),
        )
    yield Finding(
        "note",
        "the fit margin applies while layers are placed: compute buffers that are larger than estimated use it up",
    )


def _fit_with_placement(read: ReadCommand) -> Iterator[Finding]:
    moe = read.options.has("--cpu-moe", "--n-cpu-moe")
    placing = [
        name
        for name, given in (
            ("-ngl", read.gpu_layers is not None),
            ("-ts", bool(read.tensor_split)),
            ("-ot", read.options.has("--override-tensor")),
            ("-cmoe or -ncmoe", moe),
        )
        if given
    ]
    if not placing:
        return
    if not read.fork:
        yield Finding(
            "error",
            f"--fit on has no effect with {', '.join(placing)}: llama.cpp then does not place layers itself",
            "remove one or the other",
        )
    elif read.overrides:
        yield Finding(
            "error",
            f"ik_llama.cpp does not accept --fit with {' and '.join(name for name in placing if name != '-ngl')}",
            "remove one or the other",
        )
    else:
        yield Finding("note", f"ik_llama.cpp expects {', '.join(placing)} with --fit; llama.cpp would ignore --fit")


def _uneven_experts(read: ReadCommand) -> Iterator[Finding]:
    layers = read.cpu_moe_layers
    gpus = read.named_gpus
    if layers is None or read.options.has("--cpu-moe") or gpus is None or gpus < 2:
        return
    yield Finding(
        "warning",
        f"--n-cpu-moe {layers} keeps the experts of the first {layers} layers on the host, so all others are on the "
        f"last of the {gpus} GPUs",
        "distribute them with --override-tensor, or give the first GPUs more layers with -ts",
    )


def _batches(read: ReadCommand) -> Iterator[Finding]:
    asked = read.options.number("--ubatch-size")
    ubatch = read.goal.ubatch or SMALL_UBATCH
    if asked is not None and ubatch < asked:
        yield Finding(
            "warning",
            f"-b {read.goal.batch} is smaller than -ub {asked}: micro-batches have {ubatch} tokens",
            f"use -b {asked} or more",
        )
    may_be_hybrid = read.hybrid or (read.fit is True and not read.goal.cpu_only)
    if may_be_hybrid and ubatch < SMALL_UBATCH:
        yield Finding(
            "warning",
            f"-ub {ubatch}: prefill copies the experts over PCIe every {ubatch} tokens, {GOOD_UBATCH // ubatch} times "
            f"as often as with -ub {GOOD_UBATCH}; measured on one GPU: 98 tok/s at 256, 194 at 512, 530 at 2048",
            f"use -b {GOOD_UBATCH} -ub {SMALL_UBATCH} or more, which needs a larger compute buffer",
        )
    threshold = read.env.get("GGML_OP_OFFLOAD_MIN_BATCH", "")
    floor = int(threshold) if threshold.isdigit() else 32
    if read.hybrid and not read.fork and read.slots >= CLIFF_SEQUENCES and read.slots >= floor:
        reach = f"with {read.slots} slots, a decode step reaches the {floor} rows from which llama.cpp copies host "
        moved = f"set GGML_OP_OFFLOAD_MIN_BATCH={max(128, 1 << read.slots.bit_length())}"
        if read.goal.mmap is not False:
            words = "experts to the GPU; 32 sequences were measured five times slower than 16"
            yield Finding("warning", reach + words, f"{moved}, or use --no-mmap")
        else:
            words = "experts to the GPU; from pinned memory this may be faster or slower, see the forecast"
            yield Finding("note", reach + words, f"{moved} to decode on the CPU")


def _slots(read: ReadCommand) -> Iterator[Finding]:
    whole = read.options.number("--ctx-size")
    if read.program != "llama-server":
        return
    predict = read.options.number("--predict")
    if predict is not None and predict > 0:
        yield Finding("warning", f"-n {predict} truncates every answer of the server at {predict} tokens", "remove -n")
    if read.slots > 1 and whole and not read.unified:
        yield Finding(
            "warning",
            f"-c {whole} is divided between {read.slots} slots: {read.slot_tokens} tokens each",
            f"use -c {whole * read.slots} for {whole} each",
        )
    elif read.unified and not read.options.has("--parallel"):
        yield Finding(
            "note",
            f"without -np, llama-server has {read.slots} slots that share one KV cache"
            + (f" of {whole} tokens" if whole else ""),
            "use -np 1 for one sequence",
        )
    if not whole:
        yield Finding("note", "without -c, the KV cache has the size of the model's training context", "use -c TOKENS")
    cache_ram = read.options.number("--cache-ram")
    if cache_ram is not None and cache_ram < 0:
        yield Finding(
            "warning",
            "--cache-ram -1 does not limit the host prompt cache; one server was killed at 222 GB",
            "use --cache-ram MIB",
        )
    elif cache_ram is None:
        yield Finding(
            "note",
            f"without --cache-ram, the prompt cache takes up to {format_bytes(read.goal.cache_ram_bytes)} of memory",
            "use --cache-ram MIB; 0 disables it",
        )


def _cache(read: ReadCommand) -> Iterator[Finding]:
    plain = ("f32", "f16", "bf16")
    k = (read.goal.cache_type_k or "f16").lower()
    v = (read.goal.cache_type_v or "f16").lower()
    if not read.goal.flash_attention and v not in plain:
        yield Finding("error", f"-ctv {v} needs flash attention: the engine will not start", "add --flash-attn on")
    elif not read.goal.flash_attention and k not in plain:
        yield Finding(
            "warning",
            f"-ctk {k} without flash attention saves little, because scores are not quantized",
            "add --flash-attn on",
        )
    fork_only = {"q6_0", "q8_kv"} & {k, v}
    if fork_only and not read.fork:
        yield Finding(
            "error", f"llama.cpp has no cache type {', '.join(sorted(fork_only))}", "use q8_0, q5_1, q5_0, q4_1 or q4_0"
        )
    narrow = {k, v} - {*plain, "q8_0", "q6_0", "q8_kv"}
    if narrow and read.fork:
        yield Finding(
            "note", f"cache type {', '.join(sorted(narrow))} has kernels only in a build with GGML_IQK_FA_ALL_QUANTS=ON"
        )


def _loading(read: ReadCommand) -> Iterator[Finding]:
    on_host = read.goal.cpu_only or read.hybrid
    if on_host and read.goal.repack and read.goal.mmap and not read.fork:
        yield Finding(
            "warning",
            "with mmap, weights that llama.cpp repacks are resident twice: 25.9 GB instead of 13.9 GB in one report",
            "use --no-repack or --no-mmap",
        )
    if read.options.has("--merge-up-gate-experts"):
        yield Finding(
            "warning",
            "-muge copies the experts while loading: with little free memory, the machine swaps",
            "remove -muge",
        )
