"""The engine of a recipe, and who is named as the author of its answers.

A recipe whose answers are all in the store loads nothing, and still says who gave them.
"""

from tokenmill.api.batch_engine import BatchEngine
from tokenmill.api.engines import EngineChoice
from tokenmill.api.planning import EnginePlan
from tokenmill.errors import TokenmillError
from tokenmill.recipes.local_runner import origin_of
from tokenmill.recipes.runner import Origin

UNKNOWN_BUILD = "not started"


class RecipeEngine(BatchEngine):
    """The engine of one run of a recipe; opened for the first stage that has work."""

    _planned: Origin | None = None

    @property
    def origin(self) -> Origin:
        """Model, engine and build; taken from the plan until the engine is open."""
        choice = self.setup.choice
        if self.engine is not None:
            return origin_of(self.engine.identity, called=name_of(choice, self.engine.identity.model))
        if self._planned is None:
            self._planned = planned_origin(choice, self.setup.planned)
        return self._planned


def planned_origin(choice: EngineChoice, wanted: EnginePlan | None) -> Origin:
    """Who will answer, told without starting anything."""
    if choice.record is not None:
        record = choice.record
        return Origin(name_of(choice, record.model), record.model_id, record.kind, record.build)
    if wanted is None:
        return Origin(choice.model, choice.model_id, "url", UNKNOWN_BUILD)
    context = wanted.plan.settings.context
    name = name_of(choice, wanted.plan.profile.name)
    return Origin(name, choice.model_id, choice.config.kind, build_here(wanted) or UNKNOWN_BUILD, context)


def build_here(wanted: EnginePlan) -> str | None:
    """The engine's build in its own words; None where only starting it tells."""
    from tokenmill.tuner.here import build_of  # noqa: PLC0415  engines, which not every command needs

    try:
        return build_of(wanted.config)
    except TokenmillError:  # not installed, or not one that we know: who starts it says more
        return None


def name_of(choice: EngineChoice, own: str) -> str:
    """The model as people call it; for a file, as it calls itself."""
    return own if choice.url is not None or "/" in choice.model or choice.model.endswith(".gguf") else choice.model
