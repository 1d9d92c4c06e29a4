"""Every error tokenmill raises on purpose, and what each means at the edges.

    TokenmillError                the operation failed                     exit 1   http 500
    ├── UsageError                the request itself is wrong              exit 2   http 400
    │   ├── ConfigError           a TOML file has a wrong key or value
    │   ├── UnknownMachine        no such catalogue machine or file        http 404
    │   ├── UnknownModel          no such catalogue model or file          http 404
    │   ├── FlagUnknown           the engine that will run has no such flag
    │   ├── NotSpellable          no flags of the engine say what the plan says
    │   └── RequestRefused        a request that no engine could answer
    │       └── TooLong           the prompt does not fit the context
    ├── ProbeError                this machine could not be read
    ├── ModelError                a model could not be read                http 422
    │   ├── CorruptModel          the bytes are not what the format says
    │   ├── MissingSplit          one file of a split model is not there
    │   └── RemoteError           a server did not give the bytes          http 502
    ├── EngineError               an engine is missing, wrong or failed    http 502
    │   ├── EngineDied            it died with work in hand; send it again http 503
    │   ├── EngineTimeout         it took longer than it was given         http 504
    │   └── ForeignState          a saved head of another model or build   http 409
    ├── PullError                 a download did not finish                http 502
    │   ├── ChecksumMismatch      the bytes that came are not the right ones
    │   └── NoSpace               the disk cannot hold it                  http 507
    └── StoreError                the store of batches cannot be used
        ├── StoreInUse            another process works with it            http 409
        └── StoreFull             its disk is full                         http 507

The message says what is wrong, for a tired operator; the hint says what to do about it.
Exit codes are 0 done, 1 failed, 2 wrong use, 3 does not fit.
"""

from typing import ClassVar


class TokenmillError(Exception):
    """The operation failed; the message says why."""

    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(TokenmillError):
    """What was asked for is wrong: check the command, the file or the name in the message."""

    exit_code = 2
    http_status = 400


class ConfigError(UsageError):
    """A TOML file has an unknown key or a value of the wrong kind; the message names the key."""


class UnknownMachine(UsageError):
    """No machine of that name is in the catalogue and no such file exists."""

    http_status = 404


class UnknownModel(UsageError):
    """No model of that name is in the catalogue and no such file exists."""

    http_status = 404


class FlagUnknown(UsageError):
    """The engine version that will run has no such flag; the hint says what took its place."""


class NotSpellable(UsageError):
    """The plan is sound, but this engine's flags cannot express it: change the plan or the engine."""


class RequestRefused(UsageError):
    """The request cannot be answered as it is, however often it is sent; the message says why."""


class TooLong(RequestRefused):
    """The prompt, or the prompt with what it asks for, is longer than the context; the message says by how much."""

    def __init__(self, message: str, *, needed_tokens: int, context_tokens: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.needed_tokens = needed_tokens
        self.context_tokens = context_tokens


class ProbeError(TokenmillError):
    """This machine could not be read or measured."""


class ModelError(TokenmillError):
    """The model could not be read."""

    http_status = 422


class CorruptModel(ModelError):
    """The file is not what its format promises: truncated, damaged, or made to mislead."""


class MissingSplit(ModelError):
    """The model is split over several files and one of them is missing or too short."""


class RemoteError(ModelError):
    """The server holding the model file did not answer with the bytes that were asked for."""

    http_status = 502


class EngineError(TokenmillError):
    """The engine is not installed, is not the version this program speaks to, or stopped; the message says which."""

    http_status = 502


class EngineDied(EngineError):
    """The engine ended or hung with this work in hand; it is being restarted, and the work can be sent again."""

    http_status = 503

    def __init__(self, message: str, *, hint: str | None = None, from_outside: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.from_outside = from_outside  # somebody ended it or cut it off: nothing that the work did


class EngineTimeout(EngineError):
    """The work took longer than it was given; what was computed is dropped."""

    http_status = 504


class ForeignState(EngineError):
    """The file holds the state of another model, build or cache type, and was not loaded."""

    http_status = 409


class PullError(TokenmillError):
    """A download did not finish; what has arrived is kept and the same command goes on from there."""

    http_status = 502


class ChecksumMismatch(PullError):
    """What was downloaded is not what was promised; it has been removed."""


class NoSpace(PullError):
    """The disk has too little room for the download; nothing was started."""

    http_status = 507


class StoreError(TokenmillError):
    """The store of batches cannot be used; the message says why. What was acknowledged is not touched."""


class StoreInUse(StoreError):
    """Another process works with this store, and there is one at a time."""

    http_status = 409


class StoreFull(StoreError):
    """The disk is full; what was acknowledged is kept, and the same command goes on when there is room."""

    http_status = 507
