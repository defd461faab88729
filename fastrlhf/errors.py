"""The one exception for what a user can mend, and what its sentences are made of."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable

__all__ = ["UserError", "brief", "did_you_mean"]


class UserError(Exception):
    """A fault in what the user gave: one sentence saying what, where, and what to do.

    The command line prints the sentence and exits with code 2, without a traceback.
    """


def brief(err: BaseException) -> str:
    """Another library's error in one line of at most 160 characters."""
    return textwrap.shorten(str(err), 160, placeholder=" ...") or type(err).__name__


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """`; did you mean NEAREST?`, or nothing if no known name is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""
