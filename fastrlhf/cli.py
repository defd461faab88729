"""The command line: `fastrlhf COMMAND [--config FILE] [--section.field VALUE ...]`."""

from __future__ import annotations

import argparse
import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fastrlhf import __version__
from fastrlhf.config_parser import parse_config
from fastrlhf.errors import UserError, brief

__all__ = ["main"]

COMMANDS = {
    "demo": "The whole pipeline on an embedded corpus, in a few minutes on two cores.",
    "run": "SFT, reward model, PPO and evaluation on your data.",
    "sft": "Fine-tune a model on prompts and completions.",
    "reward": "Train a reward model on pairs, from an SFT model.",
    "ppo": "PPO from an SFT model, against a reward model or a Python function.",
    "evaluate": "Sample a model on held-out prompts and measure the texts.",
    "replay": "Run a recorded update again and compare every number.",
}


def _overview() -> argparse.ArgumentParser:
    lines = "\n".join(f"  {name:<10}{what}" for name, what in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="fastrlhf",
        usage="fastrlhf COMMAND [--config FILE] [--section.field VALUE ...]",
        description=f"Commands:\n{lines}\n\n`fastrlhf COMMAND --help` shows every field with its default and meaning.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fastrlhf {__version__}")
    parser.add_argument("command", choices=list(COMMANDS), metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 a replay above its limit, 2 bad input, 130 stopped by a signal after saving, 141 stopped
    because nobody reads the output."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args:
        _overview().print_help()
        return 2
    command = _overview().parse_args(args[:1]).command
    try:
        with _terminated_like_interrupted():
            code = _dispatch(command, args[1:])
            sys.stdout.flush()
            return code
    except KeyboardInterrupt:
        print(f"fastrlhf {command}: stopped by a signal; --resume goes on if the run has begun", file=sys.stderr)
        return 130
    except UserError as err:
        print(f"fastrlhf {command}: {str(err).removeprefix(f'{command}: ')}", file=sys.stderr)
        return 2
    except OSError as err:
        if err.errno == errno.EPIPE:  # whoever read the output, such as `head`, has seen enough
            code = 128 + signal.SIGPIPE
        else:
            code = 2
            full = err.errno in (errno.ENOSPC, errno.EDQUOT)
            what = "no disk space left for the output of this command; free some" if full else _os_error(err)
            print(f"fastrlhf {command}: {what}", file=sys.stderr)
        if err.errno in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered would fail again
        return code
    except (MemoryError, RuntimeError) as err:
        if not isinstance(err, MemoryError) and not re.search(_OUT_OF_MEMORY, str(err)):
            raise
        advice = "lower batch.tokens_per_micro_batch, batch.tokens_per_forward or rollout.rows_per_batch, or the model"
        print(f"fastrlhf {command}: out of memory ({brief(err)}); {advice}", file=sys.stderr)
        return 2


# What torch says of a CPU and of a GPU.
_OUT_OF_MEMORY = "not enough memory|allocate memory|out of memory"


def _os_error(err: OSError) -> str:
    """Of a file that no stage expected to fail: what, and why."""
    return f"{err.filename}: {err.strerror}" if err.filename and err.strerror else brief(err)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Outside the training loops, which save first, SIGTERM ends a command as SIGINT does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])


def _dispatch(command: str, args: list[str]) -> int:
    if command == "replay":
        return _replay(args)
    if command == "demo":
        from fastrlhf.demo import demo_defaults

        defaults = demo_defaults()
    else:
        defaults = None
    cfg = parse_config(args, command=command, description=COMMANDS[command], defaults=defaults)
    # From here on torch is needed; a wrong flag has answered by now.
    from fastrlhf import pipeline
    from fastrlhf.training import Interrupted

    try:
        if command == "demo":
            from fastrlhf.demo import run_demo

            run_demo(cfg)
        elif command == "run":
            pipeline.print_summary(pipeline.run_pipeline(cfg))
        elif command == "evaluate":
            pipeline.print_summary(pipeline.run_evaluate(cfg))
        else:
            result = {"sft": pipeline.run_sft, "reward": pipeline.run_reward, "ppo": pipeline.run_ppo}[command](cfg)
            pipeline.print_summary({"rm" if command == "reward" else command: result.metrics, "run": result.run})
            print(f"model: {result.model}")
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        return 130
    return 0


def _not_negative(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a difference; it must be 0 or more")
    return value


def _replay(args: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="fastrlhf replay", description=COMMANDS["replay"], allow_abbrev=False)
    parser.add_argument("basename", help="the recording's path without .json or .safetensors")
    parser.add_argument(
        "--max_error", type=_not_negative, default=5e-6, help="largest absolute difference allowed (default: 5e-6)"
    )
    options = parser.parse_args(args)
    from fastrlhf.replay import replay

    worst = replay(options.basename)
    print(f"{'quantity':<28} largest difference")
    for name, error in worst.items():
        print(f"{name:<28} {error:.3e}{'' if error <= options.max_error else '  ABOVE THE LIMIT'}")
    ok = all(error <= options.max_error for error in worst.values())
    print(f"{'passed' if ok else 'FAILED'}: largest {max(worst.values()):.3e}, limit {options.max_error:g}")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
