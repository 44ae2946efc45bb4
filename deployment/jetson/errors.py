"""What can go wrong while a bundle is built or served."""


class PackageError(ValueError):
    """Base: the bundle cannot be made from what was given."""


class NothingShipsError(PackageError):
    """No quantisation passed its gate; there is nothing to put on a device."""


class MissingInputError(PackageError):
    """A stage's output that the bundle needs is not there or not readable."""


class UnknownModelError(PackageError):
    """A model whose size and memory cannot be planned: no known name, or another architecture."""


class UnknownDeviceError(PackageError):
    """A device whose memory and bandwidth are not known."""


class ServingError(PackageError):
    """A way of serving that llama.cpp cannot do, or a number out of range."""


class UnknownToolError(PackageError):
    """The agent was trained with a tool the device has no code for."""


class GoldenPromptError(PackageError):
    """llama.cpp and the trainer's tokenizer disagree; the bundle would answer wrongly."""


class SigningKeyError(PackageError):
    """The signing key cannot be used, or is not the one pinned."""


class UnsafeArchiveError(PackageError):
    """An archive member would land outside its folder, or is no plain file."""


class ServeError(RuntimeError):
    """The server did not start; carries what it said."""
