"""linear_token_logprobs against its fp64 twin; how much memory and how many GEMMs it takes."""

import math

import pytest
import torch
from fastrlhf_kernels import linear_token_logprobs, reference, token_logprobs
from fastrlhf_kernels.testing import assert_matches
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GEMMS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.mm.out,
    torch.ops.aten.addmm_.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.addmm.out,
}


class Watch(TorchDispatchMode):
    """Counts GEMMs and remembers the bytes of the largest tensor that any op made."""

    def __init__(self):
        super().__init__()
        self.gemms, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.gemms += func in GEMMS
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and not leaf._is_view():
                self.largest = max(self.largest, leaf.numel() * leaf.itemsize)
        return out


def case(N=13, D=8, V=257, seed=0):
    gen = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (torch.randn(*s, generator=gen) for s in ((N, D), (V, D), (V,)))
    ids = torch.randint(0, V, (N,), generator=gen)
    g, gh = torch.randn(2, N, generator=gen)
    return hidden, weight, bias, ids, g, gh


def run(fn, hidden, weight, bias, ids, g, gh, **kwargs):
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight, bias)]
    out = fn(leaves[0], leaves[1], ids, bias=leaves[2], return_entropy=True, **kwargs)
    grads = torch.autograd.grad(tuple(out), leaves, (g.to(out.logprobs.dtype), gh.to(out.entropy.dtype)))
    return {"logprobs": out.logprobs, "entropy": out.entropy} | dict(zip(("dh", "dw", "db"), grads, strict=True))


@pytest.mark.parametrize("V", [1, 2, 7, 257, 2053])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7, "rows"])
def test_value_and_gradient(V, softcap, temperature):
    hidden, weight, bias, ids, g, gh = case(V=V)
    T = torch.rand(13) + 0.5 if temperature == "rows" else temperature
    ids[3] = -100
    for budget in (1, 4 * 3 * V * 4, 256 << 20):  # one row, a few rows and all rows in a chunk
        got = run(
            linear_token_logprobs,
            hidden,
            weight,
            bias,
            ids,
            g,
            gh,
            softcap=softcap,
            temperature=T,
            logits_budget_bytes=budget,
        )
        wide = [x.double() for x in (hidden, weight, bias)]
        T64 = T.double() if isinstance(T, torch.Tensor) else T
        want = run(reference.linear_token_logprobs, *wide, ids, g, gh, softcap=softcap, temperature=T64)
        for name in want:
            assert_matches(got[name], want[name], rtol=2e-5, atol=3e-5, name=f"{name} at budget {budget}")
        assert got["logprobs"][3] == 0 and got["entropy"][3] == 0 and (got["dh"][3] == 0).all()


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("return_entropy", [False, True])
def test_gradcheck(softcap, with_bias, return_entropy):
    hidden, weight, bias, ids, *_ = case(N=4, D=3, V=5)
    ids[0] = -100
    leaves = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    kwargs = dict(softcap=softcap, temperature=0.7, return_entropy=return_entropy)
    for fn in (reference.linear_token_logprobs, linear_token_logprobs):
        assert torch.autograd.gradcheck(
            lambda h, w, b, fn=fn: fn(h, w, ids, bias=b if with_bias else None, **kwargs), leaves
        )


def test_torch_agrees():
    hidden, weight, _, ids, g, _ = case(N=50, D=16, V=2053)
    mine, theirs = ([x.clone().requires_grad_() for x in (hidden, weight)] for _ in range(2))
    got = linear_token_logprobs(*mine, ids)
    want = -torch.nn.functional.cross_entropy(theirs[0] @ theirs[1].t(), ids, reduction="none")
    assert_matches(got, want, rtol=1e-5, atol=1e-5)
    got.backward(g)
    want.backward(g)
    for a, b in zip(mine, theirs, strict=True):
        assert_matches(a.grad, b.grad, rtol=1e-4, atol=1e-5)


def test_leading_shape_and_tied_weights():
    hidden, weight, _, ids, g, _ = case(N=12, V=257)
    w = weight.requires_grad_()
    h = hidden.view(3, 4, -1) + torch.nn.functional.embedding(ids.view(3, 4), w)
    out = linear_token_logprobs(h, w, ids.view(3, 4))
    assert out.shape == (3, 4)
    (got,) = torch.autograd.grad(out, w, g.view(3, 4))
    v = weight.detach().double().requires_grad_()
    y = reference.linear_token_logprobs(hidden.double() + torch.nn.functional.embedding(ids, v), v, ids)
    (want,) = torch.autograd.grad(y, v, g.double())
    assert_matches(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_computed_in_fp32(dtype):
    hidden, weight, bias, ids, g, gh = case(N=20, D=32, V=257)
    hidden, weight, bias = (x.to(dtype) for x in (hidden, weight, bias))
    got = run(linear_token_logprobs, hidden, weight, bias, ids, g, gh)
    want = run(reference.linear_token_logprobs, hidden.double(), weight.double(), bias.double(), ids, g, gh)
    for name in ("logprobs", "entropy"):
        assert got[name].dtype == torch.float32
        assert_matches(got[name], want[name], rtol=1e-5, atol=1e-4, name=name)
    for name in ("dh", "dw", "db"):
        assert got[name].dtype == dtype
        assert_matches(got[name], want[name], rtol=2**-8, atol=2**-8 * want[name].abs().max().item() / 10, name=name)


def test_autocast_does_not_narrow():
    hidden, weight, _, ids, g, _ = case()
    h = hidden.requires_grad_()
    plain = linear_token_logprobs(h, weight, ids)
    with torch.autocast("cpu", torch.bfloat16):
        cast = linear_token_logprobs(h, weight, ids)
    assert torch.equal(plain, cast) and cast.dtype == torch.float32


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_ignored_rows_may_hold_anything(poison):
    hidden, weight, bias, ids, g, gh = case()
    ids[[2, 5]] = -100
    T = torch.rand(13) + 0.5
    clean = run(linear_token_logprobs, hidden, weight, bias, ids, g, gh, softcap=3.0, temperature=T)
    for x in (hidden, g, gh, T):
        x[[2, 5]] = poison
    got = run(linear_token_logprobs, hidden, weight, bias, ids, g, gh, softcap=3.0, temperature=T)
    for name in clean:
        assert torch.equal(got[name], clean[name]), name


def test_ids_outside_the_vocabulary_give_nan():
    hidden, weight, bias, ids, g, gh = case()
    ids[4], ids[6] = 257, -3
    got = run(linear_token_logprobs, hidden, weight, bias, ids, g, gh)
    assert got["logprobs"].isnan().nonzero().flatten().tolist() == [4, 6]
    assert got["dw"].isfinite().all() and (got["dh"][[4, 6]] == 0).all()


def test_no_rows_and_all_ignored():
    hidden, weight, bias, _, g, gh = case()
    ids = torch.full((13,), -100)
    for x in run(linear_token_logprobs, hidden, weight, bias, ids, g, gh).values():
        assert (x == 0).all()
    empty = run(linear_token_logprobs, hidden[:0], weight, bias, ids[:0], g[:0], gh[:0])
    assert empty["logprobs"].shape == (0,) and (empty["dw"] == 0).all()


def test_extreme_logits():
    hidden, weight, bias, ids, g, gh = case()
    hidden = hidden * 40  # logits of several hundred: most probabilities underflow
    got = run(linear_token_logprobs, hidden, weight, bias, ids, g, gh)
    want = run(reference.linear_token_logprobs, hidden.double(), weight.double(), bias.double(), ids, g, gh)
    assert (got["logprobs"] <= 0).all()
    for name in want:
        assert_matches(got[name], want[name], rtol=1e-3, atol=1e-3, name=name)


@pytest.mark.parametrize("return_entropy", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_logits_stay_inside_the_budget(return_entropy, softcap):
    N, D, V = 96, 4, 2053
    hidden, weight, _, ids, _, _ = case(N, D, V)
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    budget = 12 * V * 4
    with Watch() as watch:
        out = linear_token_logprobs(
            h, w, ids, softcap=softcap, return_entropy=return_entropy, logits_budget_bytes=budget
        )
        (sum(x.sum() for x in out) if return_entropy else out.sum()).backward()
    assert 0 < watch.largest <= budget


@pytest.mark.parametrize(
    ("grad_hidden", "grad_weight", "gemms"), [(False, False, 1), (True, False, 3), (False, True, 3), (True, True, 4)]
)
def test_gemm_count(grad_hidden, grad_weight, gemms):
    # forward + recomputed logits + one product per gradient that is wanted, for each chunk
    hidden, weight, _, ids, g, _ = case()
    hidden.requires_grad_(grad_hidden)
    weight.requires_grad_(grad_weight)
    with Watch() as watch:
        out = linear_token_logprobs(hidden, weight, ids)
        if out.requires_grad:
            out.backward(g)
    assert watch.gemms == gemms
    assert (hidden.grad is not None) == grad_hidden and (weight.grad is not None) == grad_weight
    hidden.requires_grad_()
    with torch.no_grad(), Watch() as watch:
        linear_token_logprobs(hidden, weight, ids)
    assert watch.gemms == 1


def test_nothing_of_size_n_by_v_is_saved():
    hidden, weight, _, ids, _, _ = case(N=64, V=2053)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        linear_token_logprobs(hidden.requires_grad_(), weight.requires_grad_(), ids, return_entropy=True)
    assert sorted(saved)[-2:] == sorted([hidden.numel(), weight.numel()])


def test_inputs_are_not_modified():
    hidden, weight, bias, ids, g, gh = case()
    before = [x.clone() for x in (hidden, weight, bias, ids, g, gh)]
    run(linear_token_logprobs, hidden, weight, bias, ids, g, gh, softcap=2.0, temperature=0.5)
    for x, y in zip((hidden, weight, bias, ids, g, gh), before, strict=True):
        assert torch.equal(x, y)


def test_agrees_with_token_logprobs():
    hidden, weight, _, ids, *_ = case(N=30, V=2053)
    assert_matches(
        linear_token_logprobs(hidden, weight, ids), token_logprobs(hidden @ weight.t(), ids), rtol=1e-6, atol=1e-5
    )


GOOD = dict(hidden=torch.zeros(2, 3), weight=torch.zeros(5, 3), ids=torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(hidden=torch.zeros(2, 4)), "hidden"),
        (dict(hidden=torch.zeros(2, 3, dtype=torch.long)), "hidden"),
        (dict(weight=torch.zeros(0)), "weight"),
        (dict(ids=torch.zeros(3, dtype=torch.long)), "ids"),
        (dict(bias=torch.zeros(4)), "bias"),
        (dict(softcap=0.0), "softcap"),
        (dict(softcap=-1), "softcap"),
        (dict(temperature=-1.0), "temperature"),
        (dict(logits_budget_bytes=0), "logits_budget_bytes"),
        (dict(backend="liger"), "backend"),
        (dict(ids=torch.tensor([0, 5]), debug=True), "ids"),
        (dict(hidden=torch.full((2, 3), math.nan), debug=True), "hidden"),
        (dict(weight=torch.full((5, 3), math.inf), debug=True), "weight"),
    ],
)
def test_bad_arguments_are_named(change, named):
    with pytest.raises(ValueError, match=named):
        linear_token_logprobs(**(GOOD | change))
