"""A real llama.cpp server is watched while it loads, and its memory compared with its plan."""

import os
import time
from pathlib import Path

import pytest

from support.logged_server import logged_server
from tokenmill.engine import logs
from tokenmill.engine.load_history import append, read, record
from tokenmill.engine.loading.process import read_memory
from tokenmill.engine.loading.progress import LoadProgress
from tokenmill.engine.loading.watch import LoadWatch, copied_bytes
from tokenmill.engine.reconcile.reconcile import ReconciledItem, Reconciliation, observed, reconcile
from tokenmill.hardware.host import LocalHost
from tokenmill.hardware.probe import probe
from tokenmill.model.read import read as read_model
from tokenmill.model.synthetic import generate
from tokenmill.planner.goal import Goal
from tokenmill.planner.make import make
from tokenmill.planner.plan import Plan
from tokenmill.units import MIB

LIMIT_S = 200.0
STEP_S = 0.03


def planned(model: Path, *, mmap: bool) -> Plan:
    return make(probe(model), read_model(str(model)), Goal(context=1024, sequences=2, ubatch=512, mmap=mmap))


def forget(path: Path) -> None:
    """Evict a file from the page cache."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def load(plan: Plan, model: Path, log: Path) -> tuple[list[LoadProgress], Reconciliation]:
    """All progress reports of a load, and its reconciliation."""
    looks, end = [], time.monotonic() + LIMIT_S
    with logged_server(plan, model, log, warmup=False) as server:
        os.setpriority(os.PRIO_PROCESS, server.pid, 4)  # who watches goes before who loads, however few the processors
        watch = LoadWatch(server.pid, [model], log=log, copied_bytes=copied_bytes(plan))
        looks.append(watch.sample())
        while not server.ended.wait(STEP_S):
            looks.append(watch.sample())
            assert time.monotonic() < end
        assert server.address, log.read_text(encoding="utf-8")[-2000:]
        looks.append(watch.sample())
        while looks[-1].phase != "ready":  # its log is written by a thread of its own, and may come after its address
            assert time.monotonic() < end, log.read_text(encoding="utf-8")[-2000:]
            time.sleep(STEP_S)
            looks.append(watch.sample())
        assert watch.findings(plan) == ()
        memory = read_memory(LocalHost(), watch.pids)
        text = log.read_text(encoding="utf-8", errors="replace")
    return looks, reconcile(plan, observed(logs.read("llama-server", text), memory=memory))


def rows(found: Reconciliation) -> dict[str, ReconciledItem]:
    return {row.item: row for row in found.rows}


def close(row: ReconciledItem, predicted: int | None = None) -> bool:
    """Equal within 5 % and the rounding of logs to hundredths of MiB."""
    assert row.measured_bytes is not None
    gap = abs((row.predicted_bytes if predicted is None else predicted) - row.measured_bytes)
    return gap <= 0.05 * row.measured_bytes + MIB / 100


def test_smollm2_takes_what_its_plan_says(smollm2_path: Path, tmp_path: Path) -> None:
    plan = planned(smollm2_path, mmap=True)
    looks, found = load(plan, smollm2_path, tmp_path / "log")
    shares = [look.share for look in looks if look.share is not None]
    assert shares == sorted(shares)
    assert (shares[-1], looks[-1].phase, looks[-1].eta_s) == (1.0, "ready", 0.0)
    assert looks[-1].bytes_total == smollm2_path.stat().st_size
    by_item = rows(found)
    for item in ("weights", "kv", "output"):
        assert close(by_item[item]), by_item[item]
    assert close(by_item["compute"], by_item["compute"].as_asked_bytes), by_item["compute"]
    assert by_item["mapped"].measured_bytes is not None
    assert by_item["mapped"].measured_bytes >= by_item["mapped"].predicted_bytes
    assert all(row.explanation for row in found.flagged)

    append(tmp_path, record(plan, found, model_id="smollm2"))
    assert read(tmp_path)[0].rows == found.rows


@pytest.mark.parametrize("mmap", [True, False])
def test_a_cold_mixture_of_experts_loads_in_steps(mmap: bool, tmp_path: Path) -> None:
    model = tmp_path / "moe.gguf"
    sizes = generate.sizes("moe", {"layers": 6, "experts": 48, "expert_ff": 512, "embed": 768})
    generate.write("moe", sizes, model)
    forget(model)
    plan = planned(model, mmap=mmap)
    looks, found = load(plan, model, tmp_path / "log")
    assert len({look.bytes_loaded for look in looks if look.phase == "reading"}) > 1, looks
    assert any(look.rate_bytes_s for look in looks)
    assert looks[-1].bytes_loaded == looks[-1].bytes_total
    by_item = rows(found)
    assert close(by_item["kv"])
    weights = by_item["weights"]
    if (
        mmap
    ):  # rewritten tensors at the ends of the file are outside the mapped buffer; the log says hundredths of a MiB
        assert weights.predicted_bytes == pytest.approx(weights.measured_bytes, abs=0.011 * MIB)
    else:
        assert close(weights), weights
    assert ("repack" in by_item) == mmap
    assert not mmap or close(by_item["repack"]), by_item["repack"]
    own = by_item["own"]
    copies = plan.ledger.of("dram", "repack") if mmap else plan.ledger.of("dram", "weights")
    assert own.measured_bytes is not None
    assert copies < own.measured_bytes < copies + 256 * MIB


def test_a_server_that_cannot_load_says_why(tmp_path: Path) -> None:
    model = tmp_path / "moe.gguf"
    generate.write("moe", generate.sizes("moe", {}), model)
    plan = planned(model, mmap=True)
    os.truncate(model, model.stat().st_size // 2)
    with logged_server(plan, model, tmp_path / "log") as server:
        assert server.ended.wait(LIMIT_S)
        assert not server.address
    cause = logs.read("llama-server", (tmp_path / "log").read_text(encoding="utf-8")).cause
    assert cause is not None
    assert cause.kind == "damaged"
