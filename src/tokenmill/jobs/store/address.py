"""Address of a store: a folder or a PostgreSQL server, whose password is never displayed."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

from tokenmill.errors import UsageError

SCHEMES = ("postgresql", "postgres")
INVALID_ADDRESS = "invalid_store_address"
"""The code of a UsageError for a text that is not the address of a store."""
_HIDDEN = "***"
_SECRET = re.compile(r"password|passwd|sslpassword|secret|token", re.IGNORECASE)
_ALMOST = re.compile(r"\s*(postgres\w*)(:(?!//)|//)", re.IGNORECASE)  # a malformed URL that looks like a folder
# libpq keywords, which would otherwise become a folder with a password in its name.
_WORDS = re.compile(r"(?:^|\s)(?:host|hostaddr|port|dbname|user|password|passfile|service|ssl\w+)\s*=", re.IGNORECASE)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_HOST = r"(?:\[[^\]@/?]*\]|[^@/?:\[\],]*)(?::\d*)?"
_HOSTS = rf"{_HOST}(?:,{_HOST})*(?:/[^@?]*)?"
_KEYS = r"user|password|passfile|host|hostaddr|port|dbname|options|service|ssl\w+|connect_timeout|application_name"
# Valid URLs quote special characters in passwords; without user info, an @ occurs only in values of known keys.
_PLAIN = re.compile(rf"{_HOSTS}(?:\?(?:(?:{_KEYS})=.*|[^@]*))?", re.DOTALL)
_OWNED = re.compile(rf"[^@/?]*@{_HOSTS}(?:\?[a-z_]*=.*|\?[^@]*)?", re.DOTALL)
_MEANT = "postgresql://user@host:5432/database"


@dataclass(frozen=True, slots=True)
class PostgresAddress:
    """A store on PostgreSQL."""

    url: str = field(repr=False)  # as passed to libpq

    def __str__(self) -> str:
        return self.shown

    def __repr__(self) -> str:
        return f"PostgresAddress({self.shown!r})"

    @property
    def shown(self) -> str:
        """The URL with secrets hidden."""
        scheme, owner, place = _parts(self.url)
        where, mark, query = place.partition("?")
        pairs = (pair.partition("=") for pair in query.split("&"))
        shown = "&".join(f"{key}{sign}{_HIDDEN if _SECRET.search(key) else value}" for key, sign, value in pairs)
        if owner is None:
            return f"{scheme}://{where}{mark}{shown}"
        name, secret = _owner(owner)
        return f"{scheme}://{name}{'' if secret is None else ':' + _HIDDEN}@{where}{mark}{shown}"

    def redacted(self, text: str) -> str:
        """Replace the secrets of the URL in a text."""
        for secret in sorted(self._secrets(), key=len, reverse=True):
            text = text.replace(secret, _HIDDEN)
        return text

    def _secrets(self) -> set[str]:
        _, owner, place = _parts(self.url)
        password = _owner(owner or "")[1] or ""
        pairs = (pair.partition("=") for pair in place.partition("?")[2].split("&"))
        found = [password, *(value for key, _, value in pairs if _SECRET.search(key))]
        spelled = {form for secret in found for form in (secret, unquote(secret), quote(secret, safe=""))}
        # libpq ends a password at the first of these, and may report the rest as a host name.
        return {secret for secret in (*spelled, *re.split("[@/?]", password)) if secret}


def _parts(url: str) -> tuple[str, str | None, str]:
    """Scheme, user info and the rest of a URL.

    Passwords may contain unquoted characters, so in doubt everything up to the last @ is the user info.
    """
    scheme, _, rest = url.partition("://")
    if _PLAIN.fullmatch(rest):
        return scheme, None, rest
    owner, at, place = rest.partition("@") if _OWNED.fullmatch(rest) else rest.rpartition("@")
    return (scheme, owner, place) if at else (scheme, rest, "")


def _owner(owner: str) -> tuple[str, str | None]:
    """The user name, and the password if there is one."""
    name, mark, _ = re.split("([:/?@])", owner, maxsplit=1) if re.search("[:/?@]", owner) else (owner, "", "")
    return name, owner[len(name) + 1 :] if mark else None


Address = Path | PostgresAddress


def address_of(text: str) -> Address:
    """Parse a folder or a server URL."""
    if almost := _ALMOST.match(text):
        raise UsageError(
            f"a server URL starts with {almost[1]}://",
            hint=f"use {_MEANT}, or ./ before the name of a folder",
            code=INVALID_ADDRESS,
        )
    scheme, mark, rest = text.partition("://")
    if _WORDS.match(text.strip()) or (_WORDS.search(text) and not mark):
        raise UsageError(
            "a store on a server is given by a URL, not by keywords such as host=...",
            hint=f"use {_MEANT}, or ./ before the name of a folder",
            code=INVALID_ADDRESS,
        )
    if not mark:
        return Path(text)
    if scheme.lower() in SCHEMES:  # libpq accepts only lower case
        text = f"{scheme.lower()}://{rest}"
    else:
        what = f"{scheme}://" if _SCHEME.fullmatch(scheme) else "this URL"
        message = f"{what} cannot be the address of a store"
        raise UsageError(message, hint=f"use a folder or {_MEANT}", code=INVALID_ADDRESS)
    server = PostgresAddress(text)
    _, owner, place = _parts(text)
    # libpq would take a password that contains an unquoted / for a host or database name.
    if not _OWNED.fullmatch(rest) and ("/" in (owner or "") or not _PLAIN.fullmatch(place) or (rest and not place)):
        message = f"invalid server URL {server}"
        raise UsageError(message, hint=f"use {_MEANT}; quote special characters as %XX", code=INVALID_ADDRESS)
    return server
