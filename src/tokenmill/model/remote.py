"""Reads a model's header over HTTP range requests, without downloading the file."""

import httpx

from tokenmill.errors import CorruptModel, RemoteError
from tokenmill.model.sources import FIRST_PIECE_BYTES


class UrlSource:
    """A file on a server that supports HTTP range requests. Raises `RemoteError`."""

    def __init__(self, url: str, headers: dict[str, str] | None = None) -> None:
        self.name = url
        # without an explicit transport, which would make httpx ignore HTTPS_PROXY
        self._client = httpx.Client(headers=headers, follow_redirects=True, timeout=30)
        self._first = b""
        try:
            self._first, self.size = self._get(0, FIRST_PIECE_BYTES)
        except BaseException:
            self._client.close()
            raise

    def read(self, offset: int, length: int) -> bytes:
        """Read up to `length` bytes."""
        if offset + length <= len(self._first) or len(self._first) == self.size:
            return self._first[offset : offset + length]
        return self._get(offset, length)[0] if offset < self.size else b""

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _get(self, offset: int, length: int) -> tuple[bytes, int]:
        wanted = f"bytes={offset}-{offset + length - 1}"
        try:
            with self._client.stream("GET", self.name, headers={"Range": wanted, "Accept-Encoding": "identity"}) as got:
                if got.status_code == 416:
                    raise CorruptModel(f"{self.name} is empty")
                if got.status_code != 206:
                    raise self._refused(got.status_code)
                return self._body(got, length), self._total(got)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise RemoteError(f"cannot read {self.name}: {reason}", hint="check the URL and the network") from error

    def _body(self, response: httpx.Response, length: int) -> bytes:
        body = bytearray()
        for piece in response.iter_raw():
            body += piece
            if len(body) > length:
                raise RemoteError(
                    f"{self.name}: the server sent more than the requested {length} bytes",
                    hint="download the file and inspect it locally",
                )
        return bytes(body)

    def _total(self, response: httpx.Response) -> int:
        total = response.headers.get("content-range", "").rpartition("/")[2]
        if not (total.isascii() and total.isdigit() and len(total) < 20):
            raise RemoteError(
                f"{self.name}: the server does not send the length of the file",
                hint="download the file and inspect it locally",
            )
        return int(total)

    def _refused(self, status: int) -> RemoteError:
        if status == 200:
            return RemoteError(
                f"{self.name}: the server does not support range requests, so its header cannot be read alone",
                hint="download the file and inspect it locally",
            )
        hints = {
            401: "the file needs a token; for a Hugging Face repository: tokenmill models pull hf:REPO:QUANT --dry-run",
            403: "access is restricted: accept the licence on the site or use a token",
            404: "check the URL; for a split model give the first file",
        }
        return RemoteError(f"{self.name}: the server answered {status}", hint=hints.get(status))
