"""The models of the catalogue that a machine can run."""

import pytest

from tokenmill.api.planning.ranking import rank
from tokenmill.config import Config
from tokenmill.errors import UnknownMachine
from tokenmill.model import catalog

NAMES = ("deepseek-r1", "deepseek-v3", "gpt-oss-20b", "kimi-k3", "qwen3-30b-a3b", "qwen3-32b")


def test_models_that_fit_come_by_size_with_predicted_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "names", lambda: NAMES)
    found = rank("epyc-9175f", Config(), context=4096)
    assert (found.machine, found.context, found.too_large) == ("epyc-9175f", 4096, ("kimi-k3",))
    sizes = [model.parameters for model in found.fits]
    assert sizes == sorted(sizes, reverse=True)
    by_name = {model.name: model for model in found.fits}
    assert set(by_name) == set(NAMES) - {"kimi-k3"}
    # the largest of the listed quantizations; equal models are planned once
    assert by_name["qwen3-32b"].quantization == "Q8_0"
    assert by_name["deepseek-r1"].decode_tok_s == by_name["deepseek-v3"].decode_tok_s
    small, large = by_name["qwen3-30b-a3b"], by_name["deepseek-r1"]
    assert small.decode_tok_s is not None
    assert large.decode_tok_s is not None
    assert small.decode_tok_s > large.decode_tok_s > 0
    assert (small.context, small.confidence is not None) == (4096, True)


def test_an_unknown_machine() -> None:
    with pytest.raises(UnknownMachine):
        rank("epyc-0", Config())
