"""Where a store is: a folder, or a PostgreSQL server. Written out anywhere, a server's password is not shown."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from tokenmill.errors import UsageError

SCHEMES = ("postgresql", "postgres")
_HIDDEN = "***"
_SECRET = re.compile(r"password|passwd|sslpassword|secret|token", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Server:
    """A store on PostgreSQL."""

    url: str = field(repr=False)  # as libpq takes it

    def __str__(self) -> str:
        return self.shown

    def __repr__(self) -> str:
        return f"Server({self.shown!r})"

    @property
    def shown(self) -> str:
        """The URL for people, without what nobody is to read."""
        head, mark, query = self.url.partition("?")
        scheme, _, rest = head.partition("://")
        # The last @ before the path: a password may hold one that was not quoted.
        owner, at, place = rest.rpartition("@")
        name, colon, _ = owner.partition(":")
        words = f"{scheme}://{name}{colon and ':' + _HIDDEN}{at}{place}"
        pairs = (pair.partition("=") for pair in query.split("&"))
        shown = "&".join(f"{key}{sign}{_HIDDEN if _SECRET.search(key) else value}" for key, sign, value in pairs)
        return f"{words}{mark}{shown}"

    def unsaid(self, words: str) -> str:
        """The same words without the secrets of the URL."""
        for secret in sorted(self._secrets(), key=len, reverse=True):
            words = words.replace(secret, _HIDDEN)
        return words

    def _secrets(self) -> set[str]:
        head, _, query = self.url.partition("?")
        owner = head.partition("://")[2].rpartition("@")[0]
        pairs = (pair.partition("=") for pair in query.split("&"))
        found = [owner.partition(":")[2], *(value for key, _, value in pairs if _SECRET.search(key))]
        spelled = {form for secret in found for form in (secret, unquote(secret), quote(secret, safe=""))}
        return {secret for secret in spelled if secret}


Address = Path | Server


def address_of(text: str) -> Address:
    """What a person wrote: a folder, or the URL of a server."""
    scheme, mark, _ = text.partition("://")
    if not mark:
        return Path(text)
    if scheme not in SCHEMES:
        raise UsageError(f"a store cannot be at {scheme}://", hint="a folder, or postgresql://user@host/database")
    server = Server(text)
    try:
        urlsplit(text).port  # noqa: B018  is refused where it is no number
    except ValueError:
        said = f"{server} is no URL of a server"
        raise UsageError(said, hint="postgresql://user@host:5432/database; quote what is special with %XX") from None
    return server
