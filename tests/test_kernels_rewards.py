"""shape_rewards against its twin and the edge cases of the reference."""

import math

import pytest
import torch
from fastrlhf_kernels import reference, shape_rewards
from fastrlhf_kernels.testing import assert_matches

LAST = torch.tensor([2, 0, 4, 5, -1])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_value(estimator, dtype):
    lp, ref = torch.randn(2, 5, 6).to(dtype)
    scores = torch.randn(5).to(dtype)
    got = shape_rewards(lp, ref, scores, LAST, kl_coef=0.05, estimator=estimator)
    want = reference.shape_rewards(lp.double(), ref.double(), scores.double(), LAST, kl_coef=0.05, estimator=estimator)
    assert got.rewards.dtype == got.kl.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_matches(got.kl, want.kl, rtol=1e-6, atol=1e-6, name="kl")
    assert_matches(got.rewards, want.rewards, rtol=1e-6, atol=1e-6, name="rewards")


def test_score_slots_of_the_reference():
    # REFERENCE.md 2.2, T = 6: one slot after the last token; on the last slot when there is none after it
    zeros = torch.zeros(5, 6)
    rewards, kl = shape_rewards(zeros, zeros, torch.full((5,), 7.0), LAST, kl_coef=0.05)
    assert rewards.nonzero().tolist() == [[0, 3], [1, 1], [2, 5], [3, 5], [4, 0]]
    assert (rewards.sum(1) == 7).all() and (kl == 0).all()


def test_score_adds_to_the_penalty_of_the_last_slot():
    rewards, _ = shape_rewards(torch.ones(1, 3), torch.zeros(1, 3), torch.tensor([2.0]), torch.tensor([2]), kl_coef=0.5)
    assert rewards.tolist() == [[-0.5, -0.5, 1.5]]


def test_estimators_agree_on_small_differences():
    lp = torch.randn(1, 50, dtype=torch.float64)
    ref = lp - 1e-4 * torch.randn(1, 50, dtype=torch.float64)
    args = (lp, ref, torch.zeros(1), torch.tensor([49]))
    k2 = shape_rewards(*args, kl_coef=1.0, estimator="k2").kl
    k3 = shape_rewards(*args, kl_coef=1.0, estimator="k3").kl
    assert (k3 >= 0).all()
    assert_matches(k3, k2, rtol=1e-3, atol=1e-13)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_slots_after_the_last_token_may_hold_anything(poison, estimator):
    lp, ref, scores = torch.randn(5, 6), torch.randn(5, 6), torch.randn(5)
    clean = shape_rewards(lp, ref, scores, LAST, kl_coef=0.05, estimator=estimator)
    after = torch.arange(6) > LAST[:, None]
    lp[after] = ref[after] = poison
    got = shape_rewards(lp, ref, scores, LAST, kl_coef=0.05, estimator=estimator)
    assert torch.equal(got.rewards, clean.rewards) and torch.equal(got.kl, clean.kl)


@pytest.mark.parametrize(("B", "T"), [(0, 4), (1, 1), (3, 0)])
def test_odd_shapes(B, T):
    last = torch.full((B,), T - 1)
    out = shape_rewards(torch.zeros(B, T), torch.zeros(B, T), torch.ones(B), last, kl_coef=0.1)
    assert out.rewards.shape == out.kl.shape == (B, T)


def test_inputs_are_not_modified_and_no_graph_is_kept():
    lp, ref = torch.randn(2, 5, 6)
    before = lp.clone()
    out = shape_rewards(lp.requires_grad_(), ref, torch.randn(5), LAST, kl_coef=0.1)
    assert torch.equal(lp.detach(), before) and not out.rewards.requires_grad


GOOD = dict(
    logprobs=torch.zeros(2, 3),
    ref_logprobs=torch.zeros(2, 3),
    scores=torch.zeros(2),
    last_index=torch.tensor([0, 2]),
    kl_coef=0.1,
)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(logprobs=torch.zeros(3)), "logprobs"),
        (dict(ref_logprobs=torch.zeros(2, 4)), "ref_logprobs"),
        (dict(scores=torch.zeros(3)), "scores"),
        (dict(last_index=torch.zeros(2)), "last_index"),
        (dict(kl_coef=math.nan), "kl_coef"),
        (dict(kl_coef=torch.tensor(0.1)), "kl_coef"),
        (dict(estimator="k4"), "k1, k2, k3"),
        (dict(backend="none"), "backend"),
        (dict(last_index=torch.tensor([0, 3]), debug=True), "last_index"),
        (dict(scores=torch.tensor([0.0, math.nan]), debug=True), "scores"),
        (dict(logprobs=torch.full((2, 3), math.inf), debug=True), "logprobs"),
    ],
)
def test_bad_arguments_are_named(change, named):
    with pytest.raises(ValueError, match=named):
        shape_rewards(**(GOOD | change))
