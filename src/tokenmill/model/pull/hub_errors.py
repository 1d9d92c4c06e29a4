"""Maps the errors of huggingface_hub to PullError and UsageError."""

from collections.abc import Iterator
from contextlib import contextmanager

from tokenmill.errors import PullError, UnknownModel, UsageError

_ACCESS_HINT = "accept its terms on its page if it has any, then set HF_TOKEN or run: hf auth login"


@contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Turn the library's errors into ours."""
    try:
        from huggingface_hub import errors  # noqa: PLC0415
    except ImportError as error:
        raise PullError("pulling from a hub needs huggingface_hub", hint="pip install 'tokenmill[hub]'") from error
    # httpx in the library's 1.x, httpx2 in its 2.x
    transport_error: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
    try:
        yield
    except ImportError as error:  # a SOCKS proxy, for one, needs a package of its own
        raise PullError(f"huggingface_hub lacks something: {error}") from error
    except errors.OfflineModeIsEnabled as error:
        raise PullError("the hub may not be asked: offline mode is on", hint="unset HF_HUB_OFFLINE") from error
    except errors.GatedRepoError as error:
        raise PullError(f"{repo} is gated", hint=_ACCESS_HINT) from error
    except errors.RepositoryNotFoundError as error:
        raise UnknownModel(
            f"there is no repository {repo}, or it is private",
            hint="check the spelling; a private one needs HF_TOKEN",
        ) from error
    except errors.HFValidationError as error:
        raise UsageError(f"{repo!r} cannot be a repository's name: {error}") from error
    except errors.HfHubHTTPError as error:
        raise _status_error(repo, error.response.status_code) from error
    except transport_error as error:
        raise PullError(
            f"the hub cannot be reached: {str(error) or type(error).__name__}",
            hint="check the network, the proxy and HF_ENDPOINT; what has arrived is kept",
        ) from error
    except OSError as error:
        if error.errno is not None or "Consistency check" not in str(error):
            raise
        raise PullError(f"a file of {repo} ended early", hint="the same command goes on from there") from error


def _status_error(repo: str, status: int) -> PullError:
    hints = {
        401: _ACCESS_HINT,
        403: _ACCESS_HINT,
        404: "the repository has changed; pull again",
        429: "too many requests; wait a few minutes, or set HF_TOKEN for a higher limit",
    }
    return PullError(f"the hub answered {status} for {repo}", hint=hints.get(status, "try again later"))
