"""What stops data prep. Every message names the file or key, the value and what to do."""


class DataError(ValueError):
    """Base of all of them; nothing has been written over."""


class DataFileMissingError(DataError, FileNotFoundError):
    """A data file is not where the config says."""

    __str__ = Exception.__str__  # not OSError's, which expects errno


class DataFileEmptyError(DataError):
    """A data file holds no row."""


class DataFileUnreadableError(DataError):
    """A data file is in another format or encoding."""


class TruncatedFileError(DataError):
    """The last line of a JSONL file was cut off."""


class UnknownShapeError(DataError):
    """The columns are none of the shapes that are recognised, or a mapped one is missing."""


class DatasetLibraryMissingError(DataError, ImportError):
    """A public dataset id is named and the library that downloads it is not installed."""


class DatasetUnavailableError(DataError, OSError):
    """A public dataset cannot be had from here: no network, no such name, no such split."""


class NoTrainingRowsError(DataError):
    """Nothing is left to train on."""


class UnknownBandError(DataError):
    """RL is to draw from a difficulty band that no training row has."""


class DataGateError(DataError):
    """The gate failed; quarantine, verdict and Data Docs have been written."""


class ReleasesChangedError(DataError):
    """The decisions on quarantined rows are not those the run began with."""
