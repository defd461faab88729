"""YAML and dotted command-line overrides -> `Config`. jsonargparse does the work; this file is its only user."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings

from fastrlhf.config import Config, type_words
from fastrlhf.errors import UserError, brief

__all__ = ["config_from_dict", "config_to_yaml", "flatten", "parse_config"]

# Fields whose value is an open mapping: their keys are not ours to check.
_OPEN = {"model.from_scratch"}


def _parser(command: str, description: str) -> ArgumentParser:
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog=f"fastrlhf {command}",
        usage=f"fastrlhf {command} [--config FILE] [--section.field VALUE ...]",
        description=description,
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="YAML file with any of the fields below.")
    # `--resume` alone means true.
    parser.add_argument(
        "--resume",
        type=bool,
        nargs="?",
        const=True,
        default=False,
        help="Go on with the run in `output_dir`, by its config.yaml.",
    )
    parser.add_class_arguments(Config, skip={"resume"}, sub_configs=False)
    return parser


def _fields(kind: type, prefix: str = "") -> Iterator[str]:
    defaults = kind()
    for field in dataclasses.fields(kind):
        value = getattr(defaults, field.name)
        if dataclasses.is_dataclass(value):
            yield from _fields(type(value), f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


FIELDS = tuple(_fields(Config))
# What other trainers call these fields.
_ELSEWHERE = {
    "learning_rate": "lr",
    "num_train_epochs": "epochs",
    "num_ppo_epochs": "epochs",
    "cliprange": "clip",
    "cliprange_value": "value_clip",
    "max_new_tokens": "response_length",
    "torch_dtype": "dtype",
}
SECTIONS = frozenset(name.rpartition(".")[0] for name in FIELDS)


def _unknown(key: str, where: str) -> UserError:
    near = difflib.get_close_matches(key, FIELDS, n=1, cutoff=0.4)
    # The right name in the wrong section, or without one, is the commonest slip.
    section, _, leaf = key.rpartition(".")
    if leaf in _ELSEWHERE:
        leaf = _ELSEWHERE[leaf]
        near = [name for name in FIELDS if name == f"{section}.{leaf}"] or near
    same_leaf = [name for name in FIELDS if name.rpartition(".")[2] == leaf]
    hint = [name for name in near if name.rpartition(".")[2] == leaf] or same_leaf[:1] or near
    return UserError(f"{where}: there is no field {key!r}" + (f"; did you mean {hint[0]}?" if hint else "; see --help"))


def _check_keys(tree: Any, where: str, prefix: str = "", seen: set[str] | None = None) -> None:
    seen = set() if seen is None else seen
    if not isinstance(tree, dict):
        raise UserError(f"{where}: {prefix.rstrip('.') or 'the file'} must be a mapping of fields to values")
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name in SECTIONS and name:
            _check_keys(value, where, f"{name}.", seen)
        elif name not in FIELDS:
            raise _unknown(name, where)
        elif name in seen:
            raise UserError(f"{where}: {name} stands twice, in its section and as a dotted name; keep one")
        seen.add(name)


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which no mapping has a key twice: the second would silently replace the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is not a plain word", key.start_mark)
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _read_yaml(path: str) -> dict[str, Any]:
    if not path:
        raise UserError("--config: the file's name is empty")
    try:
        tree = yaml.load(Path(path).read_text(encoding="utf-8"), _UniqueKeys)
    except FileNotFoundError as err:
        raise UserError(f"--config: {path} does not exist") from err
    except OSError as err:
        raise UserError(f"--config: cannot read {path}: {err.strerror or err}") from err
    except RecursionError as err:
        raise UserError(f"--config: {path} nests too deeply to be a configuration") from err
    except ValueError as err:  # bytes that are not UTF-8, a name with a null character, a date that does not exist
        raise UserError(f"--config: cannot read {path}: {brief(err)}") from err
    except yaml.YAMLError as err:
        mark = getattr(err, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(err, "problem", None) or brief(err)
        raise UserError(f"--config: {path}{line} is not valid YAML: {problem}") from err
    tree = {} if tree is None else tree
    _check_keys(tree, path)
    return tree


def _check_files(argv: Sequence[str]) -> list[str]:
    """Check the keys of every --config file; an empty file, which jsonargparse refuses, is left out."""
    out: list[str] = []
    i = 0
    while i < len(argv):
        flag, eq, path = argv[i].partition("=")
        step = 1 if eq or i + 1 == len(argv) else 2
        path = path if eq else argv[min(i + 1, len(argv) - 1)]
        if flag != "--config" or (not eq and step == 1):
            out.append(argv[i])
            i += 1
            continue
        if _read_yaml(path):
            out += argv[i : i + step]
        i += step
    return out


def _check_flags(argv: Sequence[str]) -> None:
    known = {f"--{name}" for name in FIELDS} | {"--config", "--help", "--print_config"}
    for arg in argv:
        flag = arg.partition("=")[0]
        if not flag.startswith("--") or flag in known or any(flag.startswith(f"--{name}.") for name in _OPEN):
            continue
        raise _unknown(flag[2:], "command line")


def _to_config(parser: ArgumentParser, namespace: Namespace) -> Config:
    tree = parser.instantiate(namespace)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Config):
        value = tree[field.name]
        values[field.name] = value.as_dict() if isinstance(value, Namespace) else value
    return Config(**values)


def _one_line(err: Exception) -> str:
    text = " ".join(str(err).split())
    text = text.replace('Parser key "', "field ").replace('":', ":")
    found = re.search(r"field (\S+): .*(?:Got|Given) value: (.*)", text)
    if found and found[1] in FIELDS:  # in our words, not in those of Python's types
        return f"{found[1]} is {found[2]}; it must be {type_words(_type_of(found[1]))}"
    return text


def _type_of(name: str) -> Any:
    kind: Any = Config
    for part in name.split("."):
        kind = get_type_hints(kind)[part]
    return kind


def _config_of_resumed(argv: Sequence[str], namespace: Namespace) -> str | None:
    """`--resume --output_dir DIR` alone goes on with the configuration that is there."""
    if not namespace.resume or namespace.output_dir is None or any(a.partition("=")[0] == "--config" for a in argv):
        return None
    path = os.path.join(os.path.expanduser(namespace.output_dir), "config.yaml")
    if not Path(path).is_file():
        raise UserError(f"resume: {namespace.output_dir} is not a run folder (it has no config.yaml)")
    if not _read_yaml(path):
        raise UserError(f"resume: {path} is empty; it was changed or damaged")
    return path


def parse_config(
    argv: Sequence[str], *, command: str, description: str = "", defaults: dict[str, Any] | None = None
) -> Config:
    """Command-line arguments (after the command) -> configuration. `defaults` is a tree below the user's values.

    Raises `UserError` for an unknown field, naming the nearest, or a value of the wrong type.
    """
    _check_flags(argv)
    argv = _check_files(argv)
    parser = _parser(command, description)
    if defaults:
        parser.set_defaults(flatten(defaults))
    try:
        namespace = parser.parse_args(argv)
        own = _config_of_resumed(argv, namespace)
        if own is not None:
            namespace = parser.parse_args(["--config", own, *argv])
        return _to_config(parser, namespace)
    except ArgumentError as err:
        raise UserError(_one_line(err)) from err


def config_from_dict(tree: dict[str, Any], where: str = "configuration") -> Config:
    """A nested mapping -> configuration, checked like a YAML file."""
    _check_keys(tree, where)
    parser = _parser("run", "")
    try:
        return _to_config(parser, parser.parse_object(tree))
    except ArgumentError as err:
        raise UserError(f"{where}: {_one_line(err)}") from err


def config_to_yaml(cfg: Config) -> str:
    """The resolved configuration, every field."""
    return yaml.safe_dump(dataclasses.asdict(cfg), sort_keys=False)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mapping -> {dotted field: value}."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name in SECTIONS:
            out |= flatten(value or {}, f"{name}.")
        else:
            out[name] = value
    return out
