"""The demo corpus: the gold reward must reward good summaries only, and the files must fit together."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from fastrlhf.data import demo_words
from fastrlhf.data.demo_corpus import (
    CANDIDATE_KINDS,
    SLOTS,
    CorpusPaths,
    DemoPost,
    candidate_summary,
    generate_posts,
    gold_reward,
    reference_summary,
    write_corpus,
)

ROOT = Path(__file__).resolve().parents[1]
POSTS = generate_posts(400, seed=11)


def honest(post: DemoPost) -> str:
    facts = post.facts
    return (
        f"My {facts['who']} keeps {facts['problem']} for {facts['time']}. "
        f"I feel {facts['feeling']} and I want to {facts['plan']}."
    )


def all_values(slot: str) -> list[str]:
    if slot == "feeling":
        return list(demo_words.FEELINGS)
    if slot == "time":
        return [f"{number} {unit}" for number in demo_words.NUMBERS for unit in demo_words.UNITS]
    return [value for family in demo_words.FAMILIES for value in getattr(family, slot)]


def family_values(post: DemoPost, slot: str) -> tuple[str, ...]:
    family = next(f for f in demo_words.FAMILIES if post.facts["who"] in f.who)
    return getattr(family, slot)


def who_does_what(post: DemoPost) -> str:
    return f"My {post.facts['who']} keeps {post.facts['problem']}."


# ------------------------------------------------------------------------------------------------- attacks

ATTACKS = {
    "empty": lambda post: "",
    "one word": lambda post: "Sad.",
    "constant, no fact": lambda post: "I need advice about my situation, please help.",
    "constant, one guess": lambda post: "I feel angry.",
    "constant, full": lambda post: "My boss keeps lying to me for two weeks. I feel angry and I want to move out.",
    "copy of the post": lambda post: post.post,
    "copy of title and post": lambda post: f"{post.title}. {post.post}",
    "copy of the title": lambda post: post.title,
    "first half of the post": lambda post: post.post[: len(post.post) // 2],
    "keywords": lambda post: " ".join(post.facts.values()) + ".",
    "keywords with commas": lambda post: ", ".join(post.facts.values()) + ".",
    "keywords with and": lambda post: " and ".join(post.facts.values()) + ".",
    "shuffled words": lambda post: " ".join(random.Random(post.id).sample(words := honest(post).split(), len(words))),
    "repeated facts": lambda post: " ".join([honest(post)] * 3),
    "repeated clause": lambda post: " ".join([f"I feel {post.facts['feeling']}."] * 6),
    "every feeling": lambda post: " ".join(f"I feel {value}." for value in demo_words.FEELINGS),
    "every feeling in a row": lambda post: "I feel " + " ".join(demo_words.FEELINGS) + ".",
    "every feeling, said by the facts": lambda post: (
        honest(post) + " " + " and ".join(f"I feel {value}" for value in demo_words.FEELINGS) + "."
    ),
    "every plan of the story": lambda post: ". ".join(f"I might {v}" for v in family_values(post, "plan")) + ".",
    "every problem of the story": lambda post: (
        ". ".join(f"My {post.facts['who']} keeps {v}" for v in family_values(post, "problem")) + "."
    ),
    "every person and problem": lambda post: (
        ". ".join(
            f"My {who} keeps {problem}"
            for who, problem in zip(family_values(post, "who"), family_values(post, "problem"), strict=False)
        )
        + "."
    ),
    "connectives": lambda post: "and so but now and so but now and so.",
    "filler": lambda post: " ".join(demo_words.FILLERS),
    "never ending": lambda post: honest(post)[:-1] + " and then it all goes on and on" * 5,
    "another post": lambda post: honest(POSTS[(POSTS.index(post) + 7) % len(POSTS)]),
    "made-up person": lambda post: "My dragon keeps flying around for two weeks. I feel great.",
}


@pytest.fixture(scope="module")
def reference_mean() -> float:
    rng = random.Random(0)
    return statistics.mean(gold_reward(post, reference_summary(post, rng)) for post in POSTS)


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_score_clearly_below_references(attack: str, reference_mean: float) -> None:
    rewards = [gold_reward(post, ATTACKS[attack](post)) for post in POSTS]
    assert statistics.mean(rewards) < reference_mean - 0.2
    beaten = sum(gold_reward(post, honest(post)) > reward for post, reward in zip(POSTS, rewards, strict=True))
    assert beaten >= 0.99 * len(POSTS)


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_modest_honest_summary_beats_most_attacks(attack: str) -> None:
    # Only who does what: even this is better than any trick on the bulk of the posts.
    wins = sum(gold_reward(p, who_does_what(p)) > gold_reward(p, ATTACKS[attack](p)) for p in POSTS)
    assert wins >= 0.9 * len(POSTS)


def test_bare_words_state_nothing() -> None:
    for post in POSTS:
        assert gold_reward(post, " ".join(post.facts.values()) + ".") < 0
        assert gold_reward(post, f"For {post.facts['time']}.") < 0


# ------------------------------------------------------------------------------------------- single aspects


def test_an_honest_complete_summary_is_the_best() -> None:
    for post in POSTS:
        assert gold_reward(post, honest(post)) == pytest.approx(1.0)


def test_other_wordings_count_as_well() -> None:
    post = POSTS[0]
    f = post.facts
    for text in (
        f"I feel {f['feeling']} because my {f['who']} has been {f['problem']} for over {f['time']}. "
        f"Should I {f['plan']}?",
        f"My {f['who']} won't stop {f['problem']}. It started {f['time']} ago, it makes me {f['feeling']} "
        f"and I might {f['plan']}.",
    ):
        assert gold_reward(post, text) == pytest.approx(1.0)


def parts(post: DemoPost) -> dict[str, str]:
    """The complete summary in four clauses, so that one fact can be changed at a time."""
    f = post.facts
    return {
        "problem": f"My {f['who']} keeps {f['problem']}.",
        "time": f"This has been going on for {f['time']}.",
        "feeling": f"I feel {f['feeling']}.",
        "plan": f"I want to {f['plan']}.",
    }


@pytest.mark.parametrize("slot", ["problem", "time", "feeling", "plan"])
def test_dropping_a_fact_costs_and_contradicting_it_costs_more(slot: str) -> None:
    for post in POSTS:
        full = parts(post)
        less = {"problem": f"I have trouble with my {post.facts['who']}."}
        dropped = " ".join(filter(None, (full | {slot: less.get(slot, "")}).values()))
        other = next(value for value in all_values(slot) if value != post.facts[slot])
        contradicted = " ".join(full.values()).replace(post.facts[slot], other)
        both = " ".join(full.values()) + " " + full[slot].replace(post.facts[slot], other)
        best = gold_reward(post, " ".join(full.values()))
        assert best > gold_reward(post, dropped) + 0.1
        assert gold_reward(post, dropped) > gold_reward(post, contradicted) + 0.1
        assert gold_reward(post, dropped) > gold_reward(post, both) + 0.1


def test_a_wrong_person_costs_more_than_no_person() -> None:
    for post in POSTS:
        other = next(who for who in family_values(post, "who") if who != post.facts["who"])
        right = gold_reward(post, f"My {post.facts['who']} keeps {post.facts['problem']}.")
        without = gold_reward(post, f"Someone keeps {post.facts['problem']}.")
        wrong = gold_reward(post, f"My {other} keeps {post.facts['problem']}.")
        assert right > without > wrong


@pytest.mark.parametrize("addition", demo_words.FILLERS + demo_words.ASIDES)
def test_filler_costs_and_more_filler_costs_more(addition: str) -> None:
    post = POSTS[3]
    once, twice = f"{honest(post)} {addition}", f"{honest(post)} {addition} {addition}"
    assert gold_reward(post, honest(post)) > gold_reward(post, once) > gold_reward(post, twice)


def test_end_and_joints_matter() -> None:
    for post in POSTS:
        best = gold_reward(post, honest(post))
        assert gold_reward(post, honest(post)[:-1]) < best
        assert gold_reward(post, honest(post), ended=False) < best
        assert gold_reward(post, honest(post).replace(". ", " ").replace(" and ", " ")) < best


def test_repeating_a_fact_costs() -> None:
    for post in POSTS:
        assert gold_reward(post, f"{honest(post)} I feel {post.facts['feeling']}.") < gold_reward(post, honest(post))


def test_a_phrase_broken_off_is_neither_stated_nor_denied() -> None:
    post = next(post for post in POSTS if len(post.facts["plan"].split()) == 3)
    broken = f"I feel {post.facts['feeling']} and I want to {post.facts['plan'].split()[0]}."
    without = f"I feel {post.facts['feeling']}."
    wrong = f"I feel {post.facts['feeling']} and I want to dance."
    assert gold_reward(post, without) > gold_reward(post, broken) > gold_reward(post, wrong)


def test_rewards_stay_in_range_and_spread(reference_mean: float) -> None:
    rng = random.Random(1)
    rewards = [gold_reward(post, candidate_summary(post, rng)) for post in POSTS for _ in range(3)]
    assert min(rewards) >= -1 and max(rewards) <= 1
    assert statistics.pstdev(rewards) > 0.3
    references = [gold_reward(post, reference_summary(post, rng)) for post in POSTS]
    near_perfect = sum(reward > 0.95 for reward in references) / len(references)
    assert 0.1 <= near_perfect <= 0.25
    assert 0.3 < reference_mean < 0.75


@pytest.mark.parametrize("kind", CANDIDATE_KINDS)
def test_only_complete_candidates_and_some_references_are_perfect(kind: str) -> None:
    rng = random.Random(2)
    rewards = [gold_reward(post, candidate_summary(post, rng, kind)) for post in POSTS]
    if kind == "complete":
        assert min(rewards) == pytest.approx(1.0)
    elif kind != "reference":
        assert max(rewards) < 0.95


# -------------------------------------------------------------------------------------------------- corpus


def test_posts_state_their_facts() -> None:
    for post in POSTS:
        assert set(post.facts) == set(SLOTS)
        assert all(value in post.post for value in post.facts.values())


def test_no_value_belongs_to_two_slots_or_occurs_in_other_text() -> None:
    first_words: dict[str, set[str]] = {slot: {v.split()[0] for v in all_values(slot)} for slot in SLOTS}
    for slot in SLOTS:
        for other in SLOTS:
            assert slot == other or not first_words[slot] & first_words[other]
    text = " ".join(demo_words.ASIDES + demo_words.OPENERS + demo_words.FILLERS).lower()
    for slot in SLOTS:
        assert not any(f" {value} " in f" {text} " for value in all_values(slot))


def test_posts_are_varied() -> None:
    posts = generate_posts(2000, seed=5)
    assert len({post.post for post in posts}) == len({post.id for post in posts}) == len(posts)
    assert len({tuple(post.facts.values()) for post in posts}) > 0.95 * len(posts)
    assert len({post.subreddit for post in posts}) >= 15
    grams = {tuple(w[i : i + 4]) for post in posts for w in [post.post.split()] for i in range(len(w) - 3)}
    assert len(grams) > 10_000
    lengths = [len(post.post.split()) for post in posts]
    assert statistics.pstdev(lengths) > 5
    assert min(lengths) >= 20 and max(lengths) <= 80


def test_references_are_varied() -> None:
    rng = random.Random(3)
    lengths = [len(reference_summary(post, rng).split()) for post in POSTS]
    assert min(lengths) <= 5 and max(lengths) >= 22


def test_the_seed_decides() -> None:
    assert generate_posts(50, seed=1) == generate_posts(50, seed=1)
    assert generate_posts(50, seed=1) == generate_posts(80, seed=1)[:50]
    assert generate_posts(50, seed=1) != generate_posts(50, seed=2)


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusPaths:
    return write_corpus(tmp_path_factory.mktemp("corpus"), seed=9, n_posts=600, n_heldout=300)


def test_files_have_their_columns(corpus: CorpusPaths) -> None:
    assert len(read(corpus.sft_train)) == 600
    assert len(read(corpus.sft_eval)) == 300
    assert len(read(corpus.preferences_train)) > 800
    assert len(read(corpus.preferences_eval)) > 400
    for path in (corpus.sft_train, corpus.sft_eval):
        assert all(list(row) == ["id", "subreddit", "title", "post", "summary"] for row in read(path))
    for path in (corpus.preferences_train, corpus.preferences_eval):
        assert all(list(row) == ["id", "subreddit", "title", "post", "chosen", "rejected"] for row in read(path))


def test_summaries_have_neither_leading_space_nor_end_token(corpus: CorpusPaths) -> None:
    for row in read(corpus.sft_train) + read(corpus.sft_eval):
        assert row["summary"] == row["summary"].strip() and row["summary"]
        assert "<|endoftext|>" not in row["summary"]


def test_heldout_posts_are_in_no_training_file(corpus: CorpusPaths) -> None:
    for column in ("id", "post"):
        train = {row[column] for path in (corpus.sft_train, corpus.preferences_train) for row in read(path)}
        heldout = {row[column] for path in (corpus.sft_eval, corpus.preferences_eval) for row in read(path)}
        assert not train & heldout


def test_pair_labels_agree_with_the_gold_reward(corpus: CorpusPaths) -> None:
    posts = {post.id: post for post in generate_posts(900, seed=9)}
    gaps = []
    for row in read(corpus.preferences_train) + read(corpus.preferences_eval):
        post = posts[row["id"]]
        assert row["post"] == post.post
        gaps.append(gold_reward(post, row["chosen"]) - gold_reward(post, row["rejected"]))
    assert min(gaps) >= 0.1
    # Some pairs are close calls, most are not.
    assert 0.05 < sum(gap < 0.25 for gap in gaps) / len(gaps) < 0.4


def test_files_do_not_depend_on_the_hash_seed(corpus: CorpusPaths, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from fastrlhf.data.demo_corpus import write_corpus;"
        "write_corpus(Path(sys.argv[1]), seed=9, n_posts=600, n_heldout=300)"
    )
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        folder = tmp_path / hash_seed
        subprocess.run([sys.executable, "-c", code, str(folder)], check=True, env=env)
        for path in corpus.sft_train.parent.iterdir():
            assert (folder / path.name).read_bytes() == path.read_bytes()
