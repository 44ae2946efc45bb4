"""Time zones: taken by their name, and answered with what was meant where it is wrong."""

import pytest

from configs.load import ConfigError, load_config
from configs.time_zones import UnknownTimeZoneError, time_zone


def test_known_zones_are_taken():
    assert time_zone("Europe/Berlin").key == "Europe/Berlin"
    assert time_zone("UTC").key == "UTC"


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("Europe/Berln", "did you mean Europe/Berlin"),
        ("berlin", "did you mean Europe/Berlin?"),
        ("europe/berlin", "did you mean Europe/Berlin?"),
        ("New York", "did you mean America/New_York?"),
    ],
)
def test_a_wrong_zone_is_answered_with_near_ones(wrong, meant):
    with pytest.raises(UnknownTimeZoneError) as caught:
        time_zone(wrong)
    assert repr(wrong) in str(caught.value) and meant in str(caught.value)


@pytest.mark.parametrize("wrong", ["", "Mars/Olympus", "../../etc/passwd", "東京", "a" * 5000])
def test_what_is_near_nothing_names_the_form(wrong):
    with pytest.raises(UnknownTimeZoneError, match=r"Europe/Berlin or UTC$"):
        time_zone(wrong)


def test_a_profile_in_an_unknown_zone_is_refused_by_key():
    with pytest.raises(ConfigError) as caught:
        load_config("micro", ["nightly.timezone=Europe/Berln"])
    (problem,) = caught.value.problems
    assert problem.key == "nightly.timezone"
    assert "did you mean Europe/Berlin" in problem.expected
