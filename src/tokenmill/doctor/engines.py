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
    look = Remedy("look", facts.planning, note="with the cheapest changes that would help")
    return CheckResult(
        "plan", "problem", f"{what} does not fit: {lacks}", "it would swap, or fail to load", remedies=(look,)
    )


def engine_records(facts: Facts) -> CheckResult:
    """Engines without a supervisor, and records of engines that are gone."""
    lost = [state for state in facts.engines if state.alive and not state.minded]
    gone = [state for state in facts.engines if not state.alive]
    running = [state for state in facts.engines if state.alive and state.minded]
    if lost:
        named = ", ".join(f"{state.record.name} (process {state.record.engine.pid})" for state in lost)
        return CheckResult(
            "engines",
            "problem",
            f"{named}: still running, and the process that looked after it is gone",
            "it holds its memory, and nobody restarts or ends it",
            remedies=tuple(Remedy("now", f"kill {state.record.engine.pid}") for state in lost),
        )
    if gone:
        named = ", ".join(state.record.name for state in gone)
        return CheckResult(
            "engines",
            "advice",
            f"on record but gone: {named}",
            "it was killed, or the machine went down",
            remedies=(
                Remedy("look", f"tail {shlex.quote(gone[0].record.log)}", note="its last words"),
                Remedy("now", "tokenmill engines", note="removes what is gone from the record"),
            ),
        )
    names = ", ".join(state.record.name for state in running)
    return CheckResult("engines", "fine", f"running: {names}" if names else "no engine is on record")
