"""Ranks that are launched once, and take one list of tasks after another: half of a launch is imports."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from conftest import ROOT, story

WORKER = Path(__file__).parent / "worker.py"
MOST = 12  # ranks that stand at a time; each holds half a gigabyte


class Standing:
    """A launch of worker.py. Its ranks end when their file of tests does, or this process."""

    def __init__(self, num_ranks: int, config: str, precision: str) -> None:
        self.num_ranks, self.count = num_ranks, 0
        self.folder = Path(tempfile.mkdtemp(prefix="accel_ft-ranks-"))
        config = config if "/" in config else f"accelerate_configs/{config}"
        words = ["-m", "accelerate.commands.launch", "--config_file", config]
        words += ["--num_processes", str(num_ranks), "--mixed_precision", precision]
        self.command = [sys.executable, *words, str(WORKER), str(self.folder), str(os.getpid())]
        with (self.folder / "stdout").open("w") as out, (self.folder / "stderr").open("w") as err:
            self.launcher = subprocess.Popen(
                self.command, cwd=ROOT, stdout=out, stderr=err,
                env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip

    def do(self, tasks: tuple[dict[str, Any], ...], seconds: float = 240) -> list[Any]:
        file = self.folder / f"{self.count}.json"
        self.count += 1
        file.with_suffix(".new").write_text(json.dumps(tasks, default=str))
        file.with_suffix(".new").rename(file)
        result, deadline = file.with_suffix(".result"), time.monotonic() + seconds
        while not result.exists():
            code, said = self.launcher.poll(), [self.folder / "stdout", self.folder / "stderr"]
            in_time = code is None and time.monotonic() < deadline
            assert in_time, story(self.command, code, *(path.read_text() for path in said))
            time.sleep(0.02)
        found: list[Any] = json.loads(result.read_text())
        return found

    def end(self) -> None:
        (self.folder / "end").touch()
        try:
            self.launcher.wait(30)
        except subprocess.TimeoutExpired:
            self.launcher.kill()  # its ranks end with it, or as they miss their folder
            self.launcher.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


standing: dict[tuple[int, str, str], Standing] = {}  # the one that was used last comes last


def end_all() -> None:
    for each in standing.values():
        (each.folder / "end").touch()
    while standing:
        standing.popitem()[1].end()


def on_ranks(
    num_ranks: int, *tasks: dict[str, Any], config: str = "cpu_ddp.yaml", precision: str = "no"
) -> list[Any]:
    """Run the tasks on N ranks and return what rank 0 wrote.

    Without mixed precision, sums of ranks are compared bit by bit or at float32's precision.
    """
    key = (num_ranks, Path(config).read_text() if "/" in config else config, precision)
    ranks = standing.pop(key, None)
    while standing and sum(each.num_ranks for each in standing.values()) + num_ranks > MOST:
        standing.pop(next(iter(standing))).end()
    ranks = ranks or Standing(num_ranks, config, precision)
    try:
        found = ranks.do(tasks)
    except BaseException:
        ranks.end()
        raise
    standing[key] = ranks
    return found
