"""The examples of docs/pipelines.md: batches over HTTP that survive retries, and systemd units."""

import configparser
import json
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from support import patient
from support.batches import chat_line
from support.gateway import Served, config_in, native_engine, served
from tokenmill.cli import run
from tokenmill.gateway import app
from tokenmill.gateway.batches import routes
from tokenmill.gateway.batches.service import BatchService

EXAMPLES = Path(__file__).parents[3] / "examples"
UNITS = sorted((EXAMPLES / "systemd").iterdir())
DAY = "2026-11-15"

RunBatch = Callable[..., dict[str, int]]


@pytest.fixture(scope="module")
def gateway(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(app, "extra_groups", lambda one: (routes.route_group(one, BatchService(one, 0.1)),))
        with served(native_engine(smollm2_path), config_in(tmp_path_factory.mktemp("state"))) as one:
            yield one


@pytest.fixture
def run_batch(gateway: Served, monkeypatch: pytest.MonkeyPatch) -> RunBatch:
    """The function of examples/http_batch.py."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("TOKENMILL_URL", gateway.url)
    monkeypatch.delitem(sys.modules, "http_batch", raising=False)
    found: RunBatch = runpy.run_path(str(EXAMPLES / "http_batch.py"))["run_batch"]
    return found


def jobs_in(folder: Path, *questions: str) -> Path:
    path = folder / f"jobs-{DAY}.jsonl"
    lines = [chat_line(f"q{number}", question) for number, question in enumerate(questions)]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def listed(gateway: Served, name: str) -> list[dict[str, Any]]:
    found = patient.get(f"{gateway.url}/v1/batches").json()["data"]
    return [batch for batch in found if batch["metadata"]["run"].startswith(f"{name}-")]


def test_a_retry_re_attaches_to_the_batch(gateway: Served, run_batch: RunBatch, tmp_path: Path) -> None:
    jobs, results = jobs_in(tmp_path, "Say one.", "Say two.", "word " * 3000), tmp_path / "results.jsonl"
    first = run_batch("night", jobs, results, poll_s=0.05)
    assert first == {"answered": 2, "failed": 1}
    assert [json.loads(line)["custom_id"] for line in results.read_text().splitlines()] == ["q0", "q1"]
    (error,) = (tmp_path / "results.errors.jsonl").read_text().splitlines()
    assert json.loads(error)["error"]["code"] == "too_long"
    before = results.read_bytes()
    results.unlink()
    assert run_batch("night", jobs, results, poll_s=0.05) == first
    assert results.read_bytes() == before
    assert len(listed(gateway, "night")) == 1
    run_batch("night", jobs_in(tmp_path, "Say three."), results, poll_s=0.05)
    assert len(listed(gateway, "night")) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [jobs.name, "results.errors.jsonl", "results.jsonl"]


def test_a_cancelled_batch_is_submitted_again(gateway: Served, run_batch: RunBatch, tmp_path: Path) -> None:
    jobs, results = jobs_in(tmp_path, "Say four."), tmp_path / "results.jsonl"
    run_batch("given-up", jobs, results, poll_s=0.05)
    (batch,) = listed(gateway, "given-up")
    key = batch["metadata"]["run"]
    bad = patient.post(f"{gateway.url}/v1/files", files={"file": ("x", b"\n")}, data={"purpose": "batch"}).json()["id"]
    body = {
        "input_file_id": bad,
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        "metadata": {"run": key},
    }
    made = patient.post(f"{gateway.url}/v1/batches", json=body).json()
    patient.post(f"{gateway.url}/v1/batches/{made['id']}/cancel")
    while patient.get(f"{gateway.url}/v1/batches/{made['id']}").json()["status"] not in ("failed", "cancelled"):
        pass
    assert run_batch("given-up", jobs, results, poll_s=0.05) == {"answered": 1, "failed": 0}
    assert len(listed(gateway, "given-up")) == 3


def test_an_unreachable_gateway_is_an_error_after_the_patience(run_batch: RunBatch, tmp_path: Path) -> None:
    with pytest.raises(httpx.TransportError):
        run_batch("away", jobs_in(tmp_path, "Hi."), tmp_path / "r.jsonl", url="http://127.0.0.1:9", patience_s=0.0)


def test_a_refusal_has_the_status_and_the_parameter(run_batch: RunBatch, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"\b400\b.*completion_window"):
        run_batch("refused", jobs_in(tmp_path, "Hi."), tmp_path / "r.jsonl", window="soon")


def test_openai_s_client_finds_a_batch_by_its_key(gateway: Served, run_batch: RunBatch, tmp_path: Path) -> None:
    run_batch("first", jobs_in(tmp_path, "Say six."), tmp_path / "r.jsonl", poll_s=0.05)
    run_batch("second", jobs_in(tmp_path, "Say six."), tmp_path / "r.jsonl", poll_s=0.05)
    (wanted,) = listed(gateway, "first")
    found = gateway.client().batches.list(limit=1, extra_query={"metadata[run]": wanted["metadata"]["run"]})
    assert [batch.id for batch in found.data] == [wanted["id"]]


def scheduler(filled: dict[str, str]) -> Callable[..., Any]:
    """A scheduler's decorator, with or without options: calls the function and fills in missing arguments."""

    def decorator(function: Callable[..., Any] | None = None, /, **_options: object) -> Any:
        def wrapped(inner: Callable[..., Any]) -> Callable[..., Any]:
            names = inner.__code__.co_varnames[: inner.__code__.co_argcount]
            return lambda *args: inner(*args, **{name: filled[name] for name in names[len(args) :] if name in filled})

        return wrapped(function) if function is not None else wrapped

    return decorator


def test_the_scheduler_examples(
    gateway: Served, run_batch: RunBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins for the packages, which are large: only their decorators are used."""
    jobs, results = jobs_in(tmp_path, "Say five."), tmp_path / f"results-{DAY}.jsonl"
    monkeypatch.setenv("TOKENMILL_JOBS", str(tmp_path))
    decorator = scheduler({"ds": DAY})
    for package, names in (("airflow", ()), ("airflow.sdk", ("dag", "task")), ("prefect", ("flow", "task"))):
        module = ModuleType(package)
        for name in names:
            setattr(module, name, decorator)
        monkeypatch.setitem(sys.modules, package, module)
    for name, start in (("airflow", None), ("prefect", "nightly_batch")):
        run_batch(f"{name}-nightly", jobs, results, poll_s=0.05)  # so that the example does not have to wait
        results.unlink()
        made = runpy.run_path(str(next(EXAMPLES.glob(f"{name}_*.py"))))
        if start is not None:
            assert made[start](DAY) == {"answered": 1, "failed": 0}
        assert json.loads(results.read_text())["custom_id"] == "q0"
        assert len(listed(gateway, f"{name}-nightly")) == 1


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_units_have_their_sections_and_a_valid_command(unit: Path) -> None:
    parsed = configparser.RawConfigParser(strict=True)  # refuses duplicate keys
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read_string(unit.read_text().replace("\\\n", " "))
    wanted = {"Unit", "Timer", "Install"} if unit.suffix == ".timer" else {"Unit", "Service"}
    assert wanted <= {*parsed.sections()} <= {"Unit", "Service", "Timer", "Install"}
    if unit.suffix == ".timer":
        assert unit.with_suffix(".service") in UNITS
    else:
        program, command = parsed["Service"]["ExecStart"].split()[:2]
        assert program == "/usr/local/bin/tokenmill"
        assert run([command, "--help"]) == 0


def test_systemd_verifies_the_units(tmp_path: Path) -> None:
    """With systemd-analyze, if it is installed; it checks that the programs exist."""
    program = str(Path(sys.executable).with_name("tokenmill"))
    for unit in UNITS:
        (tmp_path / unit.name).write_text(unit.read_text().replace("/usr/local/bin/tokenmill", program))
    verify = shutil.which("systemd-analyze")
    command = [verify, "verify", "--man=no"] if verify else ["ls"]
    done = subprocess.run([*command, *tmp_path.iterdir()], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
