"""Plans made from a placement, without a planner."""

from tokenmill.hardware.machine import Dram, Gpu, Machine
from tokenmill.model.profile import Profile
from tokenmill.planner.goal import Goal, Speculation
from tokenmill.planner.memory.costs import MemoryCosts
from tokenmill.planner.memory.ledger import ledger
from tokenmill.planner.placement import assemble
from tokenmill.planner.plan import Forecast, Plan, Settings
from tokenmill.units import GIB


def settings(context: int = 8192, sequences: int = 1, ubatch: int = 512, cache_type: str = "f16") -> Settings:
    return Settings(
        engine="llama.cpp",
        context=context,
        sequences=sequences,
        ubatch=ubatch,
        batch=2048,
        cache_type_k=cache_type,
        cache_type_v=cache_type,
        threads=8,
        threads_batch=8,
        flash_attention=True,
        mmap=True,
        mlock=False,
        repack=True,
        cache_ram_bytes=0,
    )


def placed(profile: Profile, wanted: Settings, cards: int = 0, first: int = 0, resident: range = range(0)) -> Plan:
    """Layers from `first` on over `cards` equal GPUs, with the experts of `resident` layers; the rest on the host."""
    machine = Machine(
        "test", dram=Dram(total_bytes=1024 * GIB), gpus=tuple(Gpu(index, "card") for index in range(cards))
    )
    count = profile.layers
    layers = [
        f"gpu{(layer - first) * cards // (count - first)}" if cards and layer >= first else "dram"
        for layer in range(count)
    ]
    placement = assemble(profile, "dram", layers, layers[-1], frozenset(resident), predicts=wanted.mtp)
    drafts = Speculation(wanted.draft_tokens or 0) if wanted.mtp else None
    goal = Goal(context=wanted.context, speculation=drafts)
    accounted = ledger(machine, MemoryCosts(profile, wanted), placement, goal)
    return Plan(machine, profile, goal, wanted, placement, accounted, Forecast((), (), None, None, None), ())
