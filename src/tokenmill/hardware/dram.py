"""Ordinary memory: what the kernel can use, made of which modules, on how many channels, how fast.

Channels are counted only where the locators name them; a board that just numbers its slots leaves them unknown.
"""

import re
from collections import Counter
from collections.abc import Sequence

from tokenmill.hardware.dmi import Module
from tokenmill.hardware.machine import Dimm, Dram, Note

# How board makers name a channel: group c, with whatever tells sockets or controllers apart in group s.
_NAMINGS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?P<s>(?:P|CPU|PROC)\d+)[-_ ](?:MC\d[-_ ])?(?:DIMM[-_ ]?)?(?P<c>[A-Z])\d?",  # P1-DIMMA1, CPU1_DIMM_A1
        r"DIMM[-_ ](?P<s>P\d+)[-_ ](?P<c>[A-Z])\d?",  # DIMM_P0_A0
        r"(?P<s>CPU\d+)[-_ ]C(?P<c>\d+)D\d+",  # CPU0_C1D0
        r"(?:DIMM|DDR\d)[-_ ]?(?P<c>[A-Z])\d?",  # DIMMA1, DIMM_A1, DDR4_A1
        r"(?P<s>.*?)CHANNEL[-_ ]?(?P<c>[A-Z](?:/[A-Z])?|\d+)(?:[-_ ].*)?",  # P0 CHANNEL A, P0_Node0_Channel1_Dimm0
    )
)
_CHANNEL_BITS = 64  # of data; narrower devices (LPDDR) are counted differently by every firmware


def make_dram(
    total_bytes: int | None, available_bytes: int | None, slots: Sequence[Module] | None, *, virtual: bool = False
) -> tuple[Dram, list[Note]]:
    """Join what the kernel and the firmware say."""
    if slots is None:
        return Dram(total_bytes, available_bytes), []
    modules = [slot for slot in slots if slot.size_bytes and not slot.is_pmem]
    kinds = {module.kind for module in modules}
    kind = kinds.pop() if len(kinds) == 1 else None
    channels, channel_notes = count_channels(modules)
    mts, speed_notes = _speed(modules)
    if virtual:
        note = "the hypervisor names the modules here; channels and speed are the host's: sudo dmidecode -t 17 there"
        channels = None
        channel_notes = [Note("dram.nominal_gb_s", note)]
        mts = None
        speed_notes = []
    dram = Dram(
        total_bytes=total_bytes,
        available_bytes=available_bytes,
        kind=kind,
        dimms=tuple(
            Dimm(
                module.locator,
                module.size_bytes or 0,
                module.kind,
                module.rated_mts,
                module.configured_mts,
                module.bank,
            )
            for module in modules
        ),
        slots=len(slots),
        channels=channels,
        mts=mts,
        nominal_gb_s=round(channels * mts * 8 / 1000, 1) if channels and mts else None,
    )
    return dram, [*channel_notes, *speed_notes]


def count_channels(modules: Sequence[Module]) -> tuple[int | None, list[Note]]:
    """Count populated channels over all sockets, from the module's own name or its bank's."""
    if not modules:
        return None, []
    odd = sorted({module.width_bits for module in modules if module.width_bits not in (None, _CHANNEL_BITS)}, key=str)
    if odd:
        return None, [
            Note(
                "dram.channels",
                f"modules of {odd[0]} data bits are not one channel each; the processor's data sheet has the bandwidth",
            )
        ]
    places = [(module.locator, module.bank or "") for module in modules]
    named = _named([locator for locator, _ in places], places=[locator for locator, _ in places])
    named = named or _named([bank for _, bank in places], places=places)
    if named is None:
        example = ", ".join(sorted({f"{locator} ({bank})" if bank else locator for locator, bank in places})[:2])
        text = f"the slot names ({example}) do not tell channels apart; the board's manual does"
        return None, [Note("dram.channels", text)]
    return len(named), []


def _named(names: list[str], *, places: Sequence[object]) -> set[tuple[str, str]] | None:
    """Return the channels if one naming explains every module, and every place is named once."""
    if len(set(places)) < len(places):
        return None
    for naming in _NAMINGS:
        matches = [naming.fullmatch(name.strip()) for name in names]
        if all(matches):
            groups = [match.groupdict() for match in matches if match]
            return {((group.get("s") or "").upper(), group["c"].upper()) for group in groups}
    return None


def _speed(modules: Sequence[Module]) -> tuple[int | None, list[Note]]:
    """The slowest module sets the pace of all; say where speed is left unused."""
    configured = Counter(module.configured_mts for module in modules if module.configured_mts)
    rated = [module.rated_mts for module in modules if module.rated_mts]
    if not configured:
        text = (
            f"the firmware states {min(rated)} MT/s as the rating, but not the speed in use"
            if rated
            else ("the firmware states no memory speed")
        )
        return None, [Note("dram.mts", f"{text}; its setup screen shows it")] if modules else []
    slowest = min(configured)
    notes = []
    if len(configured) > 1:
        spread = ", ".join(f"{count} at {mts} MT/s" for mts, count in sorted(configured.items()))
        notes.append(Note("dram.mts", f"mixed speeds ({spread}): the lowest is taken"))
    if rated and min(rated) > slowest:
        why = "two modules a channel, the processor's limit, or a profile (XMP, EXPO) not chosen in the firmware"
        notes.append(Note("dram.mts", f"the modules are rated for {min(rated)} MT/s and run at {slowest}: {why}"))
    return slowest, notes
