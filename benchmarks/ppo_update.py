"""One PPO update of fastrlhf beside TRL's PPOTrainer: the same shapes, prompts, epochs and optimiser steps, in turn.

    python -m venv /path/to/trl && /path/to/trl/bin/pip install torch trl==1.12.0
    python benchmarks/ppo_update.py --peer_python /path/to/trl/bin/python

The case is a random GPT-NeoX of Pythia-14m's shape, 16 prompts of up to 512 tokens (mean 314), 53 response tokens,
4 epochs, fp32. Only ratios of runs that took turns on one machine mean anything.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PYTHIA_14M = {
    "vocab_size": 50304,
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": 2048,
    "rotary_pct": 0.25,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def prompts(rows: int, longest: int, mean: int) -> list[list[int]]:
    """Random ids; lengths spread evenly around the mean, one prompt of the full length."""
    rng = random.Random(1)
    low = 2 * mean - longest
    lengths = [low + round(i * (longest - low) / (rows - 1)) for i in range(rows)]
    rng.shuffle(lengths)
    return [[rng.randrange(1, 500) for _ in range(n)] for n in lengths]


def run(python: str, script: str, case: Path) -> dict:
    done = subprocess.run([python, str(HERE / "peers" / script), str(case)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{script} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer_python", required=True, help="python of an environment with trl==1.12.0")
    parser.add_argument("--rounds", type=int, default=2, help="times each side runs, in turn")
    parser.add_argument("--updates", type=int, default=2, help="updates per run; the first of a run is not counted")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    case = {
        "model": PYTHIA_14M,
        "queries": prompts(16, 512, 314),
        "response_length": 53,
        "temperature": 0.7,
        "epochs": 4,
        "micro_batch": 16,
        "updates": options.updates,
        "threads": options.threads,
        "tokenizer": str(HERE.parent / "tests" / "golden" / "tokenizer"),
    }
    sides = {"trl": (options.peer_python, "trl_ppo.py"), "fastrlhf": (sys.executable, "fastrlhf_ppo.py")}
    results: dict[str, list[dict]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.json"
        path.write_text(json.dumps(case))
        for r in range(options.rounds):
            for name, (python, script) in sides.items():
                got = run(python, script, path)
                results[name].append(got)
                print(f"round {r + 1} {name:<9} " + " ".join(f"{s:.2f}" for s in got["seconds"]), flush=True)
    medians = {n: statistics.median(s for r in runs for s in r["seconds"][1:]) for n, runs in results.items()}
    peaks = {n: max(r["peak_bytes"] for r in runs) for n, runs in results.items()}
    for name in sides:
        print(f"{name:<9} median {medians[name]:.2f} s per update, peak {peaks[name] / 2**30:.2f} GiB")
    print(f"ratio {medians['trl'] / medians['fastrlhf']:.2f}")
    if options.output:
        options.output.write_text(json.dumps({"case": "pythia-14m", "medians": medians, "runs": results}, indent=1))


if __name__ == "__main__":
    main()
