"""The errors that tokenmill raises.

    TokenmillError                the operation failed                     exit 1   http 500
    ├── UsageError                the request itself is wrong              exit 2   http 400
    │   ├── ConfigError           a TOML file has a wrong key or value
    │   ├── UnknownMachine        no such catalogue machine or file        http 404
    │   ├── UnknownModel          no such catalogue model or file          http 404
    │   ├── FlagUnknown           the installed engine has no such flag
    │   ├── NotSpellable          the engine's flags cannot express the plan
    │   └── RequestRefused        a request that no engine could answer
    │       └── TooLong           the prompt does not fit the context
    ├── DoesNotFit                the plan needs more memory than there is exit 3   http 507
    ├── ProbeError                this machine could not be read
    ├── ModelError                a model could not be read                http 422
    │   ├── CorruptModel          the bytes are not what the format says
    │   ├── MissingSplit          one file of a split model is missing
    │   └── RemoteError           a server did not send the bytes          http 502
    ├── EngineError               an engine is missing, wrong or failed    http 502
    │   ├── EngineDied            it crashed with requests in flight       http 503
    │   ├── EngineTimeout         the request exceeded its timeout         http 504
    │   ├── NonFiniteLogits       the model computed NaN or infinity
    │   └── ForeignState          a saved prefix of another model or build http 409
    ├── PullError                 a download did not finish                http 502
    │   ├── ChecksumMismatch      the downloaded bytes are wrong
    │   └── NoSpace               the disk cannot hold it                  http 507
    └── StoreError                the store of batches cannot be used
        ├── StoreInUse            another process has locked it            http 409
        └── StoreFull             its disk is full                         http 507

Programs should check `code`, which is stable. The message says what is wrong with which value, the hint what to do.
Exit codes: 0 done, 1 failed, 2 wrong usage, 3 does not fit. `to_wire` and `from_wire` send errors between processes.
"""

from collections.abc import Mapping
from typing import Any, ClassVar


class TokenmillError(Exception):
    """The operation failed; the message says why."""

    code: str = "failed"
    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500
    wire_fields: ClassVar[tuple[str, ...]] = ()  # keyword arguments of the class beyond hint and code

    def __init__(self, message: str, *, hint: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if code is not None and code != self.code:
            self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        # The default passes only the message to the class, and some classes require more arguments.
        return _unpickle, (type(self), self.args, self.__dict__)


class UsageError(TokenmillError):
    """The command, file or name that the message mentions is wrong."""

    code = "invalid_usage"
    exit_code = 2
    http_status = 400


class ConfigError(UsageError):
    """A TOML file has an unknown key or a value of the wrong type; the message names the key."""

    code = "invalid_config"


class UnknownMachine(UsageError):
    """No machine of that name is in the catalogue and no such file exists."""

    code = "machine_not_found"
    http_status = 404


class UnknownModel(UsageError):
    """No model of that name is in the catalogue and no such file exists."""

    code = "model_not_found"
    http_status = 404


class FlagUnknown(UsageError):
    """The installed engine version has no such flag; the hint names its replacement."""

    code = "unknown_flag"


class NotSpellable(UsageError):
    """The plan is valid, but the engine's flags cannot express it."""

    code = "not_expressible"


class RequestRefused(UsageError):
    """The request cannot be answered and retrying does not help; `param` is the key of the body that is wrong."""

    code = "invalid_request"
    wire_fields: ClassVar[tuple[str, ...]] = ("param",)

    def __init__(
        self, message: str, *, param: str | None = None, hint: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message, hint=hint, code=code)
        self.param = param


class TooLong(RequestRefused):
    """The prompt, or the prompt plus the requested tokens, is longer than the context."""

    code = "context_length_exceeded"
    wire_fields = ("needed_tokens", "context_tokens")

    def __init__(
        self,
        message: str,
        *,
        needed_tokens: int,
        context_tokens: int,
        hint: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint, code=code)
        self.needed_tokens = needed_tokens
        self.context_tokens = context_tokens


class DoesNotFit(TokenmillError):
    """The model does not fit this machine; `plan` shows the missing memory."""

    code = "does_not_fit"
    exit_code = 3
    http_status = 507

    def __init__(self, message: str, *, plan: Any = None, hint: str | None = None, code: str | None = None) -> None:
        super().__init__(message, hint=hint, code=code)
        self.plan = plan


class ProbeError(TokenmillError):
    """This machine could not be read or measured."""

    code = "probe_failed"


class ModelError(TokenmillError):
    """The model could not be read."""

    code = "unreadable_model"
    http_status = 422


class CorruptModel(ModelError):
    """The file violates its format: truncated, damaged, or crafted to mislead."""

    code = "corrupt_model"


class MissingSplit(ModelError):
    """The model is split over several files and one of them is missing or too short."""

    code = "missing_split"


class RemoteError(ModelError):
    """The server that holds the model file did not send the requested bytes."""

    code = "remote_error"
    http_status = 502


class EngineError(TokenmillError):
    """The engine is not installed, has the wrong version, or stopped; the message says which."""

    code = "engine_error"
    http_status = 502


class EngineDied(EngineError):
    """The engine died or hung with this request in flight; it is being restarted, and the request can be retried."""

    code = "engine_died"
    http_status = 503
    wire_fields = ("from_outside",)

    def __init__(
        self, message: str, *, hint: str | None = None, from_outside: bool | None = False, code: str | None = None
    ) -> None:
        """Set `from_outside` if no request can have caused the death; None: the cause is unknown."""
        super().__init__(message, hint=hint, code=code)
        self.from_outside = from_outside


class EngineTimeout(EngineError):
    """The request exceeded its timeout; its partial answer is discarded."""

    code = "timeout"
    http_status = 504


class NonFiniteLogits(EngineError):
    """The model's output is NaN or infinite: the weights or the memory that holds them are damaged. Do not retry."""

    code = "non_finite_logits"


class ForeignState(EngineError):
    """The file holds the state of another model, build or KV type, and was not loaded."""

    code = "foreign_state"
    http_status = 409


class PullError(TokenmillError):
    """A download did not finish; the same command resumes it."""

    code = "download_failed"
    http_status = 502


class ChecksumMismatch(PullError):
    """The downloaded bytes have the wrong checksum and were removed."""

    code = "checksum_mismatch"


class NoSpace(PullError):
    """The disk has too little free space for the download, which was not started."""

    code = "no_space"
    http_status = 507


class StoreError(TokenmillError):
    """The store of batches cannot be used; the message says why. Acknowledged answers are not lost."""

    code = "store_error"


class StoreInUse(StoreError):
    """Another process has locked this store."""

    code = "store_in_use"
    http_status = 409


class StoreFull(StoreError):
    """The disk is full; acknowledged answers are kept, and the same command resumes once there is room."""

    code = "store_full"
    http_status = 507


def _unpickle(kind: type[TokenmillError], args: tuple[Any, ...], fields: dict[str, Any]) -> TokenmillError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


def to_wire(error: TokenmillError) -> dict[str, Any]:
    """The error as JSON-compatible values, for another process."""
    fields = {name: getattr(error, name) for name in error.wire_fields}
    return {"kind": type(error).__name__, "code": error.code, "message": error.message, "hint": error.hint, **fields}


def from_wire(message: Mapping[str, Any]) -> TokenmillError:
    """The error that `to_wire` wrote; an EngineError if its class is unknown."""
    kind = globals().get(str(message.get("kind")))
    text = str(message.get("message"))
    common = {"hint": message.get("hint"), "code": message.get("code")}
    if not isinstance(kind, type) or not issubclass(kind, TokenmillError):
        return EngineError(text, **common)
    return kind(text, **common, **{name: message[name] for name in kind.wire_fields if name in message})
