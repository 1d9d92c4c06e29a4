"""Predicts before a download whether a model fits this machine, and its speed."""

from dataclasses import dataclass

from tokenmill.errors import ModelError, ProbeError
from tokenmill.hardware.machine import Machine
from tokenmill.hardware.probe import probe
from tokenmill.model.profile import Profile
from tokenmill.model.pull import Offer
from tokenmill.model.read import read
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make
from tokenmill.planner.plan import Plan

_CONTEXT_TOKENS = 16384


@dataclass(frozen=True, slots=True)
class DownloadOutlook:
    """Model and machine before the download; None where one could not be read."""

    profile: Profile | None
    unread: str | None  # why the profile is None
    machine: Machine | None
    context_tokens: int = _CONTEXT_TOKENS  # of the cache in `needed_bytes`

    @property
    def needed_bytes(self) -> int | None:
        """Weights and cache."""
        return self.profile.bytes + self.profile.cache_bytes(self.context_tokens) if self.profile else None

    @property
    def free_bytes(self) -> dict[str, int]:
        """Free memory by tier, without disks."""
        tiers = self.machine.tiers() if self.machine else ()
        return {tier.name: tier.free_bytes for tier in tiers if tier.kind != "disk" and tier.free_bytes is not None}

    def plan(self) -> Plan | None:
        """The plan of one sequence on this machine; None unless the machine and a GGUF header could be read."""
        profile = self.profile
        if profile is None or self.machine is None or profile.format != "gguf":
            return None
        context = min(self.context_tokens, profile.training_context or self.context_tokens)
        return make(self.machine, profile, Goal(context=context, sequences=1))


def download_outlook(offer: Offer) -> DownloadOutlook:
    """Probe this machine and read the header of an offered model, from its server unless it is on this machine."""
    profile = None
    unread = None
    try:
        source = offer.url or (offer.folder / offer.files[0] if offer.remaining_bytes == 0 else None)
        profile = read(source, headers=offer.headers) if source else None
    except ModelError as error:
        unread = error.message
    try:
        machine = probe()
    except ProbeError:
        machine = None
    return DownloadOutlook(profile, unread, machine)
