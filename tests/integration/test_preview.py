"""Models of a hub on loopback, described from headers and configs without downloading them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.gguf_bytes import TINY_KEYS, TINY_TABLE, write
from support.pull_servers import COMMIT, Shelf, serve, stock_hub
from tokenmill.errors import PullError, RemoteError, TokenmillError, UnknownModel, UsageError
from tokenmill.model.pull.preview import preview
from tokenmill.model.read import read

REPO = "owner/model"
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 4096,
}
CONFIG_PATH = f"/{REPO}/resolve/{COMMIT}/config.json"


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with serve(Shelf()) as running:
        yield running


def stock(shelf: Shelf, files: dict[str, bytes]) -> None:
    stock_hub(shelf, REPO, files)


def test_a_repository_of_ggufs_is_read_by_its_headers(shelf: Shelf, tmp_path: Path) -> None:
    files = {}
    for quant in ("Q4_K_S", "Q8_0"):
        files[f"m-{quant}.gguf"] = write(tmp_path / f"m-{quant}.gguf", TINY_KEYS, TINY_TABLE).read_bytes()
    stock(shelf, files)
    found = preview(f"hf:{REPO}:q8_0", endpoint=shelf.url)
    assert len(found.tensors) == len(TINY_TABLE)
    assert found.files[0].path == f"{shelf.url}/{REPO}/resolve/{COMMIT}/m-Q8_0.gguf"
    with pytest.raises(UnknownModel) as caught:
        preview(f"hf:{REPO}:Q4_K_XS", endpoint=shelf.url)
    assert str(caught.value.hint).startswith("did you mean Q4_K_S?")
    with pytest.raises(UsageError, match="2 models"):
        preview(f"hf:{REPO}", endpoint=shelf.url)


def test_a_repository_of_weights_is_derived_from_its_config(shelf: Shelf) -> None:
    stock(shelf, {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": b"never asked for"})
    found = preview(f"hf:{REPO}:Q4_K_S", endpoint=shelf.url)
    assert (found.name, found.architecture, found.layers, found.quantisation) == ("model", "qwen3", 2, "Q4_K_S")
    assert not any(asked.path.endswith(".safetensors") for asked in shelf.asked)
    with pytest.raises(UnknownModel) as caught:
        preview(f"hf:{REPO}:Q4_K_XL", endpoint=shelf.url)
    assert "did you mean Q4_K_" in str(caught.value.hint)


def test_hub_models_are_planned_by_name(shelf: Shelf, tmp_path: Path) -> None:
    stock(shelf, {"config.json": json.dumps(CONFIG).encode()})
    command = ["plan", f"hf:{REPO}:Q8_0", "--machine", "epyc-9175f", "--context", "4096", "--json"]
    answer = subprocess.run(
        [sys.executable, "-m", "tokenmill", *command],
        env=os.environ | {"HF_ENDPOINT": shelf.url, "HF_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert found["fits"]
    assert found["command"]["argv"][2] == f"hf:{REPO}:Q8_0"
    assert not (tmp_path / "tokenmill" / "models").exists()


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({"README.md": b"hello"}, UnknownModel),
        ({"config.json": b"<html>"}, TokenmillError),
        ({"config.json": json.dumps(CONFIG | {"model_type": "qwen9"}).encode()}, UnknownModel),
    ],
)
def test_repositories_without_a_usable_config(
    files: dict[str, bytes], error: type[TokenmillError], shelf: Shelf
) -> None:
    stock(shelf, files)
    with pytest.raises(error) as caught:
        preview(f"hf:{REPO}:Q8_0", endpoint=shelf.url)
    assert caught.value.hint


@pytest.mark.parametrize("status", ["401", "403"])
def test_a_gated_config_names_the_login(status: str, shelf: Shelf) -> None:
    stock(shelf, {"config.json": json.dumps(CONFIG).encode()})
    shelf.faults[CONFIG_PATH] = [status]
    with pytest.raises(PullError) as caught:
        preview(f"hf:{REPO}:Q8_0", endpoint=shelf.url)
    assert "HF_TOKEN" in str(caught.value.hint)


def test_a_config_at_a_url(shelf: Shelf) -> None:
    shelf.files["/a/folder/config.json"] = json.dumps(CONFIG).encode()
    found = read(f"{shelf.url}/a/folder/config.json:Q8_0")
    assert (found.name, found.quantisation, found.layers) == ("folder", "Q8_0", 2)
    assert read(f"{shelf.url}/a/folder/config.json").quantisation == "Q4_K_M"
    with pytest.raises(RemoteError, match="404"):
        read(f"{shelf.url}/b/config.json")
