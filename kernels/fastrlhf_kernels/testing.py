"""assert_matches: compare a result with the truth, and say where and by how much it is off."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_matches(actual: Tensor, expected: Tensor, *, rtol: float, atol: float, name: str = "result") -> None:
    """Every |actual - expected| <= atol + rtol * |expected|, compared in fp64.

    NaN on either side alone is a failure of its own, as is an infinity that the other side does not have; NaN
    against NaN and equal infinities match.
    """
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    a, e = actual.detach().double(), expected.detach().double()
    for side, x, other in (("the result", a, e), ("the expectation", e, a)):
        alone = x.isnan() & ~other.isnan()
        if alone.any():
            count = f"{int(alone.sum())} of {a.numel()}"
            raise AssertionError(f"{name}: NaN in {side} only, {count}, first at {_first(alone)}")
    wrong_inf = (a.isinf() | e.isinf()) & (a != e) & ~a.isnan()
    if wrong_inf.any():
        at = _first(wrong_inf)
        raise AssertionError(f"{name}: {float(a[at])} instead of {float(e[at])} at {at}, {int(wrong_inf.sum())} in all")
    difference = torch.where(a.isfinite() & e.isfinite(), (a - e).abs(), 0.0)
    bad = difference > atol + rtol * e.abs().nan_to_num(0, 0, 0)
    if not bad.any():
        return
    relative = torch.where(difference > 0, difference / e.abs(), 0.0)
    report = [f"{name}: {int(bad.sum())} of {a.numel()} outside atol={atol:g} rtol={rtol:g}"]
    for what, error in (("max-abs", difference), ("max-rel", relative)):
        at = _first(error == error.max())
        report.append(f"{what} {float(error[at]):.3e} at {at}: got {float(a[at])!r}, expected {float(e[at])!r}")
    rms = (difference.square().mean() / e.nan_to_num(0, 0, 0).square().mean()).sqrt()
    raise AssertionError("; ".join([*report, f"RMS ratio {float(rms):.3e}"]))


def _first(where: Tensor) -> tuple[int, ...]:
    return tuple(where.nonzero()[0].tolist())
