"""Address of a store: a folder or a PostgreSQL server. The server's password is never displayed."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

from tokenmill.errors import UsageError

SCHEMES = ("postgresql", "postgres")
_HIDDEN = "***"
_SECRET = re.compile(r"password|passwd|sslpassword|secret|token", re.IGNORECASE)
_ALMOST = re.compile(r"\s*(postgres\w*)(:(?!//)|//)", re.IGNORECASE)  # a URL that would be mistaken for a folder
# psql keywords, which would be mistaken for a folder with a password in its name.
_WORDS = re.compile(r"(?:^|\s)(?:host|hostaddr|port|dbname|user|password|passfile|service|ssl\w+)\s*=", re.IGNORECASE)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_HOST = r"(?:\[[^\]@/?]*\]|[^@/?:\[\],]*)(?::\d*)?"
_HOSTS = rf"{_HOST}(?:,{_HOST})*(?:/[^@?]*)?"
_KEYS = r"user|password|passfile|host|hostaddr|port|dbname|options|service|ssl\w+|connect_timeout|application_name"
# A valid URL quotes special characters in the password; without user info, an @ occurs only in values of known keys.
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
        return f"Server({self.shown!r})"

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

    def redacted(self, words: str) -> str:
        """Replace the secrets of the URL in a text."""
        for secret in sorted(self._secrets(), key=len, reverse=True):
            words = words.replace(secret, _HIDDEN)
        return words

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

    A password may contain unquoted characters, so in doubt everything up to the last @ is the user info.
    """
    scheme, _, rest = url.partition("://")
    if _PLAIN.fullmatch(rest):
        return scheme, None, rest
    owner, at, place = rest.partition("@") if _OWNED.fullmatch(rest) else rest.rpartition("@")
    return (scheme, owner, place) if at else (scheme, rest, "")


def _owner(owner: str) -> tuple[str, str | None]:
    """Name and password, if there is one."""
    name, mark, _ = re.split("([:/?@])", owner, maxsplit=1) if re.search("[:/?@]", owner) else (owner, "", "")
    return name, owner[len(name) + 1 :] if mark else None


Address = Path | PostgresAddress


def address_of(text: str) -> Address:
    """Parse a folder or a server URL."""
    if almost := _ALMOST.match(text):
        raise UsageError(
            f"a URL of a server begins with {almost[1]}://", hint=f"{_MEANT}, or ./ before a folder's name"
        )
    scheme, mark, rest = text.partition("://")
    if _WORDS.match(text.strip()) or (_WORDS.search(text) and not mark):
        raise UsageError(
            "a store on a server is named by a URL, not by words such as host=...",
            hint=f"{_MEANT}, or ./ before a folder's name",
        )
    if not mark:
        return Path(text)
    if scheme.lower() in SCHEMES:  # libpq accepts it in lower case only
        text = f"{scheme.lower()}://{rest}"
    else:
        what = f"{scheme}://" if _SCHEME.fullmatch(scheme) else "such a URL"
        raise UsageError(f"a store cannot be at {what}", hint="a folder, or postgresql://user@host/database")
    server = PostgresAddress(text)
    _, owner, place = _parts(text)
    # libpq would not see a password before a bare /: it would take it for a host or database name.
    if not _OWNED.fullmatch(rest) and ("/" in (owner or "") or not _PLAIN.fullmatch(place) or (rest and not place)):
        raise UsageError(f"{server} is no URL of a server", hint=f"{_MEANT}; quote what is special with %XX")
    return server
