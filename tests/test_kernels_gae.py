"""gae and gae_whiten against their twins, the reference's own loop, and random masks."""

import math

import pytest
import torch
from fastrlhf_kernels import gae, gae_whiten, masked_whiten, reference
from fastrlhf_kernels.testing import assert_matches
from hypothesis import given, settings
from hypothesis import strategies as st


def reference_loop(rewards, values, gamma, lam):
    """REFERENCE.md 2, step 7: over all T slots, values zeroed outside the mask beforehand, no mask in the scan."""
    advantages = torch.zeros_like(rewards)
    T = rewards.shape[1]
    carried = torch.zeros(len(rewards), dtype=rewards.dtype)
    for t in reversed(range(T)):
        next_value = values[:, t + 1] if t < T - 1 else 0.0
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        carried = delta + gamma * lam * carried
        advantages[:, t] = carried
    return advantages, advantages + values


def case(B, T, dtype=torch.float32, seed=0):
    gen = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, B, T, generator=gen).to(dtype)
    return rewards, values, torch.rand(B, T, generator=gen) > 0.3, torch.randn(B, generator=gen).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("B", "T"), [(0, 3), (1, 0), (1, 1), (3, 2), (5, 53), (2, 129)])
@pytest.mark.parametrize("with_bootstrap", [False, True])
def test_padded(B, T, dtype, with_bootstrap):
    rewards, values, mask, bootstrap = case(B, T, dtype)
    bootstrap = bootstrap if with_bootstrap else None
    got = gae(rewards, values, mask, gamma=0.99, lam=0.95, bootstrap=bootstrap)
    wide = None if bootstrap is None else bootstrap.double()
    want = reference.gae(rewards.double(), values.double(), mask, gamma=0.99, lam=0.95, bootstrap=wide)
    for name in ("advantages", "returns"):
        a = getattr(got, name)
        assert a.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert_matches(a, getattr(want, name), rtol=1e-5, atol=1e-5, name=name)
        assert (a[~mask] == 0).all()


@pytest.mark.parametrize("lengths", [[], [0], [1], [3, 0, 5, 1, 0], [1, 2, 31, 32, 33, 127, 128], [4097]])
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("with_bootstrap", [False, True])
def test_packed(lengths, holes, with_bootstrap):
    N, S = sum(lengths), len(lengths)
    rewards, values, mask, _ = (x.flatten() for x in case(1, N))
    mask = mask if holes else torch.ones(N, dtype=torch.bool)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    bootstrap = torch.randn(S) if with_bootstrap else None
    kwargs = dict(gamma=1.0, lam=0.95, cu_seqlens=cu)
    got = gae(rewards, values, mask, bootstrap=bootstrap, **kwargs)
    wide = None if bootstrap is None else bootstrap.double()
    want = reference.gae(rewards.double(), values.double(), mask, bootstrap=wide, **kwargs)
    for a, b, name in zip(got, want, got._fields, strict=True):
        assert_matches(a, b, rtol=1e-5, atol=1e-5, name=name)
    assert torch.equal(
        gae(rewards, values, mask, bootstrap=bootstrap, **(kwargs | dict(cu_seqlens=cu.int())))[0], got[0]
    )


def test_packed_equals_padded():
    rewards, values, mask, bootstrap = case(4, 17)
    padded = gae(rewards, values, mask, gamma=0.9, lam=0.8, bootstrap=bootstrap)
    packed = gae(
        rewards.flatten(),
        values.flatten(),
        mask.flatten(),
        gamma=0.9,
        lam=0.8,
        bootstrap=bootstrap,
        cu_seqlens=torch.arange(5) * 17,
    )
    for a, b in zip(padded, packed, strict=True):
        assert_matches(b.view(4, 17), a, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.0, 0.95), (1.0, 0.0)])
def test_agrees_with_the_reference_over_a_prefix_mask(gamma, lam):
    # The reference scans over padding too; with values and rewards 0 there, nothing reaches a valid slot.
    T = 53
    lengths = torch.tensor([0, 1, 2, 30, 52, 53])
    mask = torch.arange(T) < lengths[:, None]
    rewards, values = (torch.where(mask, torch.randn(6, T, dtype=torch.float64), 0.0) for _ in range(2))
    advantages, returns = reference_loop(rewards, values, gamma, lam)
    got = gae(rewards, values, mask, gamma=gamma, lam=lam)
    assert_matches(got.advantages, torch.where(mask, advantages, 0.0), rtol=1e-12, atol=1e-12)
    assert_matches(got.returns, torch.where(mask, returns, 0.0), rtol=1e-12, atol=1e-12)


def test_holes_are_cut_out():
    rewards, values, mask, bootstrap = case(1, 40)
    got = gae(rewards, values, mask, gamma=0.9, lam=0.8, bootstrap=bootstrap)
    cut = [x[:, mask[0]] for x in (rewards, values, mask)]
    want = gae(*cut, gamma=0.9, lam=0.8, bootstrap=bootstrap)
    assert torch.equal(got.advantages[:, mask[0]], want.advantages)
    assert torch.equal(got.returns[:, mask[0]], want.returns)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("packed", [False, True])
def test_masked_slots_may_hold_anything(poison, packed):
    rewards, values, mask, bootstrap = case(4, 23)
    mask[2] = False
    bootstrap[2] = 0.0
    kwargs = dict(gamma=0.99, lam=0.95, bootstrap=bootstrap)
    if packed:
        rewards, values, mask = (x.flatten() for x in (rewards, values, mask))
        kwargs["cu_seqlens"] = torch.arange(5) * 23
    clean = gae(rewards, values, mask, **kwargs)
    bootstrap[2] = poison  # the bootstrap of a sequence without valid slots
    got = gae(torch.where(mask, rewards, poison), torch.where(mask, values, poison), mask, **kwargs)
    assert torch.equal(got.advantages, clean.advantages) and torch.equal(got.returns, clean.returns)


def test_long_scan_in_fp32_from_bf16():
    # gamma = lam = 1 over 32768 slots: a bf16 accumulator would stall at 256
    rewards = torch.full((1, 32768), 1.0, dtype=torch.bfloat16)
    mask = torch.ones(1, 32768, dtype=torch.bool)
    got = gae(rewards, torch.zeros_like(rewards), mask, gamma=1.0, lam=1.0)
    assert got.advantages[0, 0] == 32768


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_random_masks(data):
    B, T = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12))
    bits = data.draw(st.lists(st.booleans(), min_size=B * T, max_size=B * T))
    mask = torch.tensor(bits).view(B, T)
    gamma, lam = data.draw(st.floats(0, 1)), data.draw(st.floats(0, 1))
    rewards, values, _, bootstrap = case(B, T, torch.float64, data.draw(st.integers(0, 99)))
    got = gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap=bootstrap)
    want = reference.gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap=bootstrap)
    packed = gae(
        rewards.flatten(),
        values.flatten(),
        mask.flatten(),
        gamma=gamma,
        lam=lam,
        bootstrap=bootstrap,
        cu_seqlens=torch.arange(B + 1) * T,
    )
    for a, p, b in zip(got, packed, want, strict=True):
        assert_matches(a, b, rtol=1e-11, atol=1e-11)
        assert_matches(p.view(B, T), b, rtol=1e-11, atol=1e-11)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 99), st.integers(1, 10))
def test_lambda_one_telescopes(seed, T):
    # lam = 1: the return is the discounted sum of rewards and the advantage what it exceeds the value by
    rewards, values, _, _ = case(2, T, torch.float64, seed)
    got = gae(rewards, values, torch.ones(2, T, dtype=torch.bool), gamma=0.9, lam=1.0)
    discount = 0.9 ** torch.arange(T, dtype=torch.float64)
    assert_matches(got.returns[:, 0], (rewards * discount).sum(1), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("B", "T"), [(0, 3), (1, 1), (6, 53)])
def test_gae_whiten(B, T):
    rewards, values, _, _ = case(B, T)
    lengths = torch.randint(0, T + 1, (B,))
    policy_mask = torch.arange(T) < lengths[:, None]
    value_mask = torch.arange(T) < lengths[:, None] + 1
    got = gae_whiten(rewards, values, value_mask, policy_mask, gamma=1.0, lam=0.95)
    want = reference.gae_whiten(rewards.double(), values.double(), value_mask, policy_mask, gamma=1.0, lam=0.95)
    assert_matches(got.advantages, want.advantages, rtol=1e-4, atol=1e-5, name="advantages")
    assert_matches(got.returns, want.returns, rtol=1e-5, atol=1e-5, name="returns")
    assert (got.advantages[~policy_mask] == 0).all() and (got.returns[~value_mask] == 0).all()
    parts = gae(rewards, values, value_mask, gamma=1.0, lam=0.95)
    assert torch.equal(got.advantages, masked_whiten(parts.advantages, policy_mask))
    poisoned = (torch.where(value_mask, x, math.nan) for x in (rewards, values))
    again = gae_whiten(*poisoned, value_mask, policy_mask, gamma=1.0, lam=0.95)
    assert torch.equal(again.advantages, got.advantages) and torch.equal(again.returns, got.returns)


def test_empty_masks_give_zeros():
    none = torch.zeros(2, 5, dtype=torch.bool)
    nan = torch.full((2, 5), math.nan)
    for out in (*gae(nan, nan, none, gamma=1.0, lam=0.9), *gae_whiten(nan, nan, none, none, gamma=1.0, lam=0.9)):
        assert (out == 0).all()


def test_inputs_are_not_modified_and_no_graph_is_kept():
    rewards, values, mask, bootstrap = case(3, 9)
    before = [x.clone() for x in (rewards, values, mask, bootstrap)]
    out = gae(rewards, values.requires_grad_(), mask, gamma=0.9, lam=0.9, bootstrap=bootstrap)
    out2 = gae_whiten(rewards, values, mask, mask, gamma=0.9, lam=0.9)
    assert not any(x.requires_grad for x in (*out, *out2))
    assert all(torch.equal(a.detach(), b) for a, b in zip((rewards, values, mask, bootstrap), before, strict=True))


Z = torch.zeros(2, 3)
GOOD = dict(rewards=Z, values=Z, mask=torch.ones(2, 3).bool(), gamma=1.0, lam=0.9)
PACKED = dict(rewards=Z[0], values=Z[0], mask=torch.ones(3).bool(), cu_seqlens=torch.tensor([0, 3]))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(rewards=Z[0]), "rewards"),
        (dict(values=torch.zeros(2, 4)), "values"),
        (dict(mask=Z), "mask"),
        (dict(mask=torch.ones(3).bool()), "mask"),
        (dict(gamma=1.5), "gamma"),
        (dict(lam=-0.1), "lam"),
        (dict(bootstrap=torch.zeros(3)), "bootstrap"),
        (dict(cu_seqlens=torch.tensor([0, 3])), "rewards"),
        (dict(backend="triton"), "backend"),
        (PACKED | dict(cu_seqlens=torch.tensor([0.0, 3.0])), "cu_seqlens"),
        (PACKED | dict(cu_seqlens=torch.tensor([0])), "cu_seqlens"),
        (PACKED | dict(cu_seqlens=torch.tensor([0, 2]), debug=True), "cu_seqlens"),
        (dict(values=torch.full((2, 3), math.nan), debug=True), "values"),
        (dict(rewards=torch.full((2, 3), math.nan), debug=True), "rewards"),
    ],
)
def test_bad_arguments_are_named(change, named):
    with pytest.raises(ValueError, match=named):
        gae(**(GOOD | change))


def test_policy_mask_outside_value_mask_is_named():
    with pytest.raises(ValueError, match="policy_mask"):
        gae_whiten(Z, Z, torch.zeros(2, 3).bool(), torch.ones(2, 3).bool(), gamma=1.0, lam=0.9, debug=True)
