"""ppo_loss against autograd of its fp64 twin: values, gradients at and around the clip edges, statistics, poison."""

import math

import pytest
import torch
from fastrlhf_kernels import PPOStats, ppo_loss, reference
from fastrlhf_kernels.testing import assert_matches

CLIPS = dict(clip=0.2, value_clip=0.2, vf_coef=0.1)
POLICY = ("logprobs", "old_logprobs", "advantages", "entropy")
VALUE = ("values", "old_values", "returns")


def case(shape=(4, 9), value_shape=None, dtype=torch.float32, seed=0):
    gen = torch.Generator().manual_seed(seed)
    value_shape = value_shape or shape
    x = {name: torch.randn(*shape, generator=gen).to(dtype) * 0.3 for name in POLICY}
    x |= {name: torch.randn(*value_shape, generator=gen).to(dtype) * 0.3 for name in VALUE}
    x["mask"] = torch.rand(*shape, generator=gen) > 0.3
    x["value_mask"] = torch.rand(*value_shape, generator=gen) > 0.3
    return x


def run(fn, inputs, weights=(1.0, 0.0, 0.0), **kwargs):
    """(outputs, gradients of weights . (loss, pg_loss, vf_loss) in logprobs, values and entropy)."""
    x = {k: v.detach().clone() for k, v in inputs.items()}
    leaves = [x[k].requires_grad_() for k in ("logprobs", "values", "entropy") if k in x]
    out = fn(**x, **(CLIPS | kwargs))
    total = sum(w * part for w, part in zip(weights, out[:3], strict=True) if w != 0)
    return out, torch.autograd.grad(total, leaves, allow_unused=True)


def widened(inputs):
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


def compare(inputs, tol, weights=(1.0, 0.0, 0.0), **kwargs):
    got, grads = run(ppo_loss, inputs, weights, **kwargs)
    want, want_grads = run(reference.ppo_loss, widened(inputs), weights, **kwargs)
    for name in ("loss", "pg_loss", "vf_loss"):
        assert_matches(getattr(got, name), getattr(want, name), rtol=tol, atol=tol, name=name)
    for name in PPOStats._fields:
        assert_matches(getattr(got.stats, name), getattr(want.stats, name), rtol=tol, atol=tol, name=name)
        assert not getattr(got.stats, name).requires_grad
    for name, a, b in zip(("dlogprobs", "dvalues", "dentropy"), grads, want_grads, strict=False):
        assert (a is None) == (b is None), name
        if a is not None:
            assert_matches(a, b, rtol=tol, atol=tol, name=name)
    return got, grads


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize(
    ("shape", "value_shape"),
    [((4, 9), (4, 9)), ((0,), (0,)), ((1,), (1,)), ((37,), (41,)), ((2, 3), (0,)), ((64, 53), (64, 53))],
)
def test_value_gradient_and_stats(shape, value_shape, dtype, tol):
    inputs = case(shape, value_shape, dtype)
    compare(inputs, tol * 10, entropy_coef=0.01)
    compare(
        inputs,
        tol * 10,
        weights=(0.7, -1.3, 2.1),
        entropy_coef=0.01,
        normalizer=17,
        value_normalizer=torch.tensor(23.0),
    )


@pytest.mark.parametrize("weights", [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (-2.5, 0.0, 0.5)])
def test_each_output_is_differentiable(weights):
    compare(case(dtype=torch.float64), 1e-12, weights, entropy_coef=0.3)


def test_without_entropy():
    inputs = case(dtype=torch.float64)
    del inputs["entropy"]
    compare(inputs, 1e-12)


def test_gradcheck():
    x = case((3, 4), dtype=torch.float64)
    leaves = [x.pop(k).requires_grad_() for k in ("logprobs", "values", "entropy")]
    for fn in (reference.ppo_loss, ppo_loss):
        assert torch.autograd.gradcheck(
            lambda lp, v, h, fn=fn: fn(logprobs=lp, values=v, entropy=h, entropy_coef=0.1, **x, **CLIPS)[:3], leaves
        )


def test_gradient_at_the_policy_clip_edges():
    # Binary fractions make 1 +- clip and the ratios exact, so that equality with the edge really happens.
    edges = torch.tensor([0.25, 0.5, 0.5 - 2**-20, 0.5 + 2**-20, 1.0, 1.5, 1.5 - 2**-20, 1.5 + 2**-20, 4.0])
    edges = edges.double().repeat(3)
    old = -edges.log()
    exact = (torch.zeros_like(old) - old).exp() == edges
    assert exact[[1, 4, 5]].all(), "the edge cases must hit the edge"
    advantages = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64).repeat_interleave(9)
    x = case((27,), (1,), torch.float64)
    x |= dict(
        logprobs=torch.zeros(27, dtype=torch.float64),
        old_logprobs=old,
        advantages=advantages,
        mask=torch.ones(27, dtype=torch.bool),
    )
    compare(x, 1e-12, clip=0.5)
    compare(widened({k: v.float() if v.is_floating_point() else v for k, v in x.items()}), 1e-12, clip=0.5)


def test_gradient_at_the_value_clip_edges():
    v = torch.tensor([-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0], dtype=torch.float64)
    grid = torch.cartesian_prod(v, torch.tensor([-1.0, -0.75, -0.5, 0.0, 0.5, 0.75, 1.0], dtype=torch.float64))
    x = case((1,), (49,), torch.float64)
    # returns of +-0.75 lie halfway between v = +-1 and its clipped +-0.5: both branches tie away from the edge
    x |= dict(
        values=grid[:, 0],
        returns=grid[:, 1],
        old_values=torch.zeros(49, dtype=torch.float64),
        value_mask=torch.ones(49, dtype=torch.bool),
    )
    _, grads = compare(x, 1e-12, value_clip=0.5)
    tie = ((grid[:, 0] == 1.0) & (grid[:, 1] == 0.75)).nonzero().item()
    assert grads[1][tie] != 0


def test_fp32_gradients_equal_torch_autograd_of_the_same_arithmetic():
    inputs = case((64, 53))
    got, grads = run(ppo_loss, inputs)
    want, want_grads = run(reference.ppo_loss, inputs)
    for a, b in zip(grads[:2], want_grads[:2], strict=True):
        assert_matches(a, b, rtol=1e-6, atol=1e-9)
    assert got.stats.pg_clipped == want.stats.pg_clipped and got.stats.vf_clipped == want.stats.vf_clipped


def test_first_epoch_has_ratio_one():
    inputs = case()
    inputs["old_logprobs"] = inputs["logprobs"].clone()
    out, grads = run(ppo_loss, inputs)
    n = inputs["mask"].sum()
    assert out.stats.ratio_sum == n and out.stats.ratio_max == 1 and out.stats.pg_clipped == 0
    assert out.stats.kl_k1_sum == out.stats.kl_k2_sum == out.stats.kl_k3_sum == 0
    assert_matches(grads[0], torch.where(inputs["mask"], -inputs["advantages"] / n, 0.0), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_slots_may_hold_anything(poison):
    inputs = case()
    clean, clean_grads = run(ppo_loss, inputs, entropy_coef=0.01)
    for name in POLICY:
        inputs[name] = torch.where(inputs["mask"], inputs[name], poison)
    for name in VALUE:
        inputs[name] = torch.where(inputs["value_mask"], inputs[name], poison)
    got, grads = run(ppo_loss, inputs, entropy_coef=0.01)
    for a, b in zip((*got[:3], *got.stats, *grads), (*clean[:3], *clean.stats, *clean_grads), strict=True):
        assert torch.equal(a, b)
    assert (grads[0][~inputs["mask"]] == 0).all() and (grads[1][~inputs["value_mask"]] == 0).all()


@pytest.mark.parametrize("fill", [0.5, math.nan])
def test_empty_masks_give_zero(fill):
    inputs = {k: torch.full_like(v, fill) if v.is_floating_point() else torch.zeros_like(v) for k, v in case().items()}
    out, grads = run(ppo_loss, inputs, entropy_coef=0.01)
    for x in (*out[:3], *out.stats, *grads):
        assert (x == 0).all()


@pytest.mark.parametrize("pieces", [1, 2, 3, 8])
def test_micro_batches_add_up(pieces):
    inputs = case((8, 11), dtype=torch.float64)
    n, n_value = inputs["mask"].sum(), inputs["value_mask"].sum()
    whole, grads = run(ppo_loss, inputs)
    parts = [
        run(ppo_loss, dict(zip(inputs, chunk, strict=True)), normalizer=n, value_normalizer=n_value)
        for chunk in zip(*(x.tensor_split(pieces) for x in inputs.values()), strict=True)
    ]
    assert_matches(sum(out.loss for out, _ in parts), whole.loss, rtol=1e-12, atol=0.0)
    for i in range(2):
        assert_matches(torch.cat([g[i] for _, g in parts]), grads[i], rtol=1e-12, atol=1e-15)
    for name in PPOStats._fields:
        combine = max if name == "ratio_max" else sum
        assert_matches(
            combine(getattr(o.stats, name) for o, _ in parts), getattr(whole.stats, name), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs(dtype):
    inputs = case(dtype=dtype)
    got, grads = run(ppo_loss, inputs)
    want, want_grads = run(reference.ppo_loss, widened(inputs))
    assert got.loss.dtype == torch.float32 and grads[0].dtype == grads[1].dtype == dtype
    assert_matches(got.loss, want.loss, rtol=1e-6, atol=1e-6)
    for a, b in zip(grads[:2], want_grads[:2], strict=True):
        assert_matches(a, b, rtol=2**-8, atol=1e-6)


def test_nan_at_a_valid_slot_is_loud():
    inputs = case()
    inputs["mask"][0, 0] = True
    inputs["old_logprobs"][0, 0] = math.nan
    out, grads = run(ppo_loss, inputs)
    assert out.loss.isnan() and grads[0][0, 0].isnan()


def test_only_values_need_a_gradient_and_inputs_are_not_modified():
    inputs = case()
    before = {k: v.clone() for k, v in inputs.items()}
    v = inputs["values"].requires_grad_()
    ppo_loss(**inputs, **CLIPS).loss.backward()
    assert v.grad is not None
    assert all(torch.equal(inputs[k].detach(), before[k]) for k in inputs)
    with torch.no_grad():
        assert not ppo_loss(**inputs, **CLIPS).loss.requires_grad


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(old_logprobs=torch.zeros(3)), "old_logprobs"),
        (dict(advantages=torch.zeros(4, 9, dtype=torch.long)), "advantages"),
        (dict(mask=torch.ones(4, 9)), "mask"),
        (dict(value_mask=torch.ones(4, 8).bool()), "value_mask"),
        (dict(old_values=torch.zeros(4, 8)), "old_values"),
        (dict(returns=torch.zeros(4)), "returns"),
        (dict(entropy=torch.zeros(4)), "entropy"),
        (dict(clip=-0.1), "clip"),
        (dict(value_clip=math.inf), "value_clip"),
        (dict(vf_coef="1"), "vf_coef"),
        (dict(normalizer=0), "normalizer"),
        (dict(normalizer=torch.ones(2)), "normalizer"),
        (dict(value_normalizer=-1.0), "value_normalizer"),
        (dict(backend="triton"), "backend"),
        (dict(logprobs=torch.full((4, 9), math.nan), debug=True), "logprobs"),
        (dict(returns=torch.full((4, 9), math.inf), debug=True), "returns"),
        (dict(normalizer=torch.tensor(0.0), debug=True), "normalizer"),
    ],
)
def test_bad_arguments_are_named(change, named):
    with pytest.raises(ValueError, match=named):
        ppo_loss(**(case() | CLIPS | change))


def test_entropy_coefficient_needs_entropy():
    inputs = case()
    del inputs["entropy"]
    with pytest.raises(ValueError, match="entropy_coef"):
        ppo_loss(**inputs, **CLIPS, entropy_coef=0.1)
