"""Downloads one file of known size over HTTP and resumes after interruptions.

Bytes are appended to a part file. The server's ETag or date is stored with it and sent as If-Range, so that a changed
file is downloaded from the start. A dropped connection is retried a few times; after that, the next run resumes. The
caller checks the hash.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from tokenmill.errors import ChecksumMismatch, PullError
from tokenmill.model.pull.store import DownloadProgress, disk_errors
from tokenmill.units import format_bytes

ATTEMPTS = 5  # maximum of consecutive attempts without a new byte
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
_REFUSED = frozenset({401, 403, 407})
_CONTENT_RANGE = re.compile(r"bytes (\d+)-")


class DownloadRefused(PullError):
    """The download is impossible with these credentials, certificates or network settings."""


class _Retryable(Exception):
    """This attempt failed, but another may succeed."""


def fetch(
    url: str,
    part: Path,
    *,
    size_bytes: int,
    client: httpx.Client,
    progress: DownloadProgress,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Complete `part` to `size_bytes`; return the number of bytes downloaded.

    Raises `DownloadRefused` or `PullError`, and `ChecksumMismatch` if the server's file has another size.
    """
    fetched_bytes = failures = 0

    def arrived(count: int, done: int) -> None:
        nonlocal fetched_bytes, failures
        fetched_bytes += count
        failures = 0
        progress(done, size_bytes)

    while True:
        try:
            with disk_errors(part.parent):
                _attempt(url, part, size_bytes, client, arrived)
        except (_Retryable, httpx.TransportError) as error:
            failures += 1
            permanent = "CERTIFICATE_VERIFY_FAILED" in str(error) or isinstance(error, httpx.UnsupportedProtocol)
            if permanent or failures >= ATTEMPTS:
                raise _failure(url, part, error, fetched_bytes) from error
            pause(2.0 ** (failures - 1))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise PullError(f"cannot download {_display_name(url)}: {error}") from error
        else:
            return fetched_bytes


def discard(part: Path) -> None:
    """Remove a part file and its metadata."""
    part.unlink(missing_ok=True)
    _validator(part).unlink(missing_ok=True)


def _attempt(url: str, part: Path, size_bytes: int, client: httpx.Client, arrived: Callable[[int, int], None]) -> None:
    """Request the missing bytes once and write the response."""
    have = part.stat().st_size if part.exists() else 0
    if have == size_bytes:
        return
    if have > size_bytes:
        discard(part)
        have = 0
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
        if _validator(part).exists():
            headers["If-Range"] = _validator(part).read_text(encoding="utf-8")
    with client.stream("GET", url, headers=headers) as response:
        start = _start(response, part, have)
        length = response.headers.get("content-length", "")
        if length.isdigit() and start + int(length) != size_bytes:
            discard(part)
            raise ChecksumMismatch(f"{_display_name(url)} has {start + int(length)} bytes, not {size_bytes}")
        if start == 0:
            _store_validator(response, part)
        _write(response, part, start, size_bytes, arrived)


def _start(response: httpx.Response, part: Path, have: int) -> int:
    """The offset of the response's first byte; raises if the response is unusable."""
    status = response.status_code
    if status == 206:
        match = _CONTENT_RANGE.match(response.headers.get("content-range", ""))
        if match and int(match[1]) == have:
            return have
        discard(part)
        raise _Retryable("the server sent another range than the requested one")
    if status == 200:  # the whole file: it was requested or has changed, or the server does not support ranges
        return 0
    if status == 416:
        discard(part)
        raise _Retryable("the server's file is smaller than the part already downloaded")
    where = _display_name(str(response.request.url))
    if status in _REFUSED:
        raise DownloadRefused(
            f"{where}: the server answered {status}", hint="check the credentials of your package index"
        )
    if status in _RETRIED:
        raise _Retryable(f"the server answered {status}")
    raise PullError(f"{where}: the server answered {status}", hint="try again later, or check the index")


def _write(
    response: httpx.Response, part: Path, start: int, size_bytes: int, arrived: Callable[[int, int], None]
) -> None:
    done = start
    with part.open("ab" if start else "wb") as file:
        for piece in response.iter_raw():
            if done + len(piece) > size_bytes:
                discard(part)
                raise ChecksumMismatch(f"{_display_name(str(response.request.url))} has more than {size_bytes} bytes")
            file.write(piece)
            done += len(piece)
            arrived(len(piece), done)
    if done != size_bytes:
        raise _Retryable(f"the connection ended after {format_bytes(done)}")


def _validator(part: Path) -> Path:
    return part.with_name(part.name + ".etag")


def _store_validator(response: httpx.Response, part: Path) -> None:
    """Store the validator for If-Range: a strong ETag, else the date."""
    etag = response.headers.get("etag", "")
    validator = etag if etag.startswith('"') else response.headers.get("last-modified", "")
    if validator:
        _validator(part).write_text(validator, encoding="utf-8")
    else:
        _validator(part).unlink(missing_ok=True)


def _failure(url: str, part: Path, error: Exception, fetched_bytes: int) -> PullError:
    kept = format_bytes(part.stat().st_size) if part.exists() else None
    message = f"the download of {_display_name(url)} failed: {str(error) or type(error).__name__}"
    hint = f"{kept} are kept; run the same command to resume" if kept else "check the network and the proxy"
    return PullError(message, hint=hint) if fetched_bytes else DownloadRefused(message, hint=hint)


def _display_name(url: str) -> str:
    """File name and host; the rest of a URL may contain secrets."""
    parsed = httpx.URL(url)
    return f"{parsed.path.rpartition('/')[2]} on {parsed.host}"
