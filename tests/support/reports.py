"""A report with data in every section: a large model on an H200 machine, with the curves measured there."""

from dataclasses import replace
from functools import cache
from typing import Any

from tokenmill.engine.load_history import LoadRecord
from tokenmill.engine.reconcile.reconcile import ReconciledItem
from tokenmill.hardware.catalog import find
from tokenmill.hardware.identity import machine_id
from tokenmill.hardware.machine import Measurements, Rate
from tokenmill.jobs.models import Batch, BatchTotals, Counts
from tokenmill.model.read import read
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make
from tokenmill.report.collect import Results, Subject, build_report
from tokenmill.report.report import CommandText, ReportPage
from tokenmill.tuner.history import SpeedRecord
from tokenmill.tuner.point import Aim, Figures, OperatingPoint, PointScope, Trial, TrialSettings
from tokenmill.tuner.soak.judge import MemoryReading, SoakResult, SoakStep
from tokenmill.units import GIB, MIB

MODEL = "gpt-oss-120b:MXFP4"
BUILD = "llama.cpp b11549"
WHEN = "2026-11-15T09:00:00+00:00"
DIALS = TrialSettings(threads=14, threads_batch=16, sequences=16, ubatch=512, context=8192)
THREADS = {4: 35.6, 8: 60.4, 12: 80.6, 14: 91.2, 16: 84.8}
SEQUENCES = {1: 46.9, 2: 75.6, 4: 76.9, 8: 84.1, 16: 91.2, 32: 19.2}


@cache
def asked(model: str = MODEL) -> Subject:
    rates = (
        Rate("dram", 214.0, 14, {1: 19.0, 4: 74.0, 8: 139.0, 12: 196.0, 14: 214.0, 16: 209.0}),
        Rate("gpu0", 3980.0),
        Rate("dram->gpu0", 51.2),
    )
    machine = replace(find("h200-1x"), measured=Measurements(WHEN, rates))
    profile = read(model)
    plan = make(machine, profile, Goal(context=8192, sequences=16, gpus=None))
    commands = (
        CommandText("Plan it again", f"tokenmill plan {model}"),
        CommandText("Run a batch", "tokenmill run jobs.jsonl"),
    )
    return Subject(machine, model, "f" * 64, profile, plan, commands=commands)


def speed(given: Subject, dials: TrialSettings, figures: Figures, **more: Any) -> SpeedRecord:
    model = given.profile.name if given.profile else ""
    kept = {
        "when": WHEN,
        "machine": given.machine.name,
        "machine_id": machine_id(given.machine),
        "model": model,
        "model_id": given.model_id,
        "engine": "native",
        "build": BUILD,
        "source": "tune",
        "depth": 0,
        "predicted": Figures(),
    }
    return SpeedRecord(**{**kept, **more}, dials=dials, figures=figures)


def speeds(given: Subject) -> tuple[SpeedRecord, ...]:
    found = [
        speed(given, replace(DIALS, threads=threads), Figures(decode_tok_s=tok_s * share, prefill_tok_s=8 * tok_s))
        for threads, tok_s in THREADS.items()
        for share in (0.97, 1.0, 1.02)
    ]
    found += [
        speed(
            given,
            replace(DIALS, sequences=count),
            Figures(decode_tok_s=tok_s, jobs_tok_s=0.8 * tok_s),
            predicted=Figures(decode_tok_s=1.1 * tok_s),
        )
        for count, tok_s in SEQUENCES.items()
        if count != DIALS.sequences
    ]
    found += [
        speed(
            given,
            replace(DIALS, sequences=1),
            Figures(decode_tok_s=60 - depth / 400, prefill_tok_s=900 - depth / 20),
            source="bench",
            depth=depth,
            predicted=Figures(decode_tok_s=63 - depth / 500, prefill_tok_s=990 - depth / 18),
        )
        for depth in range(0, 8193, 1024)
    ]
    return tuple(found)


def point(given: Subject) -> OperatingPoint:
    place = PointScope(given.machine.name, machine_id(given.machine), MODEL, given.model_id or "", "native", BUILD)
    tried = [
        Trial(replace(DIALS, threads=threads), "measured", Figures(decode_tok_s=tok_s), when=WHEN)
        for threads, tok_s in THREADS.items()
    ]
    tried += [
        Trial(replace(DIALS, sequences=count), "measured", Figures(decode_tok_s=tok_s), when=WHEN)
        for count, tok_s in SEQUENCES.items()
        if count != DIALS.sequences
    ]
    tried.append(Trial(replace(DIALS, sequences=64), "out of memory", detail="cudaMalloc failed"))
    return OperatingPoint(
        place,
        Aim(),
        DIALS,
        Figures(decode_tok_s=91.2, first_token_s=0.8),
        0.02,
        ("16 threads instead of 14: 7 % less, and no core free",),
        "beyond 16 sequences tok/s falls from 91 to 19",
        tuple(tried[1:4]),
        tuple(tried),
        1,
        412.0,
        WHEN,
    )


def load(given: Subject) -> LoadRecord:
    rows = (
        ReconciledItem("gpu0", "weights", 57 * GIB, 57 * GIB, "engine"),
        ReconciledItem("gpu0", "kv", 2 * GIB, 2 * GIB, "engine"),
        ReconciledItem("gpu0", "compute", 900 * MIB, 1100 * MIB, "engine"),
        ReconciledItem("host", "weights", 600 * MIB, 600 * MIB, "engine"),
        ReconciledItem(
            "host", "own", 3 * GIB, 2 * GIB, "process", explanation="the plan allows the program itself 1.0 GiB"
        ),
    )
    settings = {"context": 8192, "sequences": 16, "ubatch": 512, "cache_type_k": "f16"}
    return LoadRecord(
        WHEN, given.machine.name, machine_id(given.machine), MODEL, given.model_id or "", BUILD, settings, rows, 42.0
    )


def batch(number: int, prompt: int, cached: int) -> Batch:
    return Batch(
        number,
        f"batch_{number}",
        f"/jobs/night-{number}.jsonl",
        "f" * 64,
        None,
        None,
        True,
        0,
        None,
        {},
        1794700000.0,
        1794700001.0,
        None,
        48,
        Counts(done=48),
        BatchTotals(40, 8, prompt, cached, 2304, 99.0),
    )


def kept(given: Subject) -> Results:
    steps = tuple(
        SoakStep(depth, 1, (MemoryReading("gpu0", 60 * GIB + depth * MIB // 8, 60 * GIB + depth * MIB // 7, 9 * GIB),))
        for depth in (1024, 2048, 4096, 7168)
    )
    soak = SoakResult(
        given.machine.name,
        machine_id(given.machine),
        MODEL,
        given.model_id or "",
        "native",
        BUILD,
        WHEN,
        8192,
        steps,
        7168,
        "gpu0 would have 300 MiB left",
        "memory",
    )
    checks = {
        "needle": {"score": 0.96, "threshold": 0.9, "words": "23 of 24 found"},
        "code": {"score": 0.5, "threshold": 0.8, "words": 'forgets a closing "'},
    }
    return Results(
        (load(given),),
        speeds(given),
        point(given),
        soak,
        {"checks": checks, "build": BUILD},
        (batch(1, 62_000, 52_770), batch(2, 9_249, 0)),
        {"batch_2": {"length": 8, "stop": 40}},
    )


def full_report() -> ReportPage:
    given = asked()
    return build_report(given, kept(given), WHEN)
