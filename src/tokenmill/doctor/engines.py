"""Checks of registered engines and of the plan."""

import shlex

from tokenmill.doctor.check_result import CheckResult, Remedy
from tokenmill.doctor.facts import Facts
from tokenmill.units import format_bytes


def plan_fits(facts: Facts) -> CheckResult | None:
    """Whether the model fits on this machine."""
    if facts.model is None:
        return None
    plan = facts.model.plan
    what = " ".join(filter(None, (plan.profile.name, plan.profile.quantisation)))
    if plan.fits:
        return CheckResult("plan", "fine", f"{what} fits: {plan.settings.sequences} x {plan.settings.context} tokens")
    lacks = "; ".join(f"{lack.tier} lacks {format_bytes(lack.missing_bytes)}" for lack in plan.shortfalls)
    look = Remedy("look", facts.planning, note="shows the cheapest changes that make it fit")
    return CheckResult(
        "plan", "problem", f"{what} does not fit: {lacks}", "loading fails, or the machine swaps", remedies=(look,)
    )


def engine_records(facts: Facts) -> CheckResult:
    """Registered engines that run without a supervisor or have ended."""
    unsupervised = [state for state in facts.engines if state.alive and not state.supervised]
    ended = [state for state in facts.engines if not state.alive]
    running = [state for state in facts.engines if state.alive and state.supervised]
    if unsupervised:
        named = ", ".join(f"{state.record.name} (process {state.record.engine.pid})" for state in unsupervised)
        return CheckResult(
            "engines",
            "problem",
            f"running without a supervisor: {named}",
            "it keeps its memory, and no process restarts or stops it",
            remedies=tuple(Remedy("now", f"kill {state.record.engine.pid}") for state in unsupervised),
        )
    if ended:
        named = ", ".join(state.record.name for state in ended)
        return CheckResult(
            "engines",
            "advice",
            f"registered but not running: {named}",
            "the engine or its supervisor was killed, or the machine restarted",
            remedies=(
                Remedy("look", f"tail {shlex.quote(ended[0].record.log)}", note="the end of its log"),
                Remedy("now", "tokenmill engines", note="removes engines that ended from the registry"),
            ),
        )
    names = ", ".join(state.record.name for state in running)
    return CheckResult("engines", "fine", f"running: {names}" if names else "no engine is registered")
