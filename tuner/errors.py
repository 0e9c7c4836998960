"""What can be wrong with a search that its user can put right; each message is one line."""

from decoding.errors import SdtuneError


class ConfigError(SdtuneError):
    """A setting, a file of settings, a model or a device that does not do."""


class DatasetError(SdtuneError):
    """A dataset that cannot be read, or holds too little to search on."""


class StorageError(SdtuneError):
    """A storage of trials that cannot be used, or that holds another search under the same name."""


class TrackingError(SdtuneError):
    """An MLflow tracking store that cannot be used."""


class SearchError(SdtuneError):
    """A search that could not come to a result."""
