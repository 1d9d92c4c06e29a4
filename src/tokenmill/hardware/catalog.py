"""Finds machines by name: catalogue entries, machine files, and `this` machine.

A catalogue entry is an ordinary machine file (catalog/NAME.toml) whose notes give the source of every figure. For your
own machine, prefer a file written by `tokenmill probe -o FILE`.
"""

import difflib
from contextlib import suppress
from pathlib import Path

from tokenmill.errors import UnknownMachine
from tokenmill.hardware.machine import Machine
from tokenmill.hardware.machine_file import read

THIS = "this"
_FOLDER = Path(__file__).with_name("catalog")


def names() -> tuple[str, ...]:
    """All catalogue names, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def load_all() -> tuple[Machine, ...]:
    """All machines of the catalogue, sorted by name."""
    return tuple(_entry(name) for name in names())


def find(name: str) -> Machine:
    """The machine with this name: `this`, a catalogue name, or a path to a machine file.

    Raises `UnknownMachine` if there is no such machine, `ConfigError` for a wrong machine file.
    """
    if name == THIS:
        from tokenmill.hardware.probe import probe  # noqa: PLC0415  imports the whole probe

        return probe()
    if "/" in name or name.endswith(".toml"):
        return _file(Path(name))
    if name in names():
        return _entry(name)
    raise UnknownMachine(f"no machine called {name!r}", hint=_suggestion(name))


def _file(path: Path) -> Machine:
    with suppress(RuntimeError):  # the home of an unknown user: left as it is, so not found
        path = path.expanduser()
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        hint = f"tokenmill probe -o {path} writes a file for this machine"
        raise UnknownMachine(f"no machine file at {path}", hint=hint) from error
    except OSError:
        pass  # it may exist; reading it reports the error
    return read(path)


def _entry(name: str) -> Machine:
    return read(_FOLDER / f"{name}.toml")


def _suggestion(name: str) -> str:
    wanted = name.lower()
    known = (*names(), THIS)
    near = [candidate for candidate in known if wanted and wanted in candidate]
    near = near[:3] or difflib.get_close_matches(wanted, known, n=3)
    if near:
        return f"did you mean {' or '.join(near)}? tokenmill machines lists all names"
    return "tokenmill machines lists all names; or give the path of a machine file"
