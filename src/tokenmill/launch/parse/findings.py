"""Finds problems in a command before the model is loaded.

Uses the command alone; `machine_findings` adds checks against a machine and a model. Each check is a small function
that yields findings.
"""

import re
from collections.abc import Iterable, Iterator

from tokenmill.launch.flag_sets import FlagSet
from tokenmill.launch.parse.parsed import Finding, ReadCommand
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
    yield from _piled_up(read)
    yield from _batches(read)
    yield from _slots(read)
    yield from _cache(read)
    yield from _loading(read)


def _words(read: ReadCommand, flags: FlagSet, unset: tuple[str, ...]) -> Iterator[Finding]:
    for flag in read.unknown:
        yield Finding("error", f"{flags.version} has no flag {flag}", flags.instead_of(flag))
    for name in unset:
        yield Finding("note", f"the command uses ${name}, which it does not set", f"write {name}=... in front of it")
    if read.model is None and not unset:
        yield Finding("warning", "the command names no model", "name it beside the command")


def _exposed(read: ReadCommand) -> Iterator[Finding]:
    if read.options.has("--api-key", "--api-key-file") or read.program not in ("llama-server", "vllm"):
        return
    if read.container is not None:
        published = read.container.all_of("publish", "p")
        open_ports = [port for port in published if not re.match(r"(127\.|\[?::1|localhost)", port)]
        if open_ports:
            yield Finding(
                "warning",
                f"-p {open_ports[0]} publishes the server on every address, and it asks for no API key",
                f"-p 127.0.0.1:{open_ports[0]}, or --api-key",
            )
        return
    # vLLM listens on every address by default
    everywhere = read.host in ("0.0.0.0", "::") or (read.engine == "vllm" and read.host is None)  # noqa: S104
    if everywhere:
        yield Finding(
            "warning",
            "the server listens on every address and asks for no API key: anyone who reaches the machine can use it",
            "--host 127.0.0.1, or --api-key",
        )


def _locked(read: ReadCommand) -> Iterator[Finding]:
    if not read.goal.mlock:
        return
    if read.container is not None:
        limits = " ".join(read.container.all_of("ulimit"))
        if "memlock" not in limits and "privileged" not in dict(read.container.options):
            yield Finding(
                "warning",
                "mlock in a container without a memlock limit: the lock fails after loading, with "
                "nothing but a line in the log",
                "--ulimit memlock=-1:-1 --cap-add=IPC_LOCK",
            )
    else:
        yield Finding("note", "mlock needs an unlimited memlock limit", "ulimit -l unlimited, or LimitMEMLOCK=infinity")


def _fit(read: ReadCommand) -> Iterator[Finding]:
    if read.fork and read.gpu_layers is None and not read.goal.cpu_only:
        yield Finding("warning", "without -ngl ik_llama.cpp before August 2026 puts nothing on a GPU", "-ngl 999")
    if read.fit:
        yield from _fit_beside_placement(read)
    if not read.fit_margins_mib:
        return
    if read.fit is None and read.fork:
        yield Finding("warning", "--fit-margin does nothing without --fit", "add --fit")
    if len(read.fit_margins_mib) > 1 and read.fork:
        first = read.fit_margins_mib[0]
        others = len(read.fit_margins_mib) - 1
        apart = ",".join(f"{gpu},{mib}" for gpu, mib in enumerate(read.fit_margins_mib) if mib != first)
        yield Finding(
            "warning",
            f"--fit-margin takes one number: {first} MiB for every GPU, and the {others} behind its comma are not read",
            f"--fit-margin {first}" + (f" --gpu-fit-margin {apart} (GPU, MiB; since May 2026)" if apart else ""),
        )
    yield Finding(
        "note",
        "the fit margin is kept free while layers are handed out, not after everything is allocated: "
        "compute buffers that were guessed too small come out of it",
    )


def _fit_beside_placement(read: ReadCommand) -> Iterator[Finding]:
    moe = read.options.has("--cpu-moe", "--n-cpu-moe")
    beside = [
        name
        for name, given in (
            ("-ngl", read.gpu_layers is not None),
            ("-ts", bool(read.tensor_split)),
            ("-ot", read.options.has("--override-tensor")),
            ("-cmoe or -ncmoe", moe),
        )
        if given
    ]
    if not beside:
        return
    if not read.fork:
        yield Finding(
            "error",
            f"--fit on beside {', '.join(beside)}: llama.cpp places nothing itself once any of them "
            "is given, so fit has no effect",
            "keep --fit, or keep the placement with --fit off",
        )
    elif read.overrides:
        yield Finding(
            "error",
            f"--fit beside {' and '.join(name for name in beside if name != '-ngl')}: "
            "ik_llama.cpp does not take them together",
            "keep one of them",
        )
    else:
        yield Finding("note", f"{', '.join(beside)} beside --fit is what ik_llama.cpp expects; llama.cpp would not fit")


def _piled_up(read: ReadCommand) -> Iterator[Finding]:
    layers = read.cpu_moe_layers
    gpus = read.named_gpus
    if layers is None or read.options.has("--cpu-moe") or gpus is None or gpus < 2:
        return
    yield Finding(
        "warning",
        f"--n-cpu-moe {layers} keeps the experts of the first {layers} layers on the host, so the "
        f"resident ones pile up on the last of the {gpus} GPUs",
        "spread them with --override-tensor, or weigh -ts towards the first GPUs",
    )


def _batches(read: ReadCommand) -> Iterator[Finding]:
    asked = read.options.number("--ubatch-size")
    ubatch = read.goal.ubatch or SMALL_UBATCH
    if asked is not None and ubatch < asked:
        yield Finding(
            "warning",
            f"-b {read.goal.batch} is smaller than -ub {asked}: micro-batches are {ubatch} tokens",
            f"-b {asked} or more",
        )
    may_be_hybrid = read.hybrid or (read.fit is True and not read.goal.cpu_only)
    if may_be_hybrid and ubatch < SMALL_UBATCH:
        yield Finding(
            "warning",
            f"-ub {ubatch}: a prompt's experts cross PCIe once every {ubatch} tokens, {GOOD_UBATCH // ubatch} times as "
            f"often as with -ub {GOOD_UBATCH}; one measured card prefilled 98 tok/s at 256, 194 at 512, 530 at 2048",
            f"-b {GOOD_UBATCH} -ub {SMALL_UBATCH} or more, and give the compute buffer its room",
        )
    threshold = read.env.get("GGML_OP_OFFLOAD_MIN_BATCH", "")
    floor = int(threshold) if threshold.isdigit() else 32
    if read.hybrid and not read.fork and read.slots >= CLIFF_SEQUENCES and read.slots >= floor:
        reach = f"{read.slots} slots reach the batch of {floor} rows from which llama.cpp copies host "
        moved = f"GGML_OP_OFFLOAD_MIN_BATCH={max(128, 1 << read.slots.bit_length())}"
        if read.goal.mmap is not False:
            words = "experts to the GPU at every decoding step; 32 sequences were measured five times slower than 16"
            yield Finding("warning", reach + words, f"{moved}, or load without mmap")
        else:
            words = (
                "experts to the GPU at every decoding step; from pinned memory that may pay, or not: see the forecast"
            )
            yield Finding("note", reach + words, f"{moved} leaves decoding to the processors")


def _slots(read: ReadCommand) -> Iterator[Finding]:
    whole = read.options.number("--ctx-size")
    if read.program != "llama-server":
        return
    predict = read.options.number("--predict")
    if predict is not None and predict > 0:
        yield Finding("warning", f"-n {predict} on a server cuts every answer at {predict} tokens", "leave -n out")
    if read.slots > 1 and whole and not read.unified:
        yield Finding(
            "warning",
            f"-c {whole} is split over {read.slots} slots: {read.slot_tokens} tokens each",
            f"-c {whole * read.slots} for {whole} each",
        )
    elif read.unified and not read.options.has("--parallel"):
        yield Finding(
            "note",
            f"without -np llama-server opens {read.slots} slots over one shared cache"
            + (f" of {whole} tokens" if whole else ""),
            "-np 1 for one sequence",
        )
    if not whole:
        yield Finding("note", "without -c the cache is as long as the model's training context", "-c TOKENS")
    unlimited = read.options.number("--cache-ram")
    if unlimited is not None and unlimited < 0:
        yield Finding(
            "warning",
            "--cache-ram -1 lets the host prompt cache grow without end; one was killed at 222 GB",
            "--cache-ram MIB",
        )
    elif unlimited is None:
        yield Finding(
            "note",
            f"without --cache-ram up to {format_bytes(read.goal.cache_ram_bytes)} of host memory cache prompts",
            "--cache-ram MIB, 0 for none",
        )


def _cache(read: ReadCommand) -> Iterator[Finding]:
    plain = ("f32", "f16", "bf16")
    k = (read.goal.cache_type_k or "f16").lower()
    v = (read.goal.cache_type_v or "f16").lower()
    if not read.goal.flash_attention and v not in plain:
        yield Finding("error", f"-ctv {v} needs flash attention: the engine refuses to start", "--flash-attn on")
    elif not read.goal.flash_attention and k not in plain:
        yield Finding(
            "warning", f"-ctk {k} without flash attention saves little: scores are kept in full", "--flash-attn on"
        )
    fork_only = {"q6_0", "q8_kv"} & {k, v}
    if fork_only and not read.fork:
        yield Finding(
            "error", f"llama.cpp has no cache type {', '.join(sorted(fork_only))}", "q8_0, q5_1, q5_0, q4_1, q4_0"
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
            "weights that llama.cpp repacks for the processor stay resident twice while the file "
            "is mapped: 25.9 GB instead of 13.9 GB in one report",
            "--no-repack, or load without mmap",
        )
    if read.options.has("--merge-up-gate-experts"):
        yield Finding(
            "warning",
            "-muge builds merged copies of the experts while loading: a machine that the model "
            "nearly fills goes into swap",
            "leave -muge out",
        )
