"""Compute buffers of ik_llama.cpp against published logs, in MiB."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.ik import minimax_m2, model, settings
from tokenmill.model.profile import Profile
from tokenmill.planner.compute_graph.ik_attention import Latent
from tokenmill.planner.compute_graph.ik_memory import ik_compute_bytes, ik_cpu_compute_bytes, ik_host_compute_bytes
from tokenmill.planner.compute_graph.ik_options import IK_2025, IkOptions
from tokenmill.units import MIB

PAGE = 0.02  # MiB; the last GPU receives its output ids earlier than in the graph


@dataclass(frozen=True, slots=True)
class Published:
    """One log: where it is from, what ran, and the buffers it shows."""

    source: str
    model: str
    types: dict[str, str]
    context: int
    ubatch: int
    layers: tuple[int, ...]  # of each card
    options: IkOptions
    gpus_mib: tuple[float, ...]
    host_mib: float
    resident: tuple[int, ...] = ()  # layers whose experts are on a card


AMB_512 = replace(IK_2025, amb_mib=512)
LOGS = (
    Published(
        "ik#756",
        "kimi-k2.5:Q8_0",
        {"experts": "IQ4_XS"},
        131072,
        4096,
        (10, 15, 19, 17),
        AMB_512,
        (9032.02, 7376.02, 7376.02, 7376.03),
        2160.05,
        resident=(3, 4, 5, 6),
    ),
    Published(
        "ik#733",
        "kimi-k2.5:Q8_0",
        {"up": "IQ3_KS", "gate": "IQ3_KS", "down": "IQ4_KS"},
        131072,
        4096,
        (13, 48),
        replace(AMB_512, fmoe=False),
        (9032.02, 7376.03),
        2160.05,
    ),
    Published("ik#616", "kimi-k2.5:Q8_0", {"experts": "IQ3_XXS"}, 2048, 512, (31, 30), AMB_512, (263.0, 334.0), 162.01),
    Published(
        "ik discussion 258",
        "deepseek-v3:Q8_0",
        {"experts": "IQ2_K_R4"},
        153600,
        4096,
        (21, 21, 19),
        AMB_512,
        (16257.02, 14157.02, 14157.02),
        2512.05,
    ),
    Published(
        "ik discussion 718",
        "deepseek-v3:Q8_0",
        {"experts": "Q6_K"},
        163840,
        4096,
        (13, 25, 23),
        AMB_512,
        (17512.02, 14992.02, 14992.03),
        2672.05,
    ),
    Published(
        "ik discussion 715",
        "deepseek-v3:Q8_0",
        {"experts": "Q5_K"},
        114688,
        8192,
        (24, 37),
        AMB_512,
        (15840.03, 12432.03),
        3808.09,
    ),
    Published(
        "ik#370",
        "qwen3-235b-a22b:Q8_0",
        {},
        32768,
        512,
        (94,),
        replace(IK_2025, rtr=True),
        (312.75,),
        128.01,
        resident=tuple(range(14)),
    ),
)


def shares(counts: Sequence[int]) -> list[range]:
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def computes(profile: Profile, log: Published) -> list[float]:
    asked = settings(log.context, log.ubatch)
    return [
        ik_compute_bytes(
            profile,
            asked,
            layers,
            head=layers.stop == profile.layers,
            first=layers.start == 0,
            staged=[layer for layer in layers if layer not in log.resident],
            options=log.options,
        )
        / MIB
        for layers in shares(log.layers)
    ]


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.source)
def test_buffers_of_the_log(log: Published) -> None:
    profile = model(log.model, **log.types)
    assert computes(profile, log) == pytest.approx(log.gpus_mib, abs=PAGE)
    host = ik_host_compute_bytes(profile, settings(log.context, log.ubatch), options=log.options)
    assert host / MIB == pytest.approx(log.host_mib, abs=PAGE)


def test_without_a_gpu() -> None:
    """R1 on a Xeon 6980P, `-c 16896 -ub 512 -mla 3 -amb 1024 -ctk q8_0` (ik#287)."""
    options = replace(IK_2025, amb_mib=1024)
    asked = ik_cpu_compute_bytes(model("deepseek-v3:Q8_0"), settings(16896, 512), options=options)
    assert asked / MIB == pytest.approx(1383.76, abs=PAGE)


def test_minimax_with_experts_copied_to_the_gpu() -> None:
    """`-ub 2048 -c 65536`, experts in host memory: 1990 MiB (loftllc.dev, February 2026)."""
    profile, every = minimax_m2("IQ5_K"), range(62)
    asked = ik_compute_bytes(profile, settings(65536, 2048, "f16"), every, head=True, first=True, staged=every)
    assert asked / MIB == pytest.approx(1990, abs=0.5)


def test_glm_on_the_host() -> None:
    """The mask is in 16 bits since autumn 2025 (ik#893); the GPU's buffer depends on an unpublished mix."""
    asked = ik_host_compute_bytes(model("glm-4.5:Q8_0"), settings(65536, 4096, "iq4_nl"))
    assert asked / MIB == pytest.approx(592.05, abs=PAGE)


@pytest.mark.parametrize(("amb_mib", "share"), [(0, 1), (2048, 4), (512, 16), (256, 32)])
def test_amb_bounds_the_buffer(amb_mib: int, share: int) -> None:
    """Kimi at 100 K and `-ub 256`: 6400 MiB in 32 bits, half as much in 16, and rope of each head, by groups."""
    layers = range(8, 16)
    asked = ik_compute_bytes(
        model("kimi-k2.5:Q4_X"),
        settings(102400, 256, "q6_0"),
        layers,
        head=False,
        first=False,
        staged=layers,
        options=IkOptions(amb_mib=amb_mib),
    )
    ropes = 800 / share if share > 1 else 0  # made after the only group, before the second of several
    assert asked / MIB == pytest.approx(6400 * 1.5 / share + ropes + 130, abs=30)


def test_short_batches_and_mla_1_stay_in_the_latent_space() -> None:
    profile, layers = model("kimi-k2.5:Q4_X"), range(8, 16)

    def asked(ubatch: int, mla: int) -> int:
        return ik_compute_bytes(
            profile,
            settings(102400, ubatch, "q6_0"),
            layers,
            head=False,
            first=False,
            options=IkOptions(mla=mla, amb_mib=0),
        )

    assert asked(127, 3) < asked(256, 1) < 300 * MIB
    assert asked(128, 3) > 9000 * MIB


def test_more_context_never_takes_less() -> None:
    profile, layers = model("kimi-k2.5:Q4_X"), range(8, 12)
    asked = [
        ik_compute_bytes(profile, settings(context, 512), layers, head=False, first=False, options=IkOptions(amb_mib=0))
        for context in range(8192, 131073, 8192)
    ]
    assert asked == sorted(asked)


@given(st.integers(1, 128), st.integers(1, 1024), st.integers(0, 4096))
def test_head_groups_divide_the_heads_and_keep_the_bound(heads: int, kilocells: int, amb_mib: int) -> None:
    latent = Latent(heads, 128, 64, 128, 512)
    together = latent.heads_per_group(kilocells * 1024, amb_mib)
    assert heads % together == 0
    if amb_mib and together > 1:
        # the engine compares whole MiB, rounded down twice
        assert together * latent.expanded * kilocells * 1024 * 4 < (amb_mib + 2) * MIB
