"""A small corpus of TL;DR-like posts, written by a program, with a gold reward that is known exactly.

The real TL;DR data cannot be judged automatically: only people know which of two summaries is better. Here
every post is written from five hidden facts (who does what, for how long, how the writer feels, what they
plan), so :func:`gold_reward` can read a summary and check it. That makes it possible to train a reward
model and a policy in minutes and then to *know* whether the policy got better, instead of trusting the
reward model.

Reference summaries are deliberately uneven, like those of Reddit: most leave facts out, some ramble, some get
a fact wrong, and about one in seven is complete and to the point.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fastrlhf.data import demo_words as words

SLOTS = ("who", "problem", "time", "feeling", "plan")
_FAMILY_SLOTS = ("who", "problem", "plan")


@dataclass(frozen=True, slots=True)
class DemoPost:
    """A post, and the facts it was written from (which only the gold reward may look at)."""

    id: str
    subreddit: str
    title: str
    post: str
    facts: dict[str, str]


@dataclass(frozen=True, slots=True)
class CorpusPaths:
    """The JSONL files :func:`write_corpus` wrote."""

    sft_train: Path
    sft_eval: Path
    preferences_train: Path
    preferences_eval: Path


# ---------------------------------------------------------------------------------------------------- posts


def generate_posts(n: int, *, seed: int) -> list[DemoPost]:
    """Write ``n`` different posts; the same seed gives the same posts."""
    # Seeding with a string hashes it with SHA-512, so the stream does not depend on PYTHONHASHSEED.
    rng = random.Random(f"fastrlhf demo posts {seed}")
    posts: list[DemoPost] = []
    seen: set[str] = set()
    while len(posts) < n:
        family = rng.choice(words.FAMILIES)
        facts = {
            "who": rng.choice(family.who),
            "problem": rng.choice(family.problem),
            "time": f"{rng.choice(words.NUMBERS)} {rng.choice(words.UNITS)}",
            "feeling": rng.choice(words.FEELINGS),
            "plan": rng.choice(family.plan),
        }
        body = _write_body(facts, rng)
        if body in seen:
            continue
        seen.add(body)
        title = rng.choice(words.TITLES).format(**facts)
        posts.append(DemoPost(f"demo-{len(posts):05d}", rng.choice(family.subreddits), title, body, facts))
    return posts


def _write_body(facts: Mapping[str, str], rng: random.Random) -> str:
    if rng.random() < 0.5:
        lead = [rng.choice(words.WHO_PROBLEM_SENTENCES)]
    else:
        lead = [rng.choice(words.WHO_SENTENCES), rng.choice(words.PROBLEM_SENTENCES)]
    rest = [
        rng.choice(words.TIME_SENTENCES),
        rng.choice(words.FEELING_SENTENCES),
        rng.choice(words.PLAN_SENTENCES),
        *rng.sample(words.ASIDES, rng.choice((0, 0, 1, 1, 2))),
    ]
    rng.shuffle(rest)
    # The story mostly opens with the person, as people do, but now and then it starts elsewhere.
    at = 0 if rng.random() < 0.75 else rng.randrange(1, len(rest))
    opener = [rng.choice(words.OPENERS)] if rng.random() < 0.4 else []
    sentences = opener + rest[:at] + lead + rest[at:]
    return " ".join(sentences).format(**facts, age=rng.randint(18, 39), job=rng.choice(words.JOBS))


# ------------------------------------------------------------------------------------------------ summaries


def reference_summary(post: DemoPost, rng: random.Random) -> str:
    """A summary as a hasty human would leave it: sometimes perfect, mostly incomplete, sometimes worse."""
    if rng.random() < 0.15:
        return _say(post.facts, rng)
    stated = _some_facts(post, rng)
    if rng.random() < 0.08:
        stated |= _wrong_facts(post, rng, rng.sample(sorted(stated), 1))
    summary = _say(stated, rng)
    if rng.random() < 0.3:
        summary = _pad(summary, rng, rng.choice((1, 1, 1, 2)))
    if rng.random() < 0.08:
        summary = summary[:-1]
    return summary


def _some_facts(post: DemoPost, rng: random.Random) -> dict[str, str]:
    keep = set(rng.sample(SLOTS, rng.choice((1, 2, 3, 3, 4, 4))))
    return {slot: value for slot, value in post.facts.items() if slot in keep}


def _family_of(post: DemoPost) -> words.Family:
    return next(family for family in words.FAMILIES if post.facts["who"] in family.who)


def _wrong_facts(post: DemoPost, rng: random.Random, slots: Iterable[str]) -> dict[str, str]:
    """False values: mostly plausible ones, from the same kind of story, but also ones from quite another."""
    wrong = {}
    for slot in slots:
        pool: list[str]
        if slot in _FAMILY_SLOTS:
            family = _family_of(post) if rng.random() < 0.6 else rng.choice(words.FAMILIES)
            pool = list(getattr(family, slot))
        elif slot == "feeling":
            pool = list(words.FEELINGS)
        else:
            pool = [f"{number} {unit}" for number in words.NUMBERS for unit in words.UNITS]
        wrong[slot] = rng.choice([value for value in pool if value != post.facts[slot]])
    return wrong


def _clauses(stated: Mapping[str, str], rng: random.Random) -> list[str]:
    clauses = []
    if "who" in stated and "problem" in stated:
        clauses.append(rng.choice(words.SUMMARY_WHO_PROBLEM))
    elif "who" in stated:
        clauses.append(rng.choice(words.SUMMARY_WHO))
    elif "problem" in stated:
        clauses.append(rng.choice(words.SUMMARY_PROBLEM))
    if "time" in stated:
        if clauses:
            clauses[0] += " for {time}"
        else:
            clauses.append(rng.choice(words.SUMMARY_TIME))
    if "feeling" in stated:
        clauses.append(rng.choice(words.SUMMARY_FEELING))
    if "plan" in stated:
        clauses.append(rng.choice(words.SUMMARY_PLAN))
    return [clause.format(**stated) for clause in clauses]


def _say(stated: Mapping[str, str], rng: random.Random) -> str:
    """One or two sentences that state these facts."""
    clauses = _clauses(stated, rng)
    if len(clauses) > 1 and rng.random() < 0.15:
        clauses = [clauses[1], clauses[0], *clauses[2:]]
    end = "."
    if "plan" in stated and len(clauses) > 1 and rng.random() < 0.2:
        clauses[-1] = rng.choice(words.SUMMARY_QUESTION).format(**stated)
        end = "?"
    text = _capitalise(clauses[0])
    for i, clause in enumerate(clauses[1:], start=1):
        if end == "?" and i == len(clauses) - 1:
            text += ". " + _capitalise(clause)
        else:
            joint = rng.choice((". ", " and ", ", "))
            text += joint + (_capitalise(clause) if joint == ". " else clause)
    return text + end


def _capitalise(text: str) -> str:
    return text[:1].upper() + text[1:]


def _pad(summary: str, rng: random.Random, n: int) -> str:
    return " ".join([summary, *rng.sample(words.FILLERS, n)])


def _complete(post: DemoPost, rng: random.Random) -> str:
    return _say(post.facts, rng)


def _incomplete(post: DemoPost, rng: random.Random) -> str:
    return _say(_some_facts(post, rng), rng)


def _contradicting(post: DemoPost, rng: random.Random) -> str:
    summary = _complete(post, rng) if rng.random() < 0.6 else _incomplete(post, rng)
    return _corrupt(post, summary, rng)


def _corrupt(post: DemoPost, summary: str, rng: random.Random) -> str:
    """The same summary with one to three of the facts it states made false."""
    patterns = {slot: rf"\b{re.escape(post.facts[slot])}\b" for slot in SLOTS}
    stated = [slot for slot in SLOTS if re.search(patterns[slot], summary)]
    chosen = rng.sample(stated, min(len(stated), rng.choice((1, 1, 2, 3))))
    for slot, value in _wrong_facts(post, rng, chosen).items():
        summary = re.sub(patterns[slot], value, summary)
    return summary


def _padded(post: DemoPost, rng: random.Random) -> str:
    summary = _complete(post, rng) if rng.random() < 0.5 else _incomplete(post, rng)
    return _pad(summary, rng, rng.choice((1, 2, 3)))


def _repeating(post: DemoPost, rng: random.Random) -> str:
    """Says some of it twice, which small language models do a lot."""
    stated = dict(post.facts) if rng.random() < 0.5 else _some_facts(post, rng)
    again = {slot: stated[slot] for slot in rng.sample(sorted(stated), rng.randint(1, len(stated)))}
    return _say(stated, rng) + " " + _say(again, rng)


def _cut_off(post: DemoPost, rng: random.Random) -> str:
    tokens = _complete(post, rng).split(" ")
    return " ".join(tokens[: rng.randint(len(tokens) // 3, len(tokens) - 1)]).rstrip(".,?")


def _run_on(post: DemoPost, rng: random.Random) -> str:
    """Clauses strung together without any joint or end."""
    return " ".join(_clauses(dict(post.facts) if rng.random() < 0.5 else _some_facts(post, rng), rng))


def _of_another_post(post: DemoPost, rng: random.Random) -> str:
    return _say(_wrong_facts(post, rng, SLOTS) if rng.random() < 0.5 else _foreign_facts(rng), rng)


def _foreign_facts(rng: random.Random) -> dict[str, str]:
    return generate_posts(1, seed=rng.randrange(2**31))[0].facts


def _vague(post: DemoPost, rng: random.Random) -> str:
    return rng.choice(words.VAGUE_SUMMARIES)


def _copied(post: DemoPost, rng: random.Random) -> str:
    """Sentences of the post instead of a summary."""
    sentences = re.split(r"(?<=[.?]) ", post.post)
    start = rng.randrange(len(sentences))
    return " ".join(sentences[start : start + rng.randint(1, 4)])


def _keywords(post: DemoPost, rng: random.Random) -> str:
    return " ".join(rng.sample(list(post.facts.values()), rng.randint(2, 5))) + rng.choice((".", ""))


CANDIDATE_KINDS: dict[str, tuple[int, Callable[[DemoPost, random.Random], str]]] = {
    "reference": (36, reference_summary),
    "complete": (14, _complete),
    "incomplete": (14, _incomplete),
    "contradicting": (10, _contradicting),
    "padded": (9, _padded),
    "repeating": (5, _repeating),
    "cut_off": (5, _cut_off),
    "run_on": (4, _run_on),
    "of_another_post": (3, _of_another_post),
    "vague": (2, _vague),
    "copied": (3, _copied),
    "keywords": (2, _keywords),
}
"""The kinds of candidate summaries, each with its weight in the mix and its writer."""


def candidate_summary(post: DemoPost, rng: random.Random, kind: str | None = None) -> str:
    """A candidate for a preference pair: of the given kind, or of one drawn by weight."""
    if kind is None:
        kind = rng.choices(list(CANDIDATE_KINDS), [weight for weight, _ in CANDIDATE_KINDS.values()])[0]
    return CANDIDATE_KINDS[kind][1](post, rng)


# ---------------------------------------------------------------------------------------------- gold reward

FACT_VALUE = {"who": 0.2, "problem": 0.25, "time": 0.15, "feeling": 0.2, "plan": 0.2}
WRONG_FACT_COST = 0.3
REPEATED_FACT_COST = 0.12
FILLER_WORD_COST = 0.03
LONG_WORD_COST = 0.03
LONG_AFTER_WORDS = 28
MISSING_JOINT_COST = 0.08
NO_PUNCTUATION_COST = 0.1
NOT_ENDED_COST = 0.2
NOTHING_SAID_COST = 0.2


def _any_of(values: Iterable[str]) -> str:
    # The longest first, so that no value hides a longer one that begins with it.
    return "|".join(re.escape(value) for value in sorted(values, key=len, reverse=True))


_PROBLEM = rf"(?P<problem>{_any_of(p for f in words.FAMILIES for p in f.problem)}|\w+ing)\b"
_PLAN = rf"(?P<plan>{_any_of(p for f in words.FAMILIES for p in f.plan)}|\w+)\b"
_TIME = rf"(?P<time>(?:{_any_of(words.NUMBERS)}) (?:{_any_of(words.UNITS)}))\b"
_FEELING = rf"(?P<feeling>{_any_of(words.FEELINGS)})\b"
_DOES = r"(?:keeps|keep|has been|have been|won't stop|started)"

# A fact counts only inside the clause that states it: "I feel angry", not "angry".
_CLAUSES = tuple(
    re.compile(r"\b" + pattern)
    for pattern in (
        rf"my (?P<who>\w+) {_DOES} {_PROBLEM}",
        rf"(?:someone|they) {_DOES} {_PROBLEM}",
        r"(?:i have trouble|things are bad|problems?|this is about|fed up) (?:with )?my (?P<who>\w+)\b",
        rf"(?:this|it) (?:has been going on|has gone on|goes on) for {_TIME}",
        rf"(?:this|it) started {_TIME} ago\b",
        rf"(?:i feel|i'm|i am|and feel|it makes me|it just makes me) (?:so |very |really )?{_FEELING}",
        rf"(?:i|and) (?:want to|plan to|might|decided to) (?:just )?{_PLAN}",
        rf"should i {_PLAN}",
    )
)
_DURATION = re.compile(rf"\bfor (?:over |about |the past )?{_TIME}")
_JOINTS = frozenset({"and", "but", "so", "because", "now"})
_WORD = re.compile(r"[\w'$]+")


def _read_facts(text: str) -> list[tuple[int, int, dict[str, str]]]:
    """The clauses found, in order: where each begins and ends, and the values it gives."""
    found = [(m.start(), m.end(), m.groupdict()) for pattern in _CLAUSES for m in pattern.finditer(text)]
    for match in _DURATION.finditer(text):
        if any(begin <= match.start() < end for begin, end, _ in found):
            continue
        # "For two weeks." alone says nothing; a duration needs a clause in its own sentence.
        begin = max(text.rfind(mark, 0, match.start()) for mark in ".?!") + 1
        stop = min((at for mark in ".?!" if (at := text.find(mark, match.end())) >= 0), default=len(text))
        if any(begin <= other < stop for other, _, _ in found):
            found.append((match.start(), match.end(), match.groupdict()))
    return sorted(found, key=lambda clause: clause[:2])


def gold_reward(post: DemoPost, summary: str, *, ended: bool = True) -> float:
    """How good the summary is, in -1..1: 1 states all five facts, correctly, briefly, in whole sentences.

    ``ended`` says whether the writer stopped by itself (the model gave its end-of-text token).
    """
    text = " ".join(summary.lower().split())
    n_words = len(_WORD.findall(text))
    right: dict[str, int] = {}
    wrong: dict[str, int] = {}
    filler = unjoined = 0
    cursor = 0
    for begin, end, values in _read_facts(text):
        gap = text[cursor:begin] if begin > cursor else ""
        n_filler, has_joint = _read_gap(gap)
        filler += n_filler
        unjoined += cursor > 0 and not has_joint and not (set(values) == {"time"} and n_filler == 0)
        cursor = max(cursor, end)
        for slot, value in values.items():
            truth = post.facts[slot].lower()
            if value == truth:
                right[slot] = right.get(slot, 0) + 1
            elif value == truth.split()[0]:
                filler += 1  # The right phrase, broken off: it neither states the fact nor denies it.
            else:
                wrong[slot] = wrong.get(slot, 0) + 1
    filler += _read_gap(text[cursor:])[0]

    reward = sum(FACT_VALUE[slot] for slot in right if slot not in wrong)
    reward -= WRONG_FACT_COST * sum(wrong.values())
    reward -= REPEATED_FACT_COST * sum(count - 1 for count in right.values())
    reward -= FILLER_WORD_COST * filler
    reward -= LONG_WORD_COST * max(0, n_words - LONG_AFTER_WORDS)
    reward -= MISSING_JOINT_COST * unjoined
    reward -= NO_PUNCTUATION_COST * (not text.endswith((".", "?", "!")))
    reward -= NOT_ENDED_COST * (not ended)
    reward -= NOTHING_SAID_COST * (not right)
    return max(-1.0, min(1.0, reward))


def _read_gap(gap: str) -> tuple[int, bool]:
    """Of the text between two clauses: how many words are filler, and whether it joins the clauses."""
    found = _WORD.findall(gap)
    joints = [word for word in found if word in _JOINTS]
    # "and so" is fine, "and and and and" is not.
    n_filler = len(found) - min(len(joints), 2)
    return n_filler, bool(joints) or any(mark in gap for mark in ".?!,;")


# ---------------------------------------------------------------------------------------------------- files


def write_corpus(
    folder: Path,
    *,
    seed: int,
    n_posts: int,
    n_heldout: int = 400,
    pairs_per_post: int = 2,
    min_gap: float = 0.1,
    edited: float = 0.25,
) -> CorpusPaths:
    """Write the training and the held-out files; no held-out post occurs in a training file.

    ``min_gap`` is the least difference of gold reward between the two sides of a preference pair. Of the training
    pairs a share ``edited`` is one summary and the same with facts made false, so that form alone cannot tell the sides
    apart; held-out pairs are always two independent summaries.
    """
    posts = generate_posts(n_posts + n_heldout, seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    paths = CorpusPaths(
        sft_train=folder / "sft_train.jsonl",
        sft_eval=folder / "sft_eval.jsonl",
        preferences_train=folder / "preferences_train.jsonl",
        preferences_eval=folder / "preferences_eval.jsonl",
    )
    rng = random.Random(f"fastrlhf demo summaries {seed}")
    for split, sft, preferences, share in (
        (posts[:n_posts], paths.sft_train, paths.preferences_train, edited),
        (posts[n_posts:], paths.sft_eval, paths.preferences_eval, 0.0),
    ):
        _write_jsonl(sft, ({**_columns(post), "summary": reference_summary(post, rng)} for post in split))
        pairs = (pair for post in split for pair in _pairs(post, rng, pairs_per_post, min_gap, share))
        _write_jsonl(preferences, pairs)
    return paths


def _pairs(post: DemoPost, rng: random.Random, n: int, min_gap: float, edited: float) -> Iterable[dict[str, str]]:
    for _ in range(n):
        first = candidate_summary(post, rng)
        second = _corrupt(post, first, rng) if rng.random() < edited else candidate_summary(post, rng)
        gap = gold_reward(post, first) - gold_reward(post, second)
        if abs(gap) < max(min_gap, 1e-9):
            continue
        chosen, rejected = (first, second) if gap > 0 else (second, first)
        yield {**_columns(post), "chosen": chosen, "rejected": rejected}


def _columns(post: DemoPost) -> dict[str, str]:
    return {"id": post.id, "subreddit": post.subreddit, "title": post.title, "post": post.post}


def _write_jsonl(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
