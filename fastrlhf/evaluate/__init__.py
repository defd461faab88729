"""Evaluation: sampling on held-out prompts (`sampling`), measures of texts (`text`), policies compared (`compare`)."""
