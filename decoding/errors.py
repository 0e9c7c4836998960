"""The errors a caller handles. Every message is one line: what is wrong, the value received, what would be right."""


class SdtuneError(Exception):
    """Anything the user can put right: the command line prints it as one line and exits with status 2."""


class ProfileError(SdtuneError):
    """A draft profile that cannot be read, or that contradicts itself."""


class TargetMismatchError(SdtuneError):
    """A profile tuned for one model, given another."""


class UnsupportedModelError(SdtuneError):
    """A model whose layers cannot be skipped, or whose cache cannot be rolled back."""


class UnsupportedRunnerError(SdtuneError):
    """A runner that this model cannot be run by, or that there is none of."""


class UnsupportedRequestError(SdtuneError):
    """A way of generating that the decoder does not offer, such as beams or several prompts at once."""


class ExitHeadError(SdtuneError):
    """An exit head that cannot be read or written, or that belongs to another model."""


class DistillationError(SdtuneError):
    """A distillation that cannot begin, go on or write what it made."""
