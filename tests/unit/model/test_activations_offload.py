"""Saved tensors that leave and come back: the same bits, each byte once, nothing that should have stayed."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from simpletuner_gh200.memory.lane import Lane, StillUnderWay
from simpletuner_gh200.model.activations.offload import MOST_SHAPES
from tests.unit.model.saving import Engine, gradients, layers, same

X = torch.linspace(-1, 1, 64).reshape(4, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_are_the_same_to_the_bit(dtype: torch.dtype) -> None:
    model, x = layers().to(dtype), X.to(dtype)
    plain = gradients(model(x), model.parameters())
    engine = Engine()
    for _step in range(3):
        assert same(engine.run(lambda: model(x), model.parameters(), [x]), plain)
    assert engine.moved == engine.brought > 0
    assert engine.saved >= engine.moved
    assert engine.failed == engine.surprises == 0
    assert engine.arena.in_use == 0


def attention(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Views, transposes, a split of one storage, a broadcast, an output that is saved."""
    query, key, value = (x @ weight).view(2, 8, 3, 4, 4).transpose(1, 3).unbind(2)
    mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    gate = torch.sigmoid(mixed.mean(dim=-1, keepdim=True))
    return (mixed * gate.expand_as(mixed)).transpose(1, 2).reshape(2, -1).softmax(-1) ** 2


def test_views_come_back_with_their_strides() -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(2, 8, 16), torch.randn(16, 48, requires_grad=True)
    plain = gradients(attention(x, weight), [weight])
    engine = Engine()
    seen: list[tuple[int, ...]] = []
    unpack = engine._unpack
    engine._unpack = lambda handle: seen.append(unpack(handle).stride()) or unpack(handle)  # type: ignore[method-assign, func-returns-value]
    assert same(engine.run(lambda: attention(x, weight), [weight], [x]), plain)
    assert any(list(stride) != sorted(stride, reverse=True) for stride in seen), "transposed views are among them"
    assert engine.shared > 0, "three views of one storage"
    assert engine.moved < engine.saved


def test_one_storage_is_copied_once() -> None:
    weight = torch.ones(64, requires_grad=True)
    engine = Engine()
    engine.run(lambda: (lambda y: (y * y) * y.view(8, 8).t().sin().t().reshape(64))(weight * 3), [weight])
    assert engine.shared == 2, "three times the same, once as another view"
    assert engine.moved == 3 * weight.nbytes, "itself, its square, its sine"


def test_a_small_part_of_a_large_storage_is_copied_alone() -> None:
    weight = torch.ones(1, requires_grad=True)
    large = torch.arange(100_000.0)

    def forward() -> torch.Tensor:
        return large.clone()[70_001:70_101].view(10, 10).t() * weight

    engine = Engine()
    unpack = engine._unpack
    addresses: list[int] = []
    engine._unpack = lambda handle: addresses.append(unpack(handle).data_ptr()) or unpack(handle)  # type: ignore[method-assign, func-returns-value]
    assert same(engine.run(forward, [weight]), gradients(forward(), [weight]))
    assert 400 <= engine.moved < 2_000
    assert 70_001 * 4 % 64 in {address % 64 for address in addresses}, "aligned as it was, so that the same kernels run"

    def twice() -> torch.Tensor:
        part = large.clone()[70_001:70_101]
        return part.view(10, 10).t() * weight + part.view(10, 10) * weight * 2

    engine = Engine()
    assert same(engine.run(twice, [weight]), gradients(twice(), [weight]))
    assert engine.shared == 1
    assert 400 <= engine.moved < 2_000


def test_a_small_part_of_what_was_saved_whole_is_not_copied_again() -> None:
    weight = torch.ones(100, requires_grad=True)
    large = torch.arange(100_000.0)

    def forward() -> torch.Tensor:
        whole = large.clone()
        return (whole * weight.sum()).sum() + whole[70_001:70_101].view(10, 10).t() * weight.view(10, 10)

    engine = Engine()
    assert same(engine.run(forward, [weight]), gradients(forward(), [weight]))
    assert engine.shared == 1
    assert engine.moved == large.nbytes


def negative(weight: torch.Tensor) -> torch.Tensor:
    """A real tensor whose bytes have the other sign, after one of the same storage that has not."""
    number = torch.complex(torch.zeros(64), torch.arange(64.0))
    return weight * number.imag + weight * number.conj().imag * 3


def sparse(weight: torch.Tensor) -> torch.Tensor:
    return torch.sparse.mm(torch.eye(64).to_sparse(), weight.view(64, 1).expand(64, 8))


def compressed(weight: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it a beta
        rows = torch.eye(64).to_sparse_csr()
    return torch.sparse.mm(rows, weight.view(64, 1).expand(64, 8))


def nested(weight: torch.Tensor) -> torch.Tensor:
    ragged = torch.nested.nested_tensor([torch.ones(2, 64), torch.ones(3, 64)])
    return torch.nn.functional.linear(ragged, weight.view(1, 64)).to_padded_tensor(0.0)


class OneStorageOfTwoTypes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(64.0)
        ctx.save_for_backward(numbers.view(torch.uint8).view(256, 1), numbers)
        return weight * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        in_bytes, numbers = ctx.saved_tensors
        return gradient * numbers + in_bytes.sum()


@pytest.mark.parametrize("forward", [negative, sparse, compressed, nested, OneStorageOfTwoTypes.apply])
def test_tensors_whose_bytes_are_not_their_numbers(forward: Any) -> None:
    weight = torch.ones(64, requires_grad=True)
    plain = gradients(forward(weight), [weight])
    engine = Engine()
    for _ in range(2):
        assert same(engine.run(lambda: forward(weight), [weight]), plain)
    assert engine.failed == engine.arena.in_use == 0


def test_a_tensor_that_is_asked_for_out_of_turn_is_served_and_the_rest_comes_ahead() -> None:
    """Of a graph whose order is known only a part is used, then all of it."""
    model = layers(8)
    engine = Engine()
    plain = gradients(model(X), model.parameters())
    for _ in range(2):
        engine.run(lambda: model(X), model.parameters(), [X])
    with engine.step("a", model.parameters, [X]):
        middle = model[:4](X)
        out = model[4:](middle)
    before = engine.late
    first = list(torch.autograd.grad(middle.sum(), list(model[:4].parameters()), retain_graph=True))
    assert same(first, gradients(model[:4](X), model[:4].parameters()))
    assert same(gradients(out, model.parameters()), plain)
    # The first of the part; then, once it was passed, the later half on demand.
    assert 1 < engine.late - before < engine.fetched / 3
    assert engine.surprises == 0


def test_weights_buffers_inputs_and_small_tensors_stay() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 4))
    x = torch.randn(256, 64)
    engine = Engine(minimum=8 * 1024)
    sent: list[int] = []
    copy = engine._out.copy

    def watched(moves: Any, *after: Any) -> Any:
        sent.extend(source.data_ptr() for _to, (source, _start), _size in moves)
        return copy(moves, *after)

    engine._out.copy = watched  # type: ignore[method-assign]
    engine.run(lambda: model(x), model.parameters(), [x])
    known = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers(), x)}
    assert sent and known.isdisjoint(sent)
    assert engine.moved == 2 * x.nbytes, "the normalised output and its input; the last output is too small"


def test_a_weight_that_is_saved_stays_itself_and_its_views() -> None:
    """The gradient of a layer's input needs its weight: each but the first saves it, transposed."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))
    frozen = torch.nn.Parameter(torch.ones(64), requires_grad=False)
    x = torch.randn(8, 64)
    engine = Engine()
    engine.run(lambda: model(x) * frozen.view(8, 8).t().reshape(64), [*model.parameters(), frozen], [x])
    reshaped = frozen.nbytes
    assert engine.moved == 3 * x.nbytes + reshaped, "three inputs that were computed, and a copy of a weight's view"


def test_a_weight_with_a_new_storage_is_still_a_weight() -> None:
    """As some optimizers leave it."""
    model = layers()
    engine = Engine()
    for _ in range(4):
        before = engine.moved
        engine.run(lambda: model(X), model.parameters(), [X])
        moved = engine.moved - before
        for weight in model.parameters():
            weight.data = weight.data.clone()
    engine.finish()
    assert engine.moved == 4 * moved
    assert engine.surprises == 0


@pytest.mark.parametrize("frozen", [False, True])
def test_copies_of_weights_that_autocast_makes_stay(frozen: bool) -> None:
    first, model = torch.nn.Linear(8, 32), torch.nn.Linear(32, 48)
    model.requires_grad_(not frozen)
    x = torch.randn(16, 8)

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(first(x))

    weights = [*first.parameters(), *model.parameters()]
    plain = gradients(forward(), weights)
    engine = Engine()
    assert same(engine.run(forward, weights, [x]), plain)
    activations = 16 * 32 * 2
    assert engine.moved <= activations + 16 * 8 * 2, "no copy of the 32 x 48 weight is among them"


@pytest.mark.parametrize("options", [{}, {"minimum": 1 << 20}, {"limit": 0}], ids=["moved", "too small", "no room"])
def test_a_changed_tensor_raises_as_in_torch_with_the_operators_name(options: dict[str, Any]) -> None:
    weight = torch.ones(64, requires_grad=True)

    def forward() -> torch.Tensor:
        y = weight * 2
        z = y.exp()
        z.add_(1)
        return z

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(forward(), [weight])
    engine = Engine(**options)
    with pytest.raises(RuntimeError, match=r"inplace operation.*ExpBackward0.*version 1; expected version 0"):
        engine.run(forward, [weight])
    assert (engine.moved > 0) == (not options)


def test_a_changed_weight_raises_too() -> None:
    weight = torch.ones(8, requires_grad=True)
    engine = Engine()
    with engine.step("a", lambda: [weight], []):
        loss = (weight * weight.detach().clone().requires_grad_()).sum()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="MulBackward0"):
        loss.backward()


def test_what_is_saved_before_and_after_a_change_is_two_things() -> None:
    """What was saved first is never asked for, so nothing is wrong; what was saved then must be what it was then."""
    weight = torch.ones(64, requires_grad=True)

    def forward() -> torch.Tensor:
        y = torch.zeros(64)
        before = weight * y
        y.add_(2)
        del before
        return weight * y

    engine = Engine()
    assert same(engine.run(forward, [weight]), [torch.full((64,), 2.0)])
    assert engine.shared == 0
    assert engine.moved == 2 * weight.nbytes


def test_a_source_is_free_once_its_copy_is_made() -> None:
    weight = torch.ones(64, requires_grad=True)
    engine = Engine()
    with engine.step("a", lambda: [weight], []):
        y = weight.detach() * 3
        loss = (weight * y).sum()
    gone = StorageWeakRef(y.untyped_storage())
    del y
    assert gone.expired(), "while the graph that saved it lives"
    assert torch.equal(gradients(loss, [weight])[0], torch.full((64,), 3.0))


def test_an_address_that_is_used_again_is_another_tensor() -> None:
    """A source is free once its copy is made: the next tensor gets its memory, and must not get its bytes."""
    weight = torch.ones(1024, requires_grad=True)
    identities: list[int] = []

    def forward() -> torch.Tensor:
        total = weight * 0
        for number in range(50):
            temporary = torch.full((1024,), float(number))
            identities.append(temporary.untyped_storage()._cdata)
            total = total + weight * temporary
            del temporary
        return total

    engine = Engine()
    assert same(engine.run(forward, [weight]), [torch.full((1024,), float(sum(range(50))))])
    assert len(set(identities)) == 50, "while they are looked up, no storage gets another's identity"


def test_a_graph_used_twice_and_a_gradient_of_a_gradient() -> None:
    weight = torch.linspace(0.1, 1, 32, requires_grad=True)
    engine = Engine()
    with engine.step("a", lambda: [weight], []):
        loss = (weight.exp() * weight.sin()).sum()
    once = torch.autograd.grad(loss, weight, retain_graph=True)[0]
    (again,) = torch.autograd.grad(loss, weight, create_graph=True)
    assert torch.equal(once, again)
    (second,) = torch.autograd.grad(again.sum(), weight)
    (plain,) = torch.autograd.grad((weight.exp() * weight.sin()).sum(), weight, create_graph=True)
    assert torch.equal(second, torch.autograd.grad(plain.sum(), weight)[0])
    assert engine.arena.in_use > 0, "the first graph lives on"
    del loss, again
    gc.collect()
    assert engine.arena.in_use == 0


def test_nothing_is_allocated_after_the_first_step_of_a_shape() -> None:
    model = layers()
    engine = Engine()
    large, small = torch.randn(32, 16), X
    for step in range(4):
        for shape, x in (("large", large), ("small", small)):
            engine.run(lambda x=x: model(x), model.parameters(), [x], shape)
            if step == 0 and shape == "large":
                before = engine.arena.slabs, engine.arena.held
    assert (engine.arena.slabs, engine.arena.held) == before


def test_the_order_is_learned_in_the_first_step_and_followed() -> None:
    model = layers(8)
    engine = Engine()
    engine.run(lambda: model(X), model.parameters(), [X])
    first = engine.late
    assert first == engine.fetched > 10
    engine.run(lambda: model(X), model.parameters(), [X])
    assert engine.late - first == 1, "only the first is asked for before anything could be fetched ahead"
    assert engine.brought == engine.moved, "nothing is fetched twice or in vain"


def test_a_surprise_is_served_on_demand_and_learned() -> None:
    model = layers(5)
    engine = Engine()
    for part in (model[:3], model[:3], model, model, model[:3], model):  # both are known once each has come
        plain = gradients(part(X), part.parameters())
        before = engine.late
        with engine.step("a", model.parameters, [X]):
            out = part(X)
        assert same(gradients(out, part.parameters()), plain)
    engine.finish()
    assert engine.surprises == 1
    assert engine.late - before == 1


class Breaking(torch.autograd.Function):
    """Its backward pass breaks off, the first time."""

    times = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Breaking.times += 1
        if Breaking.times == 1:
            raise ValueError("in backward")
        return gradient


def test_an_order_from_a_backward_pass_that_broke_off_is_learned_again() -> None:
    Breaking.times = 0
    model, engine, late = layers(8), Engine(), []
    plain = gradients(model(X), model.parameters())
    forward = lambda: model[6:](Breaking.apply(model[:6](X)))  # noqa: E731
    with pytest.raises(ValueError, match="in backward"):
        engine.run(forward, model.parameters(), [X])
    assert engine.arena.in_use == 0
    for _ in range(4):
        before = engine.late
        assert same(engine.run(forward, model.parameters(), [X]), plain)
        late.append(engine.late - before)
    assert late[0] > 10
    assert late[1:] == [1, 1, 1]
    assert engine.surprises == 1


def test_two_forward_passes_before_a_backward_pass_are_both_learned() -> None:
    """As where a loss compares two predictions."""
    model, engine = layers(8), Engine()
    plain = gradients(model(X) + model[:5](X * 2), model.parameters())
    for _ in range(4):
        before = engine.late
        with engine.step("a", model.parameters, [X]):
            one = model(X)
        with engine.step("a", model.parameters, [X]):
            other = model[:5](X * 2)
        assert same(gradients(one + other, model.parameters()), plain)
        del one, other
    assert engine.late - before == 2, "the first of each"
    assert engine.arena.in_use == 0


def test_batches_of_other_sizes_follow_the_same_order() -> None:
    """Captions of different length in one shape."""
    model, engine = layers(8), Engine()
    for rows in (7, 5, 6, 9, 8):
        x = torch.randn(rows, 16)
        before = engine.late
        assert same(engine.run(lambda x=x: model(x), model.parameters(), [x]), gradients(model(x), model.parameters()))
    engine.finish()
    assert engine.late - before == 1
    assert engine.surprises == 0


def test_shapes_that_were_not_seen_for_long_are_forgotten() -> None:
    """One that fits as it is gets no step of ours: it is only asked about."""
    model, engine = layers(2), Engine()
    engine.run(lambda: model(X), model.parameters(), [X], "fits")
    for number in range(MOST_SHAPES + 20):
        engine.run(lambda: model(X), model.parameters(), [X], f"shape {number}")
        engine.run(lambda: model(X), model.parameters(), [X], "often")
        assert engine.mix_now("fits") is not None
    assert len(engine.shapes) == MOST_SHAPES
    assert engine.shapes["often"].steps == MOST_SHAPES + 20
    assert "shape 0" not in engine.shapes


def test_what_hbm_has_room_for_stays_from_the_end() -> None:
    model = layers(4)
    engine = Engine()
    engine.run(lambda: model(X), model.parameters(), [X])
    total = engine.moved
    engine.hbm.size = total // 2
    plain = gradients(model(X), model.parameters())
    for _ in range(2):
        before = engine.moved
        assert same(engine.run(lambda: model(X), model.parameters(), [X]), plain)
        assert total // 2 <= engine.moved - before < total * 0.7
    (shape,) = engine.shapes.values()
    assert shape.mix is not None and shape.mix.kept <= total // 2
    engine.hbm.size = 2 * total  # the room has changed: chosen anew
    before = engine.moved
    assert same(engine.run(lambda: model(X), model.parameters(), [X]), plain)
    assert engine.moved == before, "all of it stays"


def test_needs_are_read_when_backward_ends_and_at_no_other_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes between two steps (an optimizer's first step, a validation) is not a need of either."""
    engine, weight = Engine(), torch.ones(64, requires_grad=True)
    told: list[str] = []
    monkeypatch.setattr(engine.hbm, "begin", lambda: told.append("begin"))
    monkeypatch.setattr(engine.hbm, "end", lambda: told.append("end"))
    weight.register_hook(lambda gradient: told.append("gradient"))
    for _step in range(3):
        with engine.step("a", lambda: [weight], []):
            loss = (weight * 3).sin().exp()
        loss.sum().backward()
        told.append("optimizer")
    engine.finish()
    later = ["gradient", "optimizer"]
    assert told == ["begin", "gradient", "end", "optimizer", *later, *later]


def test_beyond_its_limits_tensors_stay() -> None:
    model, engine = layers(4), Engine(limit=2048)
    assert engine.arena.held == 0
    plain = gradients(model(X), model.parameters())
    for _ in range(3):
        assert same(engine.run(lambda: model(X), model.parameters(), [X]), plain)
    assert engine.moved < engine.saved
    assert engine.arena.held <= 64 << 20


def test_a_graph_without_backward_gives_its_memory_back() -> None:
    model = layers()
    engine = Engine()
    with engine.step("a", model.parameters, [X]):
        loss = model(X)
    assert engine.arena.in_use > 0
    del loss
    assert engine.arena.in_use == 0

    def broken() -> torch.Tensor:
        model(X)
        raise ValueError("in the model")

    with pytest.raises(ValueError, match="in the model"):
        engine.run(broken, model.parameters(), [X])
    assert engine.arena.in_use == 0
    assert same(engine.run(lambda: model(X), model.parameters(), [X]), gradients(model(X), model.parameters()))


def test_a_node_does_not_hold_itself() -> None:
    """An output that its own node saves must not keep the node alive: graphs go by reference counts alone."""
    weight = torch.ones(8, requires_grad=True)
    gc.disable()
    try:
        for options in ({}, {"minimum": 1 << 20}):
            engine = Engine(**options)  # type: ignore[arg-type]
            with engine.step("a", lambda: [weight], []):
                out = weight.exp()
            gone = StorageWeakRef(out.untyped_storage())
            del out
            assert gone.expired()
            assert engine.arena.in_use == 0
    finally:
        gc.enable()


class Failing(Lane):
    """Its calls from the ``nth`` on fail, so many of them."""

    def __init__(self, refusal: Exception, nth: int = 1, times: int = 1 << 30) -> None:
        super().__init__(torch.device("cpu"))
        self._refusal, self._nth, self._times, self._calls = refusal, nth, times, 0

    def copy(self, moves: Any, *after: Any) -> Any:
        self._calls += 1
        if self._nth <= self._calls < self._nth + self._times:
            raise type(self._refusal)(str(self._refusal))  # a fresh one, which holds no frames afterwards
        return super().copy(moves, *after)


@pytest.mark.parametrize("side", ["out", "back"])
def test_a_copy_that_fails_leaves_the_run_going(side: str, caplog: pytest.LogCaptureFixture) -> None:
    model = layers()
    plain = gradients(model(X), model.parameters())
    for nth in range(1, 20):
        engine = Engine(**{side: Failing(RuntimeError("a copy failed"), nth, times=1)})
        for _ in range(2):
            assert same(engine.run(lambda: model(X), model.parameters(), [X]), plain)
        assert engine.failed == 1
        assert engine.arena.in_use == 0
    assert "a copy failed" in caplog.text


def test_what_can_not_be_fetched_ahead_is_still_sent() -> None:
    model = layers()
    plain = gradients(model(X), model.parameters())
    engine = Engine(back=Failing(RuntimeError("no event")))
    moved = []
    for _ in range(3):
        before = engine.moved
        assert same(engine.run(lambda: model(X), model.parameters(), [X]), plain)
        moved.append(engine.moved - before)
    assert engine.failed > 3
    assert moved == [moved[0]] * 3


@pytest.mark.parametrize(("refusal", "kept"), [(RuntimeError("no event"), 0), (StillUnderWay("no end"), 3)])
def test_where_sending_fails_again_and_again_nothing_more_is_sent(
    caplog: pytest.LogCaptureFixture, refusal: Exception, kept: int
) -> None:
    model = layers()
    plain = gradients(model(X), model.parameters())
    engine = Engine(out=Failing(refusal))
    assert same(engine.run(lambda: model(X), model.parameters(), [X]), plain)
    assert (engine.failed, engine.moved) == (3, 0)
    assert engine.arena.in_use == kept, "a place that a copy may still write to is nobody else's"
    assert "3 copies to Grace failed" in caplog.text
