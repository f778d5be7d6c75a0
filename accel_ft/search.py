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

import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, product
from pathlib import Path
from threading import Lock
from typing import Any

import yaml
from filelock import FileLock, Timeout

from accel_ft.config import HUB_KEYS, ROW_KEYS, SearchConfig, TrainConfig, type_name
from accel_ft.data.sources import check_first_rows
from accel_ft.errors import (
    STOP_SIGNALS,
    ConfigError,
    LaunchError,
    Preempted,
    first_line,
    require,
    run_command,
)
from accel_ft.runtime.files import locked, refuse_links, sha256, write_whole
from accel_ft.runtime.logging import read_events
from accel_ft.settings import checked, meant, parse, read_settings

POLL_SECONDS = 0.2
SAME_SIGNAL_SECONDS = 1.0  # `timeout`, for one, sends its signal twice
FAILURES = 3  # after so many, with no trial finished, the job is at fault
GRID = 1000  # up to so many combinations of lists, each is tried once
LAUNCHED = ("RANK", "ACCELERATE_MIXED_PRECISION")  # set by a launcher
MEASURE = {  # settings that decide how, and when, a trial is measured
    "problem_type", "max_eval_samples", "metric_for_best_model", "greater_is_better", "reproduce",
    "eval_steps", "label_column", "label_separator",
}  # fmt: skip
NO_EFFECT = HUB_KEYS | {  # settings that do not affect a trial's result
    "output_dir", "report_to", "ddp_timeout", "dataloader_num_workers",
    "per_device_eval_batch_size", "save_steps", "save_total_limit", "logging_steps", "preflight",
    "profile", "resume_from_checkpoint", "allow_changed",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Search, and write the best settings as a job of its own."""
    config = parse(SearchConfig, argv, "search")
    if launched := [name for name in LAUNCHED if name in os.environ]:
        raise LaunchError(
            f"the search launches its trials itself, but {launched[0]} is set, as by a launcher. "
            "Fix: `python -m accel_ft.search --config_file FILE`, with accelerate's YAML"
        )
    require("search", "the search", "optuna")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)  # it would print a failed trial's traceback
    settings, space = read_settings(config.job, "job"), read_settings(config.space, "space")
    job = checked(TrainConfig, settings, origin=dict.fromkeys(settings, str(config.job)))
    if job.resume_from_checkpoint not in (None, "latest"):
        resumed = f"resume_from_checkpoint={job.resume_from_checkpoint} ({config.job})"
        raise ConfigError(f"{resumed}: a trial is a new run. Fix: leave it out")
    if job.reproduce is not None:
        raise ConfigError(
            f"reproduce={job.reproduce} ({config.job}): its trials would have that run's settings. "
            f"Fix: leave it out; --job {job.reproduce / 'config.yaml'} varies that run"
        )
    check_first_rows(job)
    ranges = _checked_ranges(config, settings, space)
    search = _Search(config, job, settings, space, ranges, _shares(config))
    config.output_dir.mkdir(parents=True, exist_ok=True)
    with locked(config.output_dir, config.output_dir / "lock"):
        # nohup ignores SIGHUP.
        heeded = [n for n in STOP_SIGNALS if signal.getsignal(n) != signal.SIG_IGN]
        before = {n: signal.signal(n, search.interrupt) for n in heeded}
        try:
            search.run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass
class _Search:
    """What all trials share.

    Attributes:
        settings: the job's keys, as in its file.
        ranges: the search space, as Optuna distributions by key.
        shares: environment variables that give each parallel trial its devices.
        failed: the settings of the trials that failed in this start, in order.
        why: the reason why the last of them failed.
        is_over: whether no further trial is started.
        is_left: whether a signal ended a trial, which saved.
        interrupted_at: monotonic time of the first signal; 0 for none.
        asking: lock around asking for a trial, and around writing best.yaml.
    """

    config: SearchConfig
    job: TrainConfig
    settings: dict[str, Any]
    space: dict[str, Any]
    ranges: dict[str, Any]
    shares: list[dict[str, str]]
    failed: list[dict[str, Any]] = field(default_factory=list)
    why: str = ""
    is_over: bool = False
    is_left: bool = False
    interrupted_at: float = 0.0
    asking: Any = field(default_factory=Lock)

    def interrupt(self, number: int, _: object) -> None:
        """Let SIGTERM and Ctrl-C end the trials, which save; a second one ends the search at once.

        The trials' threads poll `interrupted_at`: an exception here would not reach them.
        """
        now = time.monotonic()
        self.interrupted_at = self.interrupted_at or now
        if now - self.interrupted_at > SAME_SIGNAL_SECONDS:
            os._exit(128 + number)

    def run(self) -> None:
        """Start or continue the study, and write best.yaml."""
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalStorage

        folder, job, state = self.config.output_dir, self.job, optuna.trial.TrialState
        journal = folder / "study.log"
        written = journal.read_bytes() if journal.exists() else b""
        write_whole(journal, written[: written.rfind(b"\n") + 1])  # drops a line cut by a full disk
        wanted = "maximize" if job.takes_highest else "minimize"
        try:
            # The folder's lock admits one process; Optuna's own lock would outlive a kill.
            backend = JournalFileBackend(str(journal), lock_obj=Lock())
            backend.append_logs = partial(_append_whole, backend.append_logs, journal)
            storage = JournalStorage(backend)
            open_study = partial(
                optuna.create_study, study_name="search", storage=storage, load_if_exists=True,
                direction=wanted, pruner=optuna.pruners.MedianPruner(),
            )  # fmt: skip
            study = open_study()
            if not study.trials and study.direction.name.lower() != wanted:
                optuna.delete_study(study_name="search", storage=storage)  # for another metric
                study = open_study()
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{journal}: is damaged ({first_line(error)}). Fix: another output_dir"
            ) from error
        self._check_same(study)
        seed = job.seed + len(study.trials)  # a continued study must not repeat its draws
        study.sampler = optuna.samplers.TPESampler(seed=seed)
        for trial in study.get_trials(states=(state.RUNNING,)):  # left by an ended search
            study.tell(trial.number, state=state.FAIL)
            params = trial.system_attrs.get("fixed_params", {}) | trial.params  # ended inside `ask`
            study.enqueue_trial(params, user_attrs={"folder": _folder(trial)})
        turns = iter(range(self.config.num_trials - _num_ended(study)))
        with ThreadPoolExecutor(len(self.shares)) as pool:
            works = [pool.submit(self.work, study, turns, share) for share in self.shares]
        for work in works:
            work.result()
        if self.interrupted_at or self.is_left:
            raise Preempted("interrupted; the same command continues the study")
        why = f"{len(self.failed)} failed" + f": {self.why}" * bool(self.failed)
        if not study.get_trials(states=(state.COMPLETE,)):
            raise ConfigError(
                f"{folder}: no trial finished, {why} (see each trial's log). Fix: correct the job "
                "or the space, and use another output_dir"
            )
        if self.failed:
            print(f"trials of this start: {why}", file=sys.stderr, flush=True)
        print(
            f"best {job.best_metric} {study.best_value:.4f} with {study.best_params}, in "
            f"{folder / _folder(study.best_trial)}\njob: {self.leave_best(study)}"
        )

    def leave_best(self, study: Any) -> Path:
        """Write best.yaml, the job of the best trial so far; return its path."""
        path = self.config.output_dir / "best.yaml"
        with self.asking:
            own = {"output_dir": str(self.config.output_dir / "best")}
            found = self.settings | study.best_params | own
            write_whole(path, yaml.safe_dump(found, sort_keys=False, allow_unicode=True))
        return path

    def _check_same(self, study: Any) -> None:
        """Refuse a job, rows or a space whose trials would not be comparable with the study's.

        Raises:
            ConfigError: naming the key.
        """
        asked = self.job.model_dump(mode="json", exclude={*NO_EFFECT, *self.space})
        for split, path in self.job.files.items():
            asked[f"SHA-256 of {split}_file"] = sha256(path)
        strategy = _strategy(self.config)
        asked["mixed_precision of accelerate's YAML"] = strategy.get("mixed_precision") or "no"
        steps = "gradient_accumulation_steps"  # with it, more ranks make a larger global batch
        if self.job.gradient_accumulation_steps or steps in self.space:
            asked["num_processes of accelerate's YAML"] = strategy.get("num_processes")
        for key, values in self.space.items():  # the bounds of a range may change
            a_range = isinstance(values, dict) and f"a {'log ' * bool(values.get('log'))}range"
            asked[key] = a_range or f"one of {values}"
        named = {path.name for path in self.config.output_dir.glob("trial_" + "[0-9]" * 4)}
        is_asked = "asked" in study.user_attrs or not study.trials
        if not (is_asked and named <= {*map(_folder, study.trials)}):
            raise ConfigError(
                f"{self.config.output_dir / 'study.log'}: is damaged, missing or an old copy, "
                "though there are trials. Fix: another output_dir"
            )
        earlier = study.user_attrs["asked"] if study.trials else {}
        for key, was in earlier.items():
            is_hashed = f"SHA-256 of {key}" in asked.keys() & earlier.keys()  # may be moved
            if asked.get(key, was) != was and not is_hashed:
                raise ConfigError(
                    f"{key}={asked[key]}: was {was} in the trials of {self.config.output_dir}. "
                    "Fix: that value, or another output_dir"
                )
        for trial in study.trials:  # it may come from somebody else
            params = trial.system_attrs.get("fixed_params", {}) | trial.params
            if not (re.fullmatch(r"trial_\d+", _folder(trial)) and self._is_in_space(params)):
                raise ConfigError(
                    f"{self.config.output_dir / 'study.log'}: its trial {trial.number} has "
                    "settings or a folder that no search has given it. Fix: another output_dir"
                )
        study.set_user_attr("asked", asked)

    def _is_in_space(self, params: dict[str, Any]) -> bool:
        """Whether keys, and values from lists, are those of the space; ranges may change."""
        return params.keys() <= self.ranges.keys() and all(
            value in getattr(self.ranges[key], "choices", [value]) for key, value in params.items()
        )

    def work(self, study: Any, turns: Iterator[int], share: dict[str, str]) -> None:
        """Run trials one after another on a share of the devices. A trial that a signal (to it,
        or to the search) or a fault (a full disk) ends stays RUNNING in the study: the next start
        resumes it.
        """
        try:
            while not (self.is_over or self.interrupted_at) and next(turns, None) is not None:
                trial = self.ask(study)
                if trial is None:
                    return
                value, state = self.try_out(trial, share)
                if state is not None and not self.interrupted_at:
                    study.tell(trial, value, state)
                    if value is not None:
                        self.leave_best(study)
        except BaseException:
            self.is_over = True
            raise

    def ask(self, study: Any) -> Any:
        """Return the next trial. If all keys are lists, with at most GRID combinations, each is
        tried once, in random order; one that failed in an earlier start is tried again, after the
        others. None if all have been tried.
        """
        with self.asking:
            sizes = [len(getattr(each, "choices", ())) for each in self.ranges.values()]
            waiting = any(trial.state.name == "WAITING" for trial in study.trials)
            if waiting or not 0 < math.prod(sizes) <= GRID:
                return study.ask(self.ranges)
            failed = [trial.params for trial in study.trials if trial.state.name == "FAIL"]
            ended = [trial.params for trial in study.trials if trial.state.name != "FAIL"]
            choices = product(*(each.choices for each in self.ranges.values()))
            grid = [dict(zip(self.ranges, values, strict=True)) for values in choices]
            left = [params for params in grid if params not in [*ended, *self.failed]]
            if not left and not self.is_over:
                print(f"all {len(grid)} combinations have been started", flush=True)
                self.is_over = True
            if self.is_over:
                return None
            random.Random(self.job.seed).shuffle(left)
            study.enqueue_trial(min(left, key=failed.count))
            return study.ask(self.ranges)

    def try_out(self, trial: Any, share: dict[str, str]) -> tuple[float | None, Any]:
        """Train with a trial's settings; return the final model's value and the trial's state, None
        if it is to be resumed.
        """
        from optuna.trial import TrialState

        folder = self.config.output_dir / _folder(trial)
        refuse_links(folder, folder / "log")
        folder.mkdir(exist_ok=True)
        own = {"output_dir": str(folder), "resume_from_checkpoint": "latest", "push_to_hub": False}
        write_whole(folder / "job.yaml", yaml.safe_dump(self.settings | trial.params | own))
        events = folder / "metrics.jsonl"
        num_stops = len(list(read_events(events, "preempted")))
        is_pruned = self._train(trial, folder, share)
        about = f"{folder}: {trial.params}"
        if self.interrupted_at:
            return None, None
        if is_pruned:
            print(f"{about}: worse than the median, stopped", flush=True)
            return None, TrialState.PRUNED
        if ends := list(read_events(events, "end")):
            value = self.job.best_value(ends[-1], "eval_")
            if not math.isnan(value):  # Optuna would silently count NaN as a failure
                print(f"{about}: {self.job.best_metric} {value:.4f}", flush=True)
                return value, TrialState.COMPLETE
        elif len(list(read_events(events, "preempted"))) > num_stops:
            print(f"{about}: was stopped by a signal; the next start resumes it", flush=True)
            self.is_left = True
            return None, None
        why = f"its {self.job.best_metric} is NaN" if ends else _why(folder / "log")
        print(f"{about}: failed: {why} (see its log)", flush=True)
        self.failed.append(trial.params)
        self.why = why
        if len(self.failed) >= FAILURES and not _num_ended(trial.study):
            self.is_over = True
        return None, TrialState.FAIL

    def _train(self, trial: Any, folder: Path, share: dict[str, str]) -> bool:
        """Run a trial's job until it ends, is worse than the median, or a signal arrives; return
        whether it is to be pruned as worse.
        """
        if _is_locked(folder):
            print(f"{folder}: a killed search's trial still runs here: waiting", flush=True)
        while _is_locked(folder) and not self.interrupted_at:  # left by a killed search
            time.sleep(POLL_SECONDS)
        if self.interrupted_at:
            return False
        file = self.config.config_file
        command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
        command += ["--config_file", str(file)] * (file is not None)
        command += ["-m", "accel_ft.train", "--config", str(folder / "job.yaml")]
        print(f"{folder}: {trial.params}: begins, see {folder / 'log'}", flush=True)
        with (folder / "log").open("a") as log:  # a new session: Ctrl-C reaches only the search
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | share, start_new_session=True
            )
        events, told, is_pruned, is_at_work = folder / "metrics.jsonl", 0, False, True
        size = -1
        try:
            while is_at_work and not is_pruned and not self.interrupted_at:
                time.sleep(POLL_SECONDS)
                is_at_work = process.poll() is None
                size, before = events.stat().st_size if events.exists() else 0, size
                if size == before:
                    continue
                for event in islice(read_events(events, "eval"), told, None):
                    told += 1  # Optuna's step: updates differ with the batch size
                    value = self.job.best_value(event, "eval_")
                    if not math.isnan(value):
                        trial.report(value, told)
                        is_pruned |= is_at_work and bool(trial.should_prune())
                # A finished trial is not pruned: one left by a killed search may finish meanwhile.
                is_pruned = is_pruned and not any(read_events(events, "end"))
        finally:
            if process.poll() is None:  # the group: the launcher forwards no signal
                os.killpg(process.pid, signal.SIGTERM)
            while process.poll() is None or _is_locked(folder):  # nor waits for its ranks
                time.sleep(POLL_SECONDS)
        return is_pruned


def _append_whole(append: Callable[[Any], None], journal: Path, logs: Any) -> None:
    """Append to the study. A line cut by a full disk is taken back: another trial may still add
    its own, and a study with half a line in its middle cannot be read.
    """
    size = journal.stat().st_size
    try:
        append(logs)
    except OSError:
        os.truncate(journal, size)
        raise


def _why(log: Path) -> str:
    """Return the last error in a run's log that is not its launcher's own, else its last line."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    patterns = (
        r"error: ",
        r"(\[rank\d+\]: )?(?!.*(CalledProcess|ChildFailed))[\w.]+(Error|Exception)\b",
    )
    found = ([line for line in lines if re.match(each, line)] for each in patterns)
    return next((errors[-1] for errors in found if errors), lines[-1] if lines else "no message")


def _num_ended(study: Any) -> int:
    """Return how many trials count: those at their end, and those stopped early."""
    return sum(trial.state.name in ("COMPLETE", "PRUNED") for trial in study.trials)


def _folder(trial: Any) -> str:
    """Return the name of a trial's folder; a resumed trial keeps that of its first start."""
    return str(trial.user_attrs.get("folder", f"trial_{trial.number:04d}"))


def _is_locked(folder: Path) -> bool:
    """Whether a rank trains in a folder, or still saves."""
    try:
        with FileLock(folder / "ranks/lock", timeout=0, fallback_to_soft=False):
            return False
    except OSError as error:  # else the file system has no locks
        return isinstance(error, Timeout)


def _checked_ranges(
    config: SearchConfig, settings: dict[str, Any], space: dict[str, Any]
) -> dict[str, Any]:
    """Return a space as Optuna distributions by key.

    Raises:
        ConfigError: listing all faults: keys that cannot be varied, and values that are no range.
    """
    fixed = {key: value for key, value in settings.items() if key not in space}
    faults, known = [], TrainConfig.model_fields.keys() - NO_EFFECT - ROW_KEYS - MEASURE
    ranges = {}
    for key, values in space.items():
        try:
            if key in MEASURE:
                raise ConfigError(f"{key}: trials could not be compared. Fix: set it in the job")
            if key not in known:
                raise ConfigError(f"{key}: cannot be varied.{meant(key, known)}")
            counts = settings.get("max_steps") is not None or "max_steps" in space
            if key == "num_train_epochs" and counts:
                raise ConfigError(f"{key}: has no effect beside max_steps")
            ranges[key] = _distribution(key, values)
            for value in values if isinstance(values, list) else (values["low"], values["high"]):
                job = checked(TrainConfig, fixed | {key: value})
                for idle, others, words in job.idle_keys():
                    if idle == key and not space.keys() & others:
                        raise ConfigError(words)
        except ConfigError as error:
            faults.append(str(error))
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            faults.append(
                f"{key}={values}: is no range ({first_line(error)}). Allowed: {{low: A, high: B}}, "
                "A below B, with log: true or step: S; or a list"
            )
    if not space or faults:
        raise ConfigError(f"space={config.space}: " + ("\n  ".join(faults) or "is empty"))
    return ranges


def _distribution(key: str, values: Any) -> Any:
    from optuna import distributions

    if isinstance(values, list):
        plain = [",".join(map(str, each)) if isinstance(each, list) else each for each in values]
        return distributions.CategoricalDistribution(plain)
    if not isinstance(values, dict):
        raise TypeError("a single value")
    # YAML reads 1e-5, which has no dot, as text.
    values = {k: float(v) if isinstance(v, str) else v for k, v in values.items()}
    kinds = type_name(TrainConfig.model_fields[key].annotation).split("|")
    if "FLOAT" in kinds:
        return distributions.FloatDistribution(**values)
    if "INT" in kinds:
        if any(v != int(v) for v in values.values()):
            raise ValueError("not whole numbers")
        return distributions.IntDistribution(**values)
    raise TypeError("its values are no numbers")


def _strategy(config: SearchConfig) -> dict[str, Any]:
    """Return the keys of the accelerate YAML that the launcher will use; {} for none."""
    if config.config_file is not None:
        return read_settings(config.config_file, "config_file")
    from accelerate.commands.config.config_args import default_config_file

    file = Path(default_config_file)
    return read_settings(file, "config_file") if file.is_file() else {}


def _shares(config: SearchConfig) -> list[dict[str, str]]:
    """Return the environment variables of each parallel trial, which give it GPUs of its own; with
    fewer GPUs than trials, some share one.

    Raises:
        ConfigError: accelerate's YAML assigns GPUs itself.
    """
    num_trials = config.parallel_trials
    if num_trials == 1:
        return [{}]
    import torch

    strategy = _strategy(config)
    count = 0 if strategy.get("use_cpu") else torch.cuda.device_count()
    if not count:
        return [{}] * num_trials
    if (gpu_ids := strategy.get("gpu_ids")) not in (None, "all"):
        raise ConfigError(
            f"config_file={config.config_file or 'of `accelerate config`'}: its gpu_ids={gpu_ids} "
            "would put all parallel trials on these GPUs. Fix: leave it out, and "
            "choose by CUDA_VISIBLE_DEVICES"
        )
    named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    devices, each = named.split(",")[:count], max(count // num_trials, 1)
    starts = [number * each % count for number in range(num_trials)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(devices[s : s + each])} for s in starts]


if __name__ == "__main__":
    run_command(main)
