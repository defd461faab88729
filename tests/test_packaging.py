"""The two import packages, and the folder that must never become a third."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_kernels_folder_never_shadows_hugging_faces_kernels():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    code = (
        "import importlib.util as u; s = u.find_spec('kernels'); print(s.origin if s else None); "
        "from transformers import LlamaForCausalLM"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    origin = done.stdout.split()[0]
    assert origin == "None" or "site-packages" in origin


def _sources(*folders):
    return [p for folder in folders for p in (ROOT / folder).rglob("*.py")]


def test_nothing_imports_a_bare_kernels_package():
    bad = [
        p
        for p in _sources("fastrlhf", "kernels", "tests", "benchmarks", "examples")
        if re.search(r"^\s*(from|import) kernels\b", p.read_text(), re.M)
    ]
    assert not bad


def test_the_ops_depend_on_torch_alone():
    code = (
        "import sys, fastrlhf_kernels; "
        "bad = [m for m in ('transformers', 'fastrlhf', 'datasets', 'deepspeed') if m in sys.modules]; "
        "sys.exit(repr(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "kernels", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("extra, allowed", [("wandb", 1), ("trackio", 1), ("jsonargparse", 1), ("rouge_score", 1)])
def test_each_optional_library_is_imported_in_one_file(extra, allowed):
    users = [p.name for p in _sources("fastrlhf") if re.search(rf"^\s*(from|import) {extra}\b", p.read_text(), re.M)]
    assert len(users) <= allowed, users


def test_help_and_a_typo_answer_without_torch():
    code = (
        "import sys; from fastrlhf.cli import main\n"
        "code = main(['ppo', '--ppo.kl_coeff', '1'])\n"
        "sys.exit(0 if code == 2 and 'torch' not in sys.modules else 1)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "did you mean ppo.kl_coef?" in done.stderr
