"""Run tasks on several ranks, forked by a worker process (worker.py): faster than a launch for each test."""

import atexit
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from conftest import ROOT, story

WORKER = Path(__file__).parent / "worker.py"
numbers = itertools.count()
workers: list[subprocess.Popen[str]] = []  # at most one, started when it is needed


def _worker() -> subprocess.Popen[str]:
    if not workers:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, str(WORKER)], cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        workers.append(process)
        atexit.register(process.kill)  # its ranks end with it
    return workers[0]


def on_ranks(
    num_ranks: int, *tasks: dict[str, Any], config: str = "cpu_ddp.yaml", precision: str = "no"
) -> list[Any]:
    """Run the tasks on N ranks and return what rank 0 wrote.

    Without mixed precision, sums of ranks are compared bit by bit or at float32's precision.
    """
    config = config if "/" in config else f"accelerate_configs/{config}"
    words = ["--config_file", config, "--num_processes", str(num_ranks)]
    words += ["--mixed_precision", precision]
    log = Path(os.environ["HF_HOME"]) / f"ranks_{next(numbers)}.log"
    log.touch()
    asked = {"words": words, "num_ranks": num_ranks, "tasks": tasks, "log": log, "seconds": 240}
    worker = _worker()
    assert worker.stdin
    assert worker.stdout
    answer = None
    try:
        worker.stdin.write(json.dumps(asked, default=str) + "\n")
        worker.stdin.flush()
        answer = json.loads(worker.stdout.readline() or "null")
    finally:
        if answer is None:  # failed: the next call starts a new worker
            workers.clear()
            worker.kill()
            worker.wait()
    assert answer is not None, story(words, worker.returncode, "", log.read_text())
    assert not any(answer["codes"]), story(words, None, f"{answer['codes']}", log.read_text())
    return list(answer["found"])
