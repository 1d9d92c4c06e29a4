"""Terms, notes and computing time of forecasts."""

import time
from dataclasses import replace

import pytest

from support.run_models import model
from support.runs import all_on_cards, on_cards, on_processors, settings
from tokenmill.hardware.catalog import find
from tokenmill.hardware.machine import Cpu, Disk, Gpu, Machine, Measurements, Rate
from tokenmill.model.profile import Profile
from tokenmill.planner.compute_graph.ik_options import IkOptions
from tokenmill.planner.plan import Forecast, Speed
from tokenmill.planner.speed.forecast import Calibration, Correction, decode_speed, forecast, prefill_speed

KIMI = "kimi-k2.5:Q4_K_S"


@pytest.fixture(scope="module")
def kimi() -> Profile:
    return model(KIMI)


@pytest.fixture(scope="module")
def hybrid(kimi: Profile) -> Forecast:
    return forecast(find("epyc-9175f"), kimi, settings("llama.cpp", 13, context=131072, sequences=3), on_cards(kimi, 1))


def _there(speed: Speed | None) -> Speed:
    assert speed is not None
    return speed


def _terms(speed: Speed | None) -> dict[str, float]:
    return {term.name: term.seconds for term in _there(speed).terms}


def test_points_of_a_forecast(hybrid: Forecast) -> None:
    assert sorted({speed.depth for speed in hybrid.decode}) == [0, 32768, 65536, 131072]
    assert sorted({speed.sequences for speed in hybrid.decode}) == [1, 2, 3, 4, 8, 16, 32, 64]
    assert len(hybrid.decode) == 4 * 8
    assert (hybrid.decode[0].sequences, hybrid.decode[0].depth) == (1, 0)
    assert [speed.depth for speed in hybrid.prefill if speed.ubatch == 512] == [0, 32768, 65536]
    assert [speed.ubatch for speed in hybrid.prefill if speed.ubatch != 512] == [256, 1024, 2048, 4096]


def test_terms_add_up_to_the_speed(hybrid: Forecast) -> None:
    for speed in (*hybrid.decode, *hybrid.prefill):
        tokens = speed.sequences if speed.ubatch is None else 1
        assert speed.tok_s == pytest.approx(tokens / sum(term.seconds for term in speed.terms))
        assert all(term.seconds > 0 for term in speed.terms)


def test_terms_of_a_hybrid_give_upgrade_advice(hybrid: Forecast) -> None:
    terms = {term.name: term for term in hybrid.decode[0].terms}
    experts = terms["dram experts"]
    assert experts.bytes == pytest.approx(11.98e9, rel=0.01)  # 8 of 384 experts
    assert experts.gb_s == pytest.approx((experts.bytes or 0) / experts.seconds / 1e9)
    assert 0.6 * 614 < (experts.gb_s or 0) < 0.85 * 614
    assert {"gpu0 weights", "gpu0 launches", "processors unpacking", "hops to processors"} <= set(terms)


def test_prefill_of_a_hybrid_streams_experts_from_the_threshold_on(kimi: Profile) -> None:
    machine, chosen, placement = find("epyc-9175f"), settings("llama.cpp", 16), on_cards(kimi, 1)
    few = _terms(prefill_speed(machine, kimi, chosen, placement, depth=0, prompt=31))
    many = _terms(prefill_speed(machine, kimi, chosen, placement, depth=0, prompt=32))
    moved = _terms(prefill_speed(machine, kimi, chosen, placement, depth=0, prompt=32, min_batch=64))
    assert "pcie gpu0 experts" in many
    assert "pcie gpu0 experts" not in {**few, **moved}


@pytest.mark.parametrize(("tokens", "streams"), [(1535, False), (1536, True)])
def test_ik_offloads_by_rows_per_expert(kimi: Profile, tokens: int, streams: bool) -> None:
    chosen = settings("ik_llama", 13, ubatch=4096, mmap=False)
    speed = prefill_speed(find("epyc-9175f"), kimi, chosen, on_cards(kimi, 1), depth=0, prompt=tokens)
    assert ("pcie gpu0 experts" in _terms(speed)) is streams


def test_repacked_weights_stay_on_the_cpu(kimi: Profile) -> None:
    chosen = settings("ik_llama", 13, ubatch=4096, repack=True)
    speed = prefill_speed(find("epyc-9175f"), kimi, chosen, on_cards(kimi, 1), depth=0, prompt=4096)
    assert "pcie gpu0 experts" not in _terms(speed)


def test_a_mapped_file_streams_slower_than_pinned_memory(kimi: Profile) -> None:
    machine, placement = find("epyc-9175f"), on_cards(kimi, 1)
    mapped = _there(prefill_speed(machine, kimi, settings("llama.cpp", 16), placement, depth=0))
    pinned = _there(prefill_speed(machine, kimi, settings("llama.cpp", 16, mmap=False), placement, depth=0))
    assert pinned.tok_s > 3 * mapped.tok_s


def test_an_unknown_processor_gives_a_note_and_no_forecast(kimi: Profile) -> None:
    known = find("epyc-9175f")
    machine = replace(known, cpu=Cpu(), gpus=())
    made = forecast(machine, kimi, settings("llama.cpp", 8), on_processors(kimi))
    assert made.decode == ()
    assert any("the CPU" in note for note in made.notes)
    stated = replace(machine, cpu=Cpu(cores=16, isa=known.cpu.isa))
    assert forecast(stated, kimi, settings("llama.cpp", 8), on_processors(kimi)).decode


def test_a_card_that_is_not_listed_prefills_at_the_stated_rate() -> None:
    llama = model("llama-3.3-70b:Q4_K_M")
    card = Gpu(0, "Some Card", nominal_gb_s=1000.0)
    rates = {}
    for tflops in (None, 50.0, 100.0):
        machine = Machine("box", gpus=(replace(card, tflops=tflops),))
        rates[tflops] = prefill_speed(machine, llama, settings("llama.cpp", 8), all_on_cards(llama), depth=0)
    assert rates[None] is None
    assert _there(rates[100.0]).tok_s > 1.5 * _there(rates[50.0]).tok_s


def test_ranges_surround_the_forecast_and_recorded_runs_narrow_them(kimi: Profile) -> None:
    machine = find("epyc-9175f")
    given = (machine, kimi, settings("llama.cpp", 13), on_processors(kimi))
    plain = _there(decode_speed(*given, depth=0))
    assert plain.low_tok_s is not None
    assert plain.high_tok_s is not None
    assert plain.low_tok_s < plain.tok_s < plain.high_tok_s
    known = Calibration(decode=Correction(factor=1.2, spread=0.08, measurements=4))
    narrow = _there(decode_speed(*given, depth=0, calibration=known))
    assert narrow.low_tok_s is not None
    assert narrow.high_tok_s is not None
    assert narrow.high_tok_s / narrow.low_tok_s < plain.high_tok_s / plain.low_tok_s


def test_fewer_experts_per_token_decode_faster(kimi: Profile) -> None:
    machine = find("epyc-9175f")
    chosen = settings("ik_llama", 13)
    every = _there(decode_speed(machine, kimi, chosen, on_processors(kimi), depth=0))
    reduced = replace(chosen, ik=IkOptions(experts_used=4))
    fewer = _there(decode_speed(machine, kimi, reduced, on_processors(kimi), depth=0))
    assert fewer.tok_s > 1.2 * every.tok_s


def test_cliff_is_noted(hybrid: Forecast) -> None:
    assert any("GGML_OP_OFFLOAD_MIN_BATCH" in note for note in hybrid.notes)


def test_unknown_memory_bandwidth_gives_a_note_and_no_forecast(kimi: Profile) -> None:
    made = forecast(find("h200-1x"), kimi, settings("llama.cpp", 14), on_cards(kimi, 1))
    assert made.decode == ()
    assert any("bandwidth of dram" in note and "probe --measure" in note for note in made.notes)
    assert decode_speed(find("h200-1x"), kimi, settings("llama.cpp", 14), on_cards(kimi, 1), depth=0) is None
    # a model that is completely on the GPU does not depend on it
    oss = model("gpt-oss-120b:MXFP4_MOE")
    assert forecast(find("h200-1x"), oss, settings("llama.cpp", 14), all_on_cards(oss)).decode


def test_unknown_gpu_gives_no_forecast(kimi: Profile) -> None:
    machine = replace(find("epyc-9175f"), gpus=(Gpu(0, "Some Card"),))
    made = forecast(machine, kimi, settings("llama.cpp", 16), on_cards(kimi, 1))
    assert made.decode == made.prefill == ()
    assert any("Some Card" in note for note in made.notes)


def test_unknown_compute_rate_omits_prefill_only() -> None:
    oss = model("gpt-oss-120b:MXFP4_MOE")
    machine = Machine("made-up", gpus=(Gpu(0, "Some Card", nominal_gb_s=1000),))
    made = forecast(machine, oss, settings("llama.cpp", 8), all_on_cards(oss))
    assert made.prefill == ()
    assert made.decode[0].sequences == 1


def test_unknown_link_omits_offloaded_speeds(kimi: Profile) -> None:
    machine = find("epyc-7532-8x3090")  # the report does not contain the width of the slots
    made = forecast(machine, kimi, settings("llama.cpp", 32), on_cards(kimi, 8))
    assert {speed.sequences for speed in made.decode} == {1, 2, 4, 8, 16}
    assert made.prefill == ()
    assert any("PCIe link" in note for note in made.notes)


def test_confidence_follows_what_was_measured(kimi: Profile) -> None:
    machine, placement, chosen = find("epyc-9175f"), on_processors(kimi), settings("llama.cpp", 16)
    rated = replace(machine, measured=Measurements("2026-11-15", (Rate("dram", 480.0),)))
    plain = _there(decode_speed(machine, kimi, chosen, placement, depth=0))
    measured = _there(decode_speed(rated, kimi, chosen, placement, depth=0))
    own = Calibration({"dram": 240.0}, decode=Correction(1.1, 0.05, 3))
    recorded = _there(decode_speed(machine, kimi, chosen, placement, depth=0, calibration=own))
    assert (plain.confidence, measured.confidence, recorded.confidence) == ("estimated", "calibrated", "calibrated")
    term = next(term for term in recorded.terms if term.name == "dram experts")
    # sixteen threads could read faster, and all cores are in use
    assert term.gb_s == pytest.approx(240.0 / 1.1, rel=0.03)


def test_a_measured_curve_is_read_at_the_threads_in_use(kimi: Profile) -> None:
    curve = {1: 30.0, 8: 200.0, 16: 400.0}
    machine = replace(find("epyc-9175f"), measured=Measurements("2026-11-15", (Rate("dram", 400.0, 16, curve),)))
    rates = []
    for threads in (8, 12):
        speed = decode_speed(machine, kimi, settings("llama.cpp", threads), on_processors(kimi), depth=0)
        assert speed is not None
        rates.append(next(term.gb_s for term in speed.terms if term.name == "dram experts") or 0.0)
    assert rates[1] / rates[0] == pytest.approx(1.5)


def test_memory_mode_reports_its_assumptions(kimi: Profile) -> None:
    made = forecast(find("xeon-6246-optane"), kimi, settings("llama.cpp", 12), on_cards(kimi, 1, host="pmem"))
    assert any("DRAM cache" in note for note in made.notes)
    assert made.decode[0].tok_s == pytest.approx(4, rel=0.2)


def test_memory_mode_with_more_dram_is_faster(kimi: Profile) -> None:
    machine = find("xeon-6246-optane")
    speeds = []
    for gib in (96, 192, 384):
        bigger = replace(machine, dram=replace(machine.dram, total_bytes=gib << 30))
        speed = decode_speed(bigger, kimi, settings("llama.cpp", 12), on_cards(kimi, 1, host="pmem"), depth=0)
        assert speed is not None
        speeds.append(speed.tok_s)
    assert speeds == sorted(speeds)
    assert speeds[2] > 1.3 * speeds[0]


def test_two_sockets_are_not_twice_one() -> None:
    llama = model("llama-3.3-70b:Q4_K_M")
    one = decode_speed(find("epyc-7763"), llama, settings("llama.cpp", 64), on_processors(llama), depth=0)
    made = forecast(find("epyc-7763-dual"), llama, settings("llama.cpp", 128), on_processors(llama))
    half = decode_speed(find("epyc-7763-dual"), llama, settings("llama.cpp", 64), on_processors(llama), depth=0)
    assert one is not None
    assert half is not None
    assert 0.8 < made.decode[0].tok_s / one.tok_s < 1.5
    assert half.tok_s < made.decode[0].tok_s, "half of the threads cannot read both sockets' memory at its full rate"
    assert any("two sockets" in note for note in made.notes)


def test_few_chiplets_limit_memory_bandwidth(kimi: Profile) -> None:
    machine = find("threadripper-pro-7965wx")
    machine = replace(machine, measured=None, cpu=replace(machine.cpu, l3_bytes=64 << 20))
    made = forecast(machine, kimi, settings("llama.cpp", 24), on_processors(kimi))
    assert any("chiplets" in note for note in made.notes)


def test_tensor_parallel_divides_gpu_time(kimi: Profile) -> None:
    machine, placement = find("hgx-h200-8x"), all_on_cards(kimi, 8)
    one = decode_speed(machine, kimi, settings("vllm", 16), placement, depth=0)
    eight = decode_speed(machine, kimi, settings("vllm", 16, tensor_parallel=8), placement, depth=0)
    assert _terms(one)["gpu0 weights"] == pytest.approx(8 * _terms(eight)["gpu0 weights"])


def test_load_is_bound_by_the_slower_of_disk_and_copy(kimi: Profile) -> None:
    bare, placement = find("epyc-7532-8x3090"), on_cards(kimi, 8)
    slow = replace(bare, disk=Disk("/", nominal_gb_s=0.16))
    fast = replace(bare, disk=Disk("/", nominal_gb_s=12.0))
    chosen = settings("ik_llama", 32, mmap=False)
    hour = forecast(slow, kimi, chosen, placement)
    assert hour.load_bound_by == "disk"
    assert hour.load_cold_s == pytest.approx(3600, rel=0.05)  # "load 1 h"
    assert any("61 min" in note for note in hour.notes)
    assert any("page cache" in note for note in hour.notes)
    assert hour.load_warm_s == hour.load_cold_s
    assert forecast(fast, kimi, chosen, placement).load_bound_by == "copying"
    unknown = forecast(bare, kimi, chosen, placement)
    assert unknown.load_cold_s is None
    assert any("SATA" in note for note in unknown.notes)


def test_a_mapped_file_in_the_page_cache_loads_immediately() -> None:
    oss = model("gpt-oss-120b:MXFP4_MOE")
    machine = replace(find("epyc-9554"), disk=Disk("/", nominal_gb_s=3.0))
    made = forecast(machine, oss, settings("llama.cpp", 64), on_processors(oss))
    assert made.load_warm_s == 0
    assert made.load_cold_s == pytest.approx(oss.bytes / 3e9)


def test_forecast_of_a_trillion_parameters_is_fast(kimi: Profile) -> None:
    machine, chosen, placement = find("epyc-9175f"), settings("llama.cpp", 13, context=131072), on_cards(kimi, 1)
    best = min(_seconds(machine, kimi, chosen, placement) for _ in range(5))
    assert best < 0.1


def _seconds(*given: object) -> float:
    start = time.perf_counter()
    forecast(*given)  # type: ignore[arg-type]
    return time.perf_counter() - start
