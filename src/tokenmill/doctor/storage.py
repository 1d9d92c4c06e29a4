"""Checks of the models' disk: load time, kind of storage, and how much of the model is cached."""

import shlex

from tokenmill.doctor.check_result import CheckResult, Remedy
from tokenmill.doctor.facts import Facts
from tokenmill.launch.binding import mapped_bytes
from tokenmill.units import format_bytes, format_gb_s, format_seconds

SLOW_S = 600
VERY_SLOW_S = 1800
COLD = 0.05  # of the files
COLD_S = 5.0  # shorter loads are not reported
_MEASURE = Remedy("look", "tokenmill probe --measure")
_PEERS = "a published 8 x RTX 3090 machine loaded Kimi-K2.5 in an hour, its neighbours from NVMe in 3 to 5 minutes"


def disk_speed(facts: Facts) -> CheckResult | None:
    """How long a cold load takes from this disk."""
    model = facts.model
    disk = facts.machine.disk
    if model is None or (disk is not None and disk.kind == "memory"):
        return None
    size = model.file_bytes or model.plan.profile.bytes
    if model.disk_gb_s is None:
        return CheckResult(
            "disk-speed",
            "unknown",
            f"the disk's rate is not known; the model has {format_bytes(size)}",
            "a cold load takes as long as reading it",
            remedies=(_MEASURE,),
        )
    seconds = size / model.disk_gb_s / 1e9
    how = "measured" if model.disk_measured else "stated"
    seen = f"a cold load takes {format_seconds(seconds)}: {format_bytes(size)} at {format_gb_s(model.disk_gb_s)}, {how}"
    if seconds < SLOW_S:
        return CheckResult("disk-speed", "fine", seen)
    device = f"sudo smartctl -a {disk.device}" if disk is not None and disk.device else "sudo smartctl -a /dev/..."
    return CheckResult(
        "disk-speed",
        "problem" if seconds >= VERY_SLOW_S else "advice",
        seen,
        f"every start without a warm page cache waits for it: {_PEERS}",
        remedies=(
            _MEASURE,
            Remedy("look", device, note="an old or overheated disk slows down"),
            Remedy("by hand", "keep the model on NVMe; the page cache survives an engine's restart"),
        ),
    )


def file_system(facts: Facts) -> CheckResult | None:
    """What kind of file system the models lie on."""
    disk = facts.machine.disk
    if disk is None:
        return None
    where = facts.model.paths[0].parent if facts.model and facts.model.paths else disk.path
    kind = disk.filesystem
    if kind is None:
        return CheckResult(
            "file-system",
            "unknown",
            f"what {where} lies on is not known",
            remedies=(Remedy("look", f"findmnt --target {shlex.quote(str(where))}"),),
        )
    if disk.kind == "network":
        return CheckResult(
            "file-system",
            "advice",
            f"{where} is on another machine ({kind})",
            "a mapped model is read in small pieces with a round trip for each, and stalls when the network does",
            remedies=(
                Remedy("for good", f"cp -r {shlex.quote(str(where))} /local/disk/"),
                Remedy("now", f"{facts.planning} --no-mmap", note="reads it in order instead"),
            ),
        )
    if kind == "overlay":
        return CheckResult(
            "file-system",
            "advice",
            f"{where} is in a container's own layer (overlay)",
            "the model is lost with the container, and its first write copies all of it",
            remedies=(Remedy("for good", "podman run -v /srv/models:/models:ro ..."),),
        )
    if kind == "zfs":
        return CheckResult(
            "file-system",
            "advice",
            f"{where} is on ZFS",
            "ZFS caches files in memory of its own (ARC) beside the page cache, so a mapped model may be held twice",
            "OpenZFS documentation, Module Parameters, zfs_arc_max",
            (
                Remedy("now", f"{facts.planning} --no-mmap"),
                Remedy("for good", "sudo zfs set primarycache=metadata POOL/DATASET"),
            ),
        )
    return CheckResult("file-system", "fine", f"{where} is on {kind}" + (f", {disk.kind}" if disk.kind else ""))


def page_cache(facts: Facts) -> CheckResult | None:
    """How much of a mapped model is in memory before anyone asks for it."""
    model = facts.model
    if model is None or not model.paths or mapped_bytes(model.plan) == 0:
        return None
    total = model.file_bytes
    cached = model.cached_bytes
    if total is None or cached is None:
        seen = "how much of the model is in memory is told only to who owns its files or may write them"
        return CheckResult("page-cache", "unknown", seen)
    cold = total - cached
    seconds = None if model.disk_gb_s is None else cold / model.disk_gb_s / 1e9
    seen = f"{format_bytes(cached)} of the model's {format_bytes(total)} are in memory"
    if cold <= COLD * total or (seconds is not None and seconds < COLD_S):
        return CheckResult("page-cache", "fine", seen)
    wait = "" if seconds is None else f": reading the rest takes {format_seconds(seconds)}"
    files = " ".join(shlex.quote(str(path)) for path in model.paths[:1])
    if len(model.paths) > 1:
        files = shlex.quote(str(model.paths[0].parent)) + "/*.gguf"
    return CheckResult(
        "page-cache",
        "advice",
        f"{seen}{wait}",
        "the first request after a start pays for it, page by page; engines that tokenmill starts are warmed first",
        remedies=(Remedy("now", f"cat {files} > /dev/null"),),
    )
