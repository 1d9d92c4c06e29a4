"""What cannot go with --on is refused before a cluster is asked for."""

from dataclasses import replace
from pathlib import Path

import pytest

from tokenmill.cli.output import Common
from tokenmill.cli.run_on import Told, on_ray
from tokenmill.cli.starting import EngineOptions
from tokenmill.engine.away.places import News
from tokenmill.engine.loading import LoadProgress
from tokenmill.errors import UsageError
from tokenmill.jobs.address import address_of

OPTIONS = EngineOptions()


@pytest.mark.parametrize(
    ("store", "options", "words"),
    [
        ("postgresql://mill@there/jobs", OPTIONS, "--on works from a store in a folder here"),
        ("here", replace(OPTIONS, machine="epyc-9175f"), "--machine and --on contradict each other"),
        ("here", replace(OPTIONS, engine="http://127.0.0.1:8080"), "http://127.0.0.1:8080 runs already"),
        ("here", replace(OPTIONS, engine="mine"), "no engine 'mine' is known"),
        ("here", replace(OPTIONS, threads=0), "--threads must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(store: str, options: EngineOptions, words: str) -> None:
    with pytest.raises(UsageError, match=words), on_ray("ray", address_of(store), None, options, Common()):
        pass


def test_a_configuration_of_this_machine_is_refused(tmp_path: Path) -> None:
    given = Common(config=tmp_path / "mine.toml")
    with pytest.raises(UsageError, match="every machine reads its own"), on_ray("ray", tmp_path, None, OPTIONS, given):
        pass


def test_news_of_machines_are_lines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    told = Told()
    told.tell(News("alpha", "found", "16 processors, 1 GPU"))
    for loaded in (10, 20, 30):
        told.tell(News("alpha", "loading", loading=LoadProgress("reading", bytes_loaded=loaded, bytes_total=100)))
    told.tell(News("alpha", "ready", "llama.cpp; 8 lanes"))
    told.tell(News("beta", "left out", "kimi is not here", "tokenmill models pull kimi"))
    told.tell(News("alpha", "lost", "its node has died"))
    assert capsys.readouterr().err.splitlines() == [
        "alpha is there: 16 processors, 1 GPU",
        "alpha: reading 10 B of 100 B",
        "alpha is ready: llama.cpp; 8 lanes",
        "beta is left out: kimi is not here",
        "hint: tokenmill models pull kimi",
        "alpha is lost: its node has died",
    ]
    assert told.left_out == {"beta": "kimi is not here"}
