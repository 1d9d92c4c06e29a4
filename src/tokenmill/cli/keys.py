"""`tokenmill keys`: who may use the gateway."""

from datetime import UTC, datetime

from cyclopts import App
from rich.table import Table

from tokenmill.cli.output import Common, say, show, show_json, show_text
from tokenmill.gateway import keys as kept
from tokenmill.gateway.keys import KeyLimits

app = App(name="keys", help="Keys that clients of `tokenmill serve` show: add, list, revoke.")


@app.command
def add(
    name: str,
    /,
    *,
    requests_at_once: int | None = None,
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """Make a key and print it, this once.

    Only its SHA-256 is kept. A gateway that runs knows the key within a second. From the first key on, every request
    needs one.

    Parameters
    ----------
    name:
        Whose it is; it stands in logs and routes.
    requests_at_once:
        The most requests of this key that run at once; default: the configuration's.
    requests_per_minute:
        The most requests a minute; default: the configuration's.
    tokens_per_minute:
        The most tokens a minute, of prompts and answers; default: the configuration's.
    """
    limits = KeyLimits(requests_at_once, requests_per_minute, tokens_per_minute)
    secret = kept.add(common.load_config().state_path, name, limits)
    if common.json:
        show_json({"name": name, "key": secret})
        return
    show_text(secret)
    say("it is not shown again; clients send it as: Authorization: Bearer KEY")


@app.command(name="list")
def list_(*, common: Common = Common()) -> None:  # noqa: B008  frozen
    """Show the names of all keys, never the keys themselves."""
    found = kept.read(common.load_config().state_path)
    if common.json:
        show_json([{"name": key.name, "created_s": key.created_s, "limits": key.limits} for key in found])
        return
    if not found:
        say("there is no key: only this machine can use the gateway")
        return
    table = Table(box=None, pad_edge=False)
    for title in ("name", "since", "at once", "a minute", "tokens a minute"):
        table.add_column(title)
    for key in found:
        since = datetime.fromtimestamp(key.created_s, UTC).strftime("%Y-%m-%d")
        limits = key.limits
        numbers = (limits.requests_at_once, limits.requests_per_minute, limits.tokens_per_minute)
        table.add_row(key.name, since, *("-" if number is None else f"{number:,}" for number in numbers))
    show(table)


@app.command
def revoke(name: str, /, *, common: Common = Common()) -> None:  # noqa: B008  frozen
    """Make a key worthless, within a second also at a gateway that runs.

    Parameters
    ----------
    name:
        Whose.
    """
    state = common.load_config().state_path
    kept.revoke(state, name)
    left = kept.read(state)
    say(f"the key of {name} is worthless now" + ("" if left else "; there is no other"))
