"""The Jinja that chat templates run in: jinja2's sandbox with llama.cpp's few departures from Jinja.

The sandbox keeps a template away from Python's objects. It does not limit time or memory: templates from model files
are rendered in a child process that has limits (renderer.py).

Where Jinja stops at a missing value, this does what llama.cpp does: missing and None add nothing to a text, and their
`items()` are empty. Filters return lists, never generators. A witness sees what a template does with its values.
"""

import json
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Final, Protocol

from jinja2 import ChainableUndefined, Template, TemplateSyntaxError, Undefined, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS
from jinja2.visitor import NodeTransformer

# These return Markup, which escapes the text that is added to it.
_ESCAPING: Final = frozenset({"e", "escape", "forceescape", "urlize", "xmlattr"})
_LIST_METHODS: Final = frozenset({"append", "pop"})  # llama.cpp allows them; values belong to one rendering


class TemplateError(Exception):
    """The template does not compile, or failed on this conversation."""


class TemplateRefusal(TemplateError):
    """The template refused the conversation with `raise_exception`."""


class Witness(Protocol):
    """Observes what a template does with its values; may raise to end the rendering."""

    def note(self, operation: str, value: object) -> None:
        """`operation` is get, item, loop, write, deep, "filter NAME" or "test NAME"."""


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template. It renders one conversation at a time."""

    intercepted_binops = frozenset({"+"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=_Missing,
            finalize=self._written,
            extensions=[LoopControlExtension, _GenerationBlocks],
            optimized=False,
            cache_size=0,
        )
        self._witness: Witness | None = None
        filters: dict[str, Callable[..., Any]] = {name: run for name, run in FILTERS.items() if name not in _ESCAPING}
        filters |= {"tojson": self._tojson, "items": _items, "safe": FILTERS["string"]}
        self.filters = {name: self._observed(f"filter {name}", run) for name, run in filters.items()}
        tests: dict[str, Any] = TESTS
        self.tests = {name: self._observed(f"test {name}", run) for name, run in tests.items()}
        kept = {name: self.globals[name] for name in ("namespace", "dict", "range")}
        self.globals = {**kept, "raise_exception": _refuse}

    def compiled(self, source: str) -> Template:
        """The template, compiled; TemplateError if it has a syntax error."""
        try:
            return self.from_string(source)
        except MemoryError:
            raise
        except TemplateSyntaxError as error:
            raise TemplateError(f"line {error.lineno}: {error.message}") from None
        except Exception as error:  # noqa: BLE001  whatever a foreign template provokes in Jinja and in Python's compiler
            raise TemplateError(f"{type(error).__name__}: {error}") from None

    def render(self, template: Template, values: dict[str, object], witness: Witness | None = None) -> str:
        """The template's text for these values, which it may change; TemplateError if it fails."""
        self._witness = witness
        try:
            return "".join(template.root_render_func(template.new_context(values)))
        except (TemplateRefusal, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001  whatever a foreign template provokes
            raise TemplateError(str(error) or type(error).__name__) from None
        finally:
            self._witness = None

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """jinja2's rules, and `append` and `pop` of lists."""
        return (isinstance(obj, list) and attr in _LIST_METHODS) or super().is_safe_attribute(obj, attr, value)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`a.b`."""
        if obj is None and attribute == "items":
            return _Missing().items
        found = super().getattr(obj, attribute)
        self._note("get", obj if callable(found) else found)
        return found

    def getitem(self, obj: Any, argument: Any) -> Any:
        """`a[b]`."""
        found = super().getitem(obj, argument)
        if isinstance(argument, int):
            self._note("item", obj)
        self._note("get", found)
        return found

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  as in jinja2
        """Call a macro, function or method; `mapping.get(name)` reads the value."""
        found = super().call(__context, __obj, *args, **kwargs)
        __self._note("get", found)
        return found

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`a + b`: anything can be added to a text."""
        self._note("write", left)
        self._note("write", right)
        if isinstance(left, str) or isinstance(right, str):
            return f"{self._written(left)}{self._written(right)}"
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Hooks().visit(super()._parse(source, name, filename))
        return tree

    def looped(self, items: Any) -> Any:
        """What a `for` iterates over: a copy of a list, because the loop's body may append to it."""
        self._note("loop", items)
        return tuple(items) if isinstance(items, list) else items

    def joined(self, *parts: Any) -> str:
        """`a ~ b`."""
        return "".join(str(self._written(part)) for part in parts)

    def _written(self, value: Any) -> Any:
        """A value as it is written into text: None as nothing."""
        self._note("write", value)
        return "" if value is None else value

    def _observed(self, operation: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """A filter or test that reports its use and returns a list where jinja2 returns a generator."""
        position = 1 if hasattr(run, "jinja_pass_arg") else 0  # jinja2 may pass its environment or context first

        @wraps(run)
        def observed(*args: Any, **kwargs: Any) -> Any:
            self._note(operation, args[position])
            result = run(*args, **kwargs)
            return list(result) if isinstance(result, Iterator) else result

        return observed

    def _tojson(
        self,
        value: Any,
        indent: int | None = None,
        *,
        ensure_ascii: bool = False,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as the makers of models write it: no HTML escapes, other scripts as they are, missing values as null."""
        self._note("deep", value)
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
            default=_null_for_missing,
        )

    def _note(self, operation: str, value: object) -> None:
        if self._witness is not None:
            self._witness.note(operation, value)


class _Missing(ChainableUndefined):
    """A missing value: the methods that llama.cpp gives it."""

    def items(self) -> list[Any]:
        return []

    def _nothing(self, *_args: Any) -> str:
        return ""

    strip = upper = lower = title = capitalize = replace = _nothing


class _GenerationBlocks(Extension):
    """`{% generation %}` marks the assistant's tokens for training; here it does nothing."""

    tags = {"generation", "endgeneration"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return []


class _Hooks(NodeTransformer):
    """Sends `for` and `~`, which jinja2 compiles to plain Python, through the sandbox."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = _call("looped", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("joined", *node.nodes)


def _call(method: str, *args: nodes.Node) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), list(args), [], None, None)


def _items(value: Any) -> list[tuple[Any, Any]]:
    return [] if value is None or isinstance(value, Undefined) else list(dict.items(value))


def _refuse(message: object = "") -> None:
    raise TemplateRefusal(str(message))


def _null_for_missing(value: object) -> None:
    if not isinstance(value, Undefined):
        raise TypeError(f"{type(value).__name__} cannot be written as JSON")
