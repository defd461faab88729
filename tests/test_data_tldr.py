"""The TL;DR query builder against recordings of the reference's own builder: every integer."""

import json
from pathlib import Path

import pytest

from fastrlhf.config import DataConfig
from fastrlhf.data.sources import load_rows
from fastrlhf.data.tldr import build_query, format_query, summary_text
from fastrlhf.data.tokenize import load_tokenizer, tokenize_preferences, tokenize_prompts, tokenize_sft
from fastrlhf.errors import UserError

GOLDEN = Path(__file__).parent / "golden"
RECORDED = json.loads((GOLDEN / "tldr.json").read_text())
PAD = RECORDED["pad_token_id"]


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = load_tokenizer(str(GOLDEN / "tokenizer"))
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD, RECORDED["eos_token_id"])
    return tokenizer


def recorded(params, kind):
    return [r for r in RECORDED["rows"] if r["params"] == params and r["kind"] == kind]


def data_config(params):
    p = {**RECORDED["paper"], **RECORDED[params]}
    return p, DataConfig(
        max_query_length=p["length"],
        max_response_length=p["max_sft_response_length"],
        max_preference_length=p["max_rm_response_length"],
    )


def rows_from_disk(tmp_path, kind, records):
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return load_rows(str(path), kind=kind, split="train", field="data.x")


def left(ids, length):
    return [PAD] * (length - len(ids)) + list(ids)


def right(ids, length):
    """Padded, or cut where the reference's joined columns are shorter than both parts together."""
    return (list(ids) + [PAD] * (length - len(ids)))[:length]


@pytest.mark.parametrize("params", ["paper", "small"])
def test_sft_rows(tmp_path, tokenizer, params):
    p, cfg = data_config(params)
    golden = recorded(params, "sft")
    rows = rows_from_disk(tmp_path, "sft", [r["input"] for r in golden])
    examples, report = tokenize_sft(rows, tokenizer, cfg)
    prompts, _ = tokenize_prompts(rows, tokenizer, cfg)
    assert len(examples) == len(golden) > 20
    for example, prompt, want in zip(examples, prompts, (g["output"] for g in golden), strict=True):
        assert left(example.query, p["length"]) == want["query_token"]
        assert right(example.response, p["max_sft_response_length"]) == want["reference_response_token"]
        assert len(example.response) == want["reference_response_token_len"]
        joined = [*example.query, *example.response]
        assert right(joined, p["max_sft_query_response_length"]) == want["query_reference_response_token"]
        assert list(prompt.query) == list(example.query)
        assert prompt.text.lstrip() == want["query"]
    cut = sum(len(tokenizer.encode(format_query(r.tldr))) > p["length"] for r in rows)
    assert report.cut_queries == cut and (cut > 10 or params == "paper")


@pytest.mark.parametrize("params", ["paper", "small"])
def test_pairs(tmp_path, tokenizer, params):
    p, cfg = data_config(params)
    golden = recorded(params, "pair")
    records = []
    for record in (g["input"] for g in golden):
        chosen, rejected = record["choice"], 1 - record["choice"]
        texts = [s["text"] for s in record["summaries"]]
        records.append({**record["info"], "chosen": texts[chosen], "rejected": texts[rejected]})
    examples, _ = tokenize_preferences(rows_from_disk(tmp_path, "preferences", records), tokenizer, cfg)
    assert len(examples) == len(golden) > 10
    for example, want in zip(examples, (g["output"] for g in golden), strict=True):
        assert left(example.query, p["length"]) == want["query_token"]
        for side, ids in (("chosen", example.chosen), ("rejected", example.rejected)):
            assert right(ids, p["max_rm_response_length"]) == want[f"{side}_token"]
            joined = [*example.query, *ids]
            assert right(joined, p["max_rm_query_response_length"]) == want[f"query_{side}_token"]


def test_build_query_alone(tokenizer):
    for row in RECORDED["rows"][::7]:
        if row["kind"] == "sft":
            length = RECORDED[row["params"]]["length"]
            fields = dict(row["input"])
            before = dict(fields)
            ids, _ = build_query(fields, tokenizer, max_length=length)
            assert left(ids, length) == row["output"]["query_token"]
            assert fields == before


def size(tokenizer, post):
    return len(tokenizer.encode(format_query({"subreddit": "s", "title": "t", "post": post})))


def test_the_cut_is_at_the_last_newline_and_then_one_character_at_a_time(tokenizer):
    def query(post, length):
        ids, cut = build_query({"subreddit": "s", "title": "t", "post": post}, tokenizer, max_length=length)
        return tokenizer.decode(ids), cut

    post = "first line\nsecond line\nthird"
    whole = size(tokenizer, post)
    assert query(post, whole) == (format_query({"subreddit": "s", "title": "t", "post": post}), False)
    text, cut = query(post, whole - 1)
    assert cut and "POST: first line\nsecond line\n\nTL;DR:" in text
    text, _ = query(post, size(tokenizer, "first line"))
    assert "POST: first line\n\nTL;DR:" in text
    text, _ = query(post, size(tokenizer, "first line") - 1)
    assert "POST: firs" in text and "POST: first line" not in text
    # A newline at the very start of the post: the cut leaves nothing, and nothing fits.
    text, _ = query("\n" + "word " * 20, size(tokenizer, ""))
    assert "POST: \n\nTL;DR:" in text


def test_a_query_that_cannot_be_cut_to_fit_is_refused(tokenizer):
    fields = {"subreddit": "s", "title": "a title far too long for this", "post": "x\ny"}
    with pytest.raises(UserError, match=r"d\.jsonl:3.*max_query_length \(10\)"):
        build_query(fields, tokenizer, max_length=10, where="d.jsonl:3")


def test_braces_in_a_field_are_text():
    fields = {"subreddit": "s", "title": "{post}", "post": "{0} {title}"}
    assert format_query(fields) == "SUBREDDIT: r/s\n\nTITLE: {post}\n\nPOST: {0} {title}\n\nTL;DR:"


def test_one_leading_space():
    assert summary_text("a cat") == " a cat" == summary_text(" a cat")


@pytest.mark.parametrize("newlines", [False, True])
def test_a_post_far_too_long_is_cut_as_the_slow_way_does_it(tokenizer, newlines):
    import random
    import time

    rng = random.Random(1)
    words = [rng.choice(["a", "sister", "was", "12,5", "überaus", "don't", "\U0001f600"]) for _ in range(400)]
    post = ("\n" if newlines else " ").join(words) + (" tail" * 300)
    fields = {"subreddit": "r", "title": "t", "post": post}

    def slowly(limit):
        text = post
        while len(ids := tokenizer.encode(format_query({**fields, "post": text}), add_special_tokens=False)) > limit:
            at = text.rfind("\n")
            text = text[:at] if at >= 0 else text[:-1]
        return ids

    for limit in (40, 100, 301):
        assert build_query(fields, tokenizer, max_length=limit) == (slowly(limit), True)
    began = time.perf_counter()
    build_query({**fields, "post": "word " * 40_000}, tokenizer, max_length=100)
    assert time.perf_counter() - began < 20  # the slow way takes hours
