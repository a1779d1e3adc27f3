"""Any value comes back, and any sizes keep to the budget."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from simpletuner_gh200.held.caches import threshold_for
from simpletuner_gh200.held.record import copying_maker, encode, parse, tensor_maker
from simpletuner_gh200.held.segment import ALIGNMENT, key_of

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = torch.randint(0, 2, shape).to(draw(dtypes))
    order = draw(st.permutations(range(len(shape))))
    return tensor.permute(*order) if shape else tensor


plain = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.binary(max_size=8)
)
values = st.recursive(
    tensors() | plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)


def same(left, right):
    if isinstance(left, torch.Tensor):
        return (
            type(right) is torch.Tensor
            and (left.dtype, left.shape, left.stride()) == (right.dtype, right.shape, right.stride())
            and torch.equal(left, right)
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@settings(max_examples=150, deadline=None)
@given(values, st.sampled_from([tensor_maker, copying_maker]))
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
