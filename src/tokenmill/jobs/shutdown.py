"""That this process is to end, said once for all of it: whoever waits for something far away waits no longer.

A signal comes to a process, not to one of its stores; what it means for the work is decided elsewhere.
"""

_code: int | None = None


def ask(code: int) -> None:
    """From now on nothing is waited for; `code`: what the process ends with."""
    global _code  # noqa: PLW0603  as a signal is
    _code = code


def over() -> None:
    """Whatever comes now may wait again."""
    global _code  # noqa: PLW0603  as above
    _code = None


def asked() -> int | None:
    """What the process ends with, if it is to."""
    return _code
