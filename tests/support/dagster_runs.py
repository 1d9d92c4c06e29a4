"""The real Dagster for tests: its commands as processes with their own home, and what it recorded there."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import dagster as dg
import dagster_tokenmill

from support import patient

LIMIT_S = 200.0
PROJECT = Path(__file__).parents[2] / "examples" / "dagster_project"


def home_in(folder: Path) -> Path:
    """A Dagster home without telemetry that does not copy output by `tail`: two runs in a process would wait for each other."""
    folder.mkdir(parents=True, exist_ok=True)
    logs = "  module: dagster._core.storage.noop_compute_log_manager\n  class: NoOpComputeLogManager\n"
    (folder / "dagster.yaml").write_text(f"telemetry:\n  enabled: false\ncompute_logs:\n{logs}")
    return folder


@contextmanager
def instance_in(home: Path) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.from_config(str(home)) as instance:
        yield instance


def environment(home: Path, url: str, **more: str) -> dict[str, str]:
    """What a command of Dagster gets: our packages, its home, the gateway."""
    package = str(Path(dagster_tokenmill.__file__).parents[1])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "DAGSTER_HOME": str(home), "TOKENMILL_URL": url, **more}


@contextmanager
def command(*words: str, env: dict[str, str], folder: Path = PROJECT) -> Iterator["subprocess.Popen[str]"]:
    """A command of Dagster in a group of its own, all of which is gone afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dagster", *words],
        env=env,
        cwd=folder,
        start_new_session=True,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        kill(process)


def kill(process: "subprocess.Popen[str]") -> None:
    """As a power cut would."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(LIMIT_S)
    if process.stdout is not None:
        process.stdout.close()


def done(process: "subprocess.Popen[str]") -> str:
    """Its words, once it has ended well."""
    said, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, said
    return said


def batches(url: str) -> list[dict[str, Any]]:
    """All batches of a gateway, the newest first."""
    found: list[dict[str, Any]] = patient.get(f"{url}/v1/batches", params={"limit": 100}).json()["data"]
    return found


def until(holds: Callable[[], bool], process: "subprocess.Popen[str] | None" = None) -> None:
    """Something comes true elsewhere, while a process lives."""
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end
        assert process is None or process.poll() is None, process.stdout and process.stdout.read()
        time.sleep(0.02)


def facts(instance: dg.DagsterInstance, asset: str, partition: str | None = None) -> dict[str, Any]:
    """The metadata of the newest materialisation."""
    asked = dg.AssetRecordsFilter(dg.AssetKey(asset), asset_partitions=None if partition is None else [partition])
    made = instance.fetch_materializations(asked, limit=1).records[0].asset_materialization
    assert made is not None
    return {name: value.value for name, value in made.metadata.items()}
