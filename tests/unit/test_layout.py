"""Names of objects."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fr_exporter.fleet.layout import Place, object_name, parse_attempt, parse_name, quoted

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=21)
ATTEMPTS = st.integers(0, 2**31 - 1)


@given(NAMES, ATTEMPTS, NAMES)
@example("team/a job", 0, "..")
@example(".", 1, ".hidden")
@example("%2E", 2, "gpu-1.example")
def test_an_object_name_leads_back_to_its_place(training_job: str, attempt: int, node: str) -> None:
    """Whatever a job and a node are called, a listing of three levels gives them back."""
    parts = object_name(Place(training_job, attempt, node)).split("/")
    assert (parse_name(parts[0]), parse_attempt(parts[1]), parse_name(parts[2])) == (training_job, attempt, node)
    assert not any(part.startswith(".") or set(part) & set("?*[\\:") for part in parts)


@given(st.text())
@example("a%2fb")
@example("a b")
@example("%FF")
def test_a_name_stands_for_something_in_one_way_only(text: str) -> None:
    """A listed name that would be written otherwise is foreign: no two objects are of the same node."""
    name = parse_name(text)
    assert name is None or quoted(name) == text


@pytest.mark.parametrize("text", ["", ".4f2a", ".", "..", "a b", "a%2fb", "%FF", "job%"])
def test_a_foreign_name_stands_for_nothing(text: str) -> None:
    """Temporary files and what other programs left are no jobs and no nodes."""
    assert parse_name(text) is None


@pytest.mark.parametrize("text", ["", "-1", "+1", "01", "1_0", "٣", "1 ", "2147483648", "latest"])
def test_a_foreign_folder_is_no_attempt(text: str) -> None:
    """An attempt is written in one way only, and is no larger than a record can hold."""
    assert parse_attempt(text) is None


@pytest.mark.parametrize("place", [Place("j", 0, "n" * 256), Place("日" * 29, 0, "n"), Place("j", 0, "n\udcff")])
def test_a_name_that_no_file_can_have_is_refused(place: Place) -> None:
    """A file name has at most 255 bytes, and a quoted CJK character takes nine of them."""
    with pytest.raises(ValueError, match=r"shorten it|not UTF-8 text"):
        object_name(place)


@pytest.mark.parametrize("place", [Place("", 0, "n"), Place("j", 0, ""), Place("j", -1, "n"), Place("j", 2**31, "n")])
def test_a_place_without_a_name_is_refused(place: Place) -> None:
    """No object is written that no reader would find."""
    with pytest.raises(ValueError, match=r"name|attempt"):
        object_name(place)
