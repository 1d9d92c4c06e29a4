"""Checks of the disk that holds the models: load time, file system, and cached share of the model."""

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
_PEERS = "a published 8 x RTX 3090 machine loaded Kimi-K2.5 in an hour, similar ones from NVMe in 3 to 5 minutes"


def disk_speed(facts: Facts) -> CheckResult | None:
    """The time of a cold load from this disk."""
    model = facts.model
    disk = facts.machine.disk
    if model is None or (disk is not None and disk.kind == "memory"):
        return None
    size = model.file_bytes or model.plan.profile.bytes
    if model.disk_gb_s is None:
        return CheckResult(
            "disk-speed",
            "unknown",
            f"the disk's rate is unknown; the model has {format_bytes(size)}",
            "a cold load takes as long as reading the model from disk",
            remedies=(_MEASURE,),
        )
    seconds = size / model.disk_gb_s / 1e9
    how = "measured" if model.disk_measured else "nominal"
    seen = f"a cold load takes {format_seconds(seconds)}: {format_bytes(size)} at {format_gb_s(model.disk_gb_s)}, {how}"
    if seconds < SLOW_S:
        return CheckResult("disk-speed", "fine", seen)
    device = f"sudo smartctl -a {disk.device}" if disk is not None and disk.device else "sudo smartctl -a /dev/..."
    return CheckResult(
        "disk-speed",
        "problem" if seconds >= VERY_SLOW_S else "advice",
        seen,
        f"every start with a cold page cache waits for the disk: {_PEERS}",
        remedies=(
            _MEASURE,
            Remedy("look", device, note="shows wear and temperature, which slow a disk down"),
            Remedy("by hand", "move the model to NVMe; restarts of an engine read from the page cache"),
        ),
    )


def file_system(facts: Facts) -> CheckResult | None:
    """The file system that holds the models."""
    disk = facts.machine.disk
    if disk is None:
        return None
    where = facts.model.paths[0].parent if facts.model and facts.model.paths else disk.path
    kind = disk.filesystem
    if kind is None:
        return CheckResult(
            "file-system",
            "unknown",
            f"the file system of {where} is unknown",
            remedies=(Remedy("look", f"findmnt --target {shlex.quote(str(where))}"),),
        )
    if disk.kind == "network":
        return CheckResult(
            "file-system",
            "advice",
            f"{where} is on a network file system ({kind})",
            "a mapped model is read in small pieces with a network round trip each, and stalls with the network",
            remedies=(
                Remedy("for good", f"cp -r {shlex.quote(str(where))} /local/disk/"),
                Remedy("now", f"{facts.planning} --no-mmap", note="reads the file sequentially instead"),
            ),
        )
    if kind == "overlay":
        return CheckResult(
            "file-system",
            "advice",
            f"{where} is in the container's writable layer (overlay)",
            "the model is deleted with the container, and the first write copies all of it",
            remedies=(Remedy("for good", "podman run -v /srv/models:/models:ro ..."),),
        )
    if kind == "zfs":
        return CheckResult(
            "file-system",
            "advice",
            f"{where} is on ZFS",
            "ZFS has a cache (ARC) in addition to the page cache, so a mapped model may be in memory twice",
            "OpenZFS documentation, Module Parameters, zfs_arc_max",
            (
                Remedy("now", f"{facts.planning} --no-mmap"),
                Remedy("for good", "sudo zfs set primarycache=metadata POOL/DATASET"),
            ),
        )
    return CheckResult("file-system", "fine", f"{where} is on {kind}" + (f", {disk.kind}" if disk.kind else ""))


def page_cache(facts: Facts) -> CheckResult | None:
    """The share of a mapped model that is in the page cache before the start."""
    model = facts.model
    if model is None or not model.paths or mapped_bytes(model.plan) == 0:
        return None
    total = model.file_bytes
    cached = model.cached_bytes
    if total is None or cached is None:
        seen = "only the owner of the model's files can see how much of them is in memory"
        return CheckResult("page-cache", "unknown", seen)
    cold = total - cached
    seconds = None if model.disk_gb_s is None else cold / model.disk_gb_s / 1e9
    seen = f"{format_bytes(cached)} of the model's {format_bytes(total)} are in the page cache"
    if cold <= COLD * total or (seconds is not None and seconds < COLD_S):
        return CheckResult("page-cache", "fine", seen)
    wait = "" if seconds is None else f"; reading the rest takes {format_seconds(seconds)}"
    files = " ".join(shlex.quote(str(path)) for path in model.paths[:1])
    if len(model.paths) > 1:
        files = shlex.quote(str(model.paths[0].parent)) + "/*.gguf"
    return CheckResult(
        "page-cache",
        "advice",
        f"{seen}{wait}",
        "the first requests after a start wait for the disk; tokenmill warms the engines it starts before that",
        remedies=(Remedy("now", f"cat {files} > /dev/null"),),
    )
