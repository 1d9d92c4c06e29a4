"""Maps the errors of huggingface_hub to PullError and UsageError."""

from collections.abc import Iterator
from contextlib import contextmanager

from tokenmill.errors import PullError, UnknownModel, UsageError

_ACCESS_HINT = "accept the terms on its page if there are any, then set HF_TOKEN or run: hf auth login"


@contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Raise errors of huggingface_hub as `PullError`, `UnknownModel` or `UsageError`."""
    from huggingface_hub import errors  # noqa: PLC0415  slow to import

    # httpx in the library's 1.x, httpx2 in its 2.x
    transport_error: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
    try:
        yield
    except ImportError as error:  # for example, a SOCKS proxy needs another package
        raise PullError(f"huggingface_hub lacks a package: {error}") from error
    except errors.OfflineModeIsEnabled as error:
        raise PullError("huggingface_hub is in offline mode", hint="unset HF_HUB_OFFLINE") from error
    except errors.GatedRepoError as error:
        raise PullError(f"{repo} is gated", hint=_ACCESS_HINT) from error
    except errors.RepositoryNotFoundError as error:
        raise UnknownModel(
            f"repository {repo} does not exist or is private",
            hint="check the spelling; private repositories need HF_TOKEN",
        ) from error
    except errors.HFValidationError as error:
        raise UsageError(f"{repo!r} is not a valid repository name: {error}") from error
    except errors.HfHubHTTPError as error:
        raise _status_error(repo, error.response.status_code) from error
    except transport_error as error:
        raise PullError(
            f"the hub cannot be reached: {str(error) or type(error).__name__}",
            hint="check the network, the proxy and HF_ENDPOINT; downloaded bytes are kept",
        ) from error
    except OSError as error:
        if error.errno is not None or "Consistency check" not in str(error):
            raise
        raise PullError(f"a file of {repo} ended early", hint="run the same command to resume") from error


def _status_error(repo: str, status: int) -> PullError:
    hints = {
        401: _ACCESS_HINT,
        403: _ACCESS_HINT,
        404: "the repository has changed; pull again",
        429: "too many requests; wait a few minutes, or set HF_TOKEN for a higher limit",
    }
    return PullError(f"the hub answered {status} for {repo}", hint=hints.get(status, "try again later"))
