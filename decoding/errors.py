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
