"""`fastrlhf demo`: the whole pipeline on the embedded corpus, judged by the gold reward."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import yaml

from fastrlhf.config import Config

__all__ = ["demo_defaults", "run_demo"]

POSTS = 4000
HELDOUT = 400


def demo_defaults() -> dict[str, Any]:
    """The demo's configuration, below whatever the user gives."""
    return yaml.safe_load(files("fastrlhf").joinpath("configs/demo.yaml").read_text(encoding="utf-8"))


def run_demo(cfg: Config) -> dict[str, Any]:
    """Write the corpus into the run folder, train the three stages on it, and print what was learnt."""
    from fastrlhf.config_parser import config_to_yaml
    from fastrlhf.data.demo_corpus import generate_posts, gold_reward, write_corpus
    from fastrlhf.data.tldr import format_query
    from fastrlhf.pipeline import check, pipeline_in, print_summary, resolve, stages_of
    from fastrlhf.run_folder import RunFolder

    resolve(cfg)
    with RunFolder.open(cfg, "demo", config_yaml=config_to_yaml(cfg)) as run:
        paths = write_corpus(run.path / "corpus", seed=cfg.seed, n_posts=POSTS, n_heldout=HELDOUT)
        cfg.data.sft, cfg.data.sft_eval = str(paths.sft_train), str(paths.sft_eval)
        cfg.data.preferences, cfg.data.preferences_eval = str(paths.preferences_train), str(paths.preferences_eval)
        by_query = {
            format_query({"subreddit": p.subreddit, "title": p.title, "post": p.post}): p
            for p in generate_posts(POSTS + HELDOUT, seed=cfg.seed)
        }

        def judge(prompts: list[str], responses: list[str], ended: list[bool]) -> list[float]:
            rows = zip(prompts, responses, ended, strict=True)
            return [gold_reward(by_query[p], r.strip(), ended=e) for p, r, e in rows]

        check(cfg, stages_of(cfg))
        summary = pipeline_in(run, cfg, judge=judge)
        print_summary(summary)
        return summary
