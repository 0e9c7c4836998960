"""Errors that callers handle.

Each message is one line: what is wrong, the value received, what would be right.
"""


class SdtuneError(Exception):
    """An error that the user can fix.

    The command line prints it as one line and exits with status 2.
    """


class ProfileError(SdtuneError):
    """An unreadable or inconsistent draft profile."""


class TargetMismatchError(SdtuneError):
    """A profile that was tuned for a different model."""


class UnsupportedModelError(SdtuneError):
    """A model whose layers cannot be skipped or whose cache cannot be rolled back."""


class UnsupportedRunnerError(SdtuneError):
    """An unknown runner, or one that cannot run this model."""


class UnsupportedRequestError(SdtuneError):
    """A generation mode that the decoder does not support, such as beam search."""


class ExitHeadError(SdtuneError):
    """An exit head that cannot be read or written, or that belongs to a different model."""


class DistillationError(SdtuneError):
    """A distillation that cannot start, continue or write its results."""


class ProfileWarning(UserWarning):
    """A profile used where its figures were not measured, or not used because it does not fit."""


def how_to_install(extra: str) -> str:
    """Return the words that name the command: there is no sdtune on PyPI, only a checkout or a wheel made from it."""
    return f"pip install -e '.[{extra}]' in sdtune's checkout, or pip install 'WHEEL[{extra}]'"


def first_line(cause: BaseException, *, default: str | None = None) -> str:
    """Return the first line of an error's message; without one `default`, or the name of the error's class."""
    return next(iter(str(cause).strip().splitlines()), default or type(cause).__name__)


def one_line(cause: BaseException) -> str:
    """Return an error's message with every run of white space as one blank, or the name of its class if it has none."""
    return " ".join(str(cause).split()) or type(cause).__name__
