"""Machines by name: the catalogue that ships with tokenmill, machine files, and `this` one.

A catalogue entry is a machine file like any other (catalog/NAME.toml); its notes say where every
figure comes from. Prefer a file of your own: `tokenmill probe -o FILE`.
"""

import difflib
from contextlib import suppress
from pathlib import Path

from tokenmill.errors import UnknownMachine
from tokenmill.hardware.machine import Machine
from tokenmill.hardware.machine_file import read, write

__all__ = ["THIS", "find", "load_all", "names", "read", "write"]

THIS = "this"
_FOLDER = Path(__file__).with_name("catalog")


def names() -> tuple[str, ...]:
    """Every catalogue name, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def load_all() -> tuple[Machine, ...]:
    """Every machine of the catalogue, by name."""
    return tuple(_entry(name) for name in names())


def find(name: str) -> Machine:
    """The machine meant by `this`, a catalogue name, or a path to a machine file."""
    if name == THIS:
        from tokenmill.hardware.probe import probe  # noqa: PLC0415  reads the machine: only when asked

        return probe()
    if "/" in name or name.endswith(".toml"):
        return _file(Path(name))
    if name in names():
        return _entry(name)
    raise UnknownMachine(f"no machine called {name!r}", hint=_suggestion(name))


def _file(path: Path) -> Machine:
    with suppress(RuntimeError):  # ~nobody/: taken as it stands, and then not found
        path = path.expanduser()
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        hint = f"tokenmill probe -o {path} writes one for this machine"
        raise UnknownMachine(f"no machine file at {path}", hint=hint) from error
    except OSError:
        pass  # it may be there: reading it says what is wrong
    return read(path)


def _entry(name: str) -> Machine:
    return read(_FOLDER / f"{name}.toml")


def _suggestion(name: str) -> str:
    wanted = name.lower()
    known = (*names(), THIS)
    near = [candidate for candidate in known if wanted and wanted in candidate]
    near = near[:3] or difflib.get_close_matches(wanted, known, n=3)
    if near:
        return f"did you mean {' or '.join(near)}? tokenmill machines lists them all"
    return "tokenmill machines lists the catalogue; a path to a machine file works too"
