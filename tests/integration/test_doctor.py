"""The doctor on accel_ft's own jobs: no false alarm on a healthy one; it names the fault of a broken one."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT, job_words, launch, untimed_verdicts

from accel_ft import doctor, train
from accel_ft.checkpoint import convert
from accel_ft.config import TrainConfig
from accel_ft.data import loader
from accel_ft.diagnosis import job
from accel_ft.diagnosis.finding import Finding
from accel_ft.engine import build, loop, start
from accel_ft.engine.run import Run
from accel_ft.errors import LaunchError, Preempted


def examined(tmp_path: Path, *words: object) -> tuple[int, dict[str, dict[str, str]]]:
    """Return the exit code, and the findings by check."""
    file = tmp_path / "found.json"
    given = ["--output_dir", str(tmp_path / "runs" / "x"), "--json", str(file), *map(str, words)]
    code = 0
    try:
        doctor.main(given)
    except SystemExit as end:
        code = int(end.code or 0)
    assert not list((tmp_path / "runs").glob(".doctor*"))
    findings: list[dict[str, str]] = json.loads(file.read_text())
    assert len({finding["check"] for finding in findings}) == len(findings)
    return code, {finding["check"]: finding for finding in findings}


def test_healthy(
    tmp_path: Path,
    tiny_model: Path,
    rows_file: Path,
    odd_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A job with accumulation, a short last batch, and keys that the probe must apply or drop: no check warns or
    fails, except perhaps the timed one.
    """
    words = job_words(tiny_model, rows_file, odd_file, tmp_path / "ignored")
    words += "--layerwise_lr_decay 0.5 --early_stopping_patience 1 --eval_steps 1 --learning_rate 0.01".split()
    code, found = examined(tmp_path, *words, "--output_dir", tmp_path / "runs" / "x")
    assert (code, untimed_verdicts(found.values())) == (0, {"PASS", "SKIP"}), found
    assert "4 updates of 2 micro-batches" in found["accumulation"]["measured"]
    assert "gradient strides" in capsys.readouterr().out


def test_one_that_ends_early_does_not_read_as_all_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed or stopped examination cannot write a last finding: `examination` FAIL stands last until it is done."""

    def examine(_: object) -> Iterator[Finding]:
        yield Finding("versions", "PASS", "all alike")
        raise Preempted("SIGTERM: stopped after update 1 of 4, which is saved. To continue: ...")

    monkeypatch.setattr("accel_ft.diagnosis.job.examine", examine)
    file = tmp_path / "found.json"
    with pytest.raises(Preempted, match="^the examination was stopped before its end$"):
        doctor.main(["--json", str(file), "--output_dir", str(tmp_path / "run")])
    last = json.loads(file.read_text())[-1]
    assert (last["check"], last["verdict"]) == ("examination", "FAIL")


@pytest.mark.parametrize("place", [".", "run"])
def test_a_signal_leaves_nothing_behind(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing to save: a signal ends the process at once, but first its folder is removed, which may hold
    three times the model. It is inside output_dir if that exists: a container may have no other writable place.
    """
    left: list[tuple[int, list[Path]]] = []
    (tmp_path / place).mkdir(exist_ok=True)

    def be_stopped(*_: object) -> None:
        (run,) = (tmp_path / place).glob(".doctor-*")
        (run / "weights").write_text("large")
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 20
        while not left and time.monotonic() < deadline:
            time.sleep(0.05)
        raise Preempted("SIGTERM")

    monkeypatch.setattr(
        os, "_exit", lambda code: left.append((code, list((tmp_path / place).iterdir())))
    )
    monkeypatch.setattr("accel_ft.diagnosis.job.build", be_stopped)
    with pytest.raises(Preempted):
        doctor.main(["--output_dir", str(tmp_path / "run")])
    assert left == [(75, [])]


def test_a_folder_that_cannot_be_made_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = ["--json", str(tmp_path / "found.json"), "--output_dir", str(tmp_path / "file/a/run")]
    with pytest.raises(SystemExit, match="1"):
        doctor.main(words)
    (finding,) = json.loads((tmp_path / "found.json").read_text())
    assert (finding["check"], finding["verdict"]) == ("set-up", "FAIL")
    assert "Not a directory" in finding["measured"]


def test_the_doctors_own_job(tmp_path: Path) -> None:
    code, found = examined(tmp_path)
    assert (code, untimed_verdicts(found.values())) == (0, {"PASS", "SKIP"}), found


def test_adapters_of_a_small_model_learn(tmp_path: Path, tiny_model: Path, rows_file: Path) -> None:
    """At a learning rate of 0.1 / 32, that of a whole model with this hidden size, adapters would not."""
    pytest.importorskip("peft")
    job = ("--model_name_or_path", tiny_model, "--train_file", rows_file, "--max_seq_length", 32)
    code, found = examined(tmp_path, *job, "--lora_r", 4, "--global_batch_size", 8)
    assert (code, found["overfits"]["verdict"]) == (0, "PASS"), found


@pytest.mark.parametrize(("rate", "verdict"), [(1e-4, "WARN"), (0.0, "FAIL")])
def test_adapters_that_do_not_overfit(
    rate: float,
    verdict: str,
    tmp_path: Path,
    tiny_model: Path,
    rows_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a sound job adapters may have too little capacity to overfit (WARN), but their loss must fall (or FAIL)."""
    pytest.importorskip("peft")
    monkeypatch.setattr(
        job, "make_optimizer", lambda model, *_: build.make_optimizer(model, rate, 0.0)
    )
    words = ("--model_name_or_path", tiny_model, "--train_file", rows_file, "--max_seq_length", 32)
    _, found = examined(tmp_path, *words, "--lora_r", 4, "--global_batch_size", 8)
    assert found["overfits"]["verdict"] == verdict


def test_a_model_without_rows_is_examined_on_ag_news(tmp_path: Path, tiny_model: Path) -> None:
    """Without rows the job is AG News, as for `train`: the doctor's own rows and model do not stand in."""
    code, found = examined(tmp_path, "--model_name_or_path", tiny_model, "--max_seq_length", 32)
    assert (code, found["set-up"]["verdict"]) == (1, "FAIL")
    assert "dataset_name=fancyzhx/ag_news: HF_HUB_OFFLINE is set" in found["set-up"]["measured"]


def test_an_unusual_rate_and_one_label(tmp_path: Path, tiny_model: Path, rows_file: Path) -> None:
    """A learning rate out of range is a WARN; predictions are not judged if all rows learnt have one label."""
    rows, texts = (
        tmp_path / "rows.csv",
        [line.rsplit(",")[0] for line in rows_file.read_text().splitlines()][1:],
    )
    labelled = [f"{texts[0]},b\n", *(f"{text},a\n" for text in texts)]  # the first one is repeated
    rows.write_text("text,label\n" + "".join(labelled))
    words = ["--train_file", rows, "--validation_file", rows, "--model_name_or_path", tiny_model]
    words += ["--max_seq_length", 32, "--learning_rate", 5, "--lr_scaling", "linear"]
    _, found = examined(tmp_path, *words, "--global_batch_size", 64)
    assert found["learning rate"]["verdict"] == "WARN"
    assert found["learning rate"]["measured"].startswith("10 is not between")
    assert found["predictions"]["measured"] == "the rows that were learnt have one label"


def test_faults_of_the_user_are_findings(tmp_path: Path, tiny_model: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\na,x\nb,x\n")
    code, found = examined(
        tmp_path, "--train_file", rows, "--model_name_or_path", tiny_model, "--max_seq_length", 32
    )
    assert (code, found["set-up"]["verdict"]) == (1, "FAIL")
    assert "every row has the label 'x'" in found["set-up"]["measured"]


def test_keys_without_effect_and_trackers_that_are_not_there(
    tmp_path: Path, tiny_model: Path, rows_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is a WARN, the second a FAIL; `overfits` gets the loss of predicting the label frequencies."""
    told, overfits = {}, job.learning.overfits

    def heard(step: Any, **keys: Any) -> Finding:
        told.update(keys)
        return overfits(step, **keys)

    monkeypatch.setattr(job.learning, "overfits", heard)
    words = ("--model_name_or_path", tiny_model, "--train_file", rows_file, "--max_seq_length", 32)
    words = (*words, "--global_batch_size", 8)
    code, found = examined(tmp_path, *words, "--lora_alpha", 8)
    assert (code, found["keys"]["verdict"]) == (0, "WARN")
    assert found["keys"]["measured"] == "lora_alpha has no effect on training without lora_r"
    assert told == {"goal": 0.1, "chance": pytest.approx(math.log(4), abs=0.1)}
    code, found = examined(tmp_path, *words, "--report_to", "foo")
    assert (code, found["set-up"]["measured"][:32]) == (1, "report_to=foo: no such tracker. ")


def test_a_fault_of_one_rank_is_told(tmp_path: Path) -> None:
    """Only rank 0 prints findings: a fault that another rank meets goes to its standard error."""
    (tmp_path / "file").touch()
    done = subprocess.run(
        [sys.executable, "-m", "accel_ft.doctor", "--output_dir", tmp_path / "file/run"],
        env=os.environ | {"RANK": "1", "WORLD_SIZE": "1"}, cwd=ROOT, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert re.search("^error: .*Not a directory", done.stderr)


def test_a_check_that_fails_itself(tmp_path: Path) -> None:
    """An unexpected exception in a check, on one of two ranks: no rank waits for a timeout, the traceback is on
    standard error or in the log named there, and the report ends with a FAIL.
    """
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import os\n"
        "from accel_ft import doctor\n"
        "from accel_ft.diagnosis import machine, tensors\n"
        "from accel_ft.errors import run_command\n"
        "where, rank = os.environ['BROKEN'].split()\n"
        "def broken(*_): raise ValueError('what nobody thought of')\n"
        "if rank == os.environ['RANK']: setattr(*{'early': (machine, 'clocks'), 'late': (tensors, 'in_place')}[where], broken)\n"
        "run_command(doctor.main)\n"
    )
    for where in ("early 0", "late 1"):
        folder = tmp_path / where
        folder.mkdir()
        file = folder / "found.json"
        done = launch(
            "cpu_ddp.yaml", "--mixed_precision", "no", broken, "--json", file, "--output_dir", folder / "x",
            "--ddp_timeout", 600, env={"BROKEN": where}, check=False,
        )  # fmt: skip
        assert done.returncode == 1  # within 240 s: no rank waited for its timeout
        logs = [Path(log).read_text() for log in re.findall("Its log: (.+)", done.stderr)]
        assert "in broken" in "".join([done.stderr, *logs])
        assert logs
        assert {path.name for path in folder.glob(".doctor-*/*")} == {"ranks"}
        assert "ValueError: what nobody thought of" in done.stderr
        *others, last = json.loads(file.read_text())
        assert (last["check"], last["verdict"]) == ("examination", "FAIL"), last
        assert "versions" in {finding["check"] for finding in others}


def test_the_probe_accumulates_where_the_job_does(tmp_path: Path) -> None:
    config = TrainConfig(
        output_dir=tmp_path, train_file="rows.csv", global_batch_size=4096,
        per_device_train_batch_size=300,
    )  # fmt: skip
    watch: Any = SimpleNamespace(num_ranks=2)
    assert job._probe(config, tmp_path, watch).max_train_samples == 2 * 2 * 300
    few = config.resolved(max_train_samples=700)
    assert job._probe(few, tmp_path, watch).max_train_samples == 700


def test_the_disk_is_that_of_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The space wanted is that of the checkpoints still to come, on the disk of their folder."""
    seen: list[tuple[Path, int]] = []
    monkeypatch.setattr(job.machine, "disk", lambda *told: seen.append(told))
    config = TrainConfig(output_dir=tmp_path, train_file="rows.csv", save_total_limit=2)
    run: Any = SimpleNamespace(
        splits=SimpleNamespace(train=SimpleNamespace(store=range(3200000))), num_trained=1,
        num_parameters=1, plan=SimpleNamespace(global_batch_size=32),
    )  # fmt: skip
    job._disk(run, config)
    (tmp_path / "checkpoints/step_00000500").mkdir(parents=True)
    job._disk(run, config)
    assert seen == [(tmp_path / "checkpoints", 4 + 3 * 12), (tmp_path / "checkpoints", 4 + 2 * 12)]
    run.splits.train.store = range(3200)  # 300 updates
    rollback = config.resolved(on_nonfinite="rollback", save_total_limit=None)
    job._disk(run, rollback)
    (tmp_path / "checkpoints/step_00000500").rmdir()
    job._disk(run, rollback)  # begins with a checkpoint to roll back to
    assert [wanted for _, wanted in seen[2:]] == [4 + 12, 4 + 2 * 12]


def mean_of_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that averages the loss within each micro-batch, not over the global batch."""
    ours = loop.weighted_loss
    monkeypatch.setattr(loop, "weighted_loss", lambda *args: ours(*args) / len(args[1]) * 8)


def weighed_by_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that loop and doctor share, and that depends on the split: class weights normalised per micro-batch, as
    in torch.
    """
    ours = loop.weighted_loss

    def broken(*args: Any) -> torch.Tensor:
        _, labels, weights, _ = args
        return ours(*args) * weights.sum() / ((1 + labels) * weights).sum()

    for module in (loop, job):
        monkeypatch.setattr(module, "weighted_loss", broken)


def same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every micro-batch has the rows of the first."""
    monkeypatch.setattr(
        build, "train_places", lambda plan, count, number: loader.train_places(plan, count, 0)
    )


def no_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    resume = start.resume

    def broken(run: Run, folder: Path) -> list[Path]:
        kept = run.scheduler.state_dict()
        lost = resume(run, folder)
        run.scheduler.load_state_dict(kept)
        return lost

    monkeypatch.setattr(start, "resume", broken)


def no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    load_any = convert.load_any

    def broken(*args: Any) -> None:
        kept = torch.get_rng_state()
        load_any(*args)
        torch.set_rng_state(kept)

    monkeypatch.setattr(convert, "load_any", broken)


def next_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume that jumps to the next epoch."""
    resume = start.resume

    def broken(run: Run, folder: Path) -> list[Path]:
        lost = resume(run, folder)
        run.step = run.plan.steps_per_epoch
        return lost

    monkeypatch.setattr(start, "resume", broken)


def strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer that holds the parameters from before wrapping."""
    make = build.make_optimizer

    def broken(model: torch.nn.Module, *args: Any) -> Any:
        import copy

        return make(copy.deepcopy(model), *args)

    monkeypatch.setattr(build, "make_optimizer", broken)


BROKEN = {
    mean_of_means: "one against many", weighed_by_micro_batch: "one against many", same_rows: "training rows", no_schedule: "resume: scheduler",
    no_random_numbers: "resume: random numbers", next_epoch: "resume: position in the data",
    strangers: "optimizer's parameters",
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN, ids=lambda fault: fault.__name__)
def test_broken(
    tmp_path: Path,
    tiny_model: Path,
    rows_file: Path,
    odd_file: Path,
    fault: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    words = job_words(tiny_model, rows_file, odd_file, tmp_path / "ignored")
    code, found = examined(tmp_path, *words, "--output_dir", tmp_path / "runs" / "x")
    assert (code, found[BROKEN[fault]]["verdict"]) == (1, "FAIL"), found


def test_preflight(
    tmp_path: Path,
    tiny_model: Path,
    rows_file: Path,
    odd_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every run begins with the cheap checks; nothing is written before they pass."""
    strangers(monkeypatch)
    words = job_words(tiny_model, rows_file, odd_file, tmp_path / "run")
    with pytest.raises(
        LaunchError,
        match="(?s)the optimizer holds .* tensors the model no longer has.*accel_ft.doctor",
    ):
        train.main(words)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    train.main([*words, "--max_steps", "1", "--preflight", "off"])
