"""Any value comes back, and any sizes keep to the budget."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from simpletuner_gh200.held.caches import threshold_for
from simpletuner_gh200.held.record import copying_maker, encode, parse, tensor_maker
from simpletuner_gh200.held.segment import ALIGNMENT, key_of
from tests.property.test_held_tensor_files import same, values


@settings(max_examples=150, deadline=None)
@given(values(st.binary(max_size=8)), st.sampled_from([tensor_maker, copying_maker]))
def test_any_value_comes_back(value, make):
    record = encode(value)
    payload = np.zeros(record.size, np.uint8)
    for offset, piece in record.pieces:
        assert offset % ALIGNMENT == 0
        payload[offset : offset + piece.nbytes] = piece
    assert same(value, parse(record.layout).build(make(payload)))


@given(st.lists(st.binary(min_size=4), max_size=200, unique=True), st.integers(0, 200))
def test_a_smaller_budget_keeps_a_part_of_what_a_larger_one_keeps(names, allowed):
    """And about as much as it has room for, of keys that are spread evenly."""
    high = [int.from_bytes(key_of(name)[8:], "little") for name in names]
    kept = {one for one in high if one <= threshold_for(len(high), allowed)}
    assert kept <= {one for one in high if one <= threshold_for(len(high), allowed + 1)}
    assert abs(len(kept) - min(allowed, len(high))) <= 5 * len(high) ** 0.5
