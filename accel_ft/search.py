"""Search for better settings of a job with Optuna: python -m accel_ft.search --job JOB.yaml --space
SPACE.yaml.

Each trial is a run of its own, started by `accelerate launch`. One that is worse than the median at
an evaluation is stopped. The study is kept in output_dir: the same command goes on with it.

SPACE.yaml holds a line for each key to be varied:

    learning_rate: {low: 1.0e-5, high: 5.0e-4, log: true}
    num_train_epochs: {low: 1, high: 4}
    lr_scheduler_type: [linear, cosine]
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import yaml
from filelock import FileLock, Timeout

from accel_ft.config import SearchConfig, TrainConfig, type_name
from accel_ft.data.sources import check_first_rows
from accel_ft.errors import ConfigError, first_line, nearest, require, run_command
from accel_ft.runtime.files import locked, sha256, write_whole
from accel_ft.runtime.logging import read_events
from accel_ft.settings import checked, parse, read_settings

POLL_SECONDS = 0.2
SAVE_SECONDS = 600
FAILURES = 3  # after so many, and no trial at its end, the cause is the job
IDLE = {  # settings that decide nothing of what a trial finds
    "output_dir", "report_to", "push_to_hub", "hub_model_id", "hub_private_repo", "ddp_timeout",
    "dataloader_num_workers", "per_device_eval_batch_size", "save_steps", "save_total_limit",
    "logging_steps", "preflight", "profile", "resume_from_checkpoint", "allow_changed",
}  # fmt: skip
interrupted = Event()


@dataclass
class _Run:
    """A trial, and the process that trains for it.

    Attributes:
        share: of the devices, as its environment has it.
        process: None before it has begun.
        told: the value of each of its evaluations.
        ended: when its process had, on the monotonic clock; 0 before.
    """

    trial: Any
    folder: Path
    share: dict[str, str]
    process: Any = None
    told: list[float] = field(default_factory=list)
    ended: float = 0.0
    is_pruned: bool = False


def main(argv: Sequence[str] | None = None) -> None:
    """Search, and write the best settings as a job of its own."""
    config = parse(SearchConfig, argv, "search")
    require("search", "the search", "optuna")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)  # it would print a failed trial's traceback
    settings, space = read_settings(config.job), read_settings(config.space)
    job = checked(TrainConfig, settings)
    check_first_rows(job)
    _check_space(config, settings, space)
    config.output_dir.mkdir(parents=True, exist_ok=True)
    with locked(config.output_dir, config.output_dir / "lock"), _interruptible():
        _search(config, job, settings, space)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Have SIGTERM end the search as Ctrl-C does: its trials save, the next start takes them up.

    The loop looks for it: raised here, it could cut off a write to the study, which then stays
    locked. A second signal does what it always did.
    """

    def interrupt(number: int, _: object) -> None:
        interrupted.set()
        signal.signal(number, before[signal.Signals(number)])

    interrupted.clear()
    before = {n: signal.signal(n, interrupt) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _search(
    config: SearchConfig, job: TrainConfig, settings: dict[str, Any], space: dict[str, Any]
) -> None:
    import optuna
    import sqlalchemy

    database = sqlalchemy.URL.create("sqlite", database=str(config.output_dir / "study.db"))
    study = optuna.create_study(
        study_name=job.best_metric,
        storage=optuna.storages.RDBStorage(
            str(database), engine_kwargs={"poolclass": sqlalchemy.NullPool}
        ),
        load_if_exists=True,
        direction="maximize" if job.takes_highest else "minimize",
        pruner=optuna.pruners.MedianPruner(n_startup_trials=config.num_startup_trials),
    )
    _check_known(config, study, space, job)
    seed = job.seed + len(study.trials)  # a study that goes on draws anew
    study.sampler = optuna.samplers.TPESampler(seed=seed)
    for trial in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):  # of a search killed
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        study.enqueue_trial(trial.params)
    ended = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
    left = config.num_trials - len(study.get_trials(states=ended))

    shares, running, failures = _shares(config), list[_Run](), 0
    try:
        while running or left > 0:
            if left > 0 and shares:
                trial = study.ask()
                folder = _begin(trial, space, settings, config.output_dir)
                running.append(_Run(trial, folder, shares.pop(0)))
                left -= 1
            time.sleep(POLL_SECONDS)
            if interrupted.is_set():  # not wait(): the handler, in this thread, needs its lock
                raise KeyboardInterrupt
            at_work = {run.folder: run for run in reversed(running)}  # the same settings, in turn
            for run in at_work.values():
                if not _goes_on(run, config, job):
                    failures += not _tell(study, run, job)
                    running.remove(run)
                    shares.append(run.share)
            if failures >= FAILURES and not study.get_trials(states=ended):
                left = 0
    finally:  # the next start finds those that run still, and goes on with them
        begun = [run for run in running if run.process is not None]
        for run in begun:
            run.process.terminate()
        while any(map(_is_at_work, begun)):
            time.sleep(POLL_SECONDS)
    if not study.get_trials(states=(optuna.trial.TrialState.COMPLETE,)):
        raise ConfigError(f"{config.output_dir}: no trial came to its end")
    best = config.output_dir / "best.yaml"
    ran = study.best_trial.user_attrs.get("job", settings | study.best_params)
    found = ran | {"output_dir": str(config.output_dir / "best")}
    write_whole(best, yaml.safe_dump(found, sort_keys=False, allow_unicode=True))
    states = [trial.state.name.lower() for trial in study.trials]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    print(
        f"best {job.best_metric} {study.best_value:.4f} with {study.best_params} ({counts})\n"
        f"job: {best}"
    )


def _check_space(config: SearchConfig, settings: dict[str, Any], space: dict[str, Any]) -> None:
    """Refuse what is no key of a job, or no range.

    Raises:
        ConfigError: listing all faults.
    """
    import optuna

    trial = optuna.create_study().ask()  # in memory; it refuses what a trial would
    fixed = {key: value for key, value in settings.items() if key not in space}
    faults, known = [], TrainConfig.model_fields.keys() - {"output_dir"}
    for key, values in space.items():
        if key not in known:
            faults.append(f"{key}: cannot be varied.{nearest(key, known)}")
            continue
        try:
            if not isinstance(values, list | dict):
                raise TypeError("one value")
            drawn = _suggest(trial, key, values)  # a yes or no, say, is none of a range
            ends = values if isinstance(values, list) else (values["low"], values["high"])
            for value in (*ends, drawn):
                checked(TrainConfig, fixed | {key: value})
        except ConfigError as error:
            faults.append(str(error))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            faults.append(
                f"{key}={values}: no range ({first_line(error)}). Allowed: {{low: A, high: B, "
                "log: true}, or a list; YAML wants 1.0e-5, not 1e-5"
            )
    if not space or faults:
        raise ConfigError(f"space={config.space}: " + ("\n  ".join(faults) or "is empty"))


def _check_known(config: SearchConfig, study: Any, space: dict[str, Any], job: TrainConfig) -> None:
    """Refuse a space, settings or rows in which the study's earlier trials cannot be compared.

    Raises:
        ConfigError: naming the key.
    """
    settings = job.model_dump(mode="json", exclude={*IDLE, *space})
    for key in ("train_file", "validation_file", "test_file"):
        if (path := getattr(job, key)) is not None:
            settings[f"SHA-256 of {key}"] = sha256(path)
    choices = {  # of ranges, the ends may move
        key: values if isinstance(values, list) else {"log": bool(values.get("log"))}
        for key, values in space.items()
    }
    for name, file, now in (("settings", config.job, settings), ("space", config.space, choices)):
        earlier = study.user_attrs.get(name, {}) if study.trials else {}
        for key in earlier.keys() & now.keys():
            if earlier[key] != now[key]:
                was = f"was {earlier[key]!r}" if name == "settings" else "had other choices"
                raise ConfigError(
                    f"{file}: {key} {was} in the trials of {config.output_dir}. "
                    "Fix: as it was, or another output_dir"
                )
        study.set_user_attr(name, earlier | now if name == "space" else now)


def _shares(config: SearchConfig) -> list[dict[str, str]]:
    """Return what each of the trials at the same time has in its environment: GPUs of its own, as
    far as they go round.

    Raises:
        ConfigError: the strategy's YAML names other GPUs, or more processes than a trial has GPUs.
    """
    parallel_trials = config.parallel_trials
    if parallel_trials == 1:
        return [{}]
    import torch

    strategy = read_settings(config.config_file) if config.config_file is not None else {}
    count = 0 if strategy.get("use_cpu") else torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    devices, each = named.split(",")[:count], max(count // parallel_trials, 1)
    processes, gpu_ids = strategy.get("num_processes") or 1, strategy.get("gpu_ids") or "all"
    if count and gpu_ids != "all":
        raise ConfigError(
            f"config_file={config.config_file}: its gpu_ids={gpu_ids} would put all trials at the "
            "same time on these. Fix: leave it out, CUDA_VISIBLE_DEVICES says which"
        )
    if count and processes > each:
        raise ConfigError(
            f"parallel_trials={parallel_trials}: each has {each} of {count} GPUs, and "
            f"{config.config_file} starts {processes} processes. Fix: fewer at the same time"
        )
    starts = [number * each % max(count, 1) for number in range(parallel_trials)]
    shares = [",".join(devices[start : start + each]) for start in starts]
    return [{"CUDA_VISIBLE_DEVICES": share} if share else {} for share in shares]


def _suggest(trial: Any, key: str, values: Any) -> Any:
    if isinstance(values, list):
        plain = [",".join(map(str, each)) if isinstance(each, list) else each for each in values]
        return trial.suggest_categorical(key, plain)
    kinds = type_name(TrainConfig.model_fields[key].annotation).split("|")
    whole = "INT" in kinds and "FLOAT" not in kinds
    return (trial.suggest_int if whole else trial.suggest_float)(key, **values)


def _begin(trial: Any, space: dict[str, Any], settings: dict[str, Any], place: Path) -> Path:
    """Draw a trial's settings, and write its job into the folder of `place` that is returned."""
    settings = settings | {key: _suggest(trial, key, values) for key, values in space.items()}
    decisive = {key: value for key, value in settings.items() if key not in IDLE}
    text = json.dumps(decisive, sort_keys=True, default=str)
    name = hashlib.sha256(text.encode()).hexdigest()[:12]
    folder = place / f"trial_{name}"  # the same settings go on where they were
    folder.mkdir(exist_ok=True)
    trial.set_user_attr("job", settings)
    keys = settings | {"output_dir": str(folder), "resume_from_checkpoint": "latest"}
    keys["push_to_hub"] = False  # it is no model to show
    write_whole(folder / "job.yaml", yaml.safe_dump(keys, allow_unicode=True))
    return folder


def _goes_on(run: _Run, config: SearchConfig, job: TrainConfig) -> bool:
    """Start a trial's process where it has none, hand its evaluations to the study, and stop it
    where it is worse than the median; whether it is not at its end.
    """
    if run.process is None:
        if _is_locked(run.folder):  # a search that was killed left it
            return True
        command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
        if config.config_file is not None:
            command += ["--config_file", str(config.config_file)]
        command += ["-m", "accel_ft.train", "--config", str(run.folder / "job.yaml")]
        with (run.folder / "log").open("a") as log:
            environment = os.environ | run.share
            run.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    goes_on = _is_at_work(run)
    for event in _events(run.folder, "eval")[len(run.told) :]:
        run.told.append(job.best_value(event, "eval_"))
        run.trial.report(run.told[-1], len(run.told))  # updates are not alike: batches differ
        if run.process.poll() is None and not run.is_pruned and run.trial.should_prune():
            run.is_pruned = True
            run.process.send_signal(signal.SIGTERM)
    return goes_on


def _is_at_work(run: _Run) -> bool:
    """Whether a trial's process, or its rank, has not ended: the launcher of one rank ends before
    that has saved, and given its lock back.
    """
    if run.process.poll() is None:
        return True
    run.ended = run.ended or time.monotonic()
    return _is_locked(run.folder) and time.monotonic() - run.ended < SAVE_SECONDS


def _is_locked(folder: Path) -> bool:
    lock = folder / "ranks/lock"
    if not lock.exists():  # a look would make it, and its folder
        return False
    try:
        with FileLock(lock, timeout=0, fallback_to_soft=False):
            return False
    except Timeout:
        return True
    except OSError:  # a file system without locks
        return False


def _tell(study: Any, run: _Run, job: TrainConfig) -> bool:
    """Tell the study how a trial ended; False where its run failed."""
    import optuna

    last = run.told[-1] if run.told else None
    about = f"{run.folder.name}: {run.trial.params}: {last}"
    print(f"{about}{' (stopped)' * run.is_pruned}", flush=True)
    ends = _events(run.folder, "end")
    if run.is_pruned:
        study.tell(run.trial, state=optuna.trial.TrialState.PRUNED)
    elif ends:
        study.tell(run.trial, job.best_value(ends[-1], "eval_"))
    else:
        study.tell(run.trial, state=optuna.trial.TrialState.FAIL)
        log = (run.folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in log if line.startswith("error: ")] or log or [""]
        print(f"{run.folder}: failed: {errors[-1]} (see its log)", flush=True)
        return False
    return True


def _events(folder: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "metrics.jsonl") if event["event"] == name]


if __name__ == "__main__":
    run_command(main)
