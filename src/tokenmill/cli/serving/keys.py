"""`tokenmill keys`: manages the API keys of the gateway."""

from datetime import UTC, datetime

from cyclopts import App, Group
from rich.table import Table

from tokenmill.cli.options import TokenCount
from tokenmill.cli.output import Common, say, show, show_json, show_text
from tokenmill.gateway.http import keys as api_keys
from tokenmill.gateway.http.keys import LIMITS, KeyLimits

_NO_KEYS = "no keys; only clients on this machine can use the gateway"
app = App(
    name="keys",
    help="Manage the API keys of `tokenmill serve`.",
    group_parameters=Group.create_default_parameters("Options"),
)


@app.command
def add(
    name: str,
    /,
    *,
    requests_at_once: int | None = None,
    requests_per_minute: int | None = None,
    tokens_per_minute: TokenCount | None = None,
    tokens_per_day: TokenCount | None = None,
    common: Common = Common(),  # noqa: B008  frozen
) -> None:
    """Create an API key and print it.

    Only its SHA-256 hash is stored, so it cannot be shown again. A running gateway accepts it within a second. Once a
    key exists, every request requires one.

        tokenmill keys add alice --requests-per-minute 60

    Parameters
    ----------
    name:
        Name of the key's owner, for logs and routes.
    requests_at_once:
        Maximum requests in flight. [default: from the configuration]
    requests_per_minute:
        Maximum requests per minute. [default: from the configuration]
    tokens_per_minute:
        Maximum prompt and completion tokens per minute, without batches. [default: from the configuration]
    tokens_per_day:
        Maximum prompt and completion tokens per day (UTC), batches included. [default: from the configuration]
    """
    limits = KeyLimits(requests_at_once, requests_per_minute, tokens_per_minute, tokens_per_day)
    secret = api_keys.add(common.load_config().state_path, name, limits)
    if common.json:
        show_json({"name": name, "key": secret})
        return
    show_text(secret)
    say("save this key, it is not shown again; clients send it as: Authorization: Bearer KEY")


@app.command(name="list")
def list_(*, common: Common = Common()) -> None:  # noqa: B008  frozen
    """List the names and limits of all keys, without the keys themselves.

    Only SHA-256 hashes of the keys are stored, so keys cannot be shown again.

        tokenmill keys list
    """
    state = common.load_config().state_path
    found = api_keys.read(state)
    if common.json:
        show_json([{"name": key.name, "created_s": key.created_s, "limits": key.limits} for key in found])
        return
    if not found:
        revoked = api_keys.path_in(state).exists()
        say("no keys are left; the gateway refuses every request" if revoked else _NO_KEYS)
        return
    table = Table(box=None, pad_edge=False)
    for title in ("name", "created", "in flight", "requests/min", "tokens/min", "tokens/day"):
        table.add_column(title)
    for key in found:
        since = datetime.fromtimestamp(key.created_s, UTC).strftime("%Y-%m-%d")
        numbers = [getattr(key.limits, name) for name in LIMITS]
        table.add_row(key.name, since, *("-" if number is None else f"{number:,}" for number in numbers))
    show(table)


@app.command
def revoke(name: str, /, *, common: Common = Common()) -> None:  # noqa: B008  frozen
    """Revoke a key.

    A running gateway rejects it within a second. Without keys, the gateway refuses every request.

        tokenmill keys revoke alice

    Parameters
    ----------
    name:
        The name given to `tokenmill keys add`.
    """
    state = common.load_config().state_path
    api_keys.revoke(state, name)
    left = api_keys.read(state)
    if common.json:
        show_json({"name": name, "keys_left": len(left)})
        return
    say(f"revoked key {name!r}")
    if not left:
        say("no keys are left, so the gateway refuses every request")
        say(f"hint: create another, or delete {api_keys.path_in(state)} to serve this machine without keys")
