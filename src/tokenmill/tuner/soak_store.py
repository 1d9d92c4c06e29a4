"""The last soak of each machine and model on disk: `<state>/soaks/MACHINE-MODEL.json`, replaced whole or not at all."""

import json
import re
from dataclasses import asdict
from pathlib import Path

from tokenmill.decode import decode
from tokenmill.engine import measured
from tokenmill.errors import ConfigError, EngineError
from tokenmill.tuner.soak import SoakResult

_FOLDER = "soaks"


def path_of(state: Path, machine_id: str, model_id: str) -> Path:
    """Where the result for a machine and a model lies; servers may name models as they like."""
    return state / _FOLDER / f"{machine_id}-{re.sub(r'[^A-Za-z0-9_.-]', '_', model_id)[:128]}.json"


def save(state: Path, result: SoakResult) -> Path:
    """Keep a result, replacing the one before it."""
    path = path_of(state, result.machine_id, result.model_id)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        measured.replace_whole(path, json.dumps(asdict(result), indent=1).encode())
    except OSError as error:
        raise EngineError(
            f"cannot keep the result in {path.parent}: {error.strerror}",
            hint="check state_dir and the room on its disk",
        ) from error
    return path


def load(state: Path, machine_id: str, model_id: str) -> SoakResult | None:
    """The last result; None where there is none that can be read."""
    path = path_of(state, machine_id, model_id)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return decode(SoakResult, data, where=path.name) if isinstance(data, dict) else None
    except (OSError, ValueError, ConfigError):
        return None
