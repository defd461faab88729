"""token_logprobs against its fp64 twin, torch's own cross entropy, and inputs that break naive code."""

import math

import pytest
import torch
from fastrlhf_kernels import logprobs as module
from fastrlhf_kernels import reference, token_logprobs, which_backend
from fastrlhf_kernels.testing import assert_matches

# dtype: (log-probability and entropy, gradient relative to the row's largest). Truth is taken on the rounded input.
TOL = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (1e-5, 2.0**-8),
    torch.float16: (1e-5, 2.0**-10),
}


def run(fn, logits, ids, g, gh, **kwargs):
    """(logprobs, entropy, gradient) with upstream gradients g and gh."""
    x = logits.detach().requires_grad_()
    out = fn(x, ids, return_entropy=True, **kwargs)
    (grad,) = torch.autograd.grad((out.logprobs, out.entropy), x, (g.to(out.logprobs.dtype), gh.to(out.entropy.dtype)))
    return out.logprobs.detach(), out.entropy.detach(), grad


def case(shape, dtype=torch.float32, scale=5.0, seed=0):
    gen = torch.Generator().manual_seed(seed)
    logits = (torch.randn(*shape, generator=gen) * scale).to(dtype)
    ids = torch.randint(0, shape[-1], shape[:-1], generator=gen)
    g, gh = torch.randn(2, *shape[:-1], generator=gen)
    return logits, ids, g, gh


@pytest.mark.parametrize("dtype", TOL, ids=str)
@pytest.mark.parametrize("V", [1, 2, 7, 257, 2053])
@pytest.mark.parametrize("temperature", [1.0, 0.7, "rows"])
def test_value_and_gradient(V, dtype, temperature):
    logits, ids, g, gh = case((3, 5, V), dtype)
    T = torch.rand(3, 5) + 0.3 if temperature == "rows" else temperature
    ids[1, 2] = -100
    got = run(token_logprobs, logits, ids, g, gh, temperature=T)
    T64 = T.double() if isinstance(T, torch.Tensor) else T
    want = run(reference.token_logprobs, logits.double(), ids, g, gh, temperature=T64)
    tol, grad_tol = TOL[dtype]
    assert got[0].dtype == got[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert got[2].dtype == dtype
    assert_matches(got[0], want[0], rtol=tol, atol=tol, name="logprobs")
    assert_matches(got[1], want[1], rtol=tol, atol=tol, name="entropy")
    largest = want[2].abs().amax().item() if want[2].numel() else 0.0
    assert_matches(got[2], want[2], rtol=grad_tol, atol=grad_tol * largest + 1e-12, name="dlogits")
    assert got[0][1, 2] == 0 and got[1][1, 2] == 0 and (got[2][1, 2] == 0).all()
    assert (got[0] <= 0).all()


@pytest.mark.parametrize("which", ["logprobs", "entropy"])
def test_each_gradient_alone(which):
    logits, ids, g, gh = case((4, 257))
    zero = torch.zeros_like(g)
    g, gh = (g, zero) if which == "logprobs" else (zero, gh)
    x = logits.clone().requires_grad_()
    out = token_logprobs(x, ids, return_entropy=True)
    (grad,) = torch.autograd.grad(getattr(out, which), x, g if which == "logprobs" else gh)
    want = run(reference.token_logprobs, logits.double(), ids, g, gh)[2]
    assert_matches(grad, want, rtol=1e-5, atol=1e-6, name=f"dlogits from {which}")


def test_torch_agrees():
    logits, ids, g, _ = case((6, 2053))
    x = logits.clone().requires_grad_()
    y = logits.clone().requires_grad_()
    got = token_logprobs(x, ids)
    want = -torch.nn.functional.cross_entropy(y, ids, reduction="none")
    got.backward(g)
    want.backward(g)
    assert_matches(got, want, rtol=1e-6, atol=1e-6)
    assert_matches(x.grad, y.grad, rtol=1e-5, atol=1e-7, name="dlogits")


def test_twin_gradcheck():
    logits, ids, _, _ = case((2, 3, 5), torch.float64, scale=1.0)
    ids[0, 0] = -100
    fn = lambda x: tuple(reference.token_logprobs(x, ids, temperature=0.7, return_entropy=True))
    assert torch.autograd.gradcheck(fn, (logits.requires_grad_(),))
    fast = lambda x: tuple(token_logprobs(x, ids, temperature=0.7, return_entropy=True))
    assert torch.autograd.gradcheck(fast, (logits.detach().requires_grad_(),))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, 2:-1],
        lambda x: x.transpose(0, 1),
        lambda x: x[::2],
        lambda x: x[..., 3:20],
        lambda x: x[0, 0],
        lambda x: x[:0],
        lambda x: x[:1, :1].expand(3, 4, -1),
        lambda x: x.unflatten(1, (2, 3)).transpose(0, 2),
    ],
    ids=["slots", "transposed", "step", "vocab", "one row", "no rows", "expanded", "4-D"],
)
def test_strided_views(view, monkeypatch):
    monkeypatch.setattr(module, "CPU_CHUNK_BYTES", 300)  # several chunks in each view
    base, *_ = case((4, 6, 23))
    x = base.clone().requires_grad_()
    logits = view(x)
    ids = torch.randint(0, logits.shape[-1], logits.shape[:-1])
    g = torch.randn(ids.shape)
    out = token_logprobs(logits, ids)
    out.backward(g)
    y = base.double().requires_grad_()
    want = reference.token_logprobs(view(y), ids)
    want.backward(g.double())
    assert_matches(out, want, rtol=1e-5, atol=1e-6)
    assert_matches(x.grad, y.grad, rtol=1e-5, atol=1e-6, name="dlogits")


def test_views_are_never_copied():
    logits = torch.empty(8, 6, 32)[:, 2:-1]
    for view in module.row_views(logits):
        assert view.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()
    assert len(module.row_views(torch.empty(8, 6, 32))) == 1


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
def test_ignored_rows_may_hold_anything(poison):
    logits, ids, g, gh = case((4, 3, 17))
    ids[1] = -100
    clean = run(token_logprobs, logits, ids, g, gh)
    logits[1], g[1], gh[1] = poison, poison, poison
    for got, want in zip(run(token_logprobs, logits, ids, g, gh), clean, strict=True):
        assert torch.equal(got, want)
    assert (clean[2][1] == 0).all()


def test_all_rows_ignored():
    logits, _, g, gh = case((3, 7))
    for out in run(token_logprobs, logits, torch.full((3,), -100), g, gh):
        assert (out == 0).all()


def test_ignore_index_inside_the_vocabulary():
    logits, ids, g, gh = case((5, 7))
    ids[0], ids[1:] = 3, 2
    got = run(token_logprobs, logits, ids, g, gh, ignore_index=3)
    assert got[0][0] == 0 and (got[0][1:] != 0).all() and (got[2][0] == 0).all()


def test_minus_inf_logits():
    logits, ids, g, gh = case((4, 40))
    logits[:, 10:] = -math.inf
    logits[3, :9] = -math.inf  # one token left
    ids[:3], ids[3] = torch.tensor([1, 2, 11]), 9
    got = run(token_logprobs, logits, ids, g, gh)
    want = run(reference.token_logprobs, logits.double(), ids, g, gh)
    assert got[0][2] == -math.inf and got[0][3] == 0 and got[1][3].abs() < 1e-6
    for name, a, b in zip(("logprobs", "entropy", "dlogits"), got, want, strict=True):
        assert_matches(a, b, rtol=1e-5, atol=1e-6, name=name)
    x = logits.clone().requires_grad_()
    token_logprobs(x, ids).backward(g)
    assert (x.grad[:2, 10:] == 0).all(), "a banned token gets exactly no gradient"


@pytest.mark.parametrize("bad", [-1, 7, 10**12, -(10**12)])
def test_ids_outside_the_vocabulary_give_nan(bad):
    logits, ids, g, gh = case((3, 7))
    clean = run(token_logprobs, logits, ids, g, gh)
    ids[1] = bad
    got = run(token_logprobs, logits, ids, g, gh)
    assert got[0][1].isnan() and got[1][1].isnan() and (got[2][1] == 0).all()
    for a, b in zip(got, clean, strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_target_gradient_does_not_cancel(dtype):
    # In bf16 `1 - p` is 20 % off at p = 0.99. Here the log-probability is fp32, so 1 - p is good to an ulp of 1.
    logits = torch.zeros(4, 11, dtype=dtype)
    logits[:, 4] = torch.tensor([5.0, 8.0, 10.0, 20.0])
    ids, g = torch.full((4,), 4), torch.ones(4)
    x = logits.clone().requires_grad_()
    token_logprobs(x, ids).backward(g)
    want = run(reference.token_logprobs, logits.double(), ids, g, torch.zeros(4))[2]
    assert_matches(x.grad, want, rtol=1e-6 if dtype == torch.float32 else 2.0**-8, atol=1.2e-7)


def test_no_denormal_probabilities():
    logits = torch.linspace(0, -110, 4000).repeat(2, 1).requires_grad_()
    token_logprobs(logits, torch.zeros(2, dtype=torch.long)).sum().backward()
    grad = logits.grad.abs()
    assert ((grad == 0) | (grad > 1e-31)).all() and (grad == 0).any()


def test_inputs_are_not_modified_and_expanded_gradients_work():
    logits, ids, *_ = case((4, 33))
    before = logits.clone()
    x = logits.requires_grad_()
    token_logprobs(x, ids).sum().backward()  # a stride-0 upstream gradient
    assert torch.equal(x.detach(), before)
    with pytest.raises(RuntimeError):
        out = token_logprobs(x, ids)
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        first.sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode):
    logits, ids, *_ = case((4, 33))
    with mode():
        assert torch.equal(token_logprobs(logits, ids), token_logprobs(logits.requires_grad_(), ids))


def test_a_row_does_not_depend_on_its_batch():
    logits, ids, *_ = case((40, 2053))
    whole = token_logprobs(logits, ids)
    assert torch.equal(whole[7:9], token_logprobs(logits[7:9], ids[7:9]))


@pytest.mark.parametrize("aliased", [torch.softmax, torch.log_softmax])
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)
def test_torch_softmax_may_write_over_its_input(aliased, device):
    # The row arithmetic relies on it; torch documents neither way.
    for V in (1, 7, 1000, 1025, 50304):
        x = torch.randn(5, V, device=device) * 10
        want = aliased(x, 1)
        aliased(x, 1, out=x)
        assert torch.equal(x, want)


GOOD = dict(logits=torch.zeros(2, 3, 5), ids=torch.zeros(2, 3, dtype=torch.long))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(ids=torch.zeros(2, 4, dtype=torch.long)), "ids"),
        (dict(ids=torch.zeros(2, 3)), "ids"),
        (dict(logits=torch.zeros(2, 3, 5, dtype=torch.long)), "logits"),
        (dict(logits=torch.zeros(2, 3, 0)), "logits"),
        (dict(logits=torch.zeros(2, 5, 3).transpose(1, 2)), "logits"),
        (dict(temperature=0.0), "temperature"),
        (dict(temperature=math.nan), "temperature"),
        (dict(temperature="1"), "temperature"),
        (dict(temperature=torch.ones(3)), "temperature"),
        (dict(temperature=torch.ones(2, 3, requires_grad=True)), "temperature"),
        (dict(ignore_index=1.5), "ignore_index"),
        (dict(backend="triton"), "'auto', 'eager'"),
        (dict(ids=torch.full((2, 3), 5), debug=True), "ids"),
        (dict(logits=torch.full((2, 3, 5), math.nan), debug=True), "logits"),
        (dict(temperature=torch.zeros(2, 3), debug=True), "temperature"),
    ],
)
def test_bad_arguments_are_named(change, named):
    with pytest.raises(ValueError, match=named):
        token_logprobs(**(GOOD | change))


def test_which_backend():
    assert which_backend() == "eager"
