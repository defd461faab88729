"""Rows from a hub id or a local .jsonl, .parquet or .csv file, in the columns that TRL's users have."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fastrlhf.data.tldr import format_query
from fastrlhf.errors import UserError, brief

__all__ = ["Row", "is_local", "load_rows", "split_heldout"]

Kind = Literal["sft", "preferences", "prompts"]
Text = str | list[dict[str, str]]
"""Plain text, or chat messages ({role, content} each)."""

TLDR = ("subreddit", "title", "post")
_SUFFIXES = (".jsonl", ".parquet", ".csv")
# Names of files that are none of these: an answer about the file, not a search for a hub id.
_OTHER_FILES = (".json", ".txt", ".tsv", ".arrow", ".xlsx", ".gz", ".xz", ".zst", ".zip", ".yaml", ".yml", ".md")
_NEEDED = {
    "sft": "prompt and completion, messages, or subreddit, title, post and summary",
    "preferences": "prompt, chosen and rejected (whole conversations may leave out prompt), or subreddit, title, post, "
    "chosen and rejected",
    "prompts": "prompt, messages, or subreddit, title and post",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a source; fields that its kind does not have are None."""

    where: str
    """file:line, or data set and row number, for messages."""
    prompt: Text | None = None
    tldr: dict[str, str] | None = None
    """subreddit, title, post; instead of `prompt`."""
    completion: Text | None = None
    chosen: Text | None = None
    rejected: Text | None = None

    def key(self) -> str:
        """What identifies the prompt: its text or messages, whatever columns it came from."""
        prompt = self.prompt if self.tldr is None else format_query(self.tldr)
        return json.dumps(prompt, sort_keys=True, ensure_ascii=False)


def is_local(source: str) -> bool:
    """Whether `source` names a file or folder here rather than a hub id."""
    path = Path(source)
    return path.suffix.lower() in (*_SUFFIXES, *_OTHER_FILES) or source.startswith((".", "/", "~")) or path.exists()


def load_rows(source: str, *, kind: Kind, split: str, field: str) -> list[Row]:
    """Every row of `source`; `split` matters for a hub id only, `field` names the configuration's field in messages.

    Raises `UserError` for a missing or unreadable source, wrong columns, a bad row, or no rows at all.
    """
    if not source:
        raise UserError(f"{field} is empty; name a hub id or a .jsonl, .parquet or .csv file")
    records = _local(Path(os.path.expanduser(source)), field) if is_local(source) else _hub(source, split, field)
    rows = [_row(record, kind, where, field) for where, record in records]
    if not rows:
        raise UserError(f"{field}: {source} has no rows")
    return rows


# --- reading


def _local(path: Path, field: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if path.is_dir():
        raise UserError(f"{field}: {path} is a folder; name a .jsonl, .parquet or .csv file in it")
    if not path.exists():
        names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1)
        raise UserError(
            f"{field}: {path} does not exist" + (f"; did you mean {path.parent / near[0]}?" if near else "")
        )
    readers = {".jsonl": _jsonl, ".parquet": _parquet, ".csv": _csv}
    if path.suffix.lower() not in readers:
        raise UserError(f"{field}: {path} is not a .jsonl, .parquet or .csv file")
    return readers[path.suffix.lower()](path, field)


def _jsonl(path: Path, field: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        # Binary lines end at \n only: a Unicode line separator inside a string is not the end of a row.
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                where = f"{path}:{number}"
                try:
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                    if not line:
                        continue
                    record = json.loads(line, object_pairs_hook=_unique_keys)
                except (ValueError, RecursionError) as err:  # ValueError: bad UTF-8 or JSON, or a number too long
                    raise UserError(
                        f"{field}: {where} is not valid JSON ({brief(err)}); mend or remove the line"
                    ) from err
                if not isinstance(record, dict):
                    raise UserError(f"{field}: {where} is a JSON {type(record).__name__}, not an object")
                yield where, record
    except OSError as err:
        raise UserError(f"{field}: cannot read {path}: {err.strerror}") from err


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} stands twice")
    return record


def _table(table: Any, path: Path, field: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    names = table.column_names
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"{field}: {path} has more than one column {twice[0]!r}; rename or remove one")
    number = 0
    for batch in table.to_batches(max_chunksize=4096):
        try:
            records = batch.to_pylist()
        except (ValueError, OverflowError) as err:  # ValueError: text that is not UTF-8
            raise UserError(f"{field}: a row of {path} after row {number} cannot be read ({brief(err)})") from err
        for record in records:
            number += 1
            yield f"{path} row {number}", record


def _parquet(path: Path, field: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as err:
        raise UserError(f"{field}: {path} is not a readable parquet file ({brief(err)})") from err
    yield from _table(table, path, field)


def _csv(path: Path, field: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow
    import pyarrow.csv

    try:
        # A row must not be longer than a block (1 MiB by default), so the file is one block, up to Arrow's limit.
        read = pyarrow.csv.ReadOptions(block_size=min(max(path.stat().st_size, 1 << 20), (1 << 31) - 1))
        parse = pyarrow.csv.ParseOptions(newlines_in_values=True)
        head = pyarrow.csv.read_csv(path, read_options=read, parse_options=parse)
        if len(head.column_names) == 1 and (found := re.search(r"[;\t|]", head.column_names[0])):
            raise UserError(f"{field}: {path} separates its columns by {found[0]!r}; write it with commas")
        # Everything is text: a summary that happens to be "12" or "null" is still a summary.
        types = dict.fromkeys(head.column_names, pyarrow.string())
        table = pyarrow.csv.read_csv(
            path,
            read_options=read,
            parse_options=parse,
            convert_options=pyarrow.csv.ConvertOptions(column_types=types, strings_can_be_null=False),
        )
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as err:
        raise UserError(f"{field}: {path} is not a readable CSV file with a header line ({brief(err)})") from err
    yield from _table(table, path, field)


def _hub(source: str, split: str, field: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    from datasets.exceptions import DatasetsError

    try:
        dataset = _open_hub(source, split)
    except OSError as err:
        raise UserError(
            f"{field}: {source} is neither a file here nor a data set that can be reached or is cached "
            f"({brief(err)}); check the name and the network"
        ) from err
    except (DatasetsError, ValueError, RuntimeError) as err:
        cause = err.__cause__ or err
        raise UserError(
            f"{field}: cannot load split {split!r} of {source} ({brief(cause)}); choose another split, or hold out "
            "rows of the training split by data.eval_split null"
        ) from err
    for number, record in enumerate(dataset, 1):
        yield f"{source}[{split}] row {number}", record


def _open_hub(source: str, split: str) -> Any:
    from datasets import load_dataset
    from huggingface_hub import snapshot_download

    try:
        return load_dataset(source, split=split)
    except OSError as unreachable:
        # Offline, `datasets` knows only what it has converted itself, not the hub's own cache of downloaded files.
        try:
            folder = snapshot_download(source, repo_type="dataset", local_files_only=True)
        except (OSError, ValueError):
            raise unreachable from None
    return load_dataset(folder, split=split)


# --- checking


def _row(record: Mapping[str, Any], kind: Kind, where: str, field: str) -> Row:
    got = {k: v for k, v in record.items() if v is not None}
    tldr = None
    if "prompt" not in got and all(name in got for name in TLDR):
        tldr = {name: _tldr_field(got[name], name, where, field) for name in TLDR}
    prompt = None if tldr is not None else got.get("prompt")
    messages = got.get("messages")
    alone = isinstance(messages, list) and "completion" not in got and kind != "preferences"
    if alone and not isinstance(prompt, list):
        prompt = None  # some data sets repeat the first question as text beside the conversation
    parts: dict[str, Any] = {}
    if kind == "sft":
        prompt, parts["completion"] = _completion(got, prompt, tldr, where, field)
    elif kind == "preferences":
        parts = {"chosen": got.get("chosen"), "rejected": got.get("rejected")}
        both = tuple(parts.values())
        if tldr is None and not isinstance(prompt, list) and all(isinstance(p, list) for p in both):
            shared, *ends = _common_prefix(*both)
            if shared is not None or prompt is None:
                prompt, parts["chosen"], parts["rejected"] = shared, *ends
        elif tldr is None and prompt is None and all(isinstance(p, str) for p in both):
            prompt, parts["chosen"], parts["rejected"] = _common_start(*both)
    elif prompt is None and tldr is None:
        prompt = _unanswered(messages)
    missing = [name for name, value in parts.items() if value is None]
    if missing or (prompt is None and tldr is None):
        nulls = [k for k, v in record.items() if v is None]
        found = f"columns {', '.join(map(str, record))}" if record else "no columns"
        hint = f" ({', '.join(nulls)} null)" if nulls else ""
        raise UserError(f"{field}: {where} has {found}{hint}; it needs {_NEEDED[kind]}")
    if tldr is None:
        prompt = _text(prompt, "prompt", where, field)
    checked = {name: _text(value, name, where, field) for name, value in parts.items()}
    return Row(where=where, prompt=prompt, tldr=tldr, **checked)


def _completion(got: Mapping[str, Any], prompt: Any, tldr: Any, where: str, field: str) -> tuple[Any, Any]:
    if tldr is not None:
        return None, got.get("summary", got.get("completion"))
    messages = got.get("messages")
    if prompt is None and isinstance(messages, list) and messages:
        if isinstance(messages[-1], dict) and messages[-1].get("role") != "assistant":
            raise UserError(
                f"{field}: messages of {where} end with role {messages[-1].get('role')!r}, so there is no answer to "
                "learn; remove the row or its last message"
            )
        if len(messages) > 1:
            return messages[:-1], messages[-1:]
    return prompt, got.get("completion")


def _unanswered(messages: Any) -> Any:
    """The conversation without an answer at its end, so that chat SFT rows serve as prompts too."""
    if not isinstance(messages, list) or not messages or not _is_message(messages[-1]):
        return None
    return messages[:-1] or None if messages[-1]["role"] == "assistant" else messages


def _common_prefix(chosen: list[Any], rejected: list[Any]) -> tuple[list[Any] | None, list[Any], list[Any]]:
    n = 0
    while n < min(len(chosen), len(rejected)) - 1 and chosen[n] == rejected[n]:
        n += 1
    return chosen[:n] or None, chosen[n:], rejected[n:]


_TURN = "\n\nAssistant:"


def _common_start(chosen: str, rejected: str) -> tuple[str | None, str, str]:
    """Two whole dialogues as text: the prompt ends with the last `Assistant:` that both share, or else at the last
    white space before they differ."""
    pairs = zip(chosen, rejected, strict=False)
    n = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(chosen), len(rejected)))
    cut = chosen.rfind(_TURN, 0, n) + len(_TURN)
    if cut < len(_TURN):
        cut = max((m.start() for m in re.finditer(r"\s", chosen[:n])), default=0)
    return chosen[:cut] or None, chosen[cut:], rejected[cut:]


def _text(value: Any, name: str, where: str, field: str) -> Text:
    if isinstance(value, str):
        if not value.strip():
            raise UserError(f"{field}: {name} of {where} is empty; remove the row or fill it")
        return _encodable(value, name, where, field)
    if isinstance(value, list) and value and all(_is_message(m) for m in value):
        return [{k: _encodable(m[k], name, where, field) for k in ("role", "content")} for m in value]
    bad = next((i for i, m in enumerate(value, 1) if not _is_message(m)), None) if isinstance(value, list) else None
    if bad is None:
        what = "an empty list" if value == [] else type(value).__name__
        raise UserError(f"{field}: {name} of {where} is {what}; it must be text or a list of chat messages")
    raise UserError(
        f"{field}: message {bad} of {name} of {where} is no chat message; it needs role and content, both text"
    )


def _tldr_field(value: Any, name: str, where: str, field: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{field}: {name} of {where} is {type(value).__name__}; it must be text")
    return _encodable(value, name, where, field)


def _encodable(text: str, name: str, where: str, field: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as err:
        raise UserError(f"{field}: {name} of {where} holds half a surrogate pair, which no tokenizer can read") from err
    return text


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content"))


def split_heldout(
    rows: Sequence[Row], fraction: float, field: str = "data.eval_fraction"
) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows, by a hash of the prompt: every stage holds out the same prompts.

    Raises `UserError` for a fraction outside (0, 1), or too few different prompts for both sides.
    """
    if not 0 < fraction < 1:
        raise UserError(f"{field} is {fraction}; it must lie between 0 and 1")
    keys = [row.key() for row in rows]
    places = {key: _place(key) for key in set(keys)}
    if len(places) < 2:
        raise UserError(
            f"{field}: there is only {len(places)} prompt; give evaluation rows of their own, or more prompts"
        )
    held = {key for key, place in places.items() if place < fraction}
    if not held:
        held = {min(places, key=places.__getitem__)}
    elif len(held) == len(places):
        held.discard(max(places, key=places.__getitem__))
    train = [row for row, key in zip(rows, keys, strict=True) if key not in held]
    return train, [row for row, key in zip(rows, keys, strict=True) if key in held]


def _place(key: str) -> float:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
