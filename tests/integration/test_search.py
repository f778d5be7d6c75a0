"""The search over a space of settings."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Lock, Thread, Timer
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml
from conftest import ROOT, job_words, run
from filelock import FileLock

from accel_ft import search, train
from accel_ft.config import SearchConfig, TrainConfig
from accel_ft.errors import ConfigError, LaunchError, Preempted
from accel_ft.settings import checked, read_settings


def study_in(folder: Path):
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalStorage

    storage = JournalStorage(JournalFileBackend(str(folder / "study.log")))
    return optuna.create_study(study_name="search", storage=storage, load_if_exists=True)


def states(study) -> list[str]:
    return [trial.state.name for trial in study.trials]


def test_a_rank_holds_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not search._is_locked(tmp_path)  # it never had a lock
    with FileLock(tmp_path / "ranks/lock"):
        assert search._is_locked(tmp_path)
    assert not search._is_locked(tmp_path)

    def no_locks(*_: object, **__: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(search, "FileLock", no_locks)  # a file system without locks
    assert not search._is_locked(tmp_path)


def test_search(tiny_model: Path, rows_file: Path, odd_file: Path, tmp_path: Path) -> None:
    """Trials run, the study continues where it was, and its best.yaml is a job that trains."""
    pytest.importorskip("optuna")
    words = job_words(tiny_model, rows_file, odd_file, tmp_path / "run")
    settings = dict(zip((w.removeprefix("--") for w in words[::2]), words[1::2], strict=True))
    settings |= {"eval_steps": 3, "save_total_limit": None, "save_steps": 100}
    settings["push_to_hub"] = True  # for the best job, later: no trial pushes
    settings = {k: int(v) if str(v).isdigit() else v for k, v in settings.items()} | {
        "learning_rate": 1e-3
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "space.yaml").write_text(
        "learning_rate: [1.0e-9, 5.0e-3]\nwarmup_steps: {low: 0, high: 2}\n"
    )
    command = [
        "python",
        "-m",
        "accel_ft.search",
        "--job",
        tmp_path / "job.yaml",
        "--space",
        tmp_path / "space.yaml",
    ]
    command += ["--output_dir", tmp_path / "search", "--config_file", "accelerate_configs/cpu.yaml"]
    run(*command, "--num_trials", "1")
    done = run(*command, "--num_trials", "3", "--parallel_trials", "2")
    best = yaml.safe_load((tmp_path / "search/best.yaml").read_text())
    assert best["learning_rate"] in (1e-9, 5e-3)
    assert best["output_dir"] == str(tmp_path / "search/best")
    assert best["train_file"] == str(rows_file)
    assert "[I " not in done.stderr  # Optuna's log
    assert done.stdout.count(": begins, see ") == 2  # the first one is remembered
    assert len(study_in(tmp_path / "search").trials) == 3
    assert best["push_to_hub"] is True
    train.main(["--config", str(tmp_path / "search/best.yaml"), "--push_to_hub", "false"])


def test_trials_at_the_same_time_have_gpus_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    strategy = tmp_path / "strategy.yaml"

    def shares(
        parallel_trials: int, num_gpus: int, visible: str = "", **settings: object
    ) -> list[str | None]:
        monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        strategy.write_text(yaml.safe_dump(settings))
        config = SearchConfig(
            job=strategy, space=strategy, config_file=strategy, parallel_trials=parallel_trials
        )
        return [share.get("CUDA_VISIBLE_DEVICES") for share in search._shares(config)]

    assert shares(1, 8) == [None]
    assert shares(2, 0) == [None, None]
    assert shares(4, 8) == ["0,1", "2,3", "4,5", "6,7"]
    assert shares(3, 2) == ["0", "1", "0"]
    assert shares(2, 2, "5,7") == ["5", "7"]
    assert shares(2, 4, num_processes=2, gpu_ids="all") == ["0,1", "2,3"]
    assert shares(2, 4, num_processes=4, gpu_ids="0", use_cpu=True) == [None, None]
    assert shares(1, 4, gpu_ids="0,1") == [None]
    for gpu_ids in ("0,1", 0):
        with pytest.raises(ConfigError, match=f"gpu_ids={gpu_ids} would put all parallel trials"):
            shares(2, 4, num_processes=2, gpu_ids=gpu_ids)


STAND_IN = """
import fcntl, json, os, signal, sys, time, yaml
if "FAILS" in os.environ:
    sys.exit("error: the rows are bad")
keys = yaml.safe_load(open(sys.argv[sys.argv.index("--config") + 1]))
folder = keys["output_dir"]

def hold_lock():
    os.makedirs(folder + "/ranks", exist_ok=True)
    lock = os.open(folder + "/ranks/lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)

def save(*_):
    time.sleep(1)
    open(folder + "/saved", "w").close()
    os._exit(75)

if "HAS_A_RANK" in os.environ:
    if os.fork():
        os.wait()
        sys.exit()
    if "SAVES" in os.environ["HAS_A_RANK"]:
        signal.signal(signal.SIGTERM, save)
        hold_lock()
events = open(folder + "/metrics.jsonl", "w", buffering=1)
rate = float(keys["learning_rate"])
if os.environ.get("STOPPED_AT") == str(rate):
    events.write(json.dumps({"event": "preempted", "step": 1}) + "\\n")
    sys.exit(1)  # as the launcher of a rank that returns 75
if os.environ.get("FAILS_AT") == str(rate):
    sys.exit("error: out of memory")
for step in range(1, 9):
    score = rate - step / 1000
    told = None if "NO_NUMBERS" in os.environ else score
    events.write(json.dumps({"event": "eval", "step": step, "eval_accuracy": told}) + "\\n")
    time.sleep(0 if rate > 0.5 else 0.3)
score = None if "NO_NUMBER" in os.environ else score
events.write(json.dumps({"event": "end", "step": 8, "eval_accuracy": score}) + "\\n")
if "LEAVES_ITS_RANK" in os.environ:
    hold_lock()
    if os.fork() == 0:
        save()
if "FAILS_AT_ITS_END" in os.environ:
    sys.exit(1)
"""


@pytest.fixture
def search_of_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Search over stand-ins for runs: their accuracy is their learning rate, and falls with each evaluation."""
    pytest.importorskip("optuna")
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    (tmp_path / "job.yaml").write_text("seed: 1\n")
    space = tmp_path / "space.yaml"
    popen = subprocess.Popen
    monkeypatch.setattr(
        search.subprocess,
        "Popen",
        lambda command, **keys: popen(
            [sys.executable, str(tmp_path / "stand_in.py"), *command], **keys
        ),
    )

    def start(lines: str, *words: str, folder: Path = tmp_path / "search"):
        space.write_text(lines)
        places = ["--job", tmp_path / "job.yaml", "--space", space, "--output_dir", folder]
        search.main([*map(str, places), *words])
        return study_in(folder)

    return start


def stand_ins(folder: Path) -> list[int]:
    """Return the ids of the stand-ins that still run."""
    found = psutil.process_iter(["pid", "cmdline"])  # cmdline is None once it has ended
    return [p.pid for p in found if str(folder / "stand_in.py") in (p.info["cmdline"] or [])]


def signal_when_begun(folder: Path, num_trials: int, number: int = signal.SIGTERM) -> None:
    """Send this process a signal once `num_trials` trials have begun."""

    def wait() -> None:
        while len(list(folder.glob("search/trial_*/metrics.jsonl"))) < num_trials:
            time.sleep(0.1)
        os.kill(os.getpid(), number)

    Thread(target=wait, daemon=True).start()


def test_a_search_that_goes_on_tries_other_settings(search_of_stand_ins) -> None:
    space = "learning_rate: {low: 0.6, high: 0.9}\n"
    search_of_stand_ins(space, "--num_trials", "2")
    study = search_of_stand_ins(space, "--num_trials", "4")
    assert len({trial.params["learning_rate"] for trial in study.trials}) == 4
    value = study.best_params["learning_rate"] - 8 / 1000  # at its end, not at its best evaluation
    assert study.best_value == pytest.approx(value)


def test_each_combination_of_lists_is_tried_once(
    search_of_stand_ins, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same settings would give the same result again; those that failed are retried, as the fault may be fixed."""
    space = "learning_rate: [0.6, 0.7]\nweight_decay: [0.1, 0.2]\n"
    monkeypatch.setenv("FAILS", "1")
    with pytest.raises(ConfigError, match="no trial finished, 1 failed"):
        search_of_stand_ins(space, "--num_trials", "1")
    monkeypatch.delenv("FAILS")
    search_of_stand_ins(space, "--num_trials", "2")
    study = search_of_stand_ins(space, "--num_trials", "9", "--parallel_trials", "3")
    assert states(study) == ["FAIL", *["COMPLETE"] * 4]
    assert len({tuple(trial.params.items()) for trial in study.trials[1:]}) == 4
    assert study.trials[1].params != study.trials[0].params
    assert capsys.readouterr().out.count("all 4 combinations have been started") == 1


def test_a_combination_that_cannot_run_is_tried_once(
    search_of_stand_ins, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once per start: it used to be retried until no trials were left."""
    space = "learning_rate: [0.6, 0.7, 0.8]\n"
    monkeypatch.setenv("FAILS_AT", "0.8")
    study = search_of_stand_ins(space, "--num_trials", "9")
    assert sorted(states(study)) == ["COMPLETE", "COMPLETE", "FAIL"]
    told = capsys.readouterr()
    assert "all 3 combinations have been started" in told.out
    assert "trials of this start: 1 failed: error: out of memory" in told.err
    monkeypatch.delenv("FAILS_AT")
    assert states(search_of_stand_ins(space, "--num_trials", "9")).count("COMPLETE") == 3


def test_a_search_that_is_stopped_leaves_the_best_job_so_far(
    search_of_stand_ins, tmp_path: Path
) -> None:
    signal_when_begun(tmp_path, 2)
    with pytest.raises(Preempted):
        search_of_stand_ins("learning_rate: {low: 0.3, high: 0.4}\n", "--num_trials", "2")
    rate = study_in(tmp_path / "search").best_params["learning_rate"]
    best = read_settings(tmp_path / "search/best.yaml")
    assert (best["learning_rate"], best["seed"]) == (rate, 1)


def test_a_search_that_ended_before_its_first_trial_had_no_metric(
    search_of_stand_ins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A study without trials is created anew: its default direction would make the next start take the worst."""
    with monkeypatch.context() as patch:
        patch.setattr(search, "sha256", lambda _: (_ for _ in ()).throw(OSError("full")))
        (tmp_path / "rows.csv").write_text("text,label\na,b\n")
        (tmp_path / "job.yaml").write_text(f"train_file: {tmp_path / 'rows.csv'}\n")
        with pytest.raises(OSError, match="full"):
            search_of_stand_ins("learning_rate: [0.9]\n", "--num_trials", "1")
    (tmp_path / "job.yaml").write_text(
        "metric_for_best_model: accuracy\ngreater_is_better: false\n"
    )
    study = search_of_stand_ins("learning_rate: [0.8, 0.9]\n", "--num_trials", "2")
    assert study.best_params == {"learning_rate": 0.8}


def test_accelerates_default_config_is_compared(
    search_of_stand_ins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.commands.config import config_args

    default = tmp_path / "default_config.yaml"
    monkeypatch.setattr(config_args, "default_config_file", str(default))
    space = "learning_rate: [0.8, 0.9]\n"
    (tmp_path / "job.yaml").write_text("gradient_accumulation_steps: 2\n")
    search_of_stand_ins(space, "--num_trials", "1")
    default.write_text("mixed_precision: no\n")  # the value without a file
    search_of_stand_ins(space, "--num_trials", "1")
    default.write_text("mixed_precision: bf16\n")
    with pytest.raises(ConfigError, match="mixed_precision of accelerate.s YAML=bf16: was no in"):
        search_of_stand_ins(space, "--num_trials", "2")
    (tmp_path / "job.yaml").write_text("seed: 1\n")
    varied = "learning_rate: [0.9]\ngradient_accumulation_steps: [1, 2]\n"
    default.write_text("num_processes: 1\n")
    search_of_stand_ins(varied, "--num_trials", "1", folder=tmp_path / "varied")
    default.write_text("num_processes: 4\n")
    with pytest.raises(ConfigError, match="num_processes of accelerate.s YAML=4: was 1 in"):
        search_of_stand_ins(varied, "--num_trials", "2", folder=tmp_path / "varied")
    (tmp_path / "job.yaml").write_text("gradient_accumulation_steps: 2\n")
    default.write_text("num_processes: 4\n")  # which makes a global batch four times as large
    with pytest.raises(ConfigError, match="num_processes of accelerate.s YAML=4: was None in"):
        search_of_stand_ins(space, "--num_trials", "2")


def test_a_search_stops_what_is_worse_than_the_median(search_of_stand_ins) -> None:
    space = "learning_rate: [0.1, 0.9]\nseed: [1, 2, 3, 4, 5, 6, 7]\n"
    study = search_of_stand_ins(space, "--num_trials", "12")  # of 14 combinations
    found = [(trial.params["learning_rate"], trial.state.name) for trial in study.trials]
    assert len(found) == 12
    assert {state for _, state in found[:5]} == {"COMPLETE"}  # the first ones set the median
    assert {rate for rate, _ in found[:5]} == {0.1, 0.9}
    assert set(found[5:]) == {(0.1, "PRUNED"), (0.9, "COMPLETE")}
    search_of_stand_ins(space, "--num_trials", "12")
    assert len(study.trials) == 12  # those that were stopped count
    for other in ("learning_rate: [0.1, 0.5, 0.9]\n", "weight_decay: [0.1]\n"):
        with pytest.raises(ConfigError, match="=.*: was .* in the trials of"):
            search_of_stand_ins(other, "--num_trials", "13")


def test_an_evaluation_that_is_nan_prunes_nothing(
    search_of_stand_ins, monkeypatch: pytest.MonkeyPatch
) -> None:
    search_of_stand_ins("learning_rate: {low: 0.6, high: 0.7}\n", "--num_trials", "5")
    monkeypatch.setenv("NO_NUMBERS", "1")
    study = search_of_stand_ins("learning_rate: {low: 0.4, high: 0.5}\n", "--num_trials", "6")
    assert states(study) == ["COMPLETE"] * 6


def test_a_search_of_another_job(search_of_stand_ins, tmp_path: Path) -> None:
    space = (
        "weight_decay: {low: 0, high: 1}\nlearning_rate: [0.9]\nfreeze: [null]\nlora_r: [4]\n"
        "per_device_train_batch_size: {low: 8, high: 64}\nclass_weights: [[1, 2.5, 1, 1]]\nlora_target_modules: [[]]\n"
    )
    # `freeze` excludes lora_r, but the space sets it anew.
    (tmp_path / "job.yaml").write_text("seed: 1\nfreeze: encoder\n")
    study = search_of_stand_ins(space, "--num_trials", "1")
    found = study.trials[0].params
    for job in (tmp_path / "search/best.yaml", *tmp_path.glob("search/trial_*/job.yaml")):
        settings = checked(TrainConfig, read_settings(job))
        assert (settings.class_weights, settings.lora_target_modules) == ((1.0, 2.5, 1.0, 1.0), ())
    assert 0 < found["weight_decay"] < 1  # of the key's type
    assert isinstance(found["per_device_train_batch_size"], int)
    (tmp_path / "job.yaml").write_text("seed: 1\nfreeze: encoder\nddp_timeout: 9\n")
    wider = space.replace("high: 1}", "high: 2}")
    search_of_stand_ins(wider, "--num_trials", "1")
    with pytest.raises(ConfigError, match="weight_decay=a log range: was a range in the trials of"):
        search_of_stand_ins(space.replace("low: 0,", "low: 0.1, log: true,"), "--num_trials", "1")
    (tmp_path / "job.yaml").write_text("seed: 1\nmax_steps: 7\n")
    with pytest.raises(ConfigError, match="max_steps=7: was None in the trials of"):
        search_of_stand_ins(space, "--num_trials", "2")
    rows, other = tmp_path / "rows.csv", tmp_path / "other"
    (tmp_path / "job.yaml").write_text(f"seed: 1\ntrain_file: {rows}\n")
    rows.write_text("text,label\na,b\n")
    search_of_stand_ins("learning_rate: [0.9]\n", "--num_trials", "1", folder=other)
    rows.write_text("text,label\na,c\n")
    with pytest.raises(ConfigError, match="SHA-256 of train_file=.*: was"):  # not comparable
        search_of_stand_ins("learning_rate: [0.9]\n", "--num_trials", "1", folder=other)
    rows.write_text("text,label\na,b\n")
    (tmp_path / "strategy.yaml").write_text("mixed_precision: bf16\n")
    words = ["--num_trials", "2", "--config_file", str(tmp_path / "strategy.yaml")]
    with pytest.raises(ConfigError, match="mixed_precision of accelerate.s YAML=bf16: was no in"):
        search_of_stand_ins("learning_rate: [0.9]\n", *words, folder=other)


def test_rows_that_were_moved(search_of_stand_ins, tmp_path: Path) -> None:
    """The same rows under another path are compared by their hash."""
    job, rows, space = tmp_path / "job.yaml", tmp_path / "rows.csv", "learning_rate: [0.8, 0.9]\n"
    rows.write_text("text,label\na,b\n")
    job.write_text(f"train_file: {rows}\n")
    search_of_stand_ins(space, "--num_trials", "1")
    rows = rows.rename(tmp_path / "moved.csv")
    job.write_text(f"train_file: {rows}\n")
    assert states(search_of_stand_ins(space, "--num_trials", "2")) == ["COMPLETE"] * 2
    assert read_settings(tmp_path / "search/best.yaml")["train_file"] == str(rows)
    job.write_text(f"train_file: {rows}\nvalidation_file: {rows}\n")
    with pytest.raises(ConfigError, match="validation_file=.*: was None in the trials of"):
        search_of_stand_ins(space, "--num_trials", "2")


def test_the_best_job_is_the_one_that_ran(
    search_of_stand_ins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job file is edited meanwhile: trials and best.yaml keep what was read. A key may not move into the space."""
    job, folder = tmp_path / "job.yaml", tmp_path / "search?a=1"
    job.write_text("seed: 1\nweight_decay: 0.3\n")
    begin = subprocess.Popen

    def edited(*words: Any, **keys: Any) -> Any:
        job.write_text("seed: 2\nweight_decay: 0.3\n")
        return begin(*words, **keys)

    monkeypatch.setattr(subprocess, "Popen", edited)
    space = "learning_rate: {low: 0.1, high: 0.2}\n"
    search_of_stand_ins(space, "--num_trials", "2", folder=folder)
    assert (folder / "study.log").is_file()
    best = read_settings(folder / "best.yaml")
    assert (best["weight_decay"], best["seed"]) == (0.3, 1)
    assert {read_settings(each)["seed"] for each in folder.glob("trial_*/job.yaml")} == {1}
    job.write_text("seed: 1\n")
    space += "weight_decay: {low: 0.1, high: 0.2}\n"
    with pytest.raises(ConfigError, match=r"weight_decay=a range: was 0\.3 in the trials of"):
        search_of_stand_ins(space, "--num_trials", "3", folder=folder)


def test_a_job_that_resumes(search_of_stand_ins, tmp_path: Path) -> None:
    """`latest` is accepted: each trial resumes in its own folder. A checkpoint is refused, as a trial is a new run."""
    (tmp_path / "job.yaml").write_text("resume_from_checkpoint: latest\n")
    search_of_stand_ins("learning_rate: [0.1]\n", "--num_trials", "1")
    (tmp_path / "job.yaml").write_text(f"resume_from_checkpoint: {tmp_path}\n")
    with pytest.raises(ConfigError, match="job.yaml.: a trial is a new run. Fix: leave it out"):
        search_of_stand_ins("learning_rate: [0.1]\n", "--num_trials", "2")


def test_trials_at_the_same_time(search_of_stand_ins) -> None:
    words = ["--num_trials", "2", "--parallel_trials", "2"]
    study = search_of_stand_ins("learning_rate: {low: 0.1, high: 0.4}\n", *words)
    first, second = study.trials
    assert max(first.datetime_start, second.datetime_start) < min(
        first.datetime_complete, second.datetime_complete
    )


def test_trials_of_the_same_settings_have_their_folders(
    search_of_stand_ins, tmp_path: Path
) -> None:
    words = ["--num_trials", "2", "--parallel_trials", "2"]
    study = search_of_stand_ins("learning_rate: {low: 0.4, high: 0.4}\n", *words)
    assert states(study) == ["COMPLETE", "COMPLETE"]
    assert len(list(tmp_path.glob("search/trial_*/metrics.jsonl"))) == 2


@pytest.mark.parametrize(
    ("at_once", "number"), [("1", signal.SIGHUP), ("1", signal.SIGUSR1), ("2", signal.SIGTERM)]
)
def test_a_search_that_is_stopped_takes_its_trials_up_again(
    search_of_stand_ins, tmp_path: Path, at_once: str, number: int
) -> None:
    """By a scheduler, or a closed terminal: no trial runs on without the search, and the next start resumes them."""
    space, words = "learning_rate: {low: 0.1, high: 0.4}\n", ["--parallel_trials", at_once]
    signal_when_begun(tmp_path, int(at_once), number)
    with pytest.raises(Preempted, match="the same command continues the study"):
        search_of_stand_ins(space, "--num_trials", "2", *words)
    assert not stand_ins(tmp_path)
    study = search_of_stand_ins(space, "--num_trials", "2", *words)
    begun = [t.params["learning_rate"] for t in study.trials if t.state.name == "FAIL"]
    ended = [t.params["learning_rate"] for t in study.trials if t.state.name == "COMPLETE"]
    assert len(begun) == int(at_once)
    assert len(ended) == 2
    assert set(begun) <= set(ended)
    assert len(list(tmp_path.glob("search/trial_*"))) == 2  # resumed in the same folders


@pytest.mark.parametrize("seed", range(8))
def test_what_waits_to_be_taken_up_again_is_asked_for_first_and_once(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    optuna = pytest.importorskip("optuna")
    study, rates = optuna.create_study(), (0.1, 0.2, 0.3, 0.4)
    study.enqueue_trial({"learning_rate": 0.3})
    ranges = {"learning_rate": optuna.distributions.CategoricalDistribution(rates)}
    told: Any = SimpleNamespace(
        ranges=ranges, asking=Lock(), is_over=False, failed=[], job=SimpleNamespace(seed=seed)
    )
    asked = [search._Search.ask(told, study) for _ in range(5)]
    assert asked.pop() is None
    found = [trial.params["learning_rate"] for trial in asked]
    assert (found[0], sorted(found)) == (0.3, list(rates))
    monkeypatch.setattr(search, "GRID", 3)  # larger grids are left to Optuna, as ranges are
    assert search._Search.ask(told, study).params["learning_rate"] in rates


@pytest.mark.parametrize("rank", ["SAVES", "imports, and has no handler yet"])
@pytest.mark.parametrize("at_once", ["1", "2"])
def test_a_search_that_is_stopped_waits_for_the_ranks(
    search_of_stand_ins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: str, rank: str
) -> None:
    """The launcher of a single rank ends at SIGTERM at once, and does not forward it to the rank."""
    monkeypatch.setenv("HAS_A_RANK", rank)
    signal_when_begun(tmp_path, int(at_once))
    words = ["--num_trials", at_once, "--parallel_trials", at_once]
    with pytest.raises(Preempted, match="the same command continues the study"):
        search_of_stand_ins("learning_rate: {low: 0.1, high: 0.4}\n", *words)
    assert not stand_ins(tmp_path)
    saved = list(tmp_path.glob("search/trial_*/saved"))
    assert len(saved) == (int(at_once) if rank == "SAVES" else 0)
    assert set(states(study_in(tmp_path / "search"))) == {"RUNNING"}


DEAF = """
import subprocess, sys
from accel_ft import search

trial = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
popen = subprocess.Popen
def start(command, **keys):
    return popen([sys.executable, "-c", trial] if "accel_ft.train" in command else command, **keys)
search.subprocess.Popen = start
search.main(sys.argv[1:])
"""


@pytest.mark.parametrize("at_once", ["1", "2"])
def test_a_second_signal_ends_the_search_at_once(tmp_path: Path, at_once: str) -> None:
    """A signal that comes twice within a second, as from `timeout`, counts once: the search waits for its trials."""
    pytest.importorskip("optuna")
    (tmp_path / "job.yaml").write_text("seed: 1\n")
    (tmp_path / "space.yaml").write_text("learning_rate: [0.4, 0.5]\n")
    words = ["--parallel_trials", at_once, "--output_dir", tmp_path / "search"]
    for key in ("job", "space"):
        words += [f"--{key}", tmp_path / f"{key}.yaml"]
    process = subprocess.Popen([sys.executable, "-c", DEAF, *map(str, words)], cwd=ROOT)
    try:
        logs = []
        while len(logs) < int(at_once):
            assert process.poll() is None
            time.sleep(0.1)
            logs = [log for log in tmp_path.glob("search/trial_*/log") if log.stat().st_size]
        trials = psutil.Process(process.pid).children()
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 128 + signal.SIGINT
    finally:
        process.kill()
    for trial in trials:
        trial.kill()
    assert len(trials) == int(at_once)


@pytest.mark.parametrize("at_once", ["1", "2"])
def test_a_job_that_cannot_run_is_told_once(
    search_of_stand_ins,
    tmp_path: Path,
    at_once: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAILS", "1")
    words = ["--num_trials", "20", "--parallel_trials", at_once]
    with pytest.raises(
        ConfigError, match=r"no trial finished, \d failed: error: the rows are bad \(see each"
    ):
        search_of_stand_ins("learning_rate: {low: 0.1, high: 0.9}\n", *words)
    told = capsys.readouterr()
    assert told.out.count("failed: error: the rows are bad (see its log)") in (3, 2 + int(at_once))
    assert not stand_ins(tmp_path)
    assert "Traceback" not in told.out + told.err


def test_a_trial_ends_when_its_rank_has(
    search_of_stand_ins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher of a single rank ends at a signal while the rank still saves, on the same GPU."""
    monkeypatch.setenv("LEAVES_ITS_RANK", "1")
    search_of_stand_ins("learning_rate: [0.9]\n", "--num_trials", "1")
    assert list(tmp_path.glob("search/trial_*/saved"))


def test_a_trial_that_a_killed_search_left(search_of_stand_ins, tmp_path: Path) -> None:
    """A trial that still runs holds its folder: the next start waits for it, then resumes it there."""
    space, folder = "learning_rate: {low: 0.6, high: 0.9}\n", tmp_path / "search/trial_0000"
    folder.mkdir(parents=True)
    study = study_in(tmp_path / "search")
    study.set_user_attr("asked", {})
    begun = study.ask()
    begun.suggest_float("learning_rate", 0.6, 0.9)
    with (tmp_path / "search/study.log").open("a") as file:
        file.write('{"op_code":')  # cut by a full disk
    lock = FileLock(folder / "ranks/lock", thread_local=False)
    lock.acquire()
    seen = []
    Timer(2.0, lambda: (seen.append((folder / "metrics.jsonl").exists()), lock.release())).start()
    study = search_of_stand_ins(space, "--num_trials", "1")
    assert seen == [False]
    assert states(study) == ["FAIL", "COMPLETE"]
    assert study.best_params == begun.params
    assert list(tmp_path.glob("search/trial_*")) == [folder]


def test_a_trial_that_came_to_its_end_without_its_search_counts(
    search_of_stand_ins, tmp_path: Path
) -> None:
    """Its evaluations, read all at once, are below the median, but its final value is the highest: it is not pruned."""
    space, folder = "learning_rate: {low: 0.6, high: 0.7}\n", tmp_path / "search/trial_0005"
    study = search_of_stand_ins(space, "--num_trials", "5")
    begun = study.ask()
    begun.suggest_float("learning_rate", 0.6, 0.7)
    folder.mkdir()
    steps = [{"event": "eval", "step": step, "eval_accuracy": 0.1} for step in range(1, 9)]
    events = [*steps, {"event": "end", "step": 8, "eval_accuracy": 0.95}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text("import time; time.sleep(1)")  # a finished run trains nothing
    study = search_of_stand_ins(space, "--num_trials", "6")
    assert states(study) == ["COMPLETE"] * 5 + ["FAIL", "COMPLETE"]
    assert study.best_value == 0.95


def test_a_search_that_a_launcher_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That launcher's strategy would not be that of the trials."""
    for name in ("job", "space"):
        (tmp_path / f"{name}.yaml").write_text("seed: [1]\n" if name == "space" else "seed: 1\n")
    words = ["--job", str(tmp_path / "job.yaml"), "--space", str(tmp_path / "space.yaml")]
    for name in ("RANK", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.setenv(name, "0")
        with pytest.raises(LaunchError, match=f"but {name} is set, .* Fix: .*--config_file FILE"):
            search.main(words)
        monkeypatch.delenv(name)


def test_a_trial_that_was_ended_while_it_was_asked_for_keeps_its_settings(
    search_of_stand_ins, tmp_path: Path
) -> None:
    """Its parameters are suggested one by one, so some may be missing; a resumed trial lists all of them at once."""
    (tmp_path / "search").mkdir()
    study = study_in(tmp_path / "search")
    study.set_user_attr("asked", {})
    study.enqueue_trial({"learning_rate": 0.7123}, user_attrs={"folder": "trial_0000"})
    study.ask()
    study = search_of_stand_ins("learning_rate: {low: 0.6, high: 0.9}\n", "--num_trials", "1")
    assert states(study) == ["FAIL", "COMPLETE"]
    assert study.best_params == {"learning_rate": 0.7123}


@pytest.mark.parametrize(
    ("log", "why"),
    [
        (["error: the rows are bad", "Traceback", "ValueError: x"], "error: the rows are bad"),
        (
            ["torch.OutOfMemoryError: CUDA", "  at", "subprocess.CalledProcessError: Command"],
            "torch.OutOfMemoryError: CUDA",
        ),
        (["[rank1]: ValueError: x", "a.b.ChildFailedError: ", "====="], "[rank1]: ValueError: x"),
        (["Killed"], "Killed"),
        ([], "no message"),
    ],
)
def test_why_a_trial_failed(log: list[str], why: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("\n".join(log))
    assert search._why(tmp_path / "log") == why


def test_a_search_that_waits_can_be_stopped(search_of_stand_ins, tmp_path: Path) -> None:
    folder = tmp_path / "search/trial_0000"
    (tmp_path / "search").mkdir()
    study = study_in(tmp_path / "search")
    study.set_user_attr("asked", {})
    study.enqueue_trial({"learning_rate": 0.9})
    with FileLock(folder / "ranks/lock"):
        Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(Preempted, match="the same command continues the study"):
            search_of_stand_ins("learning_rate: [0.9]\n", "--num_trials", "1")
    assert not (folder / "metrics.jsonl").exists()


def test_an_end_counts_whatever_its_process_returned(
    search_of_stand_ins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS_AT_ITS_END", "1")
    assert states(search_of_stand_ins("learning_rate: [0.9]\n", "--num_trials", "1")) == [
        "COMPLETE"
    ]


def test_a_metric_that_is_no_number_counts_as_a_failure(
    search_of_stand_ins, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_NUMBER", "1")
    with pytest.raises(ConfigError, match="no trial finished"):
        search_of_stand_ins("learning_rate: {low: 0.6, high: 0.9}\n", "--num_trials", "20")
    told = capsys.readouterr().out
    assert told.count("is NaN (see its log)") == 3


@pytest.mark.parametrize("at_once", ["1", "2"])
def test_a_fault_of_the_search_itself_is_told(
    search_of_stand_ins, monkeypatch: pytest.MonkeyPatch, at_once: str
) -> None:
    """A full disk, for example; with parallel trials, in the last of them."""
    write = search.write_whole

    def is_full(path: Path, text: str | bytes) -> None:
        if path.name == "job.yaml" and path.parent.name == "trial_0001":
            raise OSError(28, "No space left on device")
        write(path, text)

    monkeypatch.setattr(search, "write_whole", is_full)
    words = ["learning_rate: [0.8, 0.9]\n", "--num_trials", "2", "--parallel_trials", at_once]
    with pytest.raises(OSError, match="No space left"):
        search_of_stand_ins(*words)


def test_a_study_that_is_damaged_or_gone(search_of_stand_ins, tmp_path: Path) -> None:
    space, journal = "learning_rate: [0.9]\n", tmp_path / "search/study.log"
    search_of_stand_ins(space, "--num_trials", "1")
    lines = journal.read_bytes().splitlines(keepends=True)
    assert b"asked" in lines[1]
    unknown = lines[2].replace(b'"op_code":', b'"op_code":9')
    for damage in (b"{\x00\n", b"{}\n", b"[]\n", b"\xff\n", unknown):
        journal.write_bytes(b"".join([*lines[:2], damage, *lines[3:]]))
        with pytest.raises(ConfigError, match=r"study\.log: is damaged .* Fix: another output_dir"):
            search_of_stand_ins(space, "--num_trials", "2")
    journal.write_bytes(b"".join([lines[0], *lines[2:]]))
    with pytest.raises(
        ConfigError, match=r"study\.log: is damaged, missing or an old copy, though"
    ):
        search_of_stand_ins(space, "--num_trials", "2")
    journal.unlink()
    with pytest.raises(
        ConfigError, match=r"study\.log: is damaged, missing or an old copy, though"
    ):
        search_of_stand_ins(space, "--num_trials", "2")
    assert not (tmp_path / "search/trial_0001").exists()


def test_a_study_older_than_its_trials(search_of_stand_ins, tmp_path: Path) -> None:
    """From a backup: a new trial would get the folder, and perhaps the result, of one that the study has forgotten."""
    space, journal = "learning_rate: [0.7, 0.8, 0.9]\n", tmp_path / "search/study.log"
    search_of_stand_ins(space, "--num_trials", "1")
    old = journal.read_bytes()
    search_of_stand_ins(space, "--num_trials", "2")
    (tmp_path / "search/trial_0001_mine").mkdir()
    search_of_stand_ins(space, "--num_trials", "2")
    journal.write_bytes(old)
    with pytest.raises(ConfigError, match=r"study\.log: is damaged, missing or an old copy"):
        search_of_stand_ins(space, "--num_trials", "2")


@pytest.mark.parametrize(
    ("params", "attrs"),
    [
        ({}, {"folder": "../victim"}),
        ({"hub_model_id": ["theirs/model"]}, {}),
        ({"lr_scheduler_type": ["polynomial"]}, {}),
    ],
)
def test_a_study_from_somebody_else(
    search_of_stand_ins, tmp_path: Path, params: dict[str, list[str]], attrs: dict[str, str]
) -> None:
    """It neither writes elsewhere, nor sets other keys in best.yaml."""
    optuna = pytest.importorskip("optuna")
    victim, space = tmp_path / "victim", "lr_scheduler_type: [linear, cosine]\n"
    victim.mkdir()
    (tmp_path / "search").mkdir()
    study = study_in(tmp_path / "search")
    study.set_user_attr("asked", {})
    ranges = {key: optuna.distributions.CategoricalDistribution(params[key]) for key in params}
    study.tell(study.ask(ranges), 1.0)
    theirs = study.ask(ranges)
    for key, value in attrs.items():
        theirs.set_user_attr(key, value)
    with pytest.raises(
        ConfigError, match=r"study\.log: its trial \d has settings or a folder that"
    ):
        search_of_stand_ins(space, "--num_trials", "2")
    assert not list(victim.iterdir())
    assert not (tmp_path / "search/best.yaml").exists()


@pytest.mark.parametrize("name", ["trial_0000", "trial_0000/log"])
def test_a_trial_is_not_written_through_a_link(
    search_of_stand_ins, tmp_path: Path, name: str
) -> None:
    link, victim = tmp_path / "search" / name, tmp_path / "victim"
    link.parent.mkdir(parents=True)
    link.symlink_to(victim)
    study = study_in(tmp_path / "search")
    study.set_user_attr("asked", {})
    study.ask()
    with pytest.raises(ConfigError, match=f"{name}: is a link to .*victim. Fix: remove it"):
        search_of_stand_ins("learning_rate: [0.9]\n", "--num_trials", "1")
    assert not victim.exists()


def test_a_line_cut_by_a_full_disk_is_taken_back(
    search_of_stand_ins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial beside it ends later, when there is space again: its line would follow half a line."""
    file = pytest.importorskip("optuna.storages.journal").JournalFileBackend
    append, cut = file.append_logs, []

    def is_full(self: Any, logs: list[dict[str, Any]]) -> None:
        if cut or logs[0].get("values") is None:
            return append(self, logs)
        with (tmp_path / "search/study.log").open("a") as journal:
            cut.append(journal.write('{"op_code":6,"work'))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file, "append_logs", is_full)
    words = ["--num_trials", "2", "--parallel_trials", "2"]
    with pytest.raises(OSError, match="No space left"):
        search_of_stand_ins("learning_rate: [0.3, 0.9]\n", *words)
    assert sorted(states(study_in(tmp_path / "search"))) == ["COMPLETE", "RUNNING"]
    study = search_of_stand_ins("learning_rate: [0.3, 0.9]\n", *words)
    assert sorted(states(study)) == ["COMPLETE", "COMPLETE", "FAIL"]
    assert len(list(tmp_path.glob("search/trial_*"))) == 2


def test_a_trial_that_a_signal_stopped_is_resumed(
    search_of_stand_ins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal to the trial alone: it has saved, so it has not failed. If it fails later, that counts."""
    space, words = "learning_rate: [0.8, 0.9]\n", ["--num_trials", "2"]
    monkeypatch.setenv("STOPPED_AT", "0.9")
    with pytest.raises(Preempted, match="the same command continues the study"):
        search_of_stand_ins(space, *words)
    assert sorted(states(study_in(tmp_path / "search"))) == ["COMPLETE", "RUNNING"]
    assert read_settings(tmp_path / "search/best.yaml")["learning_rate"] == 0.8
    monkeypatch.setenv("STOPPED_AT", "")
    study = search_of_stand_ins(space, *words)
    assert sorted(states(study)) == ["COMPLETE", "COMPLETE", "FAIL"]
    assert len(list(tmp_path.glob("search/trial_*"))) == 2  # resumed in its folder


def test_a_job_that_reproduces(search_of_stand_ins, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"reproduce: {tmp_path}\n")
    with pytest.raises(ConfigError, match=r"^reproduce=.*job\.yaml.: .*Fix: leave it out; --job"):
        search_of_stand_ins("learning_rate: [0.9]\n", "--num_trials", "1")


def test_a_space_that_cannot_be(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    (tmp_path / "job.yaml").write_text("seed: 1\n")
    (tmp_path / "space.yaml").write_text(
        "lr_scheduler_type: [linear, cosin]\nglobal_batch_size: {low: 0, high: 3}\n"
        "learning_rat: [1]\nseed: {low: 1}\nwarmup_steps: 3\nweight_decay: {low: 0, high: 0.1, log: true}\n"
        "learning_rate: {low: 1.0e-5, high: .inf}\nmax_grad_norm: {low: 1e-3, high: 5e-1, log: true}\nlr_reference_batch_size: {low: 9e0, high: 8e0}\ngradient_checkpointing: {low: false, high: true}\n"
        "push_to_hub: [true, false]\nproblem_type: [regression]\nlr: [1]\nlora_alpha: {min: 1, max: 2}\n"
        "num_train_epochs: [1, 2]\nmax_steps: [3]\nmax_eval_samples: [4, 21]\n"
        "eval_steps: {low: 1, high: 9, step: 0.5}\nsave_total_limit: [3]\n"
        "lora_r: [null, 4]\nlora_dropout: [0.1, 0.2]\nearly_stopping_threshold: [0.1, 0.2]\n"
        "gradient_accumulation_steps: {low: 1, high: 9, step: 1.9}\n"
    )
    words = ["--job", str(tmp_path / "job.yaml"), "--space", str(tmp_path / "space.yaml")]
    with pytest.raises(ConfigError) as caught:
        search.main(words)
    assert "learning_rat: cannot be varied. Did you mean `learning_rate`?" in str(caught.value)
    assert "seed={'low': 1}: is no range" in str(caught.value)
    assert "lr_scheduler_type=cosin" in str(caught.value)
    assert "global_batch_size=0" in str(caught.value)
    assert "warmup_steps=3: is no range (a single value)" in str(caught.value)
    assert "learning_rate=inf: " in str(caught.value)
    assert "push_to_hub: cannot be varied" in str(caught.value)  # it would do nothing
    assert "gradient_checkpointing={'low': False, 'high': True}: is no range" in str(caught.value)
    assert "'low': '9e0', 'high': '8e0'}: is no range" in str(caught.value)
    assert "problem_type: trials could not be compared" in str(
        caught.value
    )  # each problem type has its own metrics
    assert "max_eval_samples: trials could not be compared" in str(
        caught.value
    )  # each trial would have other rows
    # Trials are compared at their n-th evaluations.
    assert "eval_steps: trials could not be compared" in str(caught.value)
    assert "lr: cannot be varied. Fix: learning_rate" in str(caught.value)
    assert "lora_alpha={'min': 1, 'max': 2}: is no range (" in str(caught.value)
    assert "num_train_epochs: has no effect beside max_steps" in str(caught.value)
    assert "max_grad_norm" not in str(caught.value)  # though YAML reads 1e-3 as text
    assert "weight_decay={'low': 0, 'high': 0.1, 'log': True}: is no range" in str(caught.value)
    assert "'step': 1.9}: is no range (not whole numbers)" in str(caught.value)
    assert "early_stopping_threshold has no effect on training without" in str(caught.value)
    assert "lora_dropout" not in str(caught.value)  # has an effect: lora_r varies
    (tmp_path / "space.yaml").write_text("- a\n")
    with pytest.raises(ConfigError, match="^space=.*space.yaml: must be a mapping"):
        search.main(words)
    config = SearchConfig(job=tmp_path / "job.yaml", space=tmp_path / "space.yaml")
    search._checked_ranges(
        config, {"max_steps": None}, {"num_train_epochs": [1, 2]}
    )  # null, as in a run's config.yaml
    (tmp_path / "job.yaml").write_text("sead: 1\n")
    (tmp_path / "space.yaml").write_text("seed: [1, 2]\n")
    with pytest.raises(ConfigError, match=r"sead \(.*job.yaml\): unknown key. Did you mean `seed`"):
        search.main(words)
