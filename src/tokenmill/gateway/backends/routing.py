"""Chooses the engines of a request by the configured routes, with the reason for the log.

Rules are tried in order; the first match gives the chain. A rule that names a model (`*` and `?` are wildcards) sends
its requests to its engines whatever their model; one that names none uses what its engines serve. After the last rule,
all engines with the model are used. Pure, except that backends are passed through.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tokenmill.config import RouteEntry
from tokenmill.errors import UnknownModel
from tokenmill.gateway.backends.backend import Backend, ByModel, ServedModel
from tokenmill.gateway.monitoring.recorder import PriorityClass


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """The properties of a request that routing depends on."""

    model: str | None
    lane: PriorityClass
    prompt_tokens: int | None  # None: it could not be counted
    key: str | None


@dataclass(frozen=True, slots=True)
class Choice:
    """Engines in order of preference."""

    engines: tuple[str, ...]
    reason: str | None  # None: the model alone decided


Names = Mapping[str, Sequence[str]]
"""All names of its model, by engine."""


def chosen(rules: Sequence[RouteEntry], names: Names, wanted: RouteQuery) -> Choice | None:
    """The chain for a request; None if no engine serves the model."""
    for number, rule in enumerate(rules, 1):
        engines = _engines(rule, names, wanted.model)
        if engines and holds(rule, wanted):
            return Choice(engines, f"route {number}: {conditions(rule)}")
    engines = having(names, wanted.model)
    if not engines:
        return None
    return Choice(engines, "no route holds" if rules else None)


def holds(rule: RouteEntry, wanted: RouteQuery) -> bool:
    """Whether all conditions of a rule except its model hold; an unknown length never matches."""
    if rule.lane is not None and rule.lane != wanted.lane:
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
    """The conditions of a rule, in words."""
    said = [
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
    return ", ".join(said) or "everything"


def having(names: Names, model: str | None) -> tuple[str, ...]:
    """Engines with a model; without a name, the first and all with the same model."""
    if model is None:
        model = next((own[0] for own in names.values() if own), None)
    return tuple(engine for engine, own in names.items() if model in own)


def _engines(rule: RouteEntry, names: Names, model: str | None) -> tuple[str, ...]:
    """A rule's engines for a model; empty if the rule does not apply."""
    if model is None:
        return rule.engines if rule.model in (None, "*") else ()
    if rule.model is not None:
        return rule.engines if fnmatchcase(model, rule.model) else ()
    return tuple(engine for engine in rule.engines if model in names.get(engine, ()))


def is_pattern(model: str) -> bool:
    """Whether a rule's model has wildcards."""
    return any(sign in model for sign in "*?[")


class Routed:
    """Applies the configured routes to the backends."""

    def __init__(
        self, rules: Sequence[RouteEntry], served: Sequence[tuple[Backend, tuple[str, ...]]], created_s: int
    ) -> None:
        """`served`: backends with all names of their models, the displayed one first."""
        self._rules = rules
        self._created_s = created_s
        self._plain = ByModel(served, created_s)
        self._backends = {backend.name: backend for backend, _ in served}
        self._names = {backend.name: names for backend, names in served}

    @property
    def by_length(self) -> bool:
        """Whether routing depends on the prompt's length; only then is it counted."""
        return any(rule.min_prompt_tokens is not None or rule.max_prompt_tokens is not None for rule in self._rules)

    def models(self) -> Sequence[ServedModel]:
        """Every model once, and every name that only routes have."""
        plain = list(self._plain.models())
        known = {name for model in plain for name in (model.id, *model.aliases)}
        for rule in self._rules:
            if rule.model is None or is_pattern(rule.model) or rule.model in known:
                continue
            known.add(rule.model)
            context = self._backends[rule.engines[0]].engine.identity.context
            plain.append(ServedModel(rule.model, rule.engines, self._created_s, context))
        return tuple(plain)

    def choose(
        self, model: str | None, lane: PriorityClass, prompt_tokens: int | None, key: str | None
    ) -> Sequence[Backend]:
        """The chain for a request, never empty; UnknownModel where nothing serves that name."""
        return self.reasoned(model, lane, prompt_tokens, key)[0]

    def reasoned(
        self, model: str | None, lane: PriorityClass, prompt_tokens: int | None, key: str | None
    ) -> tuple[Sequence[Backend], str | None]:
        """The chain, with the reason in words."""
        choice = chosen(self._rules, self._names, RouteQuery(model, lane, prompt_tokens, key))
        if choice is None:
            known = ", ".join(one.id for one in self.models())
            raise UnknownModel(f"the model {(model or '')[:100]!r} is not served here", hint=f"served: {known}")
        return tuple(self._backends[name] for name in choice.engines), choice.reason
