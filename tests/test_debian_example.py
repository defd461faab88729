"""The Debian example: parsing, choosing and spoiling, on a small Translation-en sample."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fastrlhf.data.sources import load_rows

PATH = Path(__file__).resolve().parents[1] / "examples" / "debian_synopsis.py"

TRANSLATION = """\
Package: alpha
Description-md5: d943033bedada21853d2ae54a2578a7b
Description-en: Editor for ancient   manuscripts
 Alpha shows pages of manuscripts next to their text,
 and keeps both together while you correct the text.
 It reads scans in many formats.
 .
 Supported are:
  * scans of pages, in PNG
    and in TIFF
  * plain text

Package: alpha-dev
Description-en: Headers of the editor for manuscripts
 Alpha shows pages of manuscripts next to their text, and keeps both together while you correct.

Package: alpha-copy
Description-en: another editor for ancient manuscripts
 Alpha shows pages of manuscripts next to their text,
 and keeps both together while you correct the text.
 It reads scans in many formats.

Package: alpha
Description-en: A second version of the same package
 This description must not be read, since the package has been seen in an earlier list already.

Package: old-name
Description-en: transitional package for alpha, the editor
 This is a package that only depends on alpha and can be removed safely after the upgrade is done.

Package: short
Description-en: Something described too shortly here
 Not enough words.

Package: beta
Description-en: Übersetzer für alte Schriften – 漢字
 Beta translates manuscripts one word after another and shows what it was unsure of at the end.
 .
 A second paragraph that is far longer than the first and will be left out when the limit is small.
"""

PACKAGES = """\
Package: alpha
Source: manuscripts (1.2-3)
Version: 1.2-3+b1
Depends: libc6,
 libfoo
Section: contrib/editors

Package: beta
Section: editors
"""


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("debian_synopsis", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def found(example):
    known = example.sources(PACKAGES.splitlines(keepends=True))
    assert known == {"alpha": ("manuscripts", "editors"), "beta": ("beta", "editors")}
    return list(example.packages(TRANSLATION.splitlines(keepends=True), known))


def test_descriptions_are_reflowed(found):
    names = [p.name for p in found]
    assert names == ["alpha", "alpha-dev", "alpha-copy", "old-name", "short", "beta"]
    alpha = found[0]
    assert (alpha.source, alpha.section, alpha.synopsis) == (
        "manuscripts",
        "editors",
        "Editor for ancient manuscripts",
    )
    assert alpha.body == (
        "Alpha shows pages of manuscripts next to their text, and keeps both together while you correct the text. "
        "It reads scans in many formats.\n\n"
        "Supported are:\n* scans of pages, in PNG and in TIFF\n* plain text"
    )
    assert found[1].source == "alpha-dev"


def test_lines_that_are_indented_stay_apart(example):
    lines = [" Run it so:", "   $ one", "   $ two", " and wait", " a little."]
    assert example.reflow(lines) == "Run it so:\n$ one\n$ two\nand wait a little."
    assert example.reflow([" .", " a", " .", " .", " b"]) == "a\n\nb"
    assert example.reflow([]) == ""


def test_templates_duplicates_and_short_ones_are_dropped(example, found):
    chosen = example.choose(found, 120)
    assert [p.name for p in chosen] == ["beta"] and "second paragraph" not in chosen[0].body
    chosen = example.choose(found, 800)
    assert [p.name for p in chosen] == ["alpha", "beta"]
    assert "second paragraph" in chosen[1].body


def many(example, n=200):
    return [
        example.Package(
            f"p{i}", f"s{i // 2}", f"sec{i % 3}", f"tool number {i} for work", f"It is tool number {i} and " * 3
        )
        for i in range(n)
    ]


def test_packages_of_one_source_are_on_one_side(example):
    packages = many(example)
    held = {p.source for p in packages if example.is_heldout(p, 0.2)}
    assert not held & {p.source for p in packages if not example.is_heldout(p, 0.2)}
    assert 5 < len(held) < 40


def test_a_rejected_synopsis_differs_and_does_not_depend_on_the_process(example):
    packages = many(example)
    faults = set()
    for package in packages:
        text, fault = example.reject(package, packages, seed=1)
        faults.add(fault)
        assert text and text != package.synopsis and "\n" not in text
        assert example.reject(package, packages, seed=1) == (text, fault)
        words = text.split()
        if fault == "repeated":
            assert words == package.synopsis.split() * 2
        if fault == "dropped":
            assert len(words) == 4 and set(words) < set(package.synopsis.split())
        if fault == "copied":
            assert package.body.startswith(text)
        if fault == "other":
            assert text in {p.synopsis for p in packages}
    assert faults == set(example.FAULTS)
    # A package alone in its section, and one word shorter than that: still something worse.
    alone = example.Package("p", "s", "x", "same", "same")
    assert example.reject(alone, [alone], seed=1)[0] not in ("", "same")


def test_the_files_are_what_fastrlhf_reads(example, tmp_path):
    example.write_dataset(many(example), tmp_path, eval_share=0.2, seed=1)
    kinds = {"sft": "sft", "preferences": "preferences"}
    prompts = {}
    for name, kind in kinds.items():
        for suffix in ("", "_eval"):
            path = tmp_path / f"{name}{suffix}.jsonl"
            rows = load_rows(str(path), kind=kind, split="train", field="data.x")
            prompts[name + suffix] = [r.prompt for r in rows]
            for row in rows:
                assert row.prompt.startswith("Package: p") and row.prompt.endswith("\n\nSynopsis:")
                assert (row.completion or row.chosen).startswith(" tool number")
    assert prompts["sft"] == prompts["preferences"] and prompts["sft_eval"] == prompts["preferences_eval"]
    assert not set(prompts["sft"]) & set(prompts["sft_eval"])
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert [r["prompt"] for r in rows] == prompts["sft"]


def test_a_missing_apt_is_one_sentence(tmp_path):
    run = subprocess.run(
        [sys.executable, str(PATH), "--output_dir", str(tmp_path / "out")],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2 and not run.stdout
    assert run.stderr.startswith("error: apt-get or apt-helper is missing") and run.stderr.count("\n") == 1
