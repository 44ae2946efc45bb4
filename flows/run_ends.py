"""Ways in which a run ends early although nothing failed."""


class StoppedAfter(Exception):
    """The stage named by `stop_after` is done; the run was asked to end here."""


class NothingNewError(Exception):
    """A night found too little new to train on; says how much and what would do."""


class NightSkippedError(RuntimeError):
    """A night did not start, by rule; says which and why."""
