"""Values of a checkpoint are those that were saved, and no others."""

import pytest

from lightning_mp.core.saved_state import COUNT, holding


@pytest.mark.parametrize(
    ("value", "fits"), [({"a": 1}, True), ({"a": 1, "b": 2}, False), ({}, False), ({"b": 1}, False), ({"a": -1}, False)]
)
def test_a_mapping_has_these_entries_alone(value: object, fits: bool) -> None:
    assert holding({"a": COUNT}).accepts(value) == fits
