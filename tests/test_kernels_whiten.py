"""masked_whiten against its fp64 twin, hand-made masks and random ones."""

import math

import pytest
import torch
from fastrlhf_kernels import masked_whiten, reference
from fastrlhf_kernels.testing import assert_matches
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize("shift_mean", [True, False])
@pytest.mark.parametrize("shape", [(0, 4), (1,), (1, 1), (3, 7), (64, 53)])
def test_value_and_gradient(shape, shift_mean):
    gen = torch.Generator().manual_seed(1)
    x = (torch.randn(*shape, generator=gen) * 3 + 5).requires_grad_()
    mask = torch.rand(*shape, generator=gen) > 0.3
    g = torch.randn(*shape, generator=gen)
    y = x.detach().double().requires_grad_()
    out = masked_whiten(x, mask, shift_mean=shift_mean)
    want = reference.masked_whiten(y, mask, shift_mean=shift_mean)
    assert_matches(out, want, rtol=1e-5, atol=1e-5)
    if mask.sum() > 1:
        assert_matches(
            torch.autograd.grad(out, x, g)[0], torch.autograd.grad(want, y, g.double())[0], rtol=1e-4, atol=1e-5
        )


def test_gradcheck():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 1, 1]]).bool()
    for fn in (masked_whiten, reference.masked_whiten):
        for shift_mean in (True, False):
            assert torch.autograd.gradcheck(lambda x, fn=fn, s=shift_mean: fn(x, mask, shift_mean=s), (x,))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_slots_may_hold_anything(poison):
    x = torch.randn(4, 9)
    mask = torch.rand(4, 9) > 0.4
    for shift_mean in (True, False):
        results = []
        for fill in (0.0, poison):
            y = torch.where(mask, x, fill).requires_grad_()
            out = masked_whiten(y, mask, shift_mean=shift_mean)
            out.backward(torch.linspace(-1, 1, 36).view(4, 9))
            results.append((out.detach(), y.grad))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        assert (results[0][0][~mask] == 0).all() and (results[0][1][~mask] == 0).all()


@pytest.mark.parametrize("fill", [3.0, math.nan])
def test_empty_mask_gives_zeros(fill):
    x = torch.full((2, 3), fill, requires_grad=True)
    for shift_mean in (True, False):
        out = masked_whiten(x, torch.zeros(2, 3, dtype=torch.bool), shift_mean=shift_mean)
        assert (out == 0).all()
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert (grad == 0).all()


def test_one_slot():
    x, mask = torch.tensor([5.0, math.nan]), torch.tensor([True, False])
    assert masked_whiten(x, mask).tolist() == [0.0, 0.0]
    assert masked_whiten(x, mask, shift_mean=False).tolist() == [5.0, 0.0]


def test_narrow_input_and_large_offset():
    x = (torch.randn(1000) + 200).bfloat16()
    mask = torch.ones(1000, dtype=torch.bool)
    out = masked_whiten(x, mask)
    assert out.dtype == torch.float32
    assert_matches(out, reference.masked_whiten(x.double(), mask), rtol=1e-4, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_mean_zero_variance_one(data):
    n = data.draw(st.integers(1, 40))
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    values = data.draw(st.lists(st.floats(-100, 100, width=32), min_size=n, max_size=n))
    x = torch.tensor(values, dtype=torch.float64)
    out, kept = masked_whiten(x, mask), x[mask]
    assert (out[~mask] == 0).all()
    if len(kept) and kept.var(correction=0) > 1e-2:
        assert abs(out[mask].mean()) < 1e-9
        assert abs(out[mask].var(correction=0) - 1) < 1e-5
        back = masked_whiten(x, mask, shift_mean=False)[mask]
        assert abs(back.mean() - kept.mean()) < 1e-9


def test_input_is_not_modified():
    x, mask = torch.randn(5), torch.tensor([True, False, True, True, False])
    before = x.clone()
    masked_whiten(x, mask)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("args", "kwargs", "named"),
    [
        ((torch.zeros(2, dtype=torch.long), torch.ones(2).bool()), {}, "values"),
        ((torch.zeros(2), torch.ones(2)), {}, "mask"),
        ((torch.zeros(2), torch.ones(3).bool()), {}, "mask"),
        ((torch.zeros(2), torch.ones(2).bool()), dict(eps=-1.0), "eps"),
        ((torch.zeros(2), torch.ones(2).bool()), dict(backend="cuda"), "backend"),
        ((torch.full((2,), math.nan), torch.ones(2).bool()), dict(debug=True), "values"),
    ],
)
def test_bad_arguments_are_named(args, kwargs, named):
    with pytest.raises(ValueError, match=named):
        masked_whiten(*args, **kwargs)
