"""The folder of a run: made once, locked while written, never overwritten."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import yaml

from fastrlhf.config import Config
from fastrlhf.errors import UserError

__all__ = ["RunFolder", "atomic_write_text", "disk_errors", "save_whole"]

# A resumed run may differ in these, and in nothing else.
_MAY_CHANGE = ("resume", "output_dir", "log.", "checkpoint.")


@contextmanager
def disk_errors(what: Path | str) -> Iterator[None]:
    """Turn a full disk or an unwritable folder into a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except Exception as err:
        number = _errno(err)
        if number in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"no disk space left while writing {what}; free some and start again (--resume goes on from the last "
                "checkpoint)"
            ) from err
        if number in _UNUSABLE:
            named = err.filename if isinstance(err, OSError) and isinstance(err.filename, str) else what
            raise UserError(f"cannot read or write {named}: {os.strerror(number)}; choose another output_dir") from err
        raise


# A folder without permission, under a file, in a loop of links, with too long a name, on a file system that is
# read-only or limits the size of files, or with a file where a folder has to be.
_UNUSABLE = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENOENT,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EFBIG,
)


def _errno(err: Exception) -> int | None:
    if isinstance(err, OSError):
        return err.errno
    found = re.search(r"os error (\d+)", str(err))  # safetensors and tokenizers put the number into a text
    return int(found[1]) if found else None


def atomic_write_text(path: Path, text: str) -> None:
    """Write the whole file or nothing: a temporary name in the same folder, synced, then renamed."""
    tmp = path.with_name(f".tmp-{path.name}")
    with disk_errors(path):
        with tmp.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(tmp, path)


def save_whole(folder: Path, *writers: Callable[[Path], object]) -> None:
    """A folder that holds what all `writers` put into it, or is not there at all; an old one is replaced."""
    tmp = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    for write in writers:
        write(tmp)
    if folder.exists():
        shutil.rmtree(folder)
    os.rename(tmp, folder)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """`root` is the run's folder, `path` that of one of its stages (or the root itself)."""

    root: Path
    path: Path
    _lock: IO[str] | None = field(default=None, repr=False)
    _new: bool = False
    _made: bool = False

    @property
    def checkpoints(self) -> Path:
        """Checkpoints of this stage."""
        return self.root / "checkpoints" / self.path.name if self.path != self.root else self.root / "checkpoints"

    def stage(self, name: str) -> RunFolder:
        """The same run, seen by one stage; its folder is made."""
        path = self.root / name
        with disk_errors(path):
            path.mkdir(exist_ok=True)
        return replace(self, path=path)

    @staticmethod
    def open(cfg: Config, command: str, *, config_yaml: str) -> RunFolder:
        """Make a new run folder, or go on in an old one with `cfg.resume`.

        Raises `UserError` when the folder exists without `resume`, is missing with it, belongs to another
        configuration, or is being written by another process.
        """
        with disk_errors(cfg.output_dir or "runs"):
            return RunFolder._open(cfg, command, f"# fastrlhf {command}\n{config_yaml}")

    @staticmethod
    def _open(cfg: Config, command: str, config_yaml: str) -> RunFolder:
        made = not cfg.resume and (cfg.output_dir is None or not Path(cfg.output_dir).exists())
        root = _existing(cfg, config_yaml) if cfg.resume else _new(cfg, command)
        lock = _lock(root)
        if not cfg.resume:
            if (root / "config.yaml").exists():  # another process was faster between the look and the lock
                lock.close()
                raise UserError(f"output_dir: another run has just started in {root}; choose another folder")
            atomic_write_text(root / "config.yaml", config_yaml)
        return RunFolder(root, root, lock, not cfg.resume, made)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._new and error is not None and not (self.root / "metrics.jsonl").exists():
            # Refused before the first step: the name stays free. An empty folder that was given stays as it was.
            for path in [self.root] if self._made else list(self.root.iterdir()):
                path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()  # closing releases the lock


def _new(cfg: Config, command: str) -> Path:
    if cfg.output_dir is not None:
        root = Path(cfg.output_dir)
        if root.exists() and not root.is_dir():
            raise UserError(f"output_dir: {root} is a file; choose another folder")
        # A kill may have left the lock before config.yaml was there; that is no run yet.
        if root.exists() and any(p.name not in (".lock", ".tmp-config.yaml") for p in root.iterdir()):
            raise UserError(f"output_dir: {root} is not empty; go on with it by --resume, or choose another folder")
        with disk_errors(root):
            root.mkdir(parents=True, exist_ok=True)
        return root
    stamp = f"{command}-{time.strftime('%Y%m%d-%H%M%S')}"
    with disk_errors("runs"):
        Path("runs").mkdir(exist_ok=True)
        for n in range(1, 1000):
            root = Path("runs") / (stamp if n == 1 else f"{stamp}-{n}")
            try:
                root.mkdir()
            except FileExistsError:
                continue
            return root
    raise UserError(f"output_dir: runs/{stamp} and its variants all exist; give output_dir")


def _existing(cfg: Config, config_yaml: str) -> Path:
    if cfg.output_dir is None:
        raise UserError("resume: say which run to go on with, by --output_dir")
    root = Path(cfg.output_dir)
    if not (root / "config.yaml").is_file():
        raise UserError(f"resume: {root} is not a run folder (it has no config.yaml)")
    try:
        text = (root / "config.yaml").read_text(encoding="utf-8")
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as err:
        raise UserError(f"resume: {root}/config.yaml cannot be read; it was changed or damaged") from err
    began, now = (lines.split("\n", 1)[0].removeprefix("# ") for lines in (text, config_yaml))
    if began != now and began.startswith("fastrlhf "):
        raise UserError(f"resume: the run in {root} was started by `{began}`, not by `{now}`; use another output_dir")
    given = _flat(yaml.safe_load(config_yaml))
    saved = _flat(tree) if isinstance(tree, dict) else {}
    absent = [key for key in given if key not in saved and not key.startswith("model.from_scratch")]
    if absent:
        raise UserError(f"resume: {root}/config.yaml lacks {absent[0]}; it was changed, damaged or of another version")
    changed = [k for k in given | saved if saved.get(k) != given.get(k) and not k.startswith(_MAY_CHANGE)]
    if changed:
        first = "; ".join(f"{k} was {saved.get(k)!r} and is {given.get(k)!r}" for k in changed[:3])
        more = f"; and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise UserError(
            f"resume: the run in {root} was started with another configuration ({first}{more}); leave --config "
            "and these fields out: the run's own config.yaml then holds"
        )
    return root


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {prefix.rstrip("."): tree}
    out: dict[str, Any] = {}
    for key, value in tree.items():
        out |= _flat(value, f"{prefix}{key}.")
    return out


def _lock(root: Path) -> IO[str]:
    # The kernel drops the lock with the process, so a SIGKILL leaves nothing to clean up.
    with disk_errors(root):
        file = (root / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as err:
        file.close()
        raise UserError(f"output_dir: another process is writing {root}; wait for it or choose another folder") from err
    return file
