"""What can go wrong between this machine and a device."""


class DeployError(RuntimeError):
    """Base: a device does not run what it was meant to run."""


class NoSuchHostError(DeployError, LookupError):
    """The device's host name means nothing here."""


class UnreachableError(DeployError):
    """The device does not answer on its port."""


class ConnectionLostError(DeployError):
    """The connection broke while something was under way."""


class WrongHostKeyError(DeployError):
    """Whoever answers is not the device that was enrolled, or nobody was."""


class LoginRefusedError(DeployError):
    """The device does not take our key, or our key cannot be used."""


class NotEnrolledError(DeployError):
    """The device pins no signing key, so it could not judge a bundle."""


class OtherKeyPinnedError(DeployError):
    """The device pins another signing key than the one to enrol."""


class WrongDeviceError(DeployError):
    """The device is not what the file of devices says: another L4T major, no Python."""


class DeviceBusyError(DeployError):
    """Another installation is running on the device."""


class DiskFullError(DeployError):
    """The device has no room."""


class TransferError(DeployError):
    """What arrived is not what was sent."""


class BundleRefusedError(DeployError):
    """The device's verifier refused the bundle."""


class PreflightFailedError(DeployError):
    """The device lacks what the bundle needs."""


class UnhealthyReleaseError(DeployError):
    """The release did not start, or did not answer as recorded."""


class TooSlowError(DeployError):
    """The release generates fewer tokens a second than asked."""


class WrongReleaseError(DeployError):
    """The device serves another release than it says."""


class NothingServesError(DeployError):
    """The new release failed and the old one does not come back."""


class NoReleaseError(DeployError, LookupError):
    """The device has no such release."""


class DeviceFailedError(DeployError):
    """The device's side ended in a way nobody planned for."""


class FleetFailedError(DeployError):
    """A deployment that did not reach every device it was meant for."""


class NothingToDeployError(DeployError, ValueError):
    """There is no bundle, no champion, or no device that was meant."""


BY_KIND: dict[str, type[DeployError]] = {
    "not_enrolled": NotEnrolledError,
    "other_pin": OtherKeyPinnedError,
    "busy": DeviceBusyError,
    "disk_full": DiskFullError,
    "transfer": TransferError,
    "refused": BundleRefusedError,
    "preflight": PreflightFailedError,
    "unhealthy": UnhealthyReleaseError,
    "golden": UnhealthyReleaseError,
    "slow": TooSlowError,
    "wrong_release": WrongReleaseError,
    "nothing_serves": NothingServesError,
    "no_release": NoReleaseError,
}
"""Words of the device's side; any other is a `DeviceFailedError`."""
