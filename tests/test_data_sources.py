"""Rows from real files and a real hub cache: every accepted shape, and what is said about every bad one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from fastrlhf.data.sources import Row, load_rows, split_heldout
from fastrlhf.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
PAIR = {"prompt": "Say hi.", "completion": " hi"}
TLDR = {"subreddit": "cats", "title": "A cat", "post": "It sat.\nIt slept."}
USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def load(path, kind="sft"):
    return load_rows(str(path), kind=kind, split="train", field="data.x")


def write(tmp_path, *records, name="d.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def refusal(path, kind="sft"):
    with pytest.raises(UserError) as info:
        load(path, kind)
    message = str(info.value)
    assert message.startswith("data.x") and "\n" not in message and "Traceback" not in message
    return message


@pytest.mark.parametrize(
    "kind, record, want",
    [
        ("sft", PAIR, {"prompt": "Say hi.", "completion": " hi"}),
        ("sft", {**TLDR, "summary": "s"}, {"tldr": TLDR, "completion": "s"}),
        ("sft", {"prompt": [USER], "completion": [ANSWER]}, {"prompt": [USER], "completion": [ANSWER]}),
        ("sft", {"messages": [USER, ANSWER]}, {"prompt": [USER], "completion": [ANSWER]}),
        ("prompts", {"prompt": "p", "other": 3}, {"prompt": "p"}),
        ("prompts", PAIR, {"prompt": "Say hi."}),
        ("prompts", {**TLDR, "summary": "s"}, {"tldr": TLDR}),
        ("prompts", {"messages": [USER, ANSWER]}, {"prompt": [USER]}),
        ("prompts", {"messages": [USER]}, {"prompt": [USER]}),
        (
            "preferences",
            {"prompt": "p", "chosen": "c", "rejected": "r"},
            {"prompt": "p", "chosen": "c", "rejected": "r"},
        ),
        ("preferences", {**TLDR, "chosen": "c", "rejected": "r"}, {"tldr": TLDR, "chosen": "c", "rejected": "r"}),
        (
            "preferences",
            {"chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "b"}]},
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "b"}]},
        ),
        # HH-RLHF: two whole dialogues as text.
        (
            "preferences",
            {
                "chosen": "\n\nHuman: q\n\nAssistant: I do\n\nHuman: r\n\nAssistant: I am",
                "rejected": "\n\nHuman: q\n\nAssistant: I do\n\nHuman: r\n\nAssistant: I will",
            },
            {
                "prompt": "\n\nHuman: q\n\nAssistant: I do\n\nHuman: r\n\nAssistant:",
                "chosen": " I am",
                "rejected": " I will",
            },
        ),
        (
            "preferences",
            {"chosen": "Say good night. Goodbye", "rejected": "Say good night. Good"},
            {"prompt": "Say good night.", "chosen": " Goodbye", "rejected": " Good"},
        ),
        # UltraFeedback: the question as text, and again in both conversations.
        (
            "preferences",
            {"prompt": "q", "chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "b"}]},
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "b"}]},
        ),
        ("sft", {"prompt": "q", "messages": [USER, ANSWER]}, {"prompt": [USER], "completion": [ANSWER]}),
        ("prompts", {"prompt": "q", "messages": [USER, ANSWER]}, {"prompt": [USER]}),
        # The same answer twice: the last message stays a response, however alike the two are.
        (
            "preferences",
            {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]},
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER]},
        ),
    ],
)
def test_shapes(tmp_path, kind, record, want):
    path = write(tmp_path, record)
    assert load(path, kind) == [Row(where=f"{path}:1", **want)]


def test_message_keys_beyond_role_and_content_are_dropped(tmp_path):
    (row,) = load(write(tmp_path, {"prompt": [{**USER, "name": "x"}]}), "prompts")
    assert row.prompt == [USER]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv", "JSONL"])
def test_the_three_formats_read_alike(tmp_path, suffix):
    records = [
        {"prompt": f'line one\nline "{i}", 漢字\u2028', "completion": text}
        for i, text in enumerate(["12", "null", "NaN", "true", "2024-01-01", " x "])
    ]
    path = tmp_path / f"d.{suffix}"
    table = pa.Table.from_pylist(records)
    if suffix == "parquet":
        pyarrow.parquet.write_table(table, path)
    elif suffix == "csv":
        pyarrow.csv.write_csv(table, path)
    else:
        write(tmp_path, *records, name=path.name)
    rows = load(path)
    assert [{"prompt": r.prompt, "completion": r.completion} for r in rows] == records
    assert all(str(path) in r.where for r in rows) and len({r.where for r in rows}) == len(rows)


def test_parquet_chat_columns(tmp_path):
    path = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist([{"prompt": [USER], "completion": [ANSWER]}]), path)
    assert load(path)[0].completion == [ANSWER]


def test_jsonl_bom_crlf_blank_lines_and_unicode_separators(tmp_path):
    path = tmp_path / "d.jsonl"
    odd = json.dumps({"prompt": "a\u2028b\u2029c\x85d\x0be\x0c", "completion": "f"}, ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf" + f"{json.dumps(PAIR)}\r\n\r\n   \n{odd}\n\n{json.dumps(PAIR)}".encode())
    rows = load(path)
    assert [r.where.rsplit(":", 1)[1] for r in rows] == ["1", "4", "6"]
    assert rows[1].prompt == "a\u2028b\u2029c\x85d\x0be\x0c"


def test_csv_bom_and_crlf(tmp_path):
    path = tmp_path / "d.csv"
    path.write_bytes('\ufeffprompt,completion\r\na,"b, ""c""\r\nd"\r\n'.encode())
    assert [(r.prompt, r.completion) for r in load(path)] == [("a", 'b, "c"\r\nd')]


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_row_of_megabytes(tmp_path, suffix):
    text = "word " * 600_000
    path = tmp_path / f"d.{suffix}"
    if suffix == "jsonl":
        write(tmp_path, {"prompt": text, "completion": "b"}, PAIR)
    else:
        path.write_text(f'prompt,completion\n"{text}",b\nc,d\n')
    rows = load(path)
    assert len(rows) == 2 and rows[0].prompt == text


def test_duplicate_rows_are_kept(tmp_path):
    assert len(load(write(tmp_path, PAIR, PAIR, PAIR))) == 3


@pytest.mark.parametrize(
    "line, words",
    [
        ("{nope", ["d.jsonl:2", "not valid JSON"]),
        ('{"prompt": "a", "completion": "b"', ["d.jsonl:2", "not valid JSON"]),
        ("[1, 2]", ["d.jsonl:2", "list, not an object"]),
        ("3", ["d.jsonl:2", "int, not an object"]),
        ("[" * 50_000, ["d.jsonl:2", "not valid JSON"]),
        ('{"prompt": ' + "9" * 5000 + "}", ["d.jsonl:2", "not valid JSON"]),
        ('{"prompt": NaN, "completion": "b"}', ["prompt", "d.jsonl:2", "float", "text"]),
        ('{"prompt": "a", "completion": 3}', ["completion", "d.jsonl:2", "int"]),
        ('{"prompt": "a", "completion": null}', ["d.jsonl:2", "completion null"]),
        ('{"prompt": "a", "completion": ""}', ["completion", "d.jsonl:2", "empty", "remove the row"]),
        ('{"prompt": " \\n", "completion": "b"}', ["prompt", "d.jsonl:2", "empty"]),
        ('{"prompt": "\\ud83d", "completion": "b"}', ["prompt", "d.jsonl:2", "surrogate"]),
        ('{"prompt": [{"role": "user", "content": "\\ud83d"}], "completion": "b"}', ["d.jsonl:2", "surrogate"]),
        ('{"prompt": "a", "prompt": "b", "completion": "c"}', ["d.jsonl:2", "'prompt' stands twice"]),
        ('{"messages": [{"role": "user", "content": "q"}]}', ["messages of", "d.jsonl:2", "end with role 'user'"]),
        ('{"prompt": [{"role": "user", "content": null}], "completion": "b"}', ["message 1 of prompt", "d.jsonl:2"]),
        ('{"prompt": [], "completion": "b"}', ["prompt of", "d.jsonl:2", "an empty list"]),
        ('{"prompt": [{"role": "user"}], "completion": "b"}', ["message 1 of prompt", "d.jsonl:2", "role and content"]),
        ('{"prompt": [], "completion": "b"}', ["prompt", "d.jsonl:2"]),
        ('{"query": "a", "answer": "b"}', ["columns query, answer", "needs prompt and completion"]),
        ("{}", ["no columns", "needs prompt and completion"]),
        ('{"subreddit": "s", "title": [1], "post": "p", "summary": "x"}', ["title", "d.jsonl:2", "list", "text"]),
        ('{"subreddit": "s", "title": "t", "post": "p"}', ["subreddit, title, post", "summary"]),
    ],
)
def test_bad_jsonl_lines(tmp_path, line, words):
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(PAIR) + "\n" + line + "\n")
    message = refusal(path)
    for word in words:
        assert word in message


def test_bad_utf8_names_the_line(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(json.dumps(PAIR).encode() + b'\n{"prompt": "\xff"}\n')
    assert "d.jsonl:2" in refusal(path)


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("d.csv", b"", ["d.csv", "header"]),
        ("d.csv", b"prompt,completion\n", ["d.csv has no rows"]),
        ("d.csv", b"prompt,completion\na,b,c\n", ["d.csv", "Expected 2 columns, got 3"]),
        ("d.csv", b"prompt,completion\n\xff,b\n", ["d.csv", "UTF8"]),
        ("d.csv", b"prompt,prompt,completion\na,b,c\n", ["more than one column 'prompt'"]),
        ("d.csv", b"prompt,completion\na,b\n,c\n", ["prompt", "d.csv row 2", "empty"]),
        ("d.csv", b"text\na\n", ["columns text", "needs prompt"]),
        ("d.parquet", b"PAR1 not", ["d.parquet", "not a readable parquet file"]),
        ("d.parquet", b"", ["d.parquet", "not a readable parquet file"]),
        ("d.jsonl", b"", ["d.jsonl has no rows"]),
        ("d.jsonl", b"\n\n", ["d.jsonl has no rows"]),
        ("d.jsonl.gz", b"\x1f\x8b", ["d.jsonl.gz", "not a .jsonl, .parquet or .csv"]),
        ("d.txt", b"x", ["d.txt", "not a .jsonl, .parquet or .csv"]),
    ],
)
def test_bad_files(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    message = refusal(path)
    for word in words:
        assert word in message


def test_parquet_with_a_null_names_the_row(tmp_path):
    path = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pa.table({"prompt": ["a", None], "completion": ["b", "c"]}), path)
    message = refusal(path)
    assert "row 2" in message and "prompt null" in message


def test_missing_files_and_folders(tmp_path):
    write(tmp_path, PAIR, name="train.jsonl")
    message = refusal(tmp_path / "trian.jsonl")
    assert "does not exist" in message and "did you mean" in message and "train.jsonl" in message
    assert "does not exist" in refusal(tmp_path / "no" / "such.csv")
    assert "does not exist" in refusal("~no-such-user/d.jsonl")
    assert "is a folder" in refusal(tmp_path)
    assert "is empty" in refusal("")


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "p", "chosen": "c"},
        {"chosen": "c", "rejected": "r"},
        {"chosen": [ANSWER], "rejected": [ANSWER]},
        {"chosen": [], "rejected": []},
    ],
)
def test_incomplete_pairs(tmp_path, record):
    assert "it needs prompt, chosen and rejected" in refusal(write(tmp_path, record), "preferences")


def test_a_conversation_that_is_only_an_answer_is_no_prompt(tmp_path):
    assert "it needs prompt" in refusal(write(tmp_path, {"messages": [ANSWER]}), "prompts")


# --- holding out


def rows_of(prompts):
    return [Row(where=f"f:{i}", prompt=p) for i, p in enumerate(prompts)]


def test_heldout_is_a_share_of_the_prompts_in_their_order():
    rows = rows_of([f"p{i % 500}" for i in range(2000)])
    train, held = split_heldout(rows, 0.1)
    assert len(train) + len(held) == 2000 and 120 <= len(held) <= 280
    assert not {r.prompt for r in train} & {r.prompt for r in held}
    for part in (train, held):
        assert [int(r.where[2:]) for r in part] == sorted(int(r.where[2:]) for r in part)


def test_every_stage_holds_out_the_same_prompts():
    query = "SUBREDDIT: r/{}\n\nTITLE: t\n\nPOST: p\n\nTL;DR:"
    sft = [Row(where="a", tldr={"subreddit": f"s{i}", "title": "t", "post": "p"}, completion="c") for i in range(50)]
    pairs = [Row(where="b", prompt=query.format(f"s{i}"), chosen="c", rejected="r") for i in reversed(range(50))]
    held = [{r.key() for r in split_heldout(rows, 0.2)[1]} for rows in (sft, pairs)]
    assert held[0] == held[1] and 0 < len(held[0]) < 50


def test_heldout_does_not_depend_on_the_process():
    code = (
        "from fastrlhf.data.sources import Row, split_heldout\n"
        "rows = [Row(where='', prompt=f'p{i}') for i in range(40)]\n"
        "print([r.prompt for r in split_heldout(rows, 0.2)[1]])"
    )
    here = [r.prompt for r in split_heldout(rows_of([f"p{i}" for i in range(40)]), 0.2)[1]]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "PYTHONHASHSEED": "7"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert out.strip() == str(here)


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1 - 1e-9])
def test_both_sides_have_a_row(fraction):
    train, held = split_heldout(rows_of(["a", "b"]), fraction)
    assert len(train) == len(held) == 1


def test_heldout_refusals():
    with pytest.raises(UserError, match="only 1 prompt"):
        split_heldout(rows_of(["a", "a"]), 0.5)
    for fraction in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(UserError, match="between 0 and 1"):
            split_heldout(rows_of(["a", "b"]), fraction)


# --- the hub

HUB_SCRIPT = """
import json, sys
from fastrlhf.data.sources import load_rows
from fastrlhf.config import Config, DataConfig
from fastrlhf.data.prepare import read
from fastrlhf.errors import UserError
for source, split in json.loads(sys.argv[1]):
    try:
        if split is None:
            held = read(Config(data=DataConfig(sft=source, eval_split=None, eval_fraction=0.5)), "sft")
            print("RESULT", json.dumps([[r.prompt for r in part] for part in (held.train, held.heldout)]))
            continue
        rows = load_rows(source, kind="sft", split=split, field="data.sft")
        print("RESULT", json.dumps([[r.prompt, r.where] for r in rows]))
    except UserError as err:
        print("RESULT", json.dumps(str(err)))
"""


def cache_dataset(hub, name, files):
    """What `huggingface_hub` leaves in its cache after a download of `files`."""
    sha = "0123456789abcdef0123456789abcdef01234567"
    repo = hub / f"datasets--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(sha)
    (repo / "blobs").mkdir()
    for number, (path, content) in enumerate(files.items()):
        blob = repo / "blobs" / str(number)
        blob.write_bytes(content)
        link = repo / "snapshots" / sha / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)


def test_a_hub_id_out_of_the_cache_without_a_network(tmp_path):
    def jsonl(*prompts):
        return "".join(json.dumps({"prompt": p, "completion": "c"}) + "\n" for p in prompts).encode()

    hub = tmp_path / "hub"
    cache_dataset(
        hub, "org/toy", {"data/train-00000.jsonl": jsonl("a", "b"), "data/validation-00000.jsonl": jsonl("v")}
    )
    table = pa.BufferOutputStream()
    pyarrow.parquet.write_table(pa.table({"prompt": ["x"], "completion": ["y"]}), table)
    cache_dataset(hub, "org/arrow", {"data/train-00000-of-00001.parquet": table.getvalue().to_pybytes()})
    cache_dataset(hub, "org/broken", {"train.jsonl": b"nope"})
    asked = [
        ("org/toy", "train"),
        ("org/toy", "validation"),
        ("org/arrow", "train"),
        ("org/toy", "test"),
        ("org/broken", "train"),
        ("org/none", "train"),
        ("no such/id/at all", "train"),
        ("org/toy", None),
    ]
    env = {
        **os.environ,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_CACHE": str(hub),
        "HF_DATASETS_CACHE": str(tmp_path / "datasets"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
    }
    run = subprocess.run(
        [sys.executable, "-c", HUB_SCRIPT, json.dumps(asked)], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    toy, validation, arrow, no_split, broken, none, no_id, held = [
        json.loads(line.removeprefix("RESULT ")) for line in run.stdout.splitlines() if line.startswith("RESULT ")
    ]
    assert toy == [["a", "org/toy[train] row 1"], ["b", "org/toy[train] row 2"]]
    assert [p for p, _ in validation] == ["v"] and [p for p, _ in arrow] == ["x"]
    assert "split 'test' of org/toy" in no_split and "train" in no_split and "data.eval_split null" in no_split
    assert [len(part) for part in held] == [1, 1] and {*held[0], *held[1]} == {"a", "b"}
    assert "org/broken" in broken and "JSON" in broken
    assert "org/none is neither a file here nor a data set" in none
    assert "no such/id/at all" in no_id


def test_a_csv_with_semicolons_is_a_sentence(tmp_path):
    path = tmp_path / "d.csv"
    path.write_text("prompt;completion\na;b\n")
    assert "separates its columns by ';'" in refusal(path)
