import pytest

from deployment.jetson.on_device.l4t import (
    Fit,
    L4tError,
    L4tVersion,
    check_range,
    choose,
    fits,
    parse_release_file,
    parse_version,
)

RELEASE = "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64\n"


@pytest.mark.parametrize(
    ("host", "image", "right"),
    [
        ("35.4.1", "r36.2.0", Fit.NO),
        ("36.3.0", "r36.2.0", Fit.YES),
        ("35.4.1", "r35.3.1", Fit.SMOKE_TEST),
        ("32.7.4", "r32.7.1", Fit.SMOKE_TEST),
        ("32.7.6", "r36.4.0", Fit.NO),
        ("35.4.1", "r35.4.1", Fit.YES),
        ("36.2.0", "r36.4.0", Fit.SMOKE_TEST),
        ("39.2.0", "r36.4.0", Fit.NO),
        ("36.4.0", "r39.2.0", Fit.NO),
        ("39.2.0", "r39.2", Fit.YES),
    ],
)
def test_a20_same_major_is_required(host, image, right):
    assert fits(parse_version(host), parse_version(image)) is right


def test_a20_no_image_listed_is_an_error():
    with pytest.raises(L4tError, match=r"no image is listed for L4T 36\.4\.3"):
        choose(parse_version("36.4.3"), [])


def test_a20_no_image_of_the_major_is_an_error():
    with pytest.raises(L4tError, match=r"none of 35\.4\.1, 36\.2\.0 has major 32"):
        choose(parse_version("32.7.6"), ["r36.2.0", "r35.4.1"])


def test_a20_exact_release_is_preferred_then_the_newest_not_newer():
    host = parse_version("35.4.1")
    assert choose(host, ["r35.3.1", "r35.4.1", "r35.5.0"]) == ("r35.4.1", Fit.YES)
    assert choose(host, ["r35.2.1", "r35.3.1", "r35.5.0"]) == ("r35.3.1", Fit.SMOKE_TEST)
    assert choose(host, ["r35.5.0"]) == ("r35.5.0", Fit.SMOKE_TEST)


def test_a20_a_local_image_of_unknown_release_is_not_taken():
    with pytest.raises(L4tError, match="'latest'"):
        choose(parse_version("36.4.3"), ["r36.4.0", "latest"])


@pytest.mark.parametrize("text", ["", "R36", "# R36, REVISION: 4.3", "36.4.3", "# Rxx (release)"])
def test_a20_unknown_host_stops(text):
    with pytest.raises(L4tError, match="unknown and nothing is guessed"):
        parse_release_file(text)


def test_release_file_is_read():
    assert parse_release_file(RELEASE) == L4tVersion(36, 4, 3)
    assert parse_release_file("some comment\n" + RELEASE) == (36, 4, 3)


@pytest.mark.parametrize("text", ["36", "36.4.3.1", "36.x", "", "r", "36.4.3\n; rm", None])
def test_version_of_another_form_is_an_error(text):
    with pytest.raises(L4tError):
        parse_version(text)


@pytest.mark.parametrize(
    ("host", "good"),
    [("36.0.0", True), ("36.4.7", True), ("35.6.0", False), ("37.0.0", False), ("39.2.0", False)],
)
def test_bundle_range(host, good):
    version = parse_version(host)
    if good:
        check_range(version, "36.0", 36)
        return
    with pytest.raises(L4tError, match=r"36\.0\.0 up to 36\.x"):
        check_range(version, "36.0", 36)
