"""The TL;DR query of the paper (REFERENCE items 2 and 3)."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedTokenizerBase

from fastrlhf.errors import UserError

__all__ = ["build_query", "format_query", "summary_text"]

# Tokens by which the start of a text may be longer when it is encoded alone.
_SLACK = 64


def format_query(fields: Mapping[str, str]) -> str:
    """subreddit, title and post -> the query, without a space at its end."""
    return f"SUBREDDIT: r/{fields['subreddit']}\n\nTITLE: {fields['title']}\n\nPOST: {fields['post']}\n\nTL;DR:"


def summary_text(summary: str) -> str:
    """A summary as a response: one space before it."""
    return summary if summary.startswith(" ") else f" {summary}"


def build_query(
    fields: Mapping[str, str], tokenizer: PreTrainedTokenizerBase, *, max_length: int, where: str = "query"
) -> tuple[list[int], bool]:
    """Query ids of at most `max_length`, without padding, and whether the post was cut.

    A query that is too long loses its post's last line, again and again; with no newline left, its last character.
    Raises `UserError` naming `where` when even an empty post does not fit.
    """
    post = fields["post"]
    encoding = tokenizer(format_query(fields), add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast)
    ids = encoding["input_ids"]
    cut = False
    # Far over the limit, what is removed next need not be encoded: a post this long cannot fit.
    hopeless = len(post) + 1
    if tokenizer.is_fast and len(ids) > max_length + _SLACK:
        head = len(format_query({**fields, "post": ""})) - len("\n\nTL;DR:")
        hopeless = encoding["offset_mapping"][max_length + _SLACK][0] - head
    while len(ids) > max_length:
        if not post:
            raise UserError(
                f"{where}: the query has {len(ids)} tokens even without its post; "
                f"raise data.max_query_length ({max_length})"
            )
        # As the reference: to just before the last newline, wherever it is; else one character.
        newline = post.rfind("\n")
        post = post[:newline] if newline >= 0 else post[: max(0, min(len(post) - 1, hopeless))]
        if len(post) > hopeless:
            continue
        ids = tokenizer.encode(format_query({**fields, "post": post}), add_special_tokens=False)
        cut = True
    return ids, cut
