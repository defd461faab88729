"""The one exception for what a user can mend."""

from __future__ import annotations

__all__ = ["UserError"]


class UserError(Exception):
    """A fault in what the user gave: one sentence saying what, where, and what to do.

    The command line prints the sentence and exits with code 2, without a traceback.
    """
