"""The judge is judged: assert_matches must be able to fail, and ops must not look inside tensors."""

import math

import pytest
import torch
from fastrlhf_kernels import gae_whiten, linear_token_logprobs, ppo_loss, shape_rewards, token_logprobs
from fastrlhf_kernels.testing import assert_matches
from torch._subclasses.fake_tensor import FakeTensorMode


def test_reports_the_worst_element():
    expected = torch.tensor([[1.0, 2.0], [1e-3, 4.0]])
    actual = expected + torch.tensor([[0.0, 0.5], [1e-2, 0.0]])
    with pytest.raises(
        AssertionError, match=r"x: 2 of 4 .*max-abs 5\.000e-01 at \(0, 1\).*max-rel 1\.\d+e\+01 at \(1, 0\)"
    ):
        assert_matches(actual, expected, rtol=1e-3, atol=1e-6, name="x")


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        ([math.nan, 1.0], [1.0, 1.0], "NaN in the result only"),
        ([1.0, 1.0], [1.0, math.nan], "NaN in the expectation only"),
        ([math.inf, 1.0], [-math.inf, 1.0], "inf instead of -inf"),
        ([1.0, 1.0], [1.0, math.inf], "1.0 instead of inf"),
        ([1.0, 1.0], [1.0], "shape"),
    ],
)
def test_fails_by_name(actual, expected, message):
    with pytest.raises(AssertionError, match=message):
        assert_matches(torch.tensor(actual), torch.tensor(expected), rtol=1e9, atol=1e9)


def test_accepts_equal_specials_and_empties():
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0])
    assert_matches(x, x, rtol=0.0, atol=0.0)
    assert_matches(torch.zeros(0), torch.zeros(0), rtol=0.0, atol=0.0)


def test_no_op_looks_inside_a_tensor():
    # A fake tensor has no values: .item(), bool(tensor) and data-dependent shapes raise. That is "no host sync".
    with FakeTensorMode():
        f = lambda *shape: torch.randn(*shape, requires_grad=True)
        mask, ids = torch.ones(3, 5, dtype=torch.bool), torch.zeros(3, 5, dtype=torch.long)
        for outputs in (
            token_logprobs(f(3, 5, 7), ids, temperature=torch.ones(3, 5), return_entropy=True),
            linear_token_logprobs(f(3, 5, 4), f(7, 4), ids, bias=f(7), softcap=2.0, return_entropy=True),
            ppo_loss(
                f(3, 5), f(3, 5), f(3, 5), f(3, 5), f(3, 5), f(3, 5), mask, mask, clip=0.2, value_clip=0.2, vf_coef=0.1
            )[:1],
        ):
            sum(x.sum() for x in outputs).backward()
        rewards, _ = shape_rewards(f(3, 5), f(3, 5), f(3), torch.zeros(3, dtype=torch.long), kl_coef=0.1)
        gae_whiten(rewards, f(3, 5), mask, mask, gamma=1.0, lam=0.95)
