"""Scores that come from a Python function of the user's instead of a reward model."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from fastrlhf.errors import UserError

__all__ = ["RewardFunction", "call_reward_function", "load_reward_function"]

# Rewards are fp32 and their advantages are squared.
_LARGEST = 1e15

RewardFunction = Callable[[list[str], list[str]], Sequence[float]]


def load_reward_function(spec: str) -> RewardFunction:
    """`module:name` -> the function; modules in the working directory are found.

    Raises `UserError` when the module or the name is not there.
    """
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise UserError(f"ppo.reward_function: {spec!r} is not of the form module:name")
    if module_name.endswith(".py") or "/" in module_name or module_name.startswith("."):
        stem = Path(module_name).name.removesuffix(".py").strip(".")
        raise UserError(
            f"ppo.reward_function: {module_name!r} is a file, not a module; run from its folder and give {stem}:{name}"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as err:
        raise UserError(
            f"ppo.reward_function: cannot import {module_name!r} ({err}); run from the folder that holds it"
        ) from err
    except (Exception, SystemExit) as err:  # the user's module can raise anything
        raise UserError(f"ppo.reward_function: importing {module_name!r} raised {_brief(err)}") from err
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"ppo.reward_function: {module_name!r} has no function {name!r}")
    return function


def call_reward_function(function: RewardFunction, prompts: list[str], responses: list[str]) -> list[float]:
    """One float for each row.

    Raises `UserError` naming the row for an exception, a value that is not a finite number, or a wrong length.
    """
    try:
        got = function(list(prompts), list(responses))
        values = None if isinstance(got, (str, bytes, Mapping)) or not isinstance(got, Iterable) else list(got)
    except (Exception, SystemExit) as err:  # the user's code can raise anything; the row is found by calling it alone
        row = _first_failing(function, prompts, responses)
        raise UserError(f"ppo.reward_function raised {_brief(err)}{_at(row, prompts, responses)}") from err
    if values is None:
        if inspect.iscoroutine(got):
            got.close()
        raise UserError(
            f"ppo.reward_function returned {type(got).__name__}; it must return one float for each response"
        )
    if len(values) != len(responses):
        raise UserError(f"ppo.reward_function returned {len(values)} values for {len(responses)} responses")
    out = []
    for row, value in enumerate(values):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as err:
            raise UserError(
                f"ppo.reward_function returned {value!r}, not a number{_at(row, prompts, responses)}"
            ) from err
        if not abs(number) <= _LARGEST:
            raise UserError(f"ppo.reward_function returned {number}{_at(row, prompts, responses)}")
        out.append(number)
    return out


def _brief(err: BaseException) -> str:
    try:
        text = str(err)
    except Exception:  # the user's exception may not even print
        text = ""
    return " ".join(f"{type(err).__name__}: {text}".split())


def _first_failing(function: RewardFunction, prompts: list[str], responses: list[str]) -> int | None:
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        try:
            function([prompt], [response])
        except (
            Exception,
            SystemExit,
        ):  # which row it is is all that is asked here; the first error is the one reported
            return row
    return None


def _at(row: int | None, prompts: list[str], responses: list[str]) -> str:
    if row is None:
        return " (on the whole batch; on each row alone it does not)"
    return f" at row {row} (prompt ending {prompts[row][-40:]!r}, response {responses[row][:60]!r})"
