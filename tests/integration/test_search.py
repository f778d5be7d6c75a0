"""The search over a space of settings."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Timer

import psutil
import pytest
import yaml
from conftest import job_words
from filelock import FileLock

from accel_ft import search, train
from accel_ft.config import SearchConfig, TrainConfig
from accel_ft.errors import ConfigError
from accel_ft.settings import checked, read_settings


def study_in(folder: Path):
    """The study, read by a connection that is closed after each query."""
    import optuna
    from sqlalchemy import NullPool

    keys = {"poolclass": NullPool}
    storage = optuna.storages.RDBStorage(f"sqlite:///{folder / 'study.db'}", engine_kwargs=keys)
    return optuna.load_study(study_name="accuracy", storage=storage)


def test_a_rank_that_still_saves_is_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launcher has ended; a trial is at its end when the lock is back, and others are looked at meanwhile."""
    process = subprocess.Popen(["true"])
    run = search._Run(None, tmp_path, {}, process)
    process.wait()
    assert not search._is_at_work(run)  # it never had a lock
    with FileLock(tmp_path / "ranks/lock"):
        assert search._is_at_work(run)
        monkeypatch.setattr(search, "SAVE_SECONDS", 0)
        assert not search._is_at_work(run)
    assert not search._is_at_work(run)


def test_search(tiny_model: Path, rows_file: Path, odd_file: Path, tmp_path: Path) -> None:
    """Trials run, bad ones are stopped, the study goes on where it was, and ends in a job."""
    pytest.importorskip("optuna")
    import yaml
    from conftest import run

    words = job_words(tiny_model, rows_file, odd_file, tmp_path / "run")
    settings = dict(zip((w.removeprefix("--") for w in words[::2]), words[1::2], strict=True))
    settings |= {"eval_steps": 3, "save_total_limit": None, "save_steps": 100}
    settings["push_to_hub"] = True  # of the best one, later: no trial asks for the Hub
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
    done = run(*command, "--num_trials", "3", "--num_startup_trials", "1", "--parallel_trials", "2")
    best = yaml.safe_load((tmp_path / "search/best.yaml").read_text())
    assert best["learning_rate"] in (1e-9, 5e-3)
    assert best["output_dir"] == str(tmp_path / "search/best")
    assert best["train_file"] == str(rows_file)
    assert done.stdout.count("trial_") == 2  # the first one is remembered
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
    with pytest.raises(ConfigError, match="each has 1 of 2 GPUs, and .* starts 2 processes"):
        shares(2, 2, num_processes=2)
    with pytest.raises(ConfigError, match="gpu_ids=0,1 would put all trials"):
        shares(2, 4, num_processes=2, gpu_ids="0,1")


STAND_IN = """
import fcntl, json, os, sys, time, yaml
if "FAILS" in os.environ:
    sys.exit("error: the rows are bad")
keys = yaml.safe_load(open(sys.argv[sys.argv.index("--config") + 1]))
if "ALONE" in os.environ:
    os.close(os.open(keys["output_dir"] + "/at_work", os.O_CREAT | os.O_EXCL))
events = open(keys["output_dir"] + "/metrics.jsonl", "w", buffering=1)
rate = float(keys["learning_rate"])
for step in range(1, 9):
    score = rate - step / 1000
    events.write(json.dumps({"event": "eval", "step": step, "eval_accuracy": score}) + "\\n")
    time.sleep(0 if rate > 0.5 else 0.3)
events.write(json.dumps({"event": "end", "step": 8, "eval_accuracy": score}) + "\\n")
if "ALONE" in os.environ:
    os.remove(keys["output_dir"] + "/at_work")
if "LEAVES_ITS_RANK" in os.environ:
    os.mkdir(keys["output_dir"] + "/ranks")
    lock = os.open(keys["output_dir"] + "/ranks/lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    if os.fork() == 0:
        time.sleep(1)
        open(keys["output_dir"] + "/saved", "w").close()
"""


@pytest.fixture
def search_of_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Search over stand-ins for runs, whose accuracy is their learning rate, and falls."""
    pytest.importorskip("optuna")
    from accel_ft import search

    (tmp_path / "stand_in.py").write_text(STAND_IN)
    (tmp_path / "job.yaml").write_text("seed: 1\n")
    space, folder = tmp_path / "space.yaml", tmp_path / "search"
    popen = subprocess.Popen
    monkeypatch.setattr(
        search.subprocess,
        "Popen",
        lambda command, **keys: popen(
            [sys.executable, str(tmp_path / "stand_in.py"), *command], **keys
        ),
    )

    def start(lines: str, *words: str):
        space.write_text(lines)
        places = ["--job", tmp_path / "job.yaml", "--space", space, "--output_dir", folder]
        search.main([*map(str, places), *words])
        return study_in(folder)

    return start


def test_a_search_that_goes_on_tries_other_settings(search_of_stand_ins) -> None:
    space = "learning_rate: {low: 0.6, high: 0.9}\n"
    search_of_stand_ins(space, "--num_trials", "2")
    study = search_of_stand_ins(space, "--num_trials", "4")
    assert len({trial.params["learning_rate"] for trial in study.trials}) == 4
    value = study.best_params["learning_rate"] - 8 / 1000  # of its end, not of its best evaluation
    assert study.best_value == pytest.approx(value)


def test_a_search_stops_what_is_worse_than_the_median(search_of_stand_ins) -> None:
    space = "learning_rate: [0.1, 0.9]\n"
    words = ["--num_trials", "6", "--num_startup_trials", "1"]
    study = search_of_stand_ins(space, *words)
    states = [(trial.params["learning_rate"], trial.state.name) for trial in study.trials]
    good = states.index((0.9, "COMPLETE"))
    assert set(states[good + 1 :]) <= {(0.1, "PRUNED"), (0.9, "COMPLETE")}
    assert (0.1, "PRUNED") in states
    search_of_stand_ins("weight_decay: [0.1]\n", "--num_trials", "6")
    with pytest.raises(ConfigError, match="learning_rate had other choices in the trials of"):
        search_of_stand_ins("learning_rate: [0.1, 0.5, 0.9]\n", "--num_trials", "7")


def test_a_search_of_another_job(search_of_stand_ins, tmp_path: Path) -> None:
    space = (
        "weight_decay: {low: 0, high: 1}\nlearning_rate: [0.9]\nfreeze: [null]\nlora_r: [4]\n"
        "per_device_train_batch_size: {low: 8, high: 64}\nclass_weights: [[1, 2.5, 1, 1]]\nlora_target_modules: [[]]\n"
    )
    (tmp_path / "job.yaml").write_text("seed: 1\nfreeze: encoder\n")  # not with lora_r, but varied
    study = search_of_stand_ins(space, "--num_trials", "1")
    found = study.trials[0].params
    for job in (tmp_path / "search/best.yaml", *tmp_path.glob("search/trial_*/job.yaml")):
        settings = checked(TrainConfig, read_settings(job))
        assert (settings.class_weights, settings.lora_target_modules) == ((1.0, 2.5, 1.0, 1.0), ())
    assert 0 < found["weight_decay"] < 1  # numbers of the key's kind
    assert isinstance(found["per_device_train_batch_size"], int)
    (tmp_path / "job.yaml").write_text("seed: 1\nfreeze: encoder\nddp_timeout: 9\n")
    search_of_stand_ins(space, "--num_trials", "1")
    (tmp_path / "job.yaml").write_text("seed: 1\nmax_steps: 7\n")
    with pytest.raises(ConfigError, match="max_steps was None in the trials of"):
        search_of_stand_ins(space, "--num_trials", "2")
    rows, other = tmp_path / "rows.csv", ["--output_dir", str(tmp_path / "other")]
    (tmp_path / "job.yaml").write_text(f"seed: 1\ntrain_file: {rows}\n")
    for text, error in (("a,b", Exception), ("a,c", ConfigError)):  # the fixture's study is another
        rows.write_text(f"text,label\n{text}\n")
        with pytest.raises(error) as caught:
            search_of_stand_ins("weight_decay: [0.1]\n", "--num_trials", "1", *other)
    assert "SHA-256 of train_file was" in str(caught.value)  # trials on other rows do not compare


def test_the_best_job_is_the_one_that_ran(search_of_stand_ins, tmp_path: Path) -> None:
    """A key that went from the job into the space; a job file that is edited meanwhile."""
    job, folder = tmp_path / "job.yaml", tmp_path / "search?a=1"
    words = ["--output_dir", str(folder), "--num_trials"]
    job.write_text("seed: 1\nweight_decay: 0.3\n")
    with pytest.raises(Exception, match="unable to open|does not exist"):  # the fixture's own study
        search_of_stand_ins("learning_rate: {low: 0.8, high: 0.9}\n", *words, "1")
    job.write_text("seed: 1\n")
    timer = Timer(1.0, job.write_text, ("seed: 2\n",))
    timer.start()
    space = "learning_rate: {low: 0.1, high: 0.2}\nweight_decay: {low: 0.1, high: 0.2}\n"
    with pytest.raises(Exception, match="unable to open|does not exist"):
        search_of_stand_ins(space, *words, "3")
    timer.join()
    assert (folder / "study.db").is_file()
    best = read_settings(folder / "best.yaml")
    assert best["learning_rate"] >= 0.8
    assert (best["weight_decay"], best["seed"]) == (0.3, 1)
    assert {read_settings(each)["seed"] for each in folder.glob("trial_*/job.yaml")} == {1}


def test_trials_at_the_same_time(search_of_stand_ins) -> None:
    words = ["--num_trials", "2", "--parallel_trials", "2"]
    study = search_of_stand_ins("learning_rate: {low: 0.1, high: 0.4}\n", *words)
    first, second = study.trials
    assert max(first.datetime_start, second.datetime_start) < min(
        first.datetime_complete, second.datetime_complete
    )


def test_trials_of_the_same_settings_run_in_turn(
    search_of_stand_ins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALONE", "in its folder")
    words = ["--num_trials", "2", "--parallel_trials", "2"]
    study = search_of_stand_ins("learning_rate: [0.4]\n", *words)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "COMPLETE"]


@pytest.mark.parametrize("at_once", ["1", "2"])
def test_a_search_that_is_stopped_takes_its_trials_up_again(
    search_of_stand_ins, monkeypatch: pytest.MonkeyPatch, at_once: str
) -> None:
    """SIGTERM, as a scheduler sends it: no trial goes on alone, and none is lost."""
    space, words = "learning_rate: {low: 0.1, high: 0.4}\n", ["--parallel_trials", at_once]
    timer = Timer(2.0, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        search_of_stand_ins(space, "--num_trials", "2", *words)
    assert not any("stand_in.py" in " ".join(p.cmdline()) for p in psutil.Process().children())
    study = search_of_stand_ins(space, "--num_trials", "2", *words)
    begun = [t.params["learning_rate"] for t in study.trials if t.state.name == "FAIL"]
    ended = [t.params["learning_rate"] for t in study.trials if t.state.name == "COMPLETE"]
    assert len(begun) == int(at_once)
    assert len(ended) == 2
    assert set(begun) <= set(ended)


def test_a_job_that_cannot_run_is_told_once(
    search_of_stand_ins, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAILS", "1")
    with pytest.raises(ConfigError, match="no trial came to its end"):
        search_of_stand_ins("learning_rate: {low: 0.1, high: 0.9}\n", "--num_trials", "20")
    told = capsys.readouterr()
    assert told.out.count("failed: error: the rows are bad (see its log)") == 3
    assert "Traceback" not in told.out + told.err


def test_a_trial_ends_when_its_rank_has(
    search_of_stand_ins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher of one rank ends at a signal; the rank still saves, on the same GPU."""
    monkeypatch.setenv("LEAVES_ITS_RANK", "1")
    search_of_stand_ins("learning_rate: [0.9]\n", "--num_trials", "1")
    assert list(tmp_path.glob("search/trial_*/saved"))


def test_a_trial_that_a_killed_search_left(
    search_of_stand_ins, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It holds its folder and ends well: waited for, and counted, whatever its launcher's end was."""
    space = "learning_rate: [0.9]\n"
    search_of_stand_ins(space, "--num_trials", "1")
    (folder,) = tmp_path.glob("search/trial_*")
    for path in tmp_path.glob("search/study.db*"):
        path.unlink()
    (folder / "ranks").mkdir()
    lock = FileLock(folder / "ranks/lock", thread_local=False)
    lock.acquire()
    (folder / "metrics.jsonl").unlink()  # which a stand-in makes at its start
    begun = []
    Timer(2.0, lambda: (begun.append((folder / "metrics.jsonl").exists()), lock.release())).start()
    study = search_of_stand_ins(space, "--num_trials", "1")
    assert begun == [False]
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"]


def test_an_end_counts_whatever_its_process_returned(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    study = optuna.create_study()
    process = subprocess.Popen(["false"])
    process.wait()
    (tmp_path / "metrics.jsonl").write_text('{"event": "end", "step": 8, "eval_accuracy": 0.5}\n')
    run = search._Run(study.ask(), tmp_path, {}, process)
    assert search._tell(study, run, TrainConfig())
    assert study.trials[0].value == 0.5


def test_a_space_that_cannot_be(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    from accel_ft import search

    (tmp_path / "job.yaml").write_text("seed: 1\n")
    (tmp_path / "space.yaml").write_text(
        "lr_scheduler_type: [linear, cosin]\nsave_total_limit: {low: 0, high: 3}\n"
        "learning_rat: [1]\nseed: {low: 1}\nwarmup_steps: 3\nweight_decay: {low: 0, high: 0.1, log: true}\n"
        "learning_rate: {low: 1.0e-5, high: .inf}\nprofile: {low: false, high: true}\n"
    )
    with pytest.raises(ConfigError) as caught:
        search.main(["--job", str(tmp_path / "job.yaml"), "--space", str(tmp_path / "space.yaml")])
    assert "learning_rat: cannot be varied. Did you mean `learning_rate`?" in str(caught.value)
    assert "seed={'low': 1}: no range" in str(caught.value)
    assert "lr_scheduler_type=cosin" in str(caught.value)
    assert "save_total_limit=0" in str(caught.value)
    assert "warmup_steps=3: no range (one value)" in str(caught.value)
    assert "learning_rate={'low': 1e-05, 'high': inf}: no range" in str(caught.value)
    assert "profile=0." in str(caught.value)
    assert "weight_decay={'low': 0, 'high': 0.1, 'log': True}: no range" in str(caught.value)
