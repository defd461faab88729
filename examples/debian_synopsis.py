"""A small summarisation task from any Debian or Ubuntu machine: long package description -> one-line synopsis.

    python examples/debian_synopsis.py --output_dir data/debian
    fastrlhf run --config configs/debian.yaml

Reads the package lists of the machine's own apt sources, downloaded into a temporary folder (root is not needed and
nothing is installed), and writes sft.jsonl, sft_eval.jsonl, preferences.jsonl, preferences_eval.jsonl and
prompts.jsonl. All packages built from one source package land on the same side of the split.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

APT_HELPER = Path("/usr/lib/apt/apt-helper")

# Families whose descriptions are one template with a name in it, or belong to another package's description.
TEMPLATE_NAME = re.compile(
    r"-(dev|doc|docs|dbg|dbgsym|data|common|locales?|l10n|prof|udeb|cil|source|headers|examples|tests?|transitional)$"
    r"|^(librust|libghc|linux-(image|headers|modules|tools|buildinfo)|language-pack|task|education|hunspell|aspell|myspell"
    r"|mythes|hyphen|libreoffice-(l10n|help)|firefox(-esr)?-l10n|thunderbird-l10n|kde-l10n|tesseract-ocr|gcc|g\+\+|cpp"
    r"|gfortran|gobjc|gnat|gdc|gm2|gccgo|binutils)-"
)
BULLET = re.compile(r"([-*•+o]|\d+[.)]) ")
UNINFORMATIVE = re.compile(
    r"transitional|dummy package|meta-?package|virtual package|empty package|debug symbols", re.I
)


@dataclass(frozen=True, slots=True)
class Package:
    name: str
    source: str
    """Name of the source package, or the package's own where the lists do not tell."""
    section: str
    synopsis: str
    body: str
    """Paragraphs separated by an empty line, list items on lines of their own."""


# --- reading apt's lists


def fetch(folder: Path) -> Path:
    """Download the lists of the machine's apt sources into `folder`; returns where they are."""
    lists, cache = folder / "lists", folder / "cache"
    for path in (lists / "partial", cache / "archives" / "partial"):
        path.mkdir(parents=True)
    options = {
        "Acquire::Languages": "en",
        "Dir::State::lists": lists,
        "Dir::Cache": cache,
        # apt run by root drops to the user _apt, who cannot write into our folder.
        "APT::Sandbox::User": "root",
    }
    command = ["apt-get", *(part for key, value in options.items() for part in ("-o", f"{key}={value}")), "update"]
    print(f"downloading package lists into {folder}", flush=True)
    result = subprocess.run(command, capture_output=True, text=True)
    # One unreachable third-party source fails the whole command, so what counts is what arrived.
    if not list(lists.glob("*_Translation-en*")):
        lines = [line for line in result.stderr.splitlines() if line.startswith(("E:", "W:"))]
        stop(f"apt-get update brought no English descriptions; check the network and apt's sources ({lines[:1]})")
    return lists


def stop(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def cat(paths: Iterable[Path]) -> Iterator[str]:
    """Lines of apt's list files, however they are compressed."""
    for path in sorted(paths):
        with subprocess.Popen([APT_HELPER, "cat-file", path], stdout=subprocess.PIPE, encoding="utf-8") as process:
            assert process.stdout is not None
            yield from process.stdout
            yield "\n"
        if process.returncode:
            stop(f"apt-helper cannot read {path}; remove it or run without --lists_dir")


def stanzas(lines: Iterable[str]) -> Iterator[dict[str, list[str]]]:
    """Fields of each paragraph of a Debian control file; a value is its lines, those after the first unstripped."""
    fields: dict[str, list[str]] = {}
    last: list[str] = []
    for line in lines:
        line = line.rstrip("\n")
        if not line.strip():
            if fields:
                yield fields
            fields, last = {}, []
        elif line[0] in " \t":
            last.append(line)
        else:
            key, _, value = line.partition(":")
            last = fields.setdefault(key, [])
            last.append(value.strip())
    if fields:
        yield fields


def sources(lines: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Package -> (source package, section), from Packages files."""
    out = {}
    for fields in stanzas(lines):
        if "Package" not in fields:
            continue
        name = fields["Package"][0]
        source = fields.get("Source", [name])[0].split(" ")[0]
        out[name] = (source, fields.get("Section", ["unknown"])[0].rsplit("/", 1)[-1])
    return out


def packages(lines: Iterable[str], known: Mapping[str, tuple[str, str]]) -> Iterator[Package]:
    """Every package of Translation-en files, the first time that it appears."""
    seen = set()
    for fields in stanzas(lines):
        if "Package" not in fields or "Description-en" not in fields or fields["Package"][0] in seen:
            continue
        name = fields["Package"][0]
        seen.add(name)
        source, section = known.get(name, (name, "unknown"))
        synopsis, *rest = fields["Description-en"]
        yield Package(name, source, section, " ".join(synopsis.split()), reflow(rest))


def reflow(lines: Sequence[str]) -> str:
    """The long description: ` .` separates paragraphs; list items and lines indented further stand by themselves."""
    paragraphs: list[list[str]] = [[]]
    alone = True
    for line in lines:
        text = " ".join(line.split())
        if text == ".":
            paragraphs.append([])
            alone = True
            continue
        item = BULLET.match(text) is not None
        indented = line.startswith("  ")
        if item or alone or (indented and not BULLET.match(paragraphs[-1][-1])):
            paragraphs[-1].append(text)
        else:
            paragraphs[-1][-1] += f" {text}"
        # What follows an item or plain text belongs to it; what follows an indented line does not.
        alone = indented and not BULLET.match(paragraphs[-1][-1])
    return "\n\n".join("\n".join(p) for p in paragraphs if p)


# --- choosing


def informative(package: Package) -> bool:
    words = package.synopsis.split()
    return (
        not TEMPLATE_NAME.search(package.name)
        and not UNINFORMATIVE.search(f"{package.synopsis} {package.body}")
        and 3 <= len(words) <= 14
        and len(package.body.split()) >= 15
    )


def shorten(package: Package, max_chars: int) -> Package | None:
    """The body's first paragraphs, as many as fit; None where not even the first does."""
    kept: list[str] = []
    for paragraph in package.body.split("\n\n"):
        if len("\n\n".join([*kept, paragraph])) > max_chars:
            break
        kept.append(paragraph)
    if not kept:
        return None
    return Package(package.name, package.source, package.section, package.synopsis, "\n\n".join(kept))


def choose(found: Iterable[Package], max_chars: int) -> list[Package]:
    """Informative packages, none with the synopsis or the first paragraph of an earlier one."""
    chosen: list[Package] = []
    seen: set[tuple[str, str]] = set()
    for package in found:
        short = shorten(package, max_chars)
        if short is None or not informative(short):
            continue
        marks = {("synopsis", short.synopsis.casefold()), ("body", short.body.split("\n\n")[0].casefold())}
        if marks & seen:
            continue
        seen |= marks
        chosen.append(short)
    return chosen


def is_heldout(package: Package, share: float) -> bool:
    """By a hash of the source package: its packages describe one another."""
    digest = hashlib.sha256(package.source.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < share


# --- rows


def prompt_of(package: Package) -> str:
    return f"Package: {package.name}\n\n{package.body}\n\nSynopsis:"


def _other(package: Package, peers: Sequence[Package], rng: random.Random) -> str:
    """The synopsis of another package of the section: good English about something else."""
    others = [p.synopsis for p in rng.sample(peers, min(4, len(peers))) if p.synopsis != package.synopsis]
    return others[0] if others else ""


def _copied(package: Package, peers: Sequence[Package], rng: random.Random) -> str:
    """The description's first words, cut off in mid-sentence."""
    words = package.body.split()
    return " ".join(words[: min(rng.randint(8, 16), len(words) - 1)]).rstrip(".")


def _repeated(package: Package, peers: Sequence[Package], rng: random.Random) -> str:
    return f"{package.synopsis} {package.synopsis}"


def _dropped(package: Package, peers: Sequence[Package], rng: random.Random) -> str:
    """The synopsis without a third of its words."""
    words = package.synopsis.split()
    keep = sorted(rng.sample(range(len(words)), len(words) - max(1, len(words) // 3)))
    return " ".join(words[i] for i in keep)


FAULTS = {"other": _other, "copied": _copied, "repeated": _repeated, "dropped": _dropped}


def reject(package: Package, peers: Sequence[Package], seed: int) -> tuple[str, str]:
    """A worse synopsis and the name of its fault; the same for the same package, peers and seed."""
    rng = random.Random(f"{seed}/{package.name}")
    for fault in rng.sample(sorted(FAULTS), len(FAULTS)):
        text = FAULTS[fault](package, peers, rng)
        if text and text != package.synopsis:
            return text, fault
    raise AssertionError("a repeated synopsis is never the synopsis itself")


def write_rows(folder: Path, name: str, rows: Sequence[Mapping[str, str]]) -> None:
    with (folder / name).open("w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(f"{len(rows):7,} rows in {folder / name}", flush=True)


def write_dataset(chosen: Sequence[Package], folder: Path, *, eval_share: float, seed: int) -> Counter[str]:
    """The five files; returns how often each fault was used."""
    folder.mkdir(parents=True, exist_ok=True)
    faults: Counter[str] = Counter()
    sides = {
        "": [p for p in chosen if not is_heldout(p, eval_share)],
        "_eval": [p for p in chosen if is_heldout(p, eval_share)],
    }
    if not all(sides.values()):
        stop(
            f"{len(chosen)} descriptions are too few to hold out a share of {eval_share}; raise --eval_share or --limit"
        )
    for suffix, side in sides.items():
        sections = defaultdict(list)
        for package in side:
            sections[package.section].append(package)
        sft, pairs = [], []
        for package in side:
            prompt = prompt_of(package)
            rejected, fault = reject(package, sections[package.section], seed)
            faults[fault] += 1
            sft.append({"prompt": prompt, "completion": f" {package.synopsis}"})
            pairs.append({"prompt": prompt, "chosen": f" {package.synopsis}", "rejected": f" {rejected}"})
        write_rows(folder, f"sft{suffix}.jsonl", sft)
        write_rows(folder, f"preferences{suffix}.jsonl", pairs)
        if not suffix:
            write_rows(folder, "prompts.jsonl", [{"prompt": row["prompt"]} for row in sft])
    return faults


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("data/debian"), help="where the five files go")
    parser.add_argument("--lists_dir", type=Path, help="read apt's lists here (/var/lib/apt/lists), download nothing")
    parser.add_argument("--eval_share", type=float, default=0.05, help="share of the source packages held out")
    parser.add_argument("--max_chars", type=int, default=800, help="longest description; later paragraphs are left out")
    parser.add_argument("--limit", type=int, help="keep this many packages, drawn at random")
    parser.add_argument("--seed", type=int, default=1, help="seed of the rejected synopses and of --limit")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    if not 0 < args.eval_share < 1:
        stop(f"--eval_share is {args.eval_share}; it must lie between 0 and 1")
    if shutil.which("apt-get") is None or not APT_HELPER.exists():
        stop("apt-get or apt-helper is missing; run this on Debian, Ubuntu or in their container image")
    with tempfile.TemporaryDirectory(prefix="debian-synopsis-") as folder:
        lists = fetch(Path(folder)) if args.lists_dir is None else args.lists_dir
        translations = list(lists.glob("*_Translation-en*"))
        if not translations:
            stop(f"{lists} holds no *_Translation-en files; run without --lists_dir to download them")
        known = sources(cat(lists.glob("*_Packages*")))
        found = list(packages(cat(translations), known))
    print(f"{len(found):7,} descriptions, {len(known):,} packages with a known source", flush=True)
    chosen = choose(found, args.max_chars)
    print(f"{len(chosen):7,} are informative, short enough and unlike the others", flush=True)
    if args.limit is not None and args.limit < len(chosen):
        keep = set(random.Random(args.seed).sample(range(len(chosen)), args.limit))
        chosen = [package for i, package in enumerate(chosen) if i in keep]
    faults = write_dataset(chosen, args.output_dir, eval_share=args.eval_share, seed=args.seed)
    print("rejected: " + ", ".join(f"{n:,} {fault}" for fault, n in sorted(faults.items())))


if __name__ == "__main__":
    main()
