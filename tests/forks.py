"""Runs jobs of `fastrlhf` in forks of itself, two at a time. Not a test: conftest.py starts it.

A line on stdin is a list of jobs, the answer the list of their exit codes. A job is {argv, base} and, if wanted,
cwd; kill: a signal that the process sends itself at a chosen point; patch: a fault by the name of its function here.
"""

import errno
import json
import os
import signal
import sys

TIMEOUT_S = 60


def _die(number):
    os.kill(os.getpid(), number)


def kill_at(where, signal_number, stage=None, step=None, target=None):
    """where: log (after the metrics of a step), torn (within that line), before or after the rename to *target."""
    from fastrlhf import metrics

    if where == "log":
        log = metrics.Metrics.log

        def wrapped(self, now, values):
            out = log(self, now, values)
            if (self.stage, now) == (stage, step):
                _die(signal_number)
            return out

        metrics.Metrics.log = wrapped
    elif where == "torn":
        append = metrics._append

        def torn(path, rows):
            if (rows[0]["stage"], rows[0]["step"]) == (stage, step):
                with path.open("a") as file:
                    file.write(json.dumps(rows[0])[:25])
                _die(signal_number)
            append(path, rows)

        metrics._append = torn
    else:
        for name in ("rename", "replace"):
            setattr(os, name, _killing(getattr(os, name), where, signal_number, target))


def _killing(move, where, signal_number, target):
    def wrapped(src, dst):
        if str(dst).endswith(target):
            if where == "after":
                move(src, dst)
            _die(signal_number)
        move(src, dst)

    return wrapped


def full_disk():
    """Every write to a checkpoint finds the disk full."""
    from fastrlhf import checkpoint

    def save_file(tensors, path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoint.save_file = save_file


def nan_gradient():
    """The second backward pass leaves a NaN in the gradients while the loss stays finite."""
    import torch

    backward, calls = torch.Tensor.backward, []

    def wrapped(self, *args, **kwargs):
        calls.append(1)
        return backward(self * float("nan") if len(calls) == 2 else self, *args, **kwargs)

    torch.Tensor.backward = wrapped


def _run(job):
    signal.alarm(TIMEOUT_S)
    for number, end in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{job['base']}.{end}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
    os.chdir(job.get("cwd", "."))
    from fastrlhf.cli import main

    if "kill" in job:
        kill_at(**job["kill"])
    if "patch" in job:
        globals()[job["patch"]]()
    code = 1
    try:
        code = main(job["argv"])
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve():
    import torch.utils.tensorboard
    import transformers.models.gpt_neox.modeling_gpt_neox  # noqa: F401

    import fastrlhf.pipeline
    import fastrlhf.replay  # noqa: F401

    assert torch.get_num_threads() == 1, "a fork of a process with OpenMP threads may hang"
    for line in sys.stdin:
        jobs = json.loads(line)
        running, codes = {}, [0] * len(jobs)

        def reap(running=running, codes=codes):
            pid, status = os.wait()
            codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)

        for i, job in enumerate(jobs):
            pid = os.fork()
            if pid == 0:
                _run(job)
            running[pid] = i
            if len(running) == 2:
                reap()
        while running:
            reap()
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    serve()
