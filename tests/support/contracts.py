"""Recorded contracts: what other software reads from tokenmill, one text file each in tests/data/contracts.

`check` compares with the recorded file; with TOKENMILL_RECORD=1 in the environment it writes the file instead
(`make record`), so that a change of a contract is a diff that a reviewer sees.
"""

import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parents[1] / "data" / "contracts"
RECORD = bool(os.environ.get("TOKENMILL_RECORD"))
HINT = "if the change is meant: make record"

Shape = Any  # "int", "null | str", [shape of every element], {key: shape}, {"null or": shape}


def check(name: str, text: str) -> None:
    """The text equals the recorded one."""
    path = RECORDED / name
    if RECORD:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.is_file(), f"{path} was never recorded: make record"
    assert text == path.read_text(), HINT


def check_shape(name: str, shape: Shape, *, this_machine: bool = False) -> None:
    """The shape equals the recorded one; `this_machine`: up to values and elements that another machine lacks."""
    path = RECORDED / name
    if this_machine and path.is_file():
        found = differences(json.loads(path.read_text()), shape)
        if not found:
            return  # also when recording: a feature that this machine lacks is not a change
        assert RECORD, f"{found}; {HINT}"
    check(name, written(shape))


def written(value: object) -> str:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def shape_of(value: object, maps: Collection[str] = (), key: str = "") -> Shape:
    """Keys and types of a JSON value; of an object under a key in `maps`, whose own keys are data, one shape: `*`."""
    match value:
        case Mapping():
            shapes = {name: shape_of(item, maps, name) for name, item in value.items()}
            return {"*": _union(list(shapes.values()))} if key in maps else shapes
        case list():
            return _union_list([shape_of(item, maps, key) for item in value])
        case None:
            return "null"
        case bool() | int() | float() | str():
            return type(value).__name__
    raise TypeError(value)


def differences(recorded: Shape, seen: Shape, path: str = "") -> list[str]:
    """Where two shapes contradict each other; null and empty lists agree with everything."""
    recorded, seen = _present(recorded), _present(seen)
    if recorded in ("null", [], {"*": []}) or seen in ("null", [], {"*": []}):
        return []
    if isinstance(recorded, dict) and isinstance(seen, dict):
        alone = {**recorded, **seen}
        only = [f"{path}.{key}" for key in recorded.keys() ^ seen.keys() if "absent" not in str(alone[key])]
        both = [
            line for key in recorded.keys() & seen for line in differences(recorded[key], seen[key], f"{path}.{key}")
        ]
        return only + both
    if isinstance(recorded, list) and isinstance(seen, list):
        return differences(recorded[0], seen[0], f"{path}[]")
    if isinstance(recorded, str) and isinstance(seen, str) and _kinds(recorded) & _kinds(seen):
        return []
    return [f"{path}: {recorded} was recorded, {seen} is seen"]


def sql(text: str) -> str:
    """SQL without comments, one statement a paragraph, blanks as a formatter would leave them."""
    text = re.sub(r"--[^\n]*", "", text)
    lines = (re.sub(r"[ \t]+", " ", line).strip() for line in text.splitlines())
    return re.sub(r";\n", ";\n\n", "\n".join(line for line in lines if line)) + "\n"


def _present(shape: Shape) -> Shape:
    return shape["null or"] if isinstance(shape, dict) and set(shape) == {"null or"} else shape


def _kinds(shape: str) -> set[str]:
    return set(shape.replace("int", "float").split(" | ")) - {"null"}


def _union_list(shapes: list[Shape]) -> list[Shape]:
    return [_union(shapes)] if shapes else []


def _union(shapes: list[Shape]) -> Shape:
    found: Shape = shapes[0] if shapes else []
    for shape in shapes[1:]:
        found = _either(found, shape)
    return found


def _either(one: Shape, other: Shape) -> Shape:
    """The shape of values that have the one shape or the other."""
    if one == other:
        return one
    if isinstance(one, str) and isinstance(other, str):
        return " | ".join(sorted({*one.split(" | "), *other.split(" | ")}))
    if "null" in (one, other):
        return {"null or": _present(other if one == "null" else one)}
    present = _present(one), _present(other)
    if (one, other) != present:
        return {"null or": _either(*present)}
    if isinstance(one, list) and isinstance(other, list):
        return _union_list([*one, *other])
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: _either(one.get(key, "absent"), other.get(key, "absent")) for key in {**one, **other}}
    return {"or": sorted([one, other], key=written)}
