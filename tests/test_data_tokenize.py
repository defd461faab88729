"""Tokenizers that can be used and those that cannot, and rows as ids: ends, cuts, chat, refusals."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from fastrlhf.config import DataConfig
from fastrlhf.data.sources import Row
from fastrlhf.data.tokenize import (
    load_tokenizer,
    tokenize_preferences,
    tokenize_prompts,
    tokenize_sft,
    train_tokenizer,
    training_texts,
)
from fastrlhf.errors import UserError

GOLDEN = Path(__file__).parent / "golden" / "tokenizer"
# ChatML: every turn ends with EOS and a newline.
CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER, ANSWER = {"role": "user", "content": "how?"}, {"role": "assistant", "content": "so"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["the cat sat on the mat", "a dog, a cat; it's 12 o'clock"] * 5, 300, folder)
    return folder


@pytest.fixture
def tokenizer(folder):
    return load_tokenizer(str(folder), trust_remote_code=False)


def config(**kwargs):
    return DataConfig(**{"max_query_length": 64, "max_response_length": 16, "max_preference_length": 16, **kwargs})


def row(where="d.jsonl:1", **fields):
    return Row(where=where, **fields)


def one(rows, tokenizer, tokenize=tokenize_sft, **kwargs):
    examples, report = tokenize(rows, tokenizer, config(**kwargs))
    assert report.rows == len(rows) == len(examples)
    return examples[0], report


# --- tokenizers


def tokenizer_folder(tmp_path, **settings):
    shutil.copy(GOLDEN / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings})
    )
    return str(tmp_path)


def test_a_missing_pad_is_added_after_the_other_ids(tmp_path):
    plain = AutoTokenizer.from_pretrained(GOLDEN)
    assert plain.pad_token_id is None
    loaded = load_tokenizer(str(GOLDEN), trust_remote_code=False)
    assert (loaded.pad_token, loaded.pad_token_id) == ("[PAD]", len(plain)) and len(loaded) == len(plain) + 1


def test_a_pad_that_is_the_eos_is_replaced(tmp_path):
    path = tokenizer_folder(tmp_path, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    loaded = load_tokenizer(path, trust_remote_code=False)
    assert (loaded.eos_token_id, loaded.pad_token_id) == (0, 700)


def test_a_pad_of_its_own_is_kept(folder):
    before = AutoTokenizer.from_pretrained(folder)
    loaded = load_tokenizer(str(folder), trust_remote_code=False)
    assert loaded.pad_token_id == before.pad_token_id and len(loaded) == len(before)


def test_a_tokenizer_without_eos_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no EOS token; set eos_token in its tokenizer_config\.json"):
        load_tokenizer(tokenizer_folder(tmp_path), trust_remote_code=False)


@pytest.mark.parametrize(
    "files",
    [
        None,
        {},
        {"tokenizer_config.json": "{}"},
        {"tokenizer.json": "{nope", "tokenizer_config.json": "{}"},
        {"tokenizer.json": '{"version": "1.0"}', "tokenizer_config.json": "{}"},
        {
            "tokenizer.json": '{"added_tokens": [], "model": {"type": "Odd"}}',
            "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "x"}',
        },
    ],
)
def test_a_folder_that_holds_no_tokenizer_is_refused(tmp_path, files):
    path = tmp_path / "model"
    if files is not None:
        path.mkdir()
        for name, text in files.items():
            (path / name).write_text(text)
    with pytest.raises(UserError, match=r"^model\.tokenizer: .*model") as info:
        load_tokenizer(str(path), trust_remote_code=False)
    assert "\n" not in str(info.value)


def test_training_a_tokenizer(folder):
    loaded = AutoTokenizer.from_pretrained(folder)
    assert (loaded.eos_token, loaded.eos_token_id) == ("<|endoftext|>", 0)
    assert loaded.pad_token == "[PAD]" and loaded.pad_token_id == len(loaded) - 1
    assert 257 < len(loaded) <= 301
    for text in ("the cat , a . don't", "  漢字 ünï \n\n x\t", "\x00\u2028🙂"):
        ids = loaded(text)["input_ids"]
        assert loaded.decode(ids) == text and loaded.pad_token_id not in ids and 0 not in ids


def test_training_is_deterministic(folder, tmp_path):
    train_tokenizer(["the cat sat on the mat", "a dog, a cat; it's 12 o'clock"] * 5, 300, tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_too_few_ids_to_train(tmp_path):
    with pytest.raises(UserError, match=r"model\.train_tokenizer is 256; .* at least 257"):
        train_tokenizer(["a"], 256, tmp_path)


def test_training_texts():
    tldr = {"subreddit": "s", "title": "t", "post": "p"}
    rows = [
        row(prompt="p", completion="c"),
        row(tldr=tldr, completion="c"),
        row(prompt=[USER], completion=[ANSWER]),
    ]
    query = "SUBREDDIT: r/s\n\nTITLE: t\n\nPOST: p\n\nTL;DR:"
    assert list(training_texts(rows)) == ["p", "c", query, " c", "how?", "so"]


# --- rows


def test_ids_are_int32_without_padding(tokenizer):
    rows = [row(prompt="the cat", completion=" sat"), row(prompt="a", completion=" on the mat, on the mat")]
    for example in tokenize_sft(rows, tokenizer, config())[0]:
        for ids in (example.query, example.response):
            assert ids.dtype == np.int32 and tokenizer.pad_token_id not in ids


def test_nothing_is_put_between_prompt_and_completion(tokenizer):
    example, _ = one([row(prompt="the", completion="cat")], tokenizer)
    assert tokenizer.decode([*example.query, *example.response]) == "thecat<|endoftext|>"


@pytest.mark.parametrize("completion", [" cat", " cat<|endoftext|>"])
def test_a_response_ends_with_one_eos(tokenizer, completion):
    example, _ = one([row(prompt="the", completion=completion)], tokenizer)
    assert tokenizer.decode(example.response) == " cat<|endoftext|>"


def test_eos_inside_a_response_stays_where_it_is(tokenizer):
    example, _ = one([row(prompt="the", completion="a<|endoftext|>b")], tokenizer)
    assert tokenizer.decode(example.response) == "a<|endoftext|>b<|endoftext|>"


def test_a_response_that_is_cut_loses_its_eos(tokenizer):
    text = "abcdefgh"
    whole = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    for limit, cut in ((len(whole), 0), (len(whole) - 1, 1), (1, 1)):
        example, report = one([row(prompt="x", completion=text)], tokenizer, max_response_length=limit)
        assert list(example.response) == whole[:limit] and report.cut_responses == cut
        assert (example.response[-1] == tokenizer.eos_token_id) is np.bool_(not cut)


def test_pairs_are_cut_to_their_own_length_and_both_sides_counted(tokenizer):
    rows = [row(prompt="x", chosen="a" * 9, rejected="b"), row(prompt="x", chosen="abcdefg", rejected="hijklmn")]
    examples, report = tokenize_preferences(rows, tokenizer, config(max_preference_length=3, max_response_length=50))
    assert max(len(ids) for e in examples for ids in (e.chosen, e.rejected)) == 3
    assert tokenizer.decode(examples[0].rejected) == "b<|endoftext|>"
    long = sum(len(tokenizer(t)["input_ids"]) + 1 > 3 for t in ("a" * 9, "b", "abcdefg", "hijklmn"))
    assert report.cut_responses == long >= 2


def test_a_raw_prompt_is_cut_from_the_left(tokenizer):
    rows = [row(prompt="qwertyuiop"), row(prompt="abc")]
    examples, report = tokenize_prompts(rows, tokenizer, config(max_query_length=4))
    assert [e.text for e in examples] == ["uiop", "abc"] and report.cut_queries == 1
    assert tokenizer.decode(examples[0].query) == "uiop"


@pytest.mark.parametrize(
    "tokenize, fields",
    [
        (tokenize_prompts, {"prompt": "a [PAD] b"}),
        (tokenize_sft, {"prompt": "a", "completion": "b[PAD]"}),
        (tokenize_preferences, {"prompt": "a", "chosen": "b", "rejected": "[PAD]"}),
        (tokenize_sft, {"tldr": {"subreddit": "[PAD]", "title": "t", "post": "p"}, "completion": "b"}),
    ],
)
def test_the_padding_token_inside_a_row_is_refused(tokenizer, tokenize, fields):
    with pytest.raises(UserError, match=r"d\.jsonl:2.*\[PAD\]"):
        tokenize([row(**fields, where="d.jsonl:2")], tokenizer, config())


def test_a_prompt_without_tokens_is_refused(tokenizer):
    with pytest.raises(UserError, match=r"d\.jsonl:7 has no tokens"):
        tokenize_prompts([row(prompt="", where="d.jsonl:7")], tokenizer, config())


@pytest.mark.parametrize("name", ["max_query_length", "max_response_length"])
def test_lengths_below_one_are_refused(tokenizer, name):
    with pytest.raises(UserError, match="at least 1"):
        tokenize_sft([row(prompt="a", completion="b")], tokenizer, config(**{name: 0}))


def test_no_rows(tokenizer):
    assert tokenize_sft([], tokenizer, config())[0] == []


def test_a_bos_that_the_tokenizer_adds_by_itself_is_left_out_everywhere(tokenizer):
    from tokenizers.processors import TemplateProcessing

    tldr = {"subreddit": "s", "title": "t", "post": "line\n" * 30}
    rows = [row(tldr={**tldr, "post": "p"}, completion="c"), row(tldr=tldr, completion="c"), row(prompt="a" * 99)]
    plain = [list(e.query) for e in tokenize_prompts(rows, tokenizer, config())[0]]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    assert tokenizer("a")["input_ids"][0] == 0
    assert [list(e.query) for e in tokenize_prompts(rows, tokenizer, config())[0]] == plain


# --- chat


def test_chat_rows_go_through_the_template(tokenizer):
    tokenizer.chat_template = CHATML
    fields = {"prompt": [USER], "completion": [ANSWER]}
    example, _ = one([row(**fields)], tokenizer)
    assert tokenizer.decode(example.query) == "<user>how?<|endoftext|>\n<assistant>"
    assert tokenizer.decode(example.response) == "so<|endoftext|>"
    pair, _ = one([row(prompt=[USER], chosen=[ANSWER], rejected=[USER])], tokenizer, tokenize_prompts)
    assert list(pair.query) == list(example.query) and pair.text == "<user>how?<|endoftext|>\n<assistant>"


def test_a_template_that_ends_a_turn_otherwise_still_gets_an_eos(tokenizer):
    tokenizer.chat_template = CHATML.replace("<|endoftext|>", "|")
    example, _ = one([row(prompt=[USER], completion=[ANSWER])], tokenizer)
    assert tokenizer.decode(example.response) == "so|<|endoftext|>"


@pytest.mark.parametrize(
    "template, words",
    [
        (None, "no chat template"),
        ("{{ messages[9].content.x }}", "refuses the messages"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 + messages[0].content }}", "refuses the messages"),
        ("{{ messages | length }}{% if add_generation_prompt %}A{% endif %}", "renders the prompt differently"),
    ],
)
def test_templates_that_cannot_be_used(tokenizer, template, words):
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=rf"d\.jsonl:1.*{words}"):
        tokenize_sft([row(prompt=[USER], completion=[ANSWER])], tokenizer, config())


def test_a_chat_answer_to_a_text_prompt_is_refused(tokenizer):
    tokenizer.chat_template = CHATML
    with pytest.raises(UserError, match=r"d\.jsonl:1 has a chat response to a text prompt"):
        tokenize_sft([row(prompt="a", completion=[ANSWER])], tokenizer, config())


def test_a_word_of_a_million_letters_trains_in_linear_time(tmp_path):
    import time

    def seconds(n):
        began = time.perf_counter()
        train_tokenizer(["x" * n, "some words"] * 2, 300, tmp_path)
        return time.perf_counter() - began

    seconds(1000)
    assert seconds(1_000_000) < 30 * max(seconds(100_000), 0.02)  # as one word: 100 times
