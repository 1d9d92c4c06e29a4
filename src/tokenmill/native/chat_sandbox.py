"""The Jinja that chat templates run in: small, closed and paid for.

A template comes out of a model file, which anyone may have written. So it never touches a Python object: names after
a dot are keys of a mapping or one of the methods that `chat_words` lists, never attributes; there is no import,
include or attribute filter. And it cannot run for ever or fill the memory: each pass of a loop, call of a macro,
filter, operator and text made is paid from the budget (`chat_budget`). What can grow or recurse is taken out of
Jinja's hands while it compiles and done by `chat_values`.

This module does not know what a message is.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from types import MethodType
from typing import Any, Final

from jinja2 import ChainableUndefined, Template, TemplateError, TemplateSyntaxError, Undefined, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tokenmill.native.chat_budget import Budget, Exhausted, Failed, Limits
from tokenmill.native.chat_values import OPERATORS, Values, Witness, kind

MOST_SOURCE_CHARACTERS = 256 * 1024  # the longest published template has 51 thousand
_LOOP_WORDS = frozenset(
    {"index", "index0", "revindex", "revindex0", "first", "last", "length", "previtem", "nextitem", "depth", "depth0"}
)
_NOTHING: Final = object()
_GENERATION = {"generation", "endgeneration"}
# Steps that running a node once costs, by measurement; any other costs one.
_WEIGHTS: Final[Mapping[type[nodes.Node], int]] = {
    nodes.List: 16,
    nodes.Tuple: 16,
    nodes.Dict: 16,
    nodes.Getattr: 16,
    nodes.Getitem: 16,
    nodes.Compare: 16,
    nodes.Call: 8,
    nodes.Filter: 8,
    nodes.Test: 8,
    nodes.Concat: 8,
    nodes.Add: 8,
    nodes.Output: 4,
    nodes.Assign: 4,
}
_REFUSED_NODES: Final = (
    nodes.Include,
    nodes.Import,
    nodes.FromImport,
    nodes.Extends,
    nodes.Block,
    nodes.With,
    nodes.EvalContextModifier,
)
_ERRORS: Final = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)


class Function:
    """Something a template may call."""

    __slots__ = ("name", "run")

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        self.name = name
        self.run = run


class _GenerationBlocks(Extension):
    """`{% generation %}` marks the assistant's words for training; here it marks nothing."""

    tags = _GENERATION

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return []


class _Priced(CodeGenerator):
    """Sends comparisons, joined texts, slices and mappings through the sandbox."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self._through("joined", node.nodes, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        self.write("environment.values.compared(")
        self.visit(node.expr, frame)
        for operand in node.ops:
            self.write(f", {operand.op!r}, ")
            self.visit(operand.expr, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self._through("mapped", [part for pair in node.items for part in (pair.key, pair.value)], frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if not isinstance(node.arg, nodes.Slice):
            return super().visit_Getitem(node, frame)
        ends = [end or nodes.Const(None) for end in (node.arg.start, node.arg.stop, node.arg.step)]
        return self._through("sliced", [node.node, *ends], frame)

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: CodeGenerator._FinalizeInfo) -> str:
        """Only plain text is written while compiling: what operators do with constants is the sandbox's to say."""
        if not isinstance(node, nodes.TemplateData | nodes.Const):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def _through(self, method: str, parts: Iterable[nodes.Node], frame: Frame) -> None:
        self.write(f"environment.values.{method}(")
        for part in parts:
            self.visit(part, frame)
            self.write(", ")
        self.write(")")


class Sandbox(ImmutableSandboxedEnvironment):
    """One template with its words; it renders one conversation at a time."""

    code_generator_class = _Priced
    intercepted_binops = frozenset(OPERATORS)

    def __init__(self, limits: Limits) -> None:
        self.values = Values(limits)
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=ChainableUndefined,
            finalize=self.values.written,
            extensions=[LoopControlExtension, _GenerationBlocks],
            optimized=False,
            cache_size=0,
        )
        self.limits = limits
        self.methods: Mapping[type, Mapping[str, Callable[..., Any]]] = {}
        self.globals = {}
        self.filters = {}
        self.tests = {}

    @property
    def budget(self) -> Budget:
        """What the rendering has left."""
        return self.values.budget

    def prepared(self, source: str) -> Template:
        """The compiled template."""
        if len(source) > MOST_SOURCE_CHARACTERS:
            raise Failed(f"it has {len(source)} characters, {MOST_SOURCE_CHARACTERS} are the most")
        self.values.budget = Budget(self.limits)
        try:
            return self.from_string(source)
        except TemplateSyntaxError as error:
            raise Failed(f"line {error.lineno}: {error.message}") from None
        except _ERRORS as error:
            raise Failed(f"{type(error).__name__}: {error}") from None
        except SyntaxError as error:  # from Python's own compiler: blocks or brackets nested too deep
            raise Failed(f"it is nested too deep ({error.msg})") from None

    def run(self, template: Template, values: Mapping[str, object], witness: Witness | None = None) -> str:
        """The template's text for these values, which it may change."""
        messages = values.get("messages")
        self.values.budget = Budget(self.limits, len(messages) if isinstance(messages, list) else 0)
        self.values.witness = witness
        length = 0
        parts: list[str] = []
        try:
            for part in template.root_render_func(template.new_context(dict(values))):
                length += len(part)
                if length > self.limits.output:
                    raise Exhausted(f"it wrote more than {self.limits.output} characters")
                parts.append(part)
        except _ERRORS as error:
            raise Failed(str(error) or type(error).__name__) from None
        finally:
            self.values.witness = None
        return "".join(parts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all(nodes.Node):
            if isinstance(node, _REFUSED_NODES) or (isinstance(node, nodes.For) and node.recursive):
                raise TemplateSyntaxError(f"{type(node).__name__.lower()} has no place in a chat template", node.lineno)
        for loop in tree.find_all(nodes.For):
            loop.iter = _internal("counted", loop.iter, nodes.Const(_weight(loop)))
        for called in tree.find_all(nodes.Node):
            if isinstance(called, nodes.Macro | nodes.CallBlock):
                called.body.insert(0, nodes.ExprStmt(_internal("entered", nodes.Const(_weight(called)))))
        return tree

    # What compiled templates call.

    def counted(self, items: Any, weight: int) -> "_Counted":
        """A loop's items, each paid for by the weight of the loop's body."""
        self.values.note("loop", items)
        if isinstance(items, Undefined):
            return _Counted((), 0, self.budget)
        if not isinstance(items, dict | list | tuple | str | range):
            raise TypeError(f"{kind(items)} cannot be looped over")
        self.budget.copy(len(items))
        return _Counted(tuple(items), weight, self.budget)  # a copy: the loop's body may append to the list

    def entered(self, weight: int) -> None:
        """Pay for a macro's body, and for calling it."""
        self.budget.spend(weight + 400)

    def concat(self, parts: Iterable[str]) -> str:
        """The text of a block or macro."""
        return self.values.joined(*parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`a + b` and the like."""
        return self.values.reckoned(operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """`a.b`: a method listed for the value's kind, else the key of a mapping."""
        method = self._method(obj, attribute)
        return self._found(obj, attribute) if method is None else method

    def getitem(self, obj: Any, argument: Any) -> Any:
        """`a[b]`: an item, else a method."""
        found = self._found(obj, argument)
        if isinstance(found, Undefined) and isinstance(argument, str):
            return self._method(obj, argument) or found
        return found

    def _method(self, obj: Any, name: str) -> Function | None:
        table = self.methods.get(type(obj))
        if table is None or name not in table:
            return None
        self.values.note("get", obj)
        run = table[name]
        return Function(name, lambda *args, **kwargs: run(obj, *args, **kwargs))

    def _found(self, obj: Any, name: Any) -> Any:
        value: Any = _NOTHING
        if isinstance(obj, dict):
            value = _NOTHING if isinstance(name, Undefined) else obj.get(self.values.key(name), _NOTHING)
        elif isinstance(obj, list | tuple | str | range):
            if isinstance(name, int):
                self.values.note("item", obj)
                value = obj[name] if -len(obj) <= name < len(obj) else _NOTHING
        elif isinstance(obj, Namespace):
            value = _held(obj, name)
        elif isinstance(obj, LoopContext) and name in _LOOP_WORDS:
            value = getattr(obj, name)
        elif isinstance(obj, LoopContext) and name == "cycle":
            value = Function("cycle", obj.cycle)
        if value is _NOTHING:
            value = self.undefined(f"{kind(obj)} has no {name!r}")
        self.values.note("get", value)
        return value

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a macro of the template, or a function or method given to it."""
        __self.budget.spend(1)
        for name in ("_loop_vars", "_block_vars"):  # Jinja's own, for functions that ask for the whole context
            kwargs.pop(name, None)
        if isinstance(__obj, Function):
            return __obj.run(*args, **kwargs)
        if isinstance(__obj, Macro):
            return __context.call(__obj, *args, **kwargs)
        if isinstance(__obj, MethodType) and __obj.__self__ is __self:  # only compiled code has these
            return __obj(*args, **kwargs)
        if isinstance(__obj, Undefined):
            raise TypeError(__obj._undefined_message)
        raise TypeError(f"{kind(__obj)} cannot be called")


class _Counted(Sized):
    """Items of a loop, paid for as they are taken."""

    __slots__ = ("_budget", "_items", "_weight")

    def __init__(self, items: tuple[Any, ...], weight: int, budget: Budget) -> None:
        self._items = items
        self._weight = weight
        self._budget = budget

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._budget.spend(self._weight)
            yield item


def _internal(method: str, *args: nodes.Node) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), list(args), [], None, None)


def _weight(node: nodes.Node) -> int:
    """How much there is to do in a body, those of loops and macros in it left out: they pay themselves."""
    total = _WEIGHTS.get(type(node), 1)
    for child in node.iter_child_nodes():
        inner = isinstance(child, nodes.For | nodes.Macro | nodes.CallBlock)
        total += 32 if inner else _weight(child)
    return total


def _held(namespace: Namespace, name: object) -> Any:
    """What a namespace holds, and nothing of the object it is."""
    if not isinstance(name, str) or name in {"__class__", "_Namespace__attrs"}:
        return _NOTHING
    return getattr(namespace, name, _NOTHING)
