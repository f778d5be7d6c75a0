"""Faults in a single run: non-finite numbers, signals, locks, changed settings. Kills of jobs are in tests/faults."""

import errno
import gzip
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import wait
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from conftest import LATEST, ROOT, cut_off, events_of, run_hash
from filelock import FileLock
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from accel_ft import train
from accel_ft.checkpoint import state, transaction
from accel_ft.config import TrainConfig
from accel_ft.data import loader
from accel_ft.engine import end, evaluation, loop
from accel_ft.engine import nonfinite as handling
from accel_ft.engine.meter import Meter
from accel_ft.engine.run import Run
from accel_ft.errors import (
    STOP_SIGNALS,
    CheckpointError,
    ConfigError,
    Preempted,
    RankError,
    UserError,
    run_command,
)
from accel_ft.model import load
from accel_ft.runtime import files, launch
from accel_ft.runtime import watch as watch_module
from accel_ft.runtime.logging import EventLog, progress_bar, setup_logging
from accel_ft.runtime.watch import Watch

SICK_STEP = 5  # counted from 0


def make_sick(monkeypatch: pytest.MonkeyPatch, calls: set[int]) -> None:
    """Make the loss of these micro-batches NaN; they are counted over the whole process."""
    count = 0
    weighted_loss = loop.weighted_loss

    def sick_loss(*args: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        return weighted_loss(*args) * (float("nan") if count - 1 in calls else 1.0)

    monkeypatch.setattr(loop, "weighted_loss", sick_loss)


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(transaction.checkpoint_folder(run / "checkpoints", step) / "model.safetensors")


def signal_heard(watch: Watch, number: int) -> None:
    """Send this process a signal; wait until the watching thread, which a slow disk may delay, has noticed it."""
    os.kill(os.getpid(), number)
    deadline = time.monotonic() + 60
    while not watch.stop_signal and time.monotonic() < deadline:
        time.sleep(0.02)


def note_watches(monkeypatch: pytest.MonkeyPatch) -> list[Watch]:
    """Return a list of all watches that are entered from here on."""
    watches: list[Watch] = []
    enter = Watch.__enter__
    monkeypatch.setattr(Watch, "__enter__", lambda self: (watches.append(self), enter(self))[1])
    return watches


def nonfinite(run: Path) -> list[dict]:
    return [event for event in events_of(run) if event["event"] == "nonfinite"]


def test_stop_names_update_and_samples(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second micro-batch of update 6 is NaN: its 3 samples (of 7) are named, and the weights stay those of 5."""
    make_sick(monkeypatch, {2 * SICK_STEP + 1})
    with pytest.raises(UserError, match="update 6: the loss is nan; samples ") as error:
        train.main(words)
    (event,) = nonfinite(tmp_path / "run")
    assert (event["update"], event["policy"], event["losses"]) == (6, "stop", ["nan"])
    assert len(event["sample_ids"]) == 3
    assert ", ".join(map(str, event["sample_ids"])) in str(error.value)
    assert "the newest checkpoint is step_00000005" in str(error.value)
    assert state.newest_sound(tmp_path / "run" / "checkpoints").name == "step_00000005"


def test_skip_leaves_the_update_out(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_sick(monkeypatch, {0, 2 * SICK_STEP})
    train.main([*words, "--on_nonfinite", "skip"])
    run = tmp_path / "run"
    before, after = weights(run, SICK_STEP), weights(run, SICK_STEP + 1)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not all(torch.equal(after[n], v) for n, v in weights(run, SICK_STEP + 2).items())
    events = [event for event in events_of(run) if event["event"] == "train"]
    assert [event["step"] for event in events] == list(range(1, 13))
    assert [event["loss"] is None for event in events] == [n in (0, SICK_STEP) for n in range(12)]
    assert [event["update"] for event in nonfinite(run)] == [1, SICK_STEP + 1]


@pytest.mark.parametrize("save_steps", [1, 3, 100])
def test_rollback_passes_over_the_batch(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_steps: int
) -> None:
    """Load the last checkpoint (of update 0 if none was saved yet), then go on without the batch, like a run that
    skips it from the start, except for dropout's random numbers.
    """
    make_sick(monkeypatch, {2 * SICK_STEP})
    train.main([*words, "--on_nonfinite", "rollback", "--save_steps", str(save_steps)])
    run = tmp_path / "run"
    (event,) = nonfinite(run)
    assert event["step"] == {1: 5, 3: 3, 100: 0}[save_steps]
    events = [event for event in events_of(run) if event["event"] == "train"]
    assert [event["step"] for event in events] == list(range(1, 13))
    assert [event["loss"] is None for event in events] == [n == SICK_STEP for n in range(12)]
    newest = transaction.list_published(run / "checkpoints")[-1][1]
    assert state.read_trainer_state(newest)["passed_over"] == [SICK_STEP]
    assert events[SICK_STEP]["samples_per_second"] == 0  # nothing was trained
    assert all(torch.isfinite(value).all() for value in weights(run, 12).values())


@pytest.mark.parametrize(("killed_at", "sick_again"), [(4, {2 * (SICK_STEP - 4)}), (9, set())])
def test_a_rollback_is_told_once(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    killed_at: int,
    sick_again: set[int],
) -> None:
    """Killed before a checkpoint records the rollback, the update fails again, and is logged anew; later it is left
    out. Either way the log has one event.
    """
    words = [*words, "--on_nonfinite", "rollback", "--save_steps", "4"]
    after = Run.after_update

    def kill(run: Run) -> None:
        if run.step == killed_at and run.passed_over:
            raise RuntimeError("killed")
        after(run)

    with monkeypatch.context() as patch:
        make_sick(patch, {2 * SICK_STEP})
        patch.setattr(Run, "after_update", kill)
        with pytest.raises(RuntimeError, match="killed"):
            train.main(words)
    assert len(nonfinite(tmp_path / "run")) == 1
    make_sick(monkeypatch, sick_again)
    train.main([*words, *LATEST])
    assert [event["update"] for event in nonfinite(tmp_path / "run")] == [SICK_STEP + 1]


def test_filling_is_no_sample(words: list[str], tmp_path: Path) -> None:
    """A short batch is filled up with micro-batches without samples, which diverged weights make NaN, too."""
    words += ["--per_device_train_batch_size", "1", "--global_batch_size", "9"]
    words += ["--learning_rate", "1e30", "--warmup_steps", "0", "--oversampling", "balanced"]
    with pytest.raises(UserError, match="update 12"):
        train.main([*words, "--max_grad_norm", "0", "--on_nonfinite", "skip"])
    told = [number for event in nonfinite(tmp_path / "run") for number in event["sample_ids"]]
    assert len(told) > 20
    assert {type(number) for number in told} == {int}


def test_rollback_before_the_first_save_of_its_own(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that resumes from another run's checkpoint first saves one into its own folder, to roll back to."""
    train.main([*words, "--max_steps", "2"])
    theirs = tmp_path / "run/checkpoints/step_00000002"
    make_sick(monkeypatch, {1})
    words = [*words, "--output_dir", str(tmp_path / "other"), "--save_steps", "100"]
    train.main([*words, "--on_nonfinite", "rollback", "--resume_from_checkpoint", str(theirs)])
    (event,) = nonfinite(tmp_path / "other")
    assert (event["step"], event["update"]) == (2, 3)
    assert (tmp_path / "other/checkpoints/step_00000002").is_dir()


def test_rollback_sets_aside_what_it_passes_over(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged checkpoint would count among the newest when older ones are pruned."""
    make_sick(monkeypatch, {2 * SICK_STEP})
    handle_nonfinite, root = loop.handle_nonfinite, tmp_path / "run/checkpoints"

    def damage(run: Run) -> bool:
        run.wait_for_publication()
        for step in (4, 5):
            (root / f"step_{step:08d}/optimizer.bin").unlink()
        return handle_nonfinite(run)

    monkeypatch.setattr(loop, "handle_nonfinite", damage)
    train.main([*words, "--on_nonfinite", "rollback", "--save_total_limit", "3"])
    kept = [f"damaged-step_{step:08d}" for step in (4, 5)]
    kept += [f"step_{step:08d}" for step in (10, 11, 12)]
    assert sorted(path.name for path in root.iterdir()) == kept


@pytest.mark.parametrize("save_steps", [1, 2, 3])
def test_a_checkpoint_of_sick_weights_is_passed_over(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    save_steps: int,
) -> None:
    """Each time update 4 is made it leaves finite weights with which no loss is finite: roll back to before it, and
    leave it out.
    """
    after = Run.after_update

    def spoil(run: Run) -> None:
        if run.step == 3 and 3 not in run.passed_over:
            with torch.no_grad():
                run.unwrapped_model().classifier.weight.mul_(1e38)
        after(run)

    monkeypatch.setattr(Run, "after_update", spoil)
    words += ["--on_nonfinite", "rollback", "--save_steps", str(save_steps)]
    train.main([*words, "--save_total_limit", "2", "--max_grad_norm", "0"])
    run, back = tmp_path / "run", {1: [4, 3], 2: [4, 2], 3: [3, 3]}[save_steps]
    told = [(e["update"], e["step"]) for e in nonfinite(run)]
    assert told == list(zip([5, 6], back, strict=True))
    assert f"rolled back to update {back[1]}; leaving out update 4 and 6" in capsys.readouterr().err
    newest = transaction.list_published(run / "checkpoints")[-1]
    assert newest[0] == 12
    assert state.read_trainer_state(newest[1])["passed_over"] == [4, 5, 3]
    assert all(torch.isfinite(value).all() for value in weights(run, 12).values())


def test_what_was_saved_before_a_sickness_stays(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While updates are skipped, new checkpoints may hold damaged weights: older ones must not be pruned."""
    make_sick(monkeypatch, set(range(2 * 4, 200)))
    words += ["--on_nonfinite", "skip", "--save_steps", "3", "--save_total_limit", "2"]
    with pytest.raises(UserError, match="update 15: .* after 10 others in a row") as error:
        train.main([*words, "--max_steps", "30"])
    kept = transaction.list_published(tmp_path / "run/checkpoints")
    assert [step for step, _ in kept] == [3, 6, 9, 12]
    newest = "the newest checkpoint is step_00000012, the newest from before these weights step_00000003. "
    assert newest in str(error.value)
    assert "The weights are those after update 4;" in str(error.value)
    monkeypatch.undo()
    make_sick(monkeypatch, set(range(2 * 4, 200)))
    train.main([*words, "--max_steps", "13", "--output_dir", str(tmp_path / "sick")])
    kept = transaction.list_published(tmp_path / "sick/checkpoints")
    assert [step for step, _ in kept] == [3, 6, 9, 12, 13]  # not pruned at the end either
    monkeypatch.undo()
    train.main([*words, "--max_steps", "30", *LATEST])  # finite again
    kept = transaction.list_published(tmp_path / "run/checkpoints")
    assert [step for step, _ in kept] == [27, 30]


def test_a_rollback_that_comes_no_further_back_leaves_out_what_it_says(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """If the loaded checkpoint already contains an update, that update cannot be left out: only the failed one is."""
    make_sick(monkeypatch, set(range(2 * 4, 200)))
    words += ["--on_nonfinite", "rollback", "--save_steps", "1", "--save_total_limit", "2"]
    with pytest.raises(UserError, match="The weights are those after update 3; "):
        train.main([*words, "--max_steps", "30"])
    told = re.findall(
        r"rolled back to update (\d+); leaving out update (.*)", capsys.readouterr().err
    )
    assert told[:3] == [("4", "5"), ("3", "4 and 6"), ("6", "7")]


def test_left_out_updates_are_forgotten_with_another_seed(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another seed an update has another batch: none is left out."""
    make_sick(monkeypatch, {2 * SICK_STEP})
    after, left_out = Run.after_update, []

    def fail(run: Run) -> None:
        if run.passed_over and run.step == SICK_STEP - 1:
            run.save()
            raise RuntimeError("stopped")
        after(run)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "after_update", fail)
        with pytest.raises(RuntimeError, match="stopped"):
            train.main([*words, "--on_nonfinite", "rollback", "--save_steps", "3"])
    start = Run.start
    monkeypatch.setattr(Run, "start", lambda run: (left_out.append(run.passed_over), start(run)))
    for seed in ([], ["--seed", "7", "--allow_changed", "seed"]):
        folder = str(tmp_path / f"other{len(seed)}")
        newest = transaction.list_published(tmp_path / "run/checkpoints")[-1][1]
        words[words.index("--output_dir") + 1] = folder
        train.main([*words, "--resume_from_checkpoint", str(newest), *seed])
    assert left_out == [[SICK_STEP], []]


def test_a_skip_comes_once_in_the_log_of_a_run_that_goes_on(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_sick(monkeypatch, {2 * SICK_STEP})
    train.main([*words, "--on_nonfinite", "skip"])
    run = tmp_path / "run"
    (event,) = nonfinite(run)
    assert event["step"] == event["update"] == SICK_STEP + 1
    cut_off(run, SICK_STEP)
    monkeypatch.undo()
    make_sick(monkeypatch, {0})
    train.main([*words, "--on_nonfinite", "skip", *LATEST])
    assert len(nonfinite(run)) == 1
    newest = transaction.list_published(run / "checkpoints")[5][1]
    assert state.read_trainer_state(newest)["newest_nonfinite"] == SICK_STEP


def test_a_terminal_that_is_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def write(self, text: str) -> None:
            raise BrokenPipeError

        def flush(self) -> None:
            raise BrokenPipeError

        def isatty(self) -> bool:
            return True

    setup_logging(True)
    monkeypatch.setattr(sys, "stderr", Gone())
    bar = progress_bar(0, 2, True)
    logging.getLogger("accel_ft").warning("saving")
    bar.update(2)
    bar.refresh()
    bar.close()


LATE = "--save_steps 5 --logging_steps 4 --eval_steps 12".split()  # nothing is due after update 6


def test_no_standard_error_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `2>&-`, or in a daemon."""
    setup_logging(True)
    monkeypatch.setattr(sys, "stderr", None)
    logging.getLogger("accel_ft").warning("saving")
    bar = progress_bar(0, 2, True)
    bar.update(2)
    bar.refresh()
    bar.close()


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read outcomes an update later; the optimizer itself skips a step that is not finite."""
    monkeypatch.setattr(handling, "_is_late", lambda run: True)
    arrived = SimpleNamespace(synchronize=lambda: None)
    stream = SimpleNamespace(record_event=lambda: arrived)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)


def test_read_late_is_the_same_run(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train.main([*words, *LATE])
    early = run_hash(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    as_on_a_gpu(monkeypatch)
    train.main([*words, *LATE])
    assert run_hash(tmp_path / "run") == early


LOOKS = (
    "_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_consecutive",
)  # fmt: skip


def test_an_update_asks_nothing_of_the_device(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads no value from the device, and no shape that depends on values: the host would wait for a GPU.

    The attention path is that of a GPU. The first update, in which the loader draws a seed, is not watched.
    """
    asked: list[str] = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.name().removeprefix("aten::").split(".")[0] in LOOKS:
                asked.append(func.name())
            return func(*args, **(kwargs or {}))

    def watched(run: Run) -> None:
        after = run.after_update

        def unwatched() -> None:
            with _disable_current_modes():
                after()

        run.after_update = unwatched  # type: ignore[method-assign]
        with Watched() if run.step > 0 else nullcontext():
            update(run)
        del run.after_update

    update, load_for_training = loop.update, load.load_for_training
    monkeypatch.setattr(loop, "update", watched)
    monkeypatch.setattr(load, "load_for_training", lambda *args: load_for_training(*args[:2], None))
    as_on_a_gpu(monkeypatch)
    train.main([*words, *LATE, "--per_device_train_batch_size", "4"])
    assert asked == []


@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_read_late_is_dealt_with_alike(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """The host learns of a non-finite update once the next is computed: event and weights are as if it knew at once."""
    words += [*LATE, "--on_nonfinite", policy]
    moved: dict[str, list[bytes]] = {}
    write_event = handling._write_event

    def seen(run: Run, *args: Any) -> None:
        model = run.unwrapped_model().state_dict()
        moved[str(args[0])] = [value.numpy().tobytes() for value in model.values()]
        write_event(run, *args)

    monkeypatch.setattr(handling, "_write_event", seen)
    results = []
    for late in (False, True):
        make_sick(monkeypatch, {2 * SICK_STEP})
        if late:
            as_on_a_gpu(monkeypatch)
        if policy == "stop":
            with pytest.raises(
                UserError, match="update 6: the loss is nan; .* those after update 5"
            ):
                train.main(words)
        else:
            train.main(words)
        (event,) = nonfinite(tmp_path / "run")
        results.append((event["update"], event["losses"], event["sample_ids"]))
        if policy == "skip":  # the next update has been applied
            results[-1] = (*results[-1], run_hash(tmp_path / "run")["model"])
        else:
            results[-1] = (*results[-1], moved[policy])
        shutil.rmtree(tmp_path / "run")
        monkeypatch.undo()
        monkeypatch.setattr(handling, "_write_event", seen)
    assert results[0] == results[1]


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_what_never_ends_is_stopped(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    make_sick(monkeypatch, set(range(2, 1000)))
    words += ["--on_nonfinite", policy, "--num_train_epochs", "10"]
    told = f"update {handling.IN_A_ROW + 2}: the loss is nan; .*, after 10 others in a row"
    with pytest.raises(UserError, match=told) as caught:
        train.main(words)
    assert "on_nonfinite" not in str(caught.value)
    assert len(nonfinite(tmp_path / "run")) == handling.IN_A_ROW + 1


@pytest.mark.parametrize(
    ("loss", "norm", "scale", "finite"),
    [
        (1.0, 2.0, None, True),
        (1.0, float("inf"), None, False),
        (1.0, float("inf"), 65536.0, True),  # fp16 overflow: the scaler skips and halves
        (1.0, float("nan"), 1.0, False),  # a scale of 1 is not halved
        (float("inf"), 1.0, 65536.0, False),
        (float("-inf"), 1.0, None, False),
        (float("nan"), float("nan"), 65536.0, False),
    ],
)
def test_overflow_of_fp16_is_no_sickness(
    loss: float, norm: float, scale: float | None, finite: bool
) -> None:
    scaler = None if scale is None else SimpleNamespace(get_scale=lambda: scale)
    told: list[str] = []
    run: Any = SimpleNamespace(
        events=SimpleNamespace(write=lambda event, **_: told.append(event)),
        step=0, needs_outcome=lambda: True, config=SimpleNamespace(on_nonfinite="stop"),
        accelerator=SimpleNamespace(scaler=scaler, device=torch.device("cpu"), num_processes=1),
        watch=SimpleNamespace(stage=lambda *_, **__: None, stop_signal=0, all_max=lambda *n: list(n)),
        meter=Meter(), global_weight=lambda step: 1.0, newest_nonfinite=-1, outcomes=deque(),
    )  # fmt: skip
    assert handling.may_step(run, [torch.tensor(loss)], torch.tensor(norm)) is finite
    assert run.meter.loss_sum == (loss if finite else 0.0)
    assert told == ["overflow"] * (finite and norm == float("inf"))


def test_a_signal_has_the_newest_outcome_read_before_the_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Outcomes are read an update late, and the ranks learn of a signal as they read one: then read the newest, too."""
    monkeypatch.setattr(handling, "_is_late", lambda _: True)
    monkeypatch.setattr(
        handling,
        "_measure",
        lambda run, losses, norm: handling.Outcome(run.step, torch.stack([*losses, norm])),
    )  # as on a CPU
    run: Any = SimpleNamespace(
        step=0, stop_signal=0, config=SimpleNamespace(on_nonfinite="stop"),
        accelerator=SimpleNamespace(scaler=None, device=torch.device("cpu"), num_processes=1),
        watch=SimpleNamespace(stage=lambda *_, **__: None, stop_signal=0, all_max=lambda *n: list(n)),
        meter=Meter(), global_weight=lambda step: 1.0, newest_nonfinite=-1, outcomes=deque(),
    )  # fmt: skip
    run.needs_outcome = lambda: run.stop_signal > 0
    assert handling.may_step(run, [torch.tensor(2.0)], torch.tensor(1.0))
    assert (run.meter.loss_sum, len(run.outcomes)) == (0.0, 1)
    run.step = 1
    assert handling.may_step(run, [torch.tensor(3.0)], torch.tensor(1.0))
    assert (run.meter.loss_sum, len(run.outcomes)) == (2.0, 1)
    run.step, run.watch.stop_signal = 2, 15
    assert not handling.may_step(run, [torch.tensor(float("nan"))], torch.tensor(1.0))
    assert run.meter.loss_sum == 5.0


@pytest.mark.parametrize("step", [6, 12])
def test_a_signal_during_an_evaluation(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The state is saved without the evaluation, which the resume makes up for; also at the last update."""
    words += ["--per_device_eval_batch_size", "7"]  # the signal comes in the first of three batches
    train.main(words)
    whole = run_hash(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    forward, evaluations = evaluation.forward, 0
    watches = note_watches(monkeypatch)

    def slow_forward(*args: Any) -> torch.Tensor:
        nonlocal evaluations
        evaluations += 1
        if evaluations == 1 + 3 * (step // 6 - 1):
            signal_heard(watches[-1], signal.SIGTERM)
        return forward(*args)

    monkeypatch.setattr(evaluation, "forward", slow_forward)
    with pytest.raises(Preempted, match=f"SIGTERM: stopped after update {step} of 12"):
        train.main(words)
    monkeypatch.undo()
    events = events_of(tmp_path / "run")
    ended = events[-1]
    assert (ended["event"], ended["step"], ended["signal"]) == ("preempted", step, "SIGTERM")
    newest = transaction.list_published(tmp_path / "run" / "checkpoints")[-1]
    assert newest[0] == step
    assert state.read_trainer_state(newest[1])["eval_is_due"]
    train.main([*words, "--resume_from_checkpoint", "latest"])
    assert run_hash(tmp_path / "run") == whole
    told = [event["event"] for event in events_of(tmp_path / "run")]
    assert told.count("preempted") == told.count("resume") == 1


def test_a_saved_run_is_preempted_even_if_the_event_cannot_be_written(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, after = EventLog.write, Run.after_update

    def full(log: EventLog, event: str, step: int, **values: Any) -> None:
        if event == "preempted":
            raise CheckpointError("metrics.jsonl: cannot be written")
        write(log, event, step, **values)

    def signalled(run: Run) -> None:
        after(run)
        if run.step == 3:
            signal_heard(run.watch, signal.SIGTERM)

    monkeypatch.setattr(EventLog, "write", full)
    monkeypatch.setattr(Run, "after_update", signalled)
    with pytest.raises(Preempted, match="SIGTERM: stopped after update 4 of 12, which is saved"):
        train.main(words)


def test_a_folder_belongs_to_one_run(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.1)
    (tmp_path / "run" / "ranks").mkdir(parents=True)
    with (
        FileLock(tmp_path / "run" / "ranks" / "lock"),
        pytest.raises(ConfigError, match="another run is writing to it"),
    ):
        train.main(words)
    train.main([*words, "--max_steps", "1"])


@pytest.mark.parametrize("how", ["moved", "removed", "moved, with a run in its place"])
@pytest.mark.parametrize("meets", ["log", "save", "prune", "model"])
def test_a_run_whose_folder_is_gone_writes_to_no_other(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, meets: str
) -> None:
    """The lock moves with its file, but a run writes to paths, which may belong to another run by now."""
    run, after_update = tmp_path / "run", Run.after_update
    other = [
        "ranks",
        "ranks/lock",
        "checkpoints",
        *(f"checkpoints/step_0000000{n}" for n in range(1, 4)),
    ]
    other *= "place" in how

    def take_away(*_: object) -> None:
        run.rename(tmp_path / "moved")  # atomic: a heartbeat may come during rmtree
        if how == "removed":
            shutil.rmtree(tmp_path / "moved")
        for name in other:
            path = run / name
            path.touch() if name.endswith("lock") else path.mkdir(parents=True, exist_ok=True)
        monkeypatch.undo()

    logged = threading.Event()

    def after(self: Run) -> None:
        if self.step == 2 and meets == "log":
            take_away()
        after_update(self)
        if self.publication:  # so that pruning, not a log event, meets the move first
            logged.set()
            wait([self.publication])

    def before(plain: Any) -> Any:
        return lambda *given, **keys: (take_away(), plain(*given, **keys))[1]

    monkeypatch.setattr(Run, "after_update", after)
    if meets == "save":
        monkeypatch.setattr(state, "save", before(state.save))
    elif meets == "prune":
        prune = before(Run.prune)
        monkeypatch.setattr(Run, "prune", lambda *given: (logged.wait(60), prune(*given))[1])
    elif meets == "model":
        monkeypatch.setattr(end, "_export", before(end._export))
    with pytest.raises(CheckpointError, match="was moved or removed while this run was writing"):
        train.main([*words, "--save_steps", "4", "--save_total_limit", "2", "--max_steps", "8"])
    left = {path.relative_to(run).as_posix() for path in run.rglob("*")}
    assert set(other) <= left <= {*other, "ranks/rank_00000.json"}


def test_a_changed_setting_is_refused_unless_allowed(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train.main([*words, "--max_steps", "2"])
    again = [*words, "--max_steps", "4", "--resume_from_checkpoint", "latest", "--seed", "1"]
    again += ["--learning_rate", "1e-4"]
    with pytest.raises(CheckpointError, match="learning_rate: .*\n  seed: 42 in the checkpoint, 1"):
        train.main(again)
    with pytest.raises(
        CheckpointError, match=r"--allow_changed learning_rate,seed to .*\n  seed: 42"
    ):
        train.main([*again, "--allow_changed", "learning_rate"])
    with pytest.raises(ConfigError, match="allow_changed=sead: .* Did you mean `seed`"):
        train.main([*again, "--allow_changed", "sead"])
    train.main([*again, "--allow_changed", "learning_rate,seed"])
    assert events_of(tmp_path / "run")[-1]["step"] == 4
    assert "allow_changed: []" in (tmp_path / "run" / "config.yaml").read_text()
    more = ["--global_batch_size", "4", "--max_steps", "6"]
    assert "count as if they were made by this job" not in capsys.readouterr().err
    train.main([*again, *more, "--allow_changed", "learning_rate,seed,global_batch_size"])
    assert events_of(tmp_path / "run")[-1]["step"] == 6
    told = "the 4 of 6 updates done so far count as if they were made by this job, which goes on at epoch"
    assert told in capsys.readouterr().err


def test_links_in_the_folder_of_a_run(words: list[str], tmp_path: Path) -> None:
    """The model and a checkpoint were moved to another disk, with a link in their place."""
    train.main(words)
    run = tmp_path / "run"
    for moved in (run / "model", run / "checkpoints/step_00000012"):
        moved.rename(tmp_path / moved.name)
        moved.symlink_to(tmp_path / moved.name)
    train.main([*words, "--num_train_epochs", "3", *LATEST])
    assert [e["step"] for e in events_of(run) if e["event"] == "resume"] == [12]
    assert not (run / "model").is_symlink()
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert names >= {"step_00000018"}
    assert not [name for name in names if name.startswith(".staging")]


@pytest.mark.parametrize(
    "name",
    [
        "ranks/rank_00000.log",
        "metrics.jsonl",
        "model/vocab.txt",
        "checkpoints",
        "ranks",
        "report",
        "trackers",
        "trackers/id",
        "profile/rank_00000.txt",
    ],
)
def test_links_in_somebody_elses_run(words: list[str], tmp_path: Path, name: str) -> None:
    """A resume would write through them, into a user's key file or another run, say."""
    run, mine = tmp_path / "run", tmp_path / "mine"
    (run / "model").mkdir(parents=True)
    (run / name).parent.mkdir(exist_ok=True)
    (mine / name).mkdir(parents=True)
    (mine / "receipt.json").touch()
    (run / name).symlink_to(mine / name)
    with pytest.raises(ConfigError, match=f"run/{name}: is a link to {mine}/.*Fix: remove it"):
        train.main([*words, *LATEST])
    assert [*(mine / name).iterdir()] == []
    (run / "model").rename(run / "whole")
    (run / "model").symlink_to(mine)  # of a finished run, say: no model card is written there
    assert not train._lacks_card(TrainConfig(output_dir=run))
    (run / "model").unlink()
    (run / "whole").rename(run / "model")
    assert train._lacks_card(TrainConfig(output_dir=run))
    if name == "checkpoints":  # a link to another disk is allowed
        (mine / "receipt.json").unlink()
        (run / "model").rmdir()
        train.main([*words, *LATEST])
        assert [*(mine / name).iterdir()]


def test_what_would_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Labels and file names may come from somebody else: control characters are escaped."""

    def fail() -> None:
        logging.getLogger("accel_ft").info("no warning")
        logging.getLogger("accel_ft").warning("World\x1b[2J\x9b2J of\ttwo\nlines")
        raise ConfigError("\x1b]0;owned\x07 é\u202e")

    setup_logging(True)
    with pytest.raises(SystemExit):
        run_command(fail)
    told = capsys.readouterr().err
    warning = "warning: World\\x1b[2J\\x9b2J of\ttwo\nlines\n"
    assert told == f"no warning\n{warning}error: \\x1b]0;owned\\x07 é\\u202e\n"


def test_bytes_that_are_no_text_at_the_end_of_the_log(words: list[str], tmp_path: Path) -> None:
    """As the repair of a file system may leave them."""
    train.main(words)
    log = tmp_path / "run/metrics.jsonl"
    log.write_bytes(log.read_bytes() + b'{"event": "tr\xff\xfe')
    train.main([*words, "--num_train_epochs", "3", *LATEST])
    assert events_of(tmp_path / "run")[-1]["step"] == 18


def test_the_last_word_is_of_the_rank_that_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This rank failed because the other ended: its error file says so, even if the launcher ends this rank at once."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(Watch, "_find_lost", lambda *args, **kwargs: (1, "rank 1 was stopped", 1))
    watch = Watch(tmp_path / "ranks", 0, 1, 60)
    watch.num_ranks = 2
    with pytest.raises(RankError, match="rank 1 was stopped"), watch:
        raise RuntimeError("Connection reset by peer")
    assert (
        json.loads((tmp_path / "error.json").read_text())["message"] == "error: rank 1 was stopped"
    )


def test_a_signal_before_anything_is_saved_has_the_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    codes, cleaned = list[int](), list[bool]()
    monkeypatch.setattr(os, "_exit", codes.append)
    with Watch(tmp_path / "ranks", 0, 1, 60, clean_up=cleaned.append) as watch:
        watch.stage("model")
        watch._on_signal(signal.SIGTERM)
        words = json.loads((tmp_path / "error.json").read_text())["message"]
        assert words == "SIGTERM at stage model: nothing to save yet"
        watch._stopped_at -= 2
        watch._on_signal(signal.SIGTERM)
        words = json.loads((tmp_path / "error.json").read_text())["message"]
        assert words == "SIGTERM again: stopped at once, without saving"
    assert codes == [75, 128 + signal.SIGTERM]
    assert cleaned == [False, False]


def test_a_second_ctrl_c_ends_the_run_and_not_the_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    pthread_kill, calls = signal.pthread_kill, list[int]()

    def missed_once(thread: int, number: int) -> None:
        """Lose the first signal, as if it came just before the main thread fell asleep."""
        calls.append(number)
        if len(calls) > 1:
            pthread_kill(thread, number)

    monkeypatch.setattr(signal, "pthread_kill", missed_once)

    def saves_for_ever() -> None:
        with Watch(tmp_path / "ranks", 0, 1, 60) as watch:
            watch.stage("save", can_save=True)
            signal_heard(watch, signal.SIGINT)
            watch._stopped_at -= 2  # else the second counts as a copy
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)  # the second signal ends it

    started = time.monotonic()
    with pytest.raises(Preempted, match="SIGINT at stage save: stopped, without saving"):
        saves_for_ever()
    assert time.monotonic() - started < 50
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_clock_that_is_set_ends_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil derives a process's creation time from the boot time, and that from the present clock."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    watch = Watch(tmp_path, 0, 1, 60)
    beat = watch._beat | {"rank": 1, "pid": process.pid}
    beat["born"] = psutil.Process(process.pid).create_time()
    create_time = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: create_time(self) + 3600)
    assert watch._fate_here(beat, 60) == ""
    assert watch._fate_here(beat | {"born": beat["born"] - 10}, 60) == "died"  # the pid was reused
    process.kill()
    process.wait()
    assert watch._fate_here(beat, 60) == "died"


def test_machines_of_one_image_are_told_apart(tmp_path: Path) -> None:
    """Hostname and pid namespace are alike, the boot id is not: a pid of another machine is not looked up here."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        pytest.skip("no Linux")
    watch, own = Watch(tmp_path, 0, 1, 60), boot.read_text().strip()
    there = watch._beat | {"rank": 1, "pid": 2**22 + 1, "failed": ""}
    assert watch._fate(there, 60) == "died"
    assert watch._fate(there | {"host": there["host"].replace(own, "0" * 36)}, 60) == ""


def test_a_stopped_rank_that_another_has_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between our status check and our kill: the watching thread must survive."""

    def gone(process: psutil.Process) -> None:
        raise psutil.NoSuchProcess(process.pid)

    monkeypatch.setattr(psutil.Process, "status", lambda self: psutil.STATUS_STOPPED)
    monkeypatch.setattr(psutil.Process, "kill", gone)
    watch = Watch(tmp_path, 0, 1, 60)
    beat = watch._beat | {"rank": 1}
    assert watch._fate_here(beat, 0.001) == ""
    time.sleep(0.01)
    assert watch._fate_here(beat, 0.001).startswith("was stopped for ")


def test_a_crash_is_told_with_its_place(tmp_path: Path) -> None:
    """Only a crash of this start of the rank counts: its log keeps the earlier ones."""
    crash = "import faulthandler, os, sys; print('started now, pid', os.getpid(), flush=True); "
    crash += "faulthandler.enable(); os.kill(os.getpid(), 11)"
    with (tmp_path / "rank_00001.log").open("w") as log:
        for words in (crash, crash.partition("faulthandler.enable")[0]):
            process = subprocess.Popen([sys.executable, "-c", words], stdout=log, stderr=log)
            process.wait()
            watch = Watch(tmp_path, 0, 1, 60)
            beat = watch._beat | {"rank": 1, "pid": process.pid}
            told = watch._fate_here(beat, 60)
            crashed = 'died (Segmentation fault, File "<string>", line 1 in <module>)'
            assert told == (crashed if words == crash else "died")


LOST = RuntimeError("closed by peer")


@pytest.mark.parametrize(
    ("error", "num_ranks", "when"),
    [(LOST, 2, "leaving"), (LOST, 2, "looking"), (LOST, 2, "before"), (ValueError("cheese"), 1, "leaving"),
     (Preempted("SIGTERM"), 2, "leaving"), (None, 2, "leaving")],
)  # fmt: skip
def test_a_signal_that_comes_while_a_failed_rank_takes_leave(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception | None,
    num_ranks: int,
    when: str,
) -> None:
    """When a rank fails, the launcher signals the others and waits for them. A signal that comes while this rank
    handles that failure is raised again, not lost; and no save is announced.
    """
    watch, monkeypatched = Watch(tmp_path, 0, 1, 60), {"leaving": "_let_go", "looking": "_cause"}
    watch.num_ranks = num_ranks
    if when in monkeypatched:
        name = monkeypatched[when]
        plain = getattr(Watch, name)

        def slowly(*given: object) -> object:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.0 if when == "looking" else 0.0)
            return plain(*given)

        monkeypatch.setattr(Watch, name, slowly)
    ends = when != "before" and num_ranks == 2 and error is LOST
    fails = pytest.raises(KeyboardInterrupt if ends else type(error)) if error else nullcontext()
    with fails, watch:
        watch.stage("step 1", can_save=True)
        if when == "before":
            signal_heard(watch, signal.SIGINT)
        if error:
            raise error
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert ("saving after this update" in caplog.text) == (when == "before")


@pytest.mark.parametrize("when", ["entering", "leaving"])
def test_another_ctrl_c_while_handlers_are_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """On a slow disk: a notebook must get its own handlers back, not keep those of a run that is over."""
    write = Watch._write_beat

    def slowly(self: Watch, ended: bool = False) -> None:
        if threading.current_thread() is threading.main_thread() and ended == (when == "leaving"):
            os.kill(os.getpid(), signal.SIGINT)
        write(self, ended)

    monkeypatch.setattr(Watch, "_write_beat", slowly)

    def run() -> None:
        with Watch(tmp_path, 0, 1, 60) as watch:
            watch.stage("data")
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
            watch.stage("model")

    with pytest.raises(Preempted, match="^SIGINT at stage data: stopped, there was nothing to"):
        run()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


def test_the_last_words_are_of_the_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watching thread may be writing its default, `ended without a message`, at the same time."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    plain, begun = watch_module.leave_last_words, threading.Event()

    def slowly(words: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            time.sleep(0.5)
        plain(words)

    monkeypatch.setattr(watch_module, "leave_last_words", slowly)

    def run() -> None:
        with Watch(tmp_path / "ranks", 0, 1, 60):
            assert begun.wait(20)
            raise ValueError("cheese")

    with pytest.raises(ValueError, match="cheese"):
        run()
    assert "ValueError: cheese" in json.loads((tmp_path / "error.json").read_text())["message"]


UNREAD = """
import logging, os, sys
from pathlib import Path
from accel_ft.runtime.watch import Watch

logging.basicConfig(level=logging.WARNING)
with Watch(Path(sys.argv[1]), 0, 1, 60) as watch:
    watch.stage("step 1", can_save=True)
    while True:
        logging.warning("x" * 1000)
"""


def test_output_that_nobody_reads_keeps_no_run(tmp_path: Path) -> None:
    """Nobody reads stderr (a paused pager, a hung log collector): the main thread blocks in a write, and holds the
    logging lock. A second signal still ends the run.
    """
    command = [sys.executable, "-c", UNREAD, str(tmp_path / "ranks")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    unread, stderr = os.pipe()
    process = subprocess.Popen(command, env=environment, stderr=stderr)
    try:
        beat = tmp_path / "ranks" / "rank_00000.json"
        deadline = time.monotonic() + 60
        while not beat.exists() or json.loads(beat.read_text())["stage"] != "step 1":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
    finally:
        process.kill()
        os.close(unread), os.close(stderr)


def test_a_run_is_closed_before_it_lets_the_others_go(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When one rank has ended, the launcher signals the others: they must have nothing left to do."""
    seen: list[str] = []
    for owner, name in ((Run, "close"), (Watch, "barrier"), (Run, "wait_for_publication")):
        plain = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda self, *, name=name, plain=plain: seen.append(name) or plain(self)
        )
    after = Run.after_update

    def signalled(run: Run) -> None:
        if not run.watch.stop_signal:  # a second one would end this process at once
            signal_heard(run.watch, signal.SIGTERM)
        after(run)

    monkeypatch.setattr(Run, "after_update", signalled)
    with pytest.raises(Preempted, match="SIGTERM: stopped after update"):
        train.main(words)
    assert seen[-2:] == ["close", "barrier"]


def test_a_heartbeat_of_another_version_is_ignored(tmp_path: Path) -> None:
    watch = Watch(tmp_path, 0, 1, 60)
    watch.num_ranks = 2
    (tmp_path / "rank_00001.json").write_text('{"rank": 1}')
    assert watch._others() == []


def test_a_file_system_that_cannot_fsync_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(descriptor: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "fsync", refuses)
    files.fsync(tmp_path)
    with pytest.raises(OSError, match="Invalid argument"):
        files.fsync(tmp_path / "file")


def test_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refusing(number: int) -> Any:
        def refuse(*args: object, **kwargs: object) -> None:
            raise OSError(number, "no locks")

        return refuse

    (tmp_path / "ranks").mkdir()
    for number in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
        monkeypatch.setattr(FileLock, "acquire", refusing(number))
        with files.locked(tmp_path, tmp_path / "ranks/lock") as check:
            assert "its file system has no locks" in caplog.text
            check()
        caplog.clear()
    monkeypatch.setattr(FileLock, "acquire", refusing(errno.EIO))
    with pytest.raises(OSError, match="no locks"), files.locked(tmp_path, tmp_path / "ranks/lock"):
        pass


def test_a_watch_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with Watch(tmp_path, 0, 1, 60) as watch:
        watch.stage("model")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    beat = json.loads((tmp_path / "rank_00000.json").read_text())
    assert (beat["stage"], beat["ended"], beat["pid"]) == ("end", True, os.getpid())
    with pytest.raises(ValueError, match="cheese"), Watch(tmp_path, 0, 1, 60):
        raise ValueError("cheese")
    beat = json.loads((tmp_path / "rank_00000.json").read_text())
    assert (beat["failed"], beat["ended"]) == ("ValueError: cheese", False)
    assert "ValueError: cheese" in (tmp_path / "rank_00000.log").read_text()


@pytest.mark.parametrize("by_torchrun", [True, False])
def test_nohup_is_heeded_where_the_launcher_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_torchrun: bool
) -> None:
    """Even under nohup torchrun ends its ranks when the terminal closes: they must save."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if by_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Watch(tmp_path, 0, 1, 60) as watch:
            watch.stage("step 1", can_save=True)
            if by_torchrun:
                signal_heard(watch, signal.SIGHUP)
            else:
                os.kill(os.getpid(), signal.SIGHUP)
                time.sleep(0.5)
            assert watch.stop_signal == (signal.SIGHUP if by_torchrun else 0)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", "SIGTERM SIGINT SIGUSR1 SIGUSR2 SIGHUP".split())
def test_each_of_the_schedulers_signals_asks_for_a_save(tmp_path: Path, number: str) -> None:
    with Watch(tmp_path, 0, 1, 60) as watch:
        watch.stage("step 1", can_save=True)
        os.kill(os.getpid(), signal.Signals[number])
        deadline = time.monotonic() + 20
        while not watch.stop_signal and time.monotonic() < deadline:
            time.sleep(0.05)
        assert watch.stop_signal == signal.Signals[number]


def test_a_watch_of_many_ranks_acts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many ranks write heartbeats less often, to spare a shared disk: no sign that this process was stopped."""
    ended: list[int] = []
    monkeypatch.setattr(watch_module, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(watch_module, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(Watch, "_end", lambda self, lost: ended.append(lost[0]))
    watch = Watch(tmp_path, 0, 1, 60)
    watch.num_ranks = 10
    beat = {"rank": 1, "run": watch._beat["run"], "failed": "x", "ended": False, "at": 0}
    about = {"pid": 1, "host": "h", "stage": "step 1", "exit_code": 1}
    (tmp_path / "rank_00001.json").write_text(json.dumps(beat | about))
    with watch:
        deadline = time.monotonic() + 60
        while not ended and time.monotonic() < deadline:
            time.sleep(0.05)
        watch.num_ranks = 1
    assert ended[0] == 1


def test_warnings_are_in_the_receipt_and_the_report(words: list[str], tmp_path: Path) -> None:
    """Those of the newest start, each once, and none of another run in this process."""
    report = ["--report_to", "html"]
    train.main(
        [*words, "--max_steps", "2", "--lora_alpha", "3", "--global_batch_size", "100", *report]
    )
    receipt = json.loads((tmp_path / "run/receipt.json").read_text())
    assert any(told.startswith("global_batch_size=100: more than") for told in receipt["warnings"])
    assert len(receipt["warnings"]) == len(set(receipt["warnings"])) > 1
    idle = "lora_alpha has no effect on training without lora_r"
    assert receipt["warnings"].count(idle) == 1
    page = (tmp_path / "run/report.html").read_text()
    assert f"<li>{idle}</li>" in page
    train.main([*words, "--max_steps", "2", "--output_dir", str(tmp_path / "other"), *report])
    assert idle not in (tmp_path / "other/receipt.json").read_text()
    assert idle not in (tmp_path / "other/report.html").read_text()


def test_a_warning_of_shared_tensors_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """accelerate logs it at each save of a model with shared weights, such as T5."""
    launch.make_accelerator()
    logging.getLogger("accelerate.utils.other").warning("Removed shared tensor {'a'}")
    assert caplog.messages == []


@pytest.mark.parametrize("saved_at", [3, 4, 5])
def test_a_loss_over_several_updates_is_resumed(
    words: list[str], tmp_path: Path, saved_at: int
) -> None:
    """The loss summed since the last event is in the checkpoint."""
    seldom = [*words, "--logging_steps", "4", "--save_steps", "1", "--save_total_limit", "none"]
    train.main(seldom)
    often, whole = [*words, "--logging_steps", "1"], events_of(tmp_path / "run")
    train.main([*often, "--output_dir", str(tmp_path / "each")])
    losses = [e["loss"] for e in events_of(tmp_path / "each") if e["event"] == "train"]
    logged = [e["loss"] for e in whole if e["event"] == "train"]
    assert logged[0] == pytest.approx(sum(losses[:4]) / 4)  # 8 rows each
    assert logged[1] == pytest.approx(
        (8 * (losses[4] + losses[6] + losses[7]) + 7 * losses[5]) / 31
    )
    cut_off(tmp_path / "run", saved_at)
    train.main([*seldom, *LATEST])
    again = [e["loss"] for e in events_of(tmp_path / "run") if e["event"] == "train"]
    assert again == logged


def test_an_evaluation_is_no_time_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("accel_ft.engine.meter.time.monotonic", lambda: now[0])
    meter = Meter()
    meter.restart_clock()
    meter.samples, meter.tokens, meter.padded_tokens = 60, 600, 750
    now[0] += 5.0
    meter.pause(3.0)
    alone: Any = SimpleNamespace(all_gather=lambda value: [value])
    read = meter.read(alone)
    assert (read["samples_per_second"], read["tokens_per_second"]) == (30.0, 300.0)
    assert (read["padding"], read["loss"]) == (0.2, None)
    assert (meter.samples, meter.padded_tokens, meter.since) == (0, 0, 15.0)


@pytest.mark.parametrize(
    ("failed", "code", "kind", "told"),
    [
        ("SIGTERM, nothing to save yet", 75, Preempted, "ended (SIGTERM, nothing to save yet) at"),
        ("ValueError: x", 1, RankError, "failed (ValueError: x) at"),
    ],
)
@pytest.mark.parametrize("feels_it", [True, False])
def test_the_others_of_a_rank_that_a_signal_ended_are_preempted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failed: str,
    code: int,
    kind: type[UserError],
    told: str,
    feels_it: bool,
) -> None:
    """The exit code is that of the other rank, whether a collective fails first or the watch notices first."""
    left: list[tuple[str, int]] = []
    seen: list[dict[str, Any]] = []  # heartbeats, as a third rank reads them

    def leave(self: Watch, words: str, code: int, aloud: bool) -> None:
        left.append((words, code))
        seen.append(json.loads((tmp_path / "rank_00000.json").read_text()))

    monkeypatch.setattr(Watch, "_leave", leave)
    monkeypatch.setattr(watch_module, "TICK_SECONDS", 60.0 if feels_it else 0.05)
    monkeypatch.setattr(watch_module, "GRACE_SECONDS", 0.1)  # a stall of 1 s restarts it
    watch = Watch(tmp_path, 0, 1, 60, "ask the doctor")
    watch.num_ranks = 2
    beat = {"rank": 1, "run": watch._beat["run"], "failed": failed, "ended": False, "at": 0}
    about = {"pid": 1, "host": "h", "stage": "model", "exit_code": code}
    (tmp_path / "rank_00001.json").write_text(json.dumps(beat | about))
    if feels_it:
        with pytest.raises(kind, match=re.escape(told)) as caught, watch:
            raise RuntimeError("gloo: connection closed by peer")
        assert caught.value.exit_code == code
        assert json.loads((tmp_path / "rank_00000.json").read_text())["exit_code"] == code
        return
    with watch:
        deadline = time.monotonic() + 60
        while not left and time.monotonic() < deadline:
            time.sleep(0.05)
        watch.num_ranks = 1
    assert told in left[0][0]
    assert left[0][1] == code
    assert told in seen[0]["failed"]
    assert seen[0]["exit_code"] == code
    assert ("ask the doctor" in left[0][0]) == (code == 1)


def start(words: list[str], *, shell: bool = False) -> subprocess.Popen[str]:
    """Start accel_ft.train in a process group of its own; with `shell`, by a shell that ends once the run writes its
    heartbeat, so that the run becomes an orphan.
    """
    command = [sys.executable, "-m", "accel_ft.train", *words]
    if shell:
        beat = Path(words[words.index("--output_dir") + 1]) / "ranks" / "rank_00000.json"
        until = 'beat=$1; shift; "$@" & until [ -e "$beat" ]; do sleep 0.05; done'
        command = ["sh", "-c", until, "sh", str(beat), *command]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipe = subprocess.DEVNULL if shell else subprocess.PIPE
    return subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=pipe, stderr=pipe, text=True
    )


def wait_for_step(run: Path, step: int) -> None:
    deadline = time.monotonic() + 60
    while (
        not (run / "metrics.jsonl").exists()
        or max((e["step"] for e in events_of(run)), default=0) < step
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_signal_to_the_whole_group_spares_the_workers(words: list[str], tmp_path: Path) -> None:
    """Schedulers signal every process of a job: also the workers that prepare batches."""
    process = start([*words, "--dataloader_num_workers", "2", "--num_train_epochs", "300"])
    wait_for_step(tmp_path / "run", 3)
    os.killpg(process.pid, signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75, said
    assert "SIGTERM: stopped after update" in said
    newest = transaction.list_published(tmp_path / "run" / "checkpoints")[-1]
    assert newest[0] == events_of(tmp_path / "run")[-1]["step"]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_no_signal_ends_a_worker_from_its_start(
    words: list[str], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A spawned worker, as used with several GPUs, imports torch for seconds before it could ignore a signal."""
    plain, after_update = loader.DataLoader, Run.after_update
    monkeypatch.setattr(
        loader, "DataLoader", lambda *given, **keys: plain(*given, **keys | ({"multiprocessing_context": method} if keys["num_workers"] else {}))
    )  # fmt: skip
    blocked: list[int] = []

    def look(run: Run) -> None:
        for worker in psutil.Process().children() if run.step == 1 else ():
            if "resource_tracker" not in " ".join(worker.cmdline()):
                status = Path(f"/proc/{worker.pid}/status").read_text()
                blocked.append(int(status.partition("SigBlk:")[2].split()[0], 16))
        after_update(run)

    monkeypatch.setattr(Run, "after_update", look)
    train.main([*words, "--dataloader_num_workers", "1", "--max_steps", "4"])
    assert len(blocked) == 1
    assert all(blocked[0] >> number - 1 & 1 for number in STOP_SIGNALS)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


WORKER_THAT_DIES = """
import os, sys, time
from torch.utils.data import get_worker_info
from accel_ft import train
from accel_ft.config import TrainConfig
from accel_ft.data import loader

plain = loader.collate

def collate(*args):
    worker = get_worker_info()
    if worker is not None and worker.id == 1:
        time.sleep(1)  # its batch is waited for then
        os.kill(os.getpid(), 9)
    return plain(*args)

loader.collate = collate
train.run_command(lambda: train.main(sys.argv[1:]))
"""


def test_a_worker_that_is_killed_ends_the_run(words: list[str]) -> None:
    """The other worker, which blocks stop signals, does not keep the process alive."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WORKER_THAT_DIES, *words, "--dataloader_num_workers", "2"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "exited unexpectedly" in done.stderr


def test_a_second_signal_ends_it_at_once(words: list[str], tmp_path: Path) -> None:
    """The update lasts long: the first signal must wait for its end, the second must not."""
    slow = "import time; from accel_ft.engine import loop; f = loop.forward; "
    slow += "loop.forward = lambda *a: (time.sleep(30) if loop.stuck() else None, f(*a))[1]; "
    code = "from pathlib import Path; import sys; from accel_ft import train; " + slow
    log = tmp_path / "run" / "metrics.jsonl"
    code += f"log = Path({str(log)!r}); loop.stuck = lambda: log.exists() and b'\"step\": 3' in log.read_bytes(); "
    code += "train.run_command(lambda: train.main(sys.argv[1:]))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", code, *words], env=environment)
    wait_for_step(tmp_path / "run", 3)
    process.send_signal(signal.SIGINT)
    time.sleep(3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 128 + signal.SIGINT


def test_a_launcher_killed_while_its_rank_loads_libraries(words: list[str], tmp_path: Path) -> None:
    """There is no watch yet: the rank would train on without its launcher, and keep its folder locked."""
    command = ["-m", "accelerate.commands.launch", "--cpu", "-m", "accel_ft.train", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    launcher = subprocess.Popen(
        [sys.executable, *command, "--num_train_epochs", "300"], env=environment, cwd=ROOT
    )
    deadline, ranks = time.monotonic() + 60, []

    def loads(rank: psutil.Process) -> bool:
        # Between fork and exec it has the launcher's command line and libraries.
        is_rank = "accelerate.commands.launch" not in rank.cmdline()
        return is_rank and any("libtorch" in each.path for each in rank.memory_maps())

    while not any(map(loads, ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
        ranks = psutil.Process(launcher.pid).children()
    assert not (tmp_path / "run").exists()
    launcher.kill()
    launcher.wait()
    assert psutil.wait_procs(ranks, timeout=60)[1] == []
    assert not (tmp_path / "run").exists()


def test_the_end_of_a_shell_is_not_that_of_its_run(words: list[str], tmp_path: Path) -> None:
    shell = start([*words, "--num_train_epochs", "30"], shell=True)
    shell.wait(60)
    deadline = time.monotonic() + 180
    while not (tmp_path / "run" / "model" / "config.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert "preempted" not in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_training_goes_on_while_a_checkpoint_is_published(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Publication of the first one ends only after another update; in the end all are published."""
    goes_on = threading.Event()
    publish, after_update = transaction.publish, Run.after_update

    def slow_publish(final: Path, with_manifest: bool = True) -> None:
        if with_manifest:
            assert goes_on.wait(60), "training waited for it"
        publish(final, with_manifest)

    def seen(run: Run) -> None:
        if run.step > 0:
            goes_on.set()
        after_update(run)

    monkeypatch.setattr(transaction, "publish", slow_publish)
    monkeypatch.setattr(Run, "after_update", seen)
    train.main([*words, "--save_total_limit", "none"])
    published = transaction.list_published(tmp_path / "run" / "checkpoints")
    assert [step for step, _ in published] == list(range(1, 13))
    for _, folder in published:
        transaction.verify(folder)


def test_a_checkpoint_that_cannot_be_published_stops_the_run(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = transaction.publish

    def fail_third(final: Path, with_manifest: bool = True) -> None:
        if final.name == "step_00000003":
            raise OSError(28, "No space left on device")
        publish(final, with_manifest)

    monkeypatch.setattr(transaction, "publish", fail_third)
    with pytest.raises(
        CheckpointError, match=r"step_00000003 could not be saved: .*No space.*step_00000002"
    ):
        train.main(words)
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000001", "step_00000002"]


def test_profile_of_too_few_updates(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    train.main([*words, "--profile", "--max_steps", "4"])
    assert "profile: it needs 10 updates, this start has 4" in capsys.readouterr().err


def test_profile(words: list[str], tmp_path: Path) -> None:
    train.main([*words, "--profile"])
    folder = tmp_path / "run" / "profile"
    trace = json.loads(gzip.decompress((folder / "rank_00000.trace.json.gz").read_bytes()))
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert sum(name.startswith("ProfilerStep") for name in names) >= 5
    assert "aten::addmm" in names
    assert "aten::addmm" in (folder / "rank_00000.txt").read_text()
    assert "profile: false" in (tmp_path / "run" / "config.yaml").read_text()


def test_padding_and_memory_are_told(words: list[str], tmp_path: Path) -> None:
    train.main([*words, "--logging_steps", "2"])
    events = events_of(tmp_path / "run")
    assert all(0 <= event["padding"] < 0.6 for event in events if event["event"] == "train")
    assert events[-1]["peak_memory"] > 50e6


def test_offloaded_parameters_are_not_read_late() -> None:
    """The fused optimizer step on the CPU would not wait for the device's result."""
    device, model = torch.device("cuda"), torch.nn.Linear(1, 1)
    accelerator = SimpleNamespace(device=device, scaler=None)
    assert not handling._is_late(SimpleNamespace(accelerator=accelerator, model=model))


def test_the_update_before_one_that_is_left_out_is_judged_at_once(words: list[str]) -> None:
    """A left-out update is counted, and saved if due, without reading outcomes again."""
    run = SimpleNamespace(
        step=4, stop_signal=0, passed_over=set(), _eval_steps=100, _falls_on=lambda *_: False,
        config=SimpleNamespace(logging_steps=100, save_steps=100),
    )  # fmt: skip
    assert not Run.needs_outcome(run)
    run.passed_over = {5}
    assert Run.needs_outcome(run)
