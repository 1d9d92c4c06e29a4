"""Trials on a real llama.cpp server: one start serves all numbers of sequences, other settings need a restart."""

from dataclasses import replace
from pathlib import Path

from support.native_engine import run, this_machine
from tokenmill.config import EngineConfig
from tokenmill.model.read import read
from tokenmill.model.synthetic import generate
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make
from tokenmill.tuner.engine_rig import ServerRig, Starter
from tokenmill.tuner.measure import MeasureOptions
from tokenmill.tuner.point import Aim, TrialSettings
from tokenmill.tuner.trial_run import TrialContext, attempt
from tokenmill.tuner.work import generated_jobs

AIM = Aim(prompt_tokens=48, tail_tokens=4, output_tokens=8)
DIALS = TrialSettings(1, 1, 1, 128, 512)


def test_a_server_is_started_once_for_all_widths(tmp_path: Path) -> None:
    path = tmp_path / "moe.gguf"
    generate.write("moe-mla", generate.sizes("moe-mla", {"layers": 2, "embed": 256}), path)
    goal = Goal(context=512, sequences=2, ubatch=128, threads=1, threads_batch=1)
    plan = make(this_machine(), read(str(path)), goal)

    async def work() -> None:
        config = EngineConfig(kind="llama-server", warm=False)
        rig = ServerRig(plan, Starter(path, config, tmp_path / "state", "tune-test"), max_sequences=2)
        on = TrialContext(plan, rig, MeasureOptions(seconds=0.2), watch=None)
        try:
            for number, (dials, loads) in enumerate(
                ((DIALS, 1), (replace(DIALS, sequences=2), 1), (replace(DIALS, ubatch=64), 2))
            ):
                trial = await attempt(on, dials, generated_jobs(AIM), number)
                assert trial.outcome == "measured", trial.detail
                assert trial.figures.decode_tok_s
                assert trial.figures.prefill_tok_s
                assert rig.loads == loads
        finally:
            await rig.close()

    run(work)
