"""Time zones by their IANA name; a wrong one is answered with the names that are near."""

import difflib
from zoneinfo import ZoneInfo, available_timezones


class UnknownTimeZoneError(ValueError):
    """There is no time zone of this name."""


def time_zone(name: str) -> ZoneInfo:
    """The zone of that name.

    Raises:
        UnknownTimeZoneError: none has it; names the nearest ones.
    """
    known = available_timezones()
    if name in known:
        return ZoneInfo(name)
    near = ", ".join(_near(name, known))
    raise UnknownTimeZoneError(
        f"no time zone {name!r}; give an IANA name such as Europe/Berlin or UTC"
        + (f"; did you mean {near}?" if near else "")
    )


def _near(name: str, known: set[str]) -> list[str]:
    """Zones meant by a name with a typing error, in the wrong case, or without its continent."""
    wanted = name.strip().casefold().replace(" ", "_")
    folded = {zone.casefold(): zone for zone in sorted(known)}
    by_city = {zone.rpartition("/")[2]: zone for zone in folded}
    if wanted in folded:
        return [folded[wanted]]
    if wanted in by_city:
        return [folded[by_city[wanted]]]
    close = difflib.get_close_matches(wanted, folded, n=3, cutoff=0.7)
    close += [by_city[city] for city in difflib.get_close_matches(wanted, by_city, n=2, cutoff=0.8)]
    return [folded[zone] for zone in dict.fromkeys(close)]
