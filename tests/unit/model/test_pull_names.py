"""Names of models that can be pulled, and settings of installers."""

from pathlib import Path

import pytest

from tokenmill.errors import TokenmillError, UnknownModel, UsageError
from tokenmill.model import catalog
from tokenmill.model.pull import pull
from tokenmill.model.pull.fetch import DownloadRefused
from tokenmill.model.pull.hub import parse
from tokenmill.model.pull.index import FoundWheel, read_settings


@pytest.mark.parametrize(
    ("name", "error", "hint"),
    [
        ("smolm2", UnknownModel, "did you mean smollm2?"),
        ("smollm2:Q4_1", UnknownModel, "did you mean smollm2?"),
        ("", UnknownModel, "hf:OWNER/REPO:QUANT"),
        ("no such thing", UnknownModel, "hf:OWNER/REPO:QUANT"),
        ("owner/repo:Q4_0", UsageError, "hf:OWNER/REPO:QUANT"),
        ("https://host/m.gguf", UsageError, "hf:OWNER/REPO:QUANT"),
        ("model.gguf", UsageError, "hf:OWNER/REPO:QUANT"),
        ("hf:", UsageError, "hf:OWNER/REPO:QUANT"),
        ("hf:repo", UsageError, "hf:OWNER/REPO:QUANT"),
        ("hf:../../etc:Q4", UsageError, "hf:OWNER/REPO:QUANT"),
        ("hf:a/..:Q4", UsageError, "hf:OWNER/REPO:QUANT"),
        ("hf:a/b/c:Q4", UsageError, "hf:OWNER/REPO:QUANT"),
        ("hf:a/b c:Q4", UsageError, "hf:OWNER/REPO:QUANT"),
    ],
)
def test_wrong_names_get_a_hint(tmp_path: Path, name: str, error: type[TokenmillError], hint: str) -> None:
    with pytest.raises(error) as caught:
        pull(name, models_path=tmp_path, keep_free_bytes=0)
    assert hint in str(caught.value.hint)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", ["", ":Q4_K_S"])
def test_a_catalogue_name_without_files_points_to_the_hub(tmp_path: Path, suffix: str) -> None:
    name = next(name for name in catalog.names() if catalog.entry(name).repository is None)
    with pytest.raises(UsageError, match=name) as caught:
        pull(name + suffix, models_path=tmp_path, keep_free_bytes=0)
    assert f"hf:OWNER/REPO{suffix or ':QUANT'}" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "repo", "quant"),
    [
        ("hf:unsloth/Kimi-K2.5-GGUF:Q4_K_S", "unsloth/Kimi-K2.5-GGUF", "Q4_K_S"),
        ("hf:a/b:sub/file.gguf", "a/b", "sub/file.gguf"),
        ("hf:a/b", "a/b", None),
        ("hf:a/b:", "a/b", None),
    ],
)
def test_hub_names(name: str, repo: str, quant: str | None) -> None:
    wanted = parse(name)
    assert (wanted.repo, wanted.quant) == (repo, quant)


def test_pip_settings_by_their_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(variable, raising=False)
    bundle, env_bundle = tmp_path / "a.pem", tmp_path / "b.pem"
    bundle.touch()
    env_bundle.touch()
    found = read_settings(
        f"""\
global.cert='{bundle}'
:env:.cert='{env_bundle}'
global.index-url='https://ann:p%40ss@index.example.test/simple'
install.extra-index-url='https://bob@second.example.test/simple\\nfile:///opt/simple'
download.proxy='http://not.for.us:1'
global.proxy='http://proxy.example.test:3128'
global.timeout='60'
a line that is no setting
"""
    )
    assert found.authorities == (str(env_bundle),)
    assert found.proxy == "http://proxy.example.test:3128"
    assert found.logins == (("index.example.test", "ann", "p@ss"), ("second.example.test", "bob", ""))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("global.cert='{file}'", "certificates cannot be read"),
        ("global.proxy='gopher://x'", "the proxy cannot be used"),
    ],
)
def test_unusable_settings_lead_to_a_download_with_pip(tmp_path: Path, setting: str, message: str) -> None:
    file = tmp_path / "not.pem"
    file.write_text("nothing like a certificate")
    with pytest.raises(DownloadRefused, match=message):
        read_settings(setting.format(file=file)).client("https://host/x.whl")


def test_logins_go_to_their_host_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rc = tmp_path / "netrc"
    rc.write_text("machine files.example.test login carl password secret\n")
    rc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(rc))
    settings = read_settings("global.index-url='https://ann:one@index.example.test/simple'")
    assert settings.login("https://index.example.test/x.whl") is not None
    assert settings.login("https://files.example.test/x.whl") is not None
    assert settings.login("https://elsewhere.example.test/x.whl") is None
    monkeypatch.setenv("NETRC", str(tmp_path / "absent"))
    assert settings.login("https://files.example.test/x.whl") is None


def test_a_wheel_on_this_machine_has_a_path() -> None:
    assert FoundWheel("a==1", "file:///opt/my%20wheels/a.whl", None).local_path == Path("/opt/my wheels/a.whl")
    assert FoundWheel("a==1", "https://host/a.whl", None).local_path is None
