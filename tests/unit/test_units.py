import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolab import units


@pytest.mark.parametrize(
    ("text", "size"),
    [("12GiB", 12 * 2**30), ("512 MiB", 512 * 2**20), ("8GB", 8 * 10**9), ("1.5gib", 3 * 2**29), ("4096", 4096)],
)
def test_sizes_are_read_in_the_unit_that_they_name(text, size):
    assert units.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "12 GiBs", "1e3GiB", "12,5GiB"])
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="12GiB"):
        units.parse_bytes(text)


def test_text_keeps_the_binary_unit():
    assert units.format_bytes(2**30) == "1.00 GiB"
    assert units.format_bytes(668 * 2**20) == "0.65 GiB"
    assert units.format_bytes(100 * 2**20) == "100.0 MiB"
    assert units.format_bytes(512) == "512 B"
    assert units.format_bytes(None) == "-"
    assert units.gib(3 * 2**29) == "1.500"


@given(st.integers(min_value=0, max_value=2**50))
def test_formatting_keeps_a_size_within_the_digits_it_shows(size):
    shown = units.format_bytes(size)
    # One decimal of at least 1.0 MiB, two of at least 0.50 GiB: half a unit of the last digit.
    assert units.parse_bytes(shown) == pytest.approx(size, rel=0.05, abs=1)


def test_counts_and_durations_read_as_people_say_them():
    assert units.format_count(121_800_000) == "121.8 M"
    assert units.format_count(4096) == "4,096"
    assert units.format_count(1_049_000_000) == "1.05 B"
    assert units.format_seconds(0.0971) == "97.1 ms"
    assert units.format_seconds(12.34) == "12.3 s"
    assert units.format_seconds(185) == "3 min 5 s"
