"""Chooses the engines of a request by the configured routes.

The first matching rule gives the chain. A rule with a model (`*` and `?` are wildcards) sends its requests to its
engines whatever they serve; a rule without one uses those of its engines that serve the requested model. If no rule
matches, all engines with the model are used. Pure, except that backends are passed through.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tokenmill.config import RouteEntry
from tokenmill.errors import UnknownModel
from tokenmill.gateway.backends.backend import Backend
from tokenmill.gateway.monitoring.recorder import PriorityClass


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """The properties of a request that routing depends on."""

    model: str | None
    priority: PriorityClass
    prompt_tokens: int | None  # None: not counted
    key: str | None


@dataclass(frozen=True, slots=True)
class Choice:
    """Engines in order of preference."""

    engines: tuple[str, ...]
    reason: str | None  # the matching rule; None: there are no rules


Names = Mapping[str, Sequence[str]]
"""Engine -> names of its model."""


def choose_engines(rules: Sequence[RouteEntry], names: Names, wanted: RouteQuery) -> Choice | None:
    """The fallback chain of a request; None if no engine serves the model."""
    for number, rule in enumerate(rules, 1):
        engines = _engines(rule, names, wanted.model)
        if engines and matches(rule, wanted):
            return Choice(engines, f"route {number}: {conditions(rule)}")
    engines = engines_with(names, wanted.model)
    if not engines:
        return None
    return Choice(engines, "no route matches" if rules else None)


def matches(rule: RouteEntry, wanted: RouteQuery) -> bool:
    """Whether the conditions of a rule other than its model match; an unknown length never matches."""
    if rule.lane is not None and rule.lane != wanted.priority:
        return False
    if rule.key is not None and rule.key != wanted.key:
        return False
    if rule.min_prompt_tokens is None and rule.max_prompt_tokens is None:
        return True
    tokens = wanted.prompt_tokens
    return (
        tokens is not None
        and (rule.min_prompt_tokens is None or tokens >= rule.min_prompt_tokens)
        and (rule.max_prompt_tokens is None or tokens <= rule.max_prompt_tokens)
    )


def conditions(rule: RouteEntry) -> str:
    """The conditions of a rule as text for the log."""
    parts = [
        f"{name} {value}"
        for name, value in (
            ("model", rule.model),
            ("lane", rule.lane),
            ("key", rule.key),
            ("tokens >=", rule.min_prompt_tokens),
            ("tokens <=", rule.max_prompt_tokens),
        )
        if value is not None
    ]
    return ", ".join(parts) or "everything"


def engines_with(names: Names, model: str | None) -> tuple[str, ...]:
    """The engines with this model; for None, the engines with the first model."""
    if model is None:
        model = next((own[0] for own in names.values() if own), None)
    return tuple(engine for engine, own in names.items() if model in own)


def _engines(rule: RouteEntry, names: Names, model: str | None) -> tuple[str, ...]:
    """The engines of a rule for a model; empty if the rule does not apply."""
    if model is None:
        return rule.engines if rule.model in (None, "*") else ()
    if rule.model is not None:
        return rule.engines if fnmatchcase(model, rule.model) else ()
    return tuple(engine for engine in rule.engines if model in names.get(engine, ()))


def is_pattern(model: str) -> bool:
    """Whether the model of a rule has wildcards."""
    return any(sign in model for sign in "*?[")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model and its names."""

    id: str
    backends: tuple[str, ...]  # backends that serve it, in order of preference
    created_s: int
    context: int | None = None
    aliases: tuple[str, ...] = ()


class Routes:
    """Applies the configured routes to the backends."""

    def __init__(
        self, rules: Sequence[RouteEntry], served: Sequence[tuple[Backend, tuple[str, ...]]], created_s: int
    ) -> None:
        """`served`: backends with the names of their models, the displayed one first."""
        self._rules = rules
        self._created_s = created_s
        self._backends = {backend.name: backend for backend, _ in served}
        self._names = {backend.name: names for backend, names in served}

    @property
    def by_length(self) -> bool:
        """Whether routing depends on the prompt's length, which is counted only then."""
        return any(rule.min_prompt_tokens is not None or rule.max_prompt_tokens is not None for rule in self._rules)

    def models(self) -> Sequence[ServedModel]:
        """The served models, and the names that only routes define."""
        models: dict[str, ServedModel] = {}
        for backend, (name, *aliases) in self._names.items():
            same = models.get(name, ServedModel(name, (), self._created_s))
            models[name] = ServedModel(
                name,
                (*same.backends, backend),
                self._created_s,
                self._backends[backend].engine.identity.context,
                tuple(dict.fromkeys((*same.aliases, *aliases))),
            )
        known = {name for model in models.values() for name in (model.id, *model.aliases)}
        for rule in self._rules:
            if rule.model is not None and not is_pattern(rule.model) and rule.model not in known:
                context = self._backends[rule.engines[0]].engine.identity.context
                models.setdefault(rule.model, ServedModel(rule.model, rule.engines, self._created_s, context))
        return tuple(models.values())

    def choose(
        self, model: str | None, priority: PriorityClass, prompt_tokens: int | None, key: str | None
    ) -> Sequence[Backend]:
        """The fallback chain of a request, never empty; raises UnknownModel if no backend serves the model."""
        return self.choose_with_reason(model, priority, prompt_tokens, key)[0]

    def choose_with_reason(
        self, model: str | None, priority: PriorityClass, prompt_tokens: int | None, key: str | None
    ) -> tuple[Sequence[Backend], str | None]:
        """The fallback chain, and the matching route for the log."""
        choice = choose_engines(self._rules, self._names, RouteQuery(model, priority, prompt_tokens, key))
        if choice is None:
            known = ", ".join(one.id for one in self.models())
            raise UnknownModel(f"the model {(model or '')[:100]!r} is not served", hint=f"served models: {known}")
        return tuple(self._backends[name] for name in choice.engines), choice.reason
