"""The wheel alone is enough for a batch, a server, Parquet, a report and shell completion."""

import json
import signal
import subprocess
import zipfile
from pathlib import Path

import httpx

from dist.conftest import LIMIT_S, ROOT, Said

JOBS = [
    {"prompt": "Once upon a time", "max_tokens": 4},
    {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4},
]
SMALL = ("--context", 512, "--sequences", 2, "--threads", 1)


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    """Entries, flags, templates, static pages and prompts are data files that no import would miss."""
    source = ROOT / "src"
    files = {path.relative_to(source).as_posix() for path in (source / "tokenmill").rglob("*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    assert len([name for name in files if not name.endswith(".py")]) > 60
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("tokenmill/")}
    assert packed == files


def test_it_runs_away_from_the_source(said: Said, program: Path) -> None:
    where = [str(program.with_name("python")), "-c", "import tokenmill; print(tokenmill.__file__)"]
    found = subprocess.run(where, capture_output=True, text=True, check=True, cwd=program.parent, env={}).stdout
    assert Path(found.strip()).is_relative_to(program.parents[1])
    assert said("--help").returncode == 0
    assert said("completion", "bash", "-o", "-").returncode == 0


def test_it_plans_from_its_catalogue(said: Said) -> None:
    done = said("plan", "kimi-k2.5:Q4_K_S", "--machine", "epyc-9175f", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["fits"] is True
    assert len(json.loads(said("machines", "--json").stdout)) > 20


def test_it_runs_a_batch(said: Said, home: Path, model: Path) -> None:
    (home / "jobs.jsonl").write_text("".join(json.dumps(job) + "\n" for job in JOBS))
    done = said("run", "jobs.jsonl", "-o", "results.jsonl", "--model", model, *SMALL, "--json")
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in (home / "results.jsonl").read_text().splitlines()]
    assert [result["response"]["body"]["usage"]["completion_tokens"] for result in results] == [4, 4]
    page = said("report", model, "-o", "report.html")
    assert page.returncode == 0, page.stderr
    assert "<html" in (home / "report.html").read_text()


def test_it_reads_parquet(said: Said, program: Path, home: Path, model: Path) -> None:
    script = "import pyarrow as a, pyarrow.parquet as p; p.write_table(a.table({'prompt': ['Hi'], 'max_tokens': [2]}), 'j')"
    subprocess.run([program.with_name("python"), "-c", script], check=True, cwd=home)
    (home / "j").rename(home / "jobs.parquet")
    done = said("run", "jobs.parquet", "-o", "parquet.jsonl", "--model", model, *SMALL)
    assert done.returncode == 0, done.stderr
    assert json.loads((home / "parquet.jsonl").read_text())["error"] is None


def test_it_serves(program: Path, environment: dict[str, str], home: Path, model: Path) -> None:
    argv = [str(program), "serve", str(model), "--port", "0", "--json", *map(str, SMALL)]
    process = subprocess.Popen(argv, cwd=home, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        text = ""
        while not text.endswith("\n}\n"):
            line = process.stdout.readline()
            assert line, "the server has ended"
            text += line
        started = json.loads(text)
        url = started["url"]
        body = {"model": started["engines"][0]["name"], "prompt": "Once", "max_tokens": 3}
        answer = httpx.post(f"{url}/completions", json=body, timeout=LIMIT_S)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 3
        page = httpx.get(url.removesuffix("/v1") + "/", timeout=LIMIT_S)
        assert "<html" in page.text
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
    finally:
        process.kill()
        process.communicate()
