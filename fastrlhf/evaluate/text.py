"""Measures of generated texts."""

from __future__ import annotations

from collections.abc import Sequence

from rouge_score import rouge_scorer

__all__ = ["distinct_n", "rouge_l", "win_rate"]


def rouge_l(references: Sequence[str], texts: Sequence[str]) -> float:
    """Mean ROUGE-L F1, stemmed, in 0..1."""
    scorer = rouge_scorer.RougeScorer(["rougeL"], use_stemmer=True)
    scores = [scorer.score(ref, text)["rougeL"].fmeasure for ref, text in zip(references, texts, strict=True)]
    return sum(scores) / max(1, len(scores))


def distinct_n(texts: Sequence[str], n: int = 2) -> float:
    """Distinct word n-grams over all n-grams of all texts, in 0..1; 0 if there are none."""
    grams = [tuple(words[i : i + n]) for words in (t.split() for t in texts) for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def win_rate(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Share of rows where ours scores higher; a tie counts half."""
    points = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in zip(ours, theirs, strict=True)]
    return sum(points) / max(1, len(points))
