"""What can be represented comes back exactly; what can't is refused with a reason."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
import torch

from simpletuner_gh200.errors import CacheError
from simpletuner_gh200.held import record as layout
from simpletuner_gh200.held.record import Unrepresentable, copying_maker, encode, tensor_maker


def through(value, make=tensor_maker):
    record = encode(value)
    payload = np.zeros(record.size, np.uint8)
    for offset, piece in record.pieces:
        payload[offset : offset + piece.nbytes] = piece
    return layout.parse(record.layout).build(make(payload))


def test_a_slice_of_a_larger_storage_holds_only_itself():
    value = torch.rand(10, 4)[3:5]
    assert encode(value).size == 2 * 4 * 4
    assert torch.equal(through(value), value)


@pytest.mark.parametrize("make", [tensor_maker, copying_maker])
def test_requires_grad_comes_back(make):
    back = through({"embeds": torch.rand(2).requires_grad_()}, make)
    assert back["embeds"].requires_grad
    assert back["embeds"].is_leaf


def twice(container):
    return [container, container]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (OrderedDict(a=1), "OrderedDict"),
        (torch.nn.Parameter(torch.rand(2)), "Parameter"),
        ({"x": torch.rand(3).expand(2, 3)}, "gaps or overlap"),
        (torch.rand(4, 4)[:, :2], "gaps or overlap"),
        (torch.eye(3).to_sparse(), "layout"),
        ({"a": {1, 2}}, "set"),
        ({(1, 2): 3}, "dict key"),
        (twice([1]), "twice"),
        (twice(torch.rand(3)), "share memory"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.tensor([1 + 2j]).conj(), "conjugate"),
        (2 + 3j, "complex"),
    ],
)  # fmt: skip
def test_what_would_not_come_back_exactly_is_refused(value, reason):
    with pytest.raises(Unrepresentable, match=reason):
        encode(value)


def test_a_strange_layout_is_refused():
    with pytest.raises(CacheError, match="unreadable"):
        layout.parse(b'["x", 1]')


@pytest.mark.parametrize(("value", "finite"), [(1.0, True), (float("nan"), False), (float("inf"), False)])
def test_nan_and_infinity_are_noticed_when_asked(value, finite):
    assert encode({"latents": torch.tensor([0.0, value])}, look_for_nan=True).finite is finite
    assert encode(torch.tensor([value])).finite is False, "nobody looked"


def test_numbers_that_cannot_be_asked_count_as_not_finite():
    assert not encode(torch.ones(3).to(torch.float8_e4m3fn), look_for_nan=True).finite
    assert encode(torch.ones(3, dtype=torch.int32), look_for_nan=True).finite
