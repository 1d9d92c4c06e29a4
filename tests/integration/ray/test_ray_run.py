"""`tokenmill run --on`, on a real Ray cluster with several nodes on this machine.

The tests go from what leaves the cluster whole to what does not. Answers are forced by a schema of each line's own, so
that every line shows whether it got its own answer, whatever else was computed beside it.
"""

import json
import re
import signal
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.ray_cluster import RayCluster
from support.run_cli import begun, last_batch, ran, read, tokenmill, until, write

ONE_LANE = ("--context", "512", "--sequences", "1", "--threads", "1", "--threads-batch", "1")
HOUSES, EACH = ("Adams", "Baker", "Clark"), 8
LIMIT_S = 250.0


def lines(each: int = EACH) -> list[dict[str, Any]]:
    """Jobs with three shared prefixes, interleaved."""
    found = []
    for number in range(each):
        for house in HOUSES:
            rules = " ".join(f"Rule {rule} of house {house}: a report names its mill {rule}." for rule in range(14))
            messages = [{"role": "system", "content": rules}, {"role": "user", "content": f"Who is number {number}?"}]
            schema = {"name": "own", "schema": {"const": f"{house} {number}"}}
            found.append(
                {
                    "custom_id": f"{house} {number}",
                    "messages": messages,
                    "temperature": 0,
                    "max_tokens": 24,
                    "response_format": {"type": "json_schema", "json_schema": schema},
                }
            )
    return found


def answers(output: Path) -> list[dict[str, Any]]:
    """Output lines without the values that differ between runs: batch name, times and cached tokens."""
    found = read(output)
    for line in found:
        del line["id"], line["response"]["body"]["created"], line["response"]["body"]["usage"]["prompt_tokens_details"]
    return found


@pytest.fixture(scope="module")
def alone(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The output of the same jobs without Ray."""
    home = tmp_path_factory.mktemp("alone")
    ran(home, write(home / "jobs.jsonl", lines()), "-o", home / "out.jsonl", *ONE_LANE)
    found = answers(home / "out.jsonl")
    texts = [json.loads(line["response"]["body"]["choices"][0]["message"]["content"]) for line in found]
    assert texts == [line["custom_id"] for line in lines()]
    return found


def test_where_the_model_does_not_fit_every_machine_is_named(
    cluster: RayCluster, ray_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(ray_home))  # where Ray looks for the cluster of this machine
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # as the cluster has it, whatever tokens this user has
    jobs = write(tmp_path / "jobs.jsonl", lines())
    done = tokenmill(tmp_path, "run", jobs, "-o", tmp_path / "out", "--on", "ray", "--reserve-ram", "64 TiB", *ONE_LANE)
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    excluded = re.findall(r"^(\S+) is excluded: .* does not fit: dram lacks ", done.stderr, re.MULTILINE)
    assert sorted(excluded) == names(cluster), done.stderr
    assert re.search(r"^error: .*\nhint: ", done.stderr, re.MULTILINE)
    assert "--context" in done.stderr
    assert not (tmp_path / "out").exists()


def test_through_rays_client_heads_are_computed_on_few_machines(
    cluster: RayCluster, tmp_path: Path, alone: list[dict[str, Any]]
) -> None:
    jobs = write(tmp_path / "jobs.jsonl", lines())
    found = ran(tmp_path, jobs, "-o", tmp_path / "out.jsonl", "--on", cluster.client, *ONE_LANE)
    assert answers(tmp_path / "out.jsonl") == alone
    nodes = found["nodes"]
    assert {node["name"] for node in nodes} <= set(names(cluster))
    assert [node for node in nodes if node["lost"] or node["left_out"]] == []
    assert sum(node["answers"] for node in nodes) == found["computed"] == found["succeeded"] == len(alone)
    assert sum(node["computed_prompt_tokens"] for node in nodes) == found["computed_prompt_tokens"]
    # Each prefix is computed once, and at most once more per additional node; the rest of the prompts is short.
    prompt = (found["computed_prompt_tokens"] + found["reused_tokens"]) / len(alone)
    most = (len(HOUSES) + len(cluster.nodes) - 1) * prompt + len(alone) * prompt / 5
    assert found["computed_prompt_tokens"] <= most


def test_an_interrupted_and_a_killed_run_are_resumed(cluster: RayCluster, tmp_path: Path) -> None:
    every, output = lines(5 * EACH), tmp_path / "out.jsonl"
    jobs, store = write(tmp_path / "jobs.jsonl", every), tmp_path / "tokenmill" / "batches"
    finished = 0
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        run = begun(tmp_path, jobs, "-o", output, "--on", cluster.address, *ONE_LANE)
        try:
            until(partial(more_done, store, finished))
            run.send_signal(number)
            _, talk = run.communicate(timeout=LIMIT_S)
        finally:
            run.kill()
            run.wait()
        assert run.returncode == code, talk.decode()
        finished = last_batch(store)[0].done
    found = ran(tmp_path, jobs, "-o", output, "--on", cluster.address, *ONE_LANE)
    assert found["computed"] == len(every) - finished
    texts = [json.loads(line["response"]["body"]["choices"][0]["message"]["content"]) for line in read(output)]
    assert texts == [line["custom_id"] for line in every]


def test_a_machine_that_is_killed_costs_nothing_but_time(
    cluster: RayCluster, tmp_path: Path, alone: list[dict[str, Any]]
) -> None:
    jobs, output = write(tmp_path / "jobs.jsonl", lines()), tmp_path / "out.jsonl"
    run = begun(tmp_path, jobs, "-o", output, "--on", cluster.address, "--json", *ONE_LANE)
    try:
        assert run.stderr is not None
        # The first ready node immediately gets the jobs of at least one prefix.
        first = next(found[1].decode() for text in run.stderr if (found := re.match(rb"(\S+) is ready", text)))
        until(lambda: last_batch(tmp_path / "tokenmill" / "batches")[0].done >= 1)
        cluster.kill(dict(zip(names(cluster), sorted(cluster.nodes), strict=True))[first])
        said, talk = run.communicate(timeout=LIMIT_S)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 0, talk.decode()
    found = json.loads(said)
    assert [node["name"] for node in found["nodes"] if node["lost"] is not None] == [first]
    assert found["succeeded"] == found["jobs"] == found["computed"] == len(alone)
    assert found["failed"] == found["set_aside"] == 0
    assert answers(output) == alone


def more_done(store: Path, than: int) -> bool:
    return last_batch(store)[0].done > than


def names(cluster: RayCluster) -> list[str]:
    """The names of the nodes, ordered by id: this machine's name, with a number except for the first."""
    name = socket.gethostname()
    return [name, *(f"{name}-{number}" for number in range(2, len(cluster.nodes) + 1))]
