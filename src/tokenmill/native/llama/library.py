"""Opens llama.cpp: the shared object inside the pinned xllamacpp wheel, or a libllama.so with its llama.h.

When the library is opened, its version is checked, that every declared function is there, and that both parameter
structures have the defaults that they must have. With a llama.h, the structures are read from it.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata as packages
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenmill.errors import EngineError
from tokenmill.native.llama import cdefs, ik_llama
from tokenmill.version import INSTALL_HINT, WHEEL, WHEEL_VERSION

LLAMA_VERSION = "0.6.0-dev"  # what that wheel's llama_version() returns; structures change more often than it does
WHEEL_MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ of that wheel, which does not export the function that returns it
OWN_HINT = f"engine.library and engine.header must be of one build; without both it is the wheel's: {INSTALL_HINT}"


@dataclass(frozen=True, slots=True)
class Library:
    """An opened llama.cpp that has passed every check."""

    ffi: Any
    lib: Any
    path: Path
    version: str
    build: str  # distinguishes builds of one version: the wheel's release, or the file's hash
    max_sequences: int = WHEEL_MAX_SEQUENCES  # ids that a context can have
    is_ik: bool = False  # ik_llama.cpp, whose functions have llama.cpp's names in `lib`

    @property
    def description(self) -> str:
        """The library with its version and build, as an engine reports it."""
        version = self.version if self.is_ik else f"llama.cpp {self.version}"
        return f"{version} ({self.build})"

    def text(self, pointer: Any) -> str:
        """A C string."""
        return "" if pointer == self.ffi.NULL else bytes(self.ffi.string(pointer)).decode(errors="replace")

    def devices(self) -> dict[str, Any]:
        """Devices that can hold tensors, by name: CPU, CUDA0, ..."""
        found = [self.lib.ggml_backend_dev_get(index) for index in range(self.lib.ggml_backend_dev_count())]
        return {self.text(self.lib.ggml_backend_dev_name(device)): device for device in found}


def open_library(path: Path | None = None, *, header: Path | None = None, more: str = "") -> Library:
    """Open llama.cpp: the pinned wheel's, or `path` with the llama.h it was built from; `more`: more declarations.

    With ik_llama.cpp's llama.h, `path` is its library, and `more` is not needed.
    """
    if path is None and header is not None:
        raise EngineError(f"{header} is given without the library that was built from it", hint=OWN_HINT)
    text = None if header is None else _read_header(header)
    if path is not None and text is not None and ik_llama.is_header(text):
        return _open_ik(path, text)
    from cffi import FFI, CDefError  # noqa: PLC0415  slow to import

    source, hint = (wheel_library(), INSTALL_HINT) if path is None else (path, OWN_HINT)
    structs = cdefs.STRUCTS if text is None else structs_in(text)
    ffi = FFI()
    try:
        ffi.cdef(declare(structs) + cdefs.OPTIONAL_FUNCTIONS + more)
    except CDefError as error:
        raise EngineError(f"{header} cannot be parsed: {error}", hint=hint) from error
    if path is not None:
        _load_cpp_runtime(ffi)
    lib = _load(ffi, source, _functions_in(cdefs.FUNCTIONS + more), hint)
    version = bytes(ffi.string(lib.llama_version())).decode(errors="replace")
    if header is None and version != LLAMA_VERSION:
        raise EngineError(
            f"{source} is llama.cpp {version}, not {LLAMA_VERSION}",
            hint=f"{INSTALL_HINT}, or give the llama.h it was built from as engine.header",
        )
    _check_defaults(FFI, ffi, source, hint, anchored=header is not None)
    return Library(ffi, lib, source, version, _build(source, wheel=path is None), _max_sequences(lib))


def _open_ik(path: Path, header: str) -> Library:
    """Open ik_llama.cpp, and the wheel's llama.cpp for its samplers."""
    from cffi import FFI, CDefError  # noqa: PLC0415  slow to import

    ffi = FFI()
    try:
        ffi.cdef(ik_llama.declarations(header) + cdefs.SAMPLERS)
    except CDefError as error:
        raise EngineError(f"the llama.h of {path} cannot be parsed: {error}", hint=OWN_HINT) from error
    _load_cpp_runtime(ffi)
    lib = _load(ffi, path, _functions_in(ik_llama.FUNCTIONS), OWN_HINT)
    _check_defaults(FFI, ffi, path, OWN_HINT, anchored=True)
    samplers = _load(ffi, wheel_library(), _functions_in(cdefs.SAMPLERS), INSTALL_HINT)
    functions = ik_llama.IkFunctions(ffi, lib, samplers)
    return Library(
        ffi, functions, path, ik_llama.VERSION, _build(path, wheel=False), ik_llama.MAX_SEQUENCES, is_ik=True
    )


def _load(ffi: Any, source: Path, functions: Iterable[str], hint: str) -> Any:
    """The shared object; EngineError if it cannot be opened or lacks a function."""
    try:
        lib = ffi.dlopen(str(source))
    except OSError as error:
        why = str(error).partition(".  Additionally")[0].removeprefix(f"cannot load library '{source}': ")
        raise EngineError(f"{source} cannot be opened: {why.removeprefix(f'{source}: ')}", hint=hint) from error
    for name in functions:
        if not hasattr(lib, name):
            raise EngineError(f"{source} has no function {name}: it is another version, or not llama.cpp", hint=hint)
    return lib


def _functions_in(declarations: str) -> list[str]:
    return re.findall(r"(\w+)\s*\([^()]*(?:\([^()]*\)[^()]*)*\);", declarations)


def open_running(path: Path | None = None, *, header: Path | None = None) -> Library:
    """Open llama.cpp to run models, not only to load them: `open_library` with all declarations."""
    more = cdefs.RUNNING_FUNCTIONS + cdefs.SAMPLERS + (cdefs.BREAKDOWN if cdefs.breakdown_readable() else "")
    return open_library(path, header=header, more=more)


def metadata(library: Library, model: Any, key: str) -> str | None:
    """A scalar of a model file's metadata as text; None if the file has no such key."""
    size = int(library.lib.llama_model_meta_val_str(model, key.encode(), library.ffi.NULL, 0))
    if size < 0:
        return None
    text = library.ffi.new("char[]", size + 1)
    library.lib.llama_model_meta_val_str(model, key.encode(), text, size + 1)
    return bytes(library.ffi.buffer(text, size)).decode(errors="replace")


def _max_sequences(lib: Any) -> int:
    try:
        return int(lib.llama_max_parallel_sequences())
    except AttributeError:
        return WHEEL_MAX_SEQUENCES


def _build(source: Path, *, wheel: bool) -> str:
    if wheel:
        return f"{WHEEL} {WHEEL_VERSION}"
    try:
        with source.open("rb") as file:
            return f"{source.name} {hashlib.file_digest(file, 'sha256').hexdigest()[:12]}"
    except OSError:  # a bare name, which the loader looked up
        return source.name


def _load_cpp_runtime(ffi: Any) -> None:
    """Load the system's C++ library before all others.

    A CUDA build's libggml-cuda carries parts of it inside, and a program that does not use C++ itself, as Python, finds
    those first: llama.cpp then dies in a regular expression.
    """
    with suppress(OSError):  # a system on which it has another name does not need this
        _CPP.append(ffi.dlopen("libstdc++.so.6", ffi.RTLD_NOW | ffi.RTLD_GLOBAL))


_CPP: list[Any] = []  # never closed


def wheel_library() -> Path:
    """The shared object inside the installed wheel, which must be the pinned one."""
    spec = find_spec(WHEEL)
    if spec is None or spec.origin is None:
        raise EngineError(f"{WHEEL} is not installed", hint=INSTALL_HINT)
    installed = packages.version(WHEEL)
    if installed.partition("+")[0] != WHEEL_VERSION:  # +cu128 and the like are the same build for other devices
        raise EngineError(
            f"{WHEEL} {installed} is installed, but this tokenmill needs {WHEEL_VERSION}", hint=INSTALL_HINT
        )
    found = sorted(Path(spec.origin).parent.glob(f"{WHEEL}*.so"))
    if not found:
        raise EngineError(f"{WHEEL} {installed} contains no shared object", hint=INSTALL_HINT)
    return found[0]


def declare(structs: Mapping[str, str]) -> str:
    """All declarations for cffi."""
    bodies = "".join(f"struct {name} {{ {body} }};\n" for name, body in structs.items())
    return cdefs.TYPES + bodies + cdefs.FUNCTIONS


def structs_in(header: str) -> dict[str, str]:
    """The parameter structures that a llama.h declares, with pointers and enumerations as plain types."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", header, flags=re.DOTALL)
    found = {}
    for name, ours in cdefs.STRUCTS.items():
        match = re.search(rf"struct {name}\s*\{{(.*?)\}};", text, flags=re.DOTALL)
        if match is None:
            raise EngineError(f"the header declares no struct {name}: is it llama.h?", hint=OWN_HINT)
        fields = [field.strip() for field in match[1].split(";") if field.strip()]
        missing = _names(ours) - _names(match[1])
        needed = missing & {"n_ctx", "n_batch", "n_ubatch", "n_seq_max", "type_k", "type_v", "no_alloc", "load_mode"}
        if needed:
            raise EngineError(
                f"the header's {name} has no {', '.join(sorted(needed))}: this llama.cpp is too old for a dry run",
                hint=INSTALL_HINT,
            )
        found[name] = "".join(_plain(field) for field in fields)
    return found


def differences(found: Mapping[str, object], expected: Mapping[str, object]) -> list[str]:
    """Differences from the expected values, as text: `n_batch is 4, not 2048`."""
    return [
        f"{name} is {found[name]}, not {value}"
        for name, value in expected.items()
        if name in found and found[name] != value
    ]


def _check_defaults(maker: Any, ffi: Any, source: Path, hint: str, *, anchored: bool) -> None:
    """EngineError unless both parameter structures have their known defaults, as they do if the layout is right."""
    # A library with a longer structure would write past ours, so the call gets a larger one.
    roomy = maker()
    roomy.cdef("struct roomy { uint64_t words[256]; };")
    roomy.cdef("struct roomy llama_model_default_params(void); struct roomy llama_context_default_params(void);")
    lib = roomy.dlopen(str(source))
    for kind, defaults in (("model", cdefs.MODEL_DEFAULTS), ("context", cdefs.CONTEXT_DEFAULTS)):
        raw = getattr(lib, f"llama_{kind}_default_params")()
        params = ffi.new(f"struct llama_{kind}_params *")
        ffi.memmove(params, roomy.buffer(roomy.addressof(raw)), ffi.sizeof(params[0]))
        found = {name: _value(ffi, params, name, field) for name, field in ffi.typeof(params[0]).fields}
        expected = {name: value for name, value in defaults.items() if name in cdefs.ANCHORS} if anchored else defaults
        wrong = differences(found, expected)
        if wrong:
            raise EngineError(f"{source} lays out its {kind} parameters differently: {'; '.join(wrong[:3])}", hint=hint)


def _value(ffi: Any, params: Any, name: str, field: Any) -> object:
    """The value of a field; a byte that is not a valid bool is returned as a number."""
    if field.type.cname != "_Bool":
        return getattr(params, name)
    byte = ffi.buffer(params)[field.offset][0]
    return bool(byte) if byte in (0, 1) else byte


def _read_header(header: Path) -> str:
    try:
        return header.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise EngineError(f"cannot read {header}: {error.strerror}", hint=OWN_HINT) from error


def _names(body: str) -> set[str]:
    return set(re.findall(r"(\w+)\s*;", body))


def _plain(field: str) -> str:
    """`enum ggml_type type_k` as `int type_k;`, other pointers and callbacks as `void *`, except those that are set."""
    match = re.fullmatch(r"(.*?)(\w+(?:\[\d+\])?)", field, flags=re.DOTALL)
    if match is None:
        raise EngineError(f"the header declares {' '.join(field.split())!r}, which cannot be parsed", hint=INSTALL_HINT)
    kind = " ".join(match[1].split())
    name = match[2]
    if name in ("devices", "tensor_buft_overrides", "tensor_split"):
        return f"{kind} {name};"
    if kind.startswith("enum "):
        return f"int {name};"
    if "*" in kind or "callback" in kind:
        return f"void * {name};"
    return f"{kind} {name};"
