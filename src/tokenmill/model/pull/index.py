"""Finds packages in the user's own package index and downloads them.

The index, mirrors, find-links, proxies, certificates and passwords are configured in the user's installer, so `pip
install --dry-run --report` (or `uv pip compile` if this Python has no pip) resolves the URL from a few kilobytes of
metadata. tokenmill then downloads the file itself, because pip cannot resume and shows progress only on terminals. If
the server refuses (keyring, client certificate, private authority), `pip download` is used, which does not resume.
"""

import ast
import importlib.util
import json
import netrc
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import httpx

from tokenmill.errors import PullError
from tokenmill.model.pull.fetch import DownloadRefused
from tokenmill.model.pull.store import DownloadProgress

_TIMEOUT = httpx.Timeout(60.0, connect=20.0)
# settings for installation must not make a dry run fail
_ENVIRONMENT = {
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_INPUT": "1",
    "PIP_REQUIRE_HASHES": "0",
    "PIP_REQUIRE_VIRTUALENV": "0",
    "PIP_USER": "0",
}
_BACKEND = """\
import os

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    name = "{folder}"
    os.mkdir(os.path.join(folder, name))
    with open(os.path.join(folder, name, "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
    return name
"""
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


@dataclass(frozen=True, slots=True)
class FoundWheel:
    """One wheel in the user's index."""

    requirement: str
    url: str  # https, http or file
    pip: tuple[str, ...] | None  # the pip that found it; None: found by uv
    raw_progress: bool = False  # whether pip has a machine-readable progress bar

    @property
    def local_path(self) -> Path | None:
        """Its path; None for http URLs."""
        parts = urlsplit(self.url)
        return Path(unquote(parts.path)) if parts.scheme == "file" else None


@dataclass(frozen=True, slots=True)
class IndexConnection:
    """Connection settings of the user's pip."""

    proxy: str | None = None
    authorities: tuple[str, ...] = ()  # files or folders of certificates
    logins: tuple[tuple[str, str, str], ...] = ()  # host, user, password

    def client(self, url: str) -> httpx.Client:
        """An HTTP client for `url` with pip's certificates and proxies."""
        try:
            context = httpx.create_ssl_context()  # SSL_CERT_FILE, SSL_CERT_DIR, else certifi's
            context.load_default_certs()  # the system's, as pip does
            for authority in self.authorities:
                folder = Path(authority).is_dir()
                context.load_verify_locations(None if folder else authority, authority if folder else None)
            return httpx.Client(
                auth=self.login(url), verify=context, proxy=self.proxy, follow_redirects=True, timeout=_TIMEOUT
            )
        except OSError as error:
            raise DownloadRefused(f"certificates cannot be read: {error}", hint="check PIP_CERT") from error
        except (ValueError, httpx.InvalidURL, ImportError) as error:  # httpx has no SOCKS on its own
            raise DownloadRefused(
                f"the proxy cannot be used: {error}", hint="check PIP_PROXY and HTTPS_PROXY"
            ) from error

    def login(self, url: str) -> httpx.BasicAuth | None:
        """The login for a URL: from an index URL on the same host, else from ~/.netrc."""
        host = urlsplit(url).hostname or ""
        for known, user, password in self.logins:
            if known == host:
                return httpx.BasicAuth(user, password)
        try:
            entry = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
        except (OSError, netrc.NetrcParseError):
            return None
        return httpx.BasicAuth(entry[0], entry[2] or "") if entry else None


def find(requirement: str) -> FoundWheel:
    """Resolve the URL of `name==version` with the user's installer. Raises `PullError`."""
    if pip := _installed_pip():
        return _ask_pip(pip, requirement)
    if uv := shutil.which("uv"):
        return FoundWheel(requirement, _ask_uv(uv, requirement, "wheels"), None)
    raise _no_installer()


def connection(found: FoundWheel) -> IndexConnection:
    """Read pip's connection settings; for a wheel found by uv, only those of the environment."""
    return read_settings(_run([*found.pip, "config", "list"]).stdout) if found.pip else read_settings("")


def read_settings(listing: str) -> IndexConnection:
    """Parse the output of `pip config list`; the environment overrides [install], which overrides [global]."""
    settings: dict[str, str] = {}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in ("global", "install", ":env:") and value[:1] in ("'", '"'):
            rank = ("global", "install", ":env:").index(section)
            settings[f"{rank} {name}"] = ast.literal_eval(value)
    last = {key.partition(" ")[2]: settings[key] for key in sorted(settings)}
    bundles = (last.get("cert"), os.environ.get("REQUESTS_CA_BUNDLE"), os.environ.get("CURL_CA_BUNDLE"))
    urls = f"{last.get('index-url', '')} {last.get('extra-index-url', '')} {last.get('find-links', '')}".split()
    return IndexConnection(
        proxy=last.get("proxy") or None,
        authorities=tuple(dict.fromkeys(path for path in bundles if path and Path(path).exists())),
        logins=tuple(
            (parts.hostname, unquote(parts.username), unquote(parts.password or ""))
            for parts in map(urlsplit, urls)
            if parts.hostname and parts.username
        ),
    )


def download(found: FoundWheel, folder: Path, progress: DownloadProgress) -> Path:
    """Download the wheel with pip, which supports every kind of login."""
    if found.pip is None:
        raise PullError("uv cannot download a wheel without pip", hint="install pip: uv pip install pip")
    options = ["--only-binary=:all:", *(["--progress-bar=raw"] if found.raw_progress else [])]
    return _pip_download(found.pip, found.requirement, options, folder, progress)


def download_source(requirement: str, folder: Path, progress: DownloadProgress) -> Path:
    """Download the source distribution of `name==version` to `folder` without building it.

    Even for a download, pip runs the build backend of a source distribution for its metadata. A stand-in for that
    backend returns name and version, so that neither the backend nor the distribution's code runs.
    """
    name, _, version = requirement.partition("==")
    pip = _installed_pip()
    if pip is None:
        return _download_source_by_uv(requirement, folder, progress)
    supported = "raw" in _run([*pip, "download", "--help"]).stdout
    options = [f"--no-binary={name}", "--no-build-isolation", *(["--progress-bar=raw"] if supported else [])]
    with tempfile.TemporaryDirectory() as stand_in:
        backend = Path(stand_in) / "setuptools"
        backend.mkdir()
        (backend / "__init__.py").touch()
        info = f"{name.replace('-', '_')}-{version}.dist-info"
        code = _BACKEND.format(folder=info, name=name, version=version)
        (backend / "build_meta.py").write_text(code, encoding="utf-8")
        # some Python distributions replace the standard distutils with that of setuptools
        environment = {"PYTHONPATH": stand_in, "SETUPTOOLS_USE_DISTUTILS": "stdlib"}
        return _pip_download(pip, requirement, options, folder, progress, environment)


def _download_source_by_uv(requirement: str, folder: Path, progress: DownloadProgress) -> Path:
    uv = shutil.which("uv")
    if uv is None:
        raise _no_installer()
    url = _ask_uv(uv, requirement, "sdist")
    target = folder / Path(unquote(urlsplit(url).path)).name
    if urlsplit(url).scheme == "file":
        shutil.copyfile(unquote(urlsplit(url).path), target)
        return target
    try:
        with read_settings("").client(url) as client, client.stream("GET", url) as response, target.open("wb") as file:
            response.raise_for_status()
            total = int(response.headers.get("content-length", 0)) or None
            for piece in response.iter_bytes():
                file.write(piece)
                progress(file.tell(), total)
    except httpx.HTTPError as error:
        raise PullError(f"cannot download {requirement}: {error}") from error
    return target


def _pip_download(
    pip: tuple[str, ...],
    requirement: str,
    options: list[str],
    folder: Path,
    progress: DownloadProgress,
    environment: dict[str, str] | None = None,
) -> Path:
    command = [*pip, "download", "--no-deps", *options, "--dest", str(folder), requirement]
    env = os.environ | _ENVIRONMENT | (environment or {})
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=complaints, text=True) as process,
    ):
        try:
            for line in process.stdout or ():
                if match := _PROGRESS.match(line):
                    progress(int(match[1]), int(match[2]) or None)
        except BaseException:
            process.kill()
            raise
        process.wait()
        complaints.seek(0)
        complaint = complaints.read()
    files = [*folder.glob("*.whl"), *folder.glob("*.tar.gz")]
    if process.returncode != 0 or not files:
        raise _not_found(requirement, "pip", complaint)
    return files[0]


def _installed_pip() -> tuple[str, ...] | None:
    """This Python's pip, else the pip on PATH if there is no uv."""
    if importlib.util.find_spec("pip"):
        return (sys.executable, "-m", "pip")
    pip = None if shutil.which("uv") else shutil.which("pip3") or shutil.which("pip")
    return None if pip is None else (pip,)


def _no_installer() -> PullError:
    return PullError(
        f"this Python ({sys.executable}) has no pip, and neither pip nor uv is on PATH",
        hint="python -m ensurepip, or install uv",
    )


def _ask_pip(pip: tuple[str, ...], requirement: str) -> FoundWheel:
    name = requirement.partition("==")[0]
    command = [
        *pip,
        "install",
        "--dry-run",
        "--ignore-installed",
        "--no-deps",
        f"--only-binary={name}",
        "--quiet",
        "--report",
        "-",
        requirement,
    ]
    # fast-deps avoids downloading the wheel if the index has no metadata files; it is experimental and may disappear
    for extra in (["--use-feature=fast-deps"], []):
        answer = _run([*command, *extra])
        if answer.returncode == 0:
            break
    else:
        raise _not_found(requirement, "pip", answer.stderr)
    try:
        report = json.loads(answer.stdout[answer.stdout.index("{") :])
        url = report["install"][0]["download_info"]["url"]
        version = tuple(int(part) for part in re.findall(r"\d+", report["pip_version"])[:2])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise PullError(
            f"cannot parse pip's report on {requirement}", hint="update pip: python -m pip install --upgrade pip"
        ) from error
    return FoundWheel(requirement, str(url), pip, raw_progress=version >= (24, 1))


def _ask_uv(uv: str, requirement: str, kind: Literal["wheels", "sdist"]) -> str:
    """The URL of the wheel or of the source distribution."""
    name = requirement.partition("==")[0]
    answer = _run(
        [
            uv,
            "pip",
            "compile",
            "-",
            "--no-deps",
            "--no-header",
            "--quiet",
            "--format=pylock.toml",
            *([f"--only-binary={name}"] if kind == "wheels" else []),
            "--python",
            sys.executable,
        ],
        requirement,
    )
    if answer.returncode != 0:
        raise _not_found(requirement, "uv", answer.stderr)
    try:
        found = tomllib.loads(answer.stdout)["packages"][0][kind]
        file: dict[str, Any] = found[0] if kind == "wheels" else found
        return str(file["url"]) if "url" in file else Path(file["path"]).absolute().as_uri()
    except (tomllib.TOMLDecodeError, KeyError, IndexError, TypeError) as error:
        raise PullError(f"cannot parse uv's output for {requirement}", hint="update uv: uv self update") from error


def _run(command: list[str], given: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, env=os.environ | _ENVIRONMENT, input=given, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise PullError(f"cannot run {command[0]}: {error.strerror}") from error


def _not_found(requirement: str, tool: str, complaint: str) -> PullError:
    if "Retrying (" in complaint or "error sending request" in complaint:
        reason = "the package index cannot be reached"
    else:
        lines = [line.strip() for line in complaint.splitlines() if line.strip()]
        errors = [line for line in lines if line.lower().startswith(("error", "cause"))]
        last = (errors or lines or ["no error message"])[-1]
        reason = re.sub(r"^(error|cause):\s*", "", last, flags=re.IGNORECASE)
    return PullError(
        f"{tool} cannot get {requirement}: {reason}",
        hint=f"check the index in {tool}'s configuration; without a network, put the wheel into a folder and set "
        f"{tool.upper()}_FIND_LINKS to it",
    )
