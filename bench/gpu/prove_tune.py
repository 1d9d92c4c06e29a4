"""Runs `tokenmill tune` on the slice with its experts in host memory, within a time limit.

The command stores trials as they end. If it is stopped by its time limit, it is run once more with as many trials as
exist, which loads nothing and returns their operating point.
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prove_engine import say
from prove_plans import CARD_12, CARDS, MARGIN
from prove_rows import Clock, Row, Rows

from tokenmill import measurements
from tokenmill.config import EngineConfig
from tokenmill.hardware.machine import Machine
from tokenmill.planner.draft import capacity

CONTEXT = 1024
HEAD = 512
TAIL = 32
OUT = 64
TRIALS = 18
TRIAL_S = 2.0
STOP_S = 10.0
VERDICT_S = 25.0


@dataclass(frozen=True, slots=True)
class Tuning:
    """Options of the command."""

    model: Path
    machine: Machine
    machine_file: Path
    config: EngineConfig
    state: Path
    tiny: bool


def config_text(tuning: Tuning) -> str:
    """tokenmill.toml for the command."""
    lines = [f'state_dir = "{tuning.state}"', "", "[engine]"]
    for name in ("library", "header"):
        if (value := getattr(tuning.config, name)) is not None:
            lines.append(f'{name} = "{value}"')
    return "\n".join(lines) + "\n"


def command(tuning: Tuning, config: Path, trials: int) -> list[str]:
    """The command line; settings that need a reload stay as planned, so that one load suffices."""
    words = [
        sys.executable,
        "-m",
        "tokenmill",
        "tune",
        str(tuning.model),
        "--machine",
        str(tuning.machine_file),
        "--config",
        str(config),
        "--json",
        "--busy",
        "--trials",
        str(trials),
        "--cache-type",
        "f16",
    ]
    if tuning.tiny:
        return [
            *words,
            "--cpu-only",
            "--threads",
            "1",
            "--no-mmap",
            "--no-repack",
            "--context",
            "512",
            "--prefix-tokens",
            "128",
            "--own-tokens",
            "16",
            "--answer-tokens",
            "16",
            "--trial-seconds",
            "0.5",
        ]
    margin = capacity(tuning.machine, "gpu0") - CARDS[CARD_12] + MARGIN
    return [
        *words,
        "--margin",
        str(margin),
        "--no-mmap",
        "--no-repack",
        "--context",
        str(CONTEXT),
        "--prefix-tokens",
        str(HEAD),
        "--own-tokens",
        str(TAIL),
        "--answer-tokens",
        str(OUT),
        "--trial-seconds",
        str(TRIAL_S),
    ]


def tune(tuning: Tuning, rows: Rows, clock: Clock, log: Path) -> Row | None:
    """The operating point; None if no trial was made."""
    known = rows.get("tune", "point")
    if known is not None and "point" in known:
        return known
    tuning.state.mkdir(parents=True, exist_ok=True)
    config = tuning.state / "tokenmill.toml"
    config.write_text(config_text(tuning), encoding="utf-8")
    most = 6 if tuning.tiny else TRIALS
    text = _run(command(tuning, config, most), clock.part(max(10.0, clock.left_s - VERDICT_S)), log)
    stopped = text is None
    if stopped and (made := trials_made(tuning.state)):
        say(f"tune: stopped after {made} trials; the point of these trials")
        text = _run(command(tuning, config, made), clock, log)
    if text is None:
        return None
    point: dict[str, Any] = json.loads(text)
    for number, trial in enumerate(point["trials"]):
        rows.add(
            "tune",
            f"trial {number}",
            dials=trial["dials"],
            figures=trial["figures"],
            outcome=trial["outcome"],
            seconds=trial["seconds"],
        )
    short = {name: point[name] for name in ("dials", "figures", "noise", "knee", "given_up", "loads", "seconds")}
    say(f"tune: {point['knee']}")
    return rows.add("tune", "point", point=short, trials=len(point["trials"]), stopped=stopped)


def trials_made(state: Path) -> int:
    """Number of trials that the command has stored."""
    return len(measurements.read_json(state, "trial"))


def _run(argv: list[str], clock: Clock, log: Path) -> str | None:
    """The output of the command; None if it was stopped or failed. Its messages are also printed and logged."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as told:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=told, env=os.environ | {"COLUMNS": "100"})
        try:
            out, _ = process.communicate(timeout=clock.left_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                process.communicate(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
            return None
    if process.returncode:
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-6:]
        say("tune failed: " + " | ".join(last))
        return None
    return out.decode()
