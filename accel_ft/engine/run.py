"""A run's parts, and what happens between two updates: log, evaluate, save."""

import contextlib
import logging
import math
import signal
import sys
import time
import traceback
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import nn

from accel_ft.checkpoint import state, transaction
from accel_ft.config import TrainConfig
from accel_ft.data.loader import Batches, make_loader, read
from accel_ft.data.plan import Plan
from accel_ft.data.splits import Splits
from accel_ft.engine.evaluation import evaluate_split
from accel_ft.engine.graphs import Graphs
from accel_ft.engine.meter import Meter
from accel_ft.errors import CheckpointError, Preempted, counted
from accel_ft.model import adapters
from accel_ft.runtime.logging import TERMINAL, EventLog, progress_bar
from accel_ft.runtime.profile import make_profiler
from accel_ft.runtime.trackers import Trackers
from accel_ft.runtime.watch import Watch

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Run:
    """Everything the loop works with."""

    config: TrainConfig
    accelerator: Accelerator
    watch: Watch
    model: nn.Module
    tokenizer: Any
    optimizer: Any
    scheduler: Any
    train_batches: Batches
    validation_loader: Any
    test_loader: Any | None
    splits: Splits
    plan: Plan
    num_parameters: int
    num_trained: int
    """Trainable parameters, over all ranks."""
    num_steps: int
    accumulation_steps: int
    identity: dict[str, Any]
    """Settings and fingerprints that a resume compares with the checkpoint's."""
    events: EventLog
    step: int = 0
    """Updates made."""
    trackers: Trackers
    graphs: Graphs = field(default_factory=Graphs)
    best: dict[str, Any] | None = None
    """Step, metric and value of the best evaluation."""
    num_worse: int = 0
    """Consecutive evaluations that were not better by more than early_stopping_threshold; counted
    only if early_stopping_patience is set."""
    stop_signal: int = 0
    """Stop signal that some rank received; the same on all ranks, 0 for none."""
    eval_is_due: bool = False
    """Whether a signal interrupted the evaluation of this update."""
    passed_over: list[int] = field(default_factory=list)
    """Updates whose batch a rollback leaves out."""
    num_nonfinite: int = 0
    """Consecutive updates that were not finite."""
    newest_nonfinite: int = -1
    outcomes: deque[Any] = field(default_factory=deque)
    """Losses and norms of the newest updates, not read yet; see engine/nonfinite.py."""
    grad_norm: float | None = None
    """Of the last update over all ranks; None if it was not finite or there is none."""
    logits: NDArray[np.float32] | None = None
    """Of the newest evaluation, [n, C]."""
    evaluated_step: int = -1
    """Update of the newest evaluation."""
    thresholds: NDArray[np.float64] | None = None
    """Multi-label, at the end: the probability from which each label counts as predicted, [C]."""
    meter: Meter = field(default_factory=Meter)
    bar: Any = None
    loader: Any = None
    batches: Any = None
    """The iterator of `loader`: this rank's micro-batches from the present update on."""
    profiler: Any = None
    saved_step: int = -1
    """Update of the checkpoint that was written or loaded last."""
    saved: Path | None = None
    """The checkpoint that was written last, until all ranks know that it is published."""
    publisher: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    publication: Future[None] | None = None
    """Publication of `saved` by the thread of `publisher`; on rank 0 only."""

    @property
    def is_over(self) -> bool:
        """Whether no update is left to do."""
        patience = self.config.early_stopping_patience
        return self.step >= self.num_steps or (patience is not None and self.num_worse >= patience)

    @property
    def output_dir(self) -> Path:
        """The run's folder."""
        return self.config.output_dir

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.output_dir / "checkpoints"

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one update, over all ranks."""
        return self.accumulation_steps * int(self.accelerator.num_processes)

    def start(self) -> None:
        """Start `batches` at the present update, and start the clock. Collective."""
        if self.bar is None:
            shown = self.accelerator.is_main_process
            self.bar = progress_bar(self.step, self.num_steps, shown)
            if self.config.profile:
                rank = self.accelerator.process_index
                left = self.num_steps - self.step
                self.profiler = make_profiler(self.output_dir / "profile", rank, left)
                self.profiler.start()
        self._leave_loader()
        self.bar.n = self.step
        self.meter.restart_clock()
        if self.eval_is_due:
            self.evaluate()
        start = self.step * self.num_micro_batches
        workers = self.config.dataloader_num_workers
        self.loader = make_loader(self.accelerator, self.train_batches, start, workers)
        self.batches = read(self.loader)

    def _leave_loader(self) -> None:
        """End the loader's workers, even before its last batch."""
        if self.batches is not None:
            self.loader.end()
            self.batches.close()
            # An exception of the loader holds it in a traceback: its workers, which block signals,
            # would live on.
            for frame, _ in traceback.walk_tb(sys.exc_info()[2]):
                if frame.f_code.co_filename.endswith(("dataloader.py", "data_loader.py")):
                    with contextlib.suppress(RuntimeError):  # the frame is still executing
                        frame.clear()

    def close(self) -> None:
        """Close what runs beside the loop: loader, bar, profiler, graphs, publisher's thread."""
        self._leave_loader()
        if self.bar is not None:
            self.bar.close()
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler = None
        self.graphs = Graphs()  # frees the memory of the recorded ones
        self.publisher.shutdown()  # waits for a publication in progress

    def global_weight(self, step: int) -> float:
        """Return the weight of update `step`'s whole global batch."""
        return float(self.splits.train.weights(self.plan.global_batch(step)).sum())

    def needs_outcome(self) -> bool:
        """Return whether the outcome of this update must be known now, because a log, evaluation,
        save, stop or left-out batch follows.
        """
        every = (self.config.logging_steps, self._eval_steps, self.config.save_steps)
        following = self.step + 1
        is_due = any(self._falls_on(following, number) for number in every)
        return is_due or self.stop_signal > 0 or following in self.passed_over

    def _falls_on(self, step: int, every: int) -> bool:
        return step == self.num_steps or step % every == 0

    @property
    def _eval_steps(self) -> int:
        return self.config.eval_steps or self.plan.steps_per_epoch

    def after_update(self) -> None:
        """Count an update, and log, evaluate, save or stop where that is due. Collective."""
        if self.step not in self.passed_over:
            ids = self.plan.global_batch(self.step)
            self.meter.samples += len(ids)
            self.meter.tokens += int(self.plan.lengths(ids).sum())
        learning_rate = self.scheduler.get_last_lr()[0]
        self.scheduler.step()
        self.step += 1
        self.bar.update()
        if self.profiler is not None:
            self.profiler.step()
        is_eval = self._falls_on(self.step, self._eval_steps)
        may_be_last = is_eval and self.config.early_stopping_patience is not None
        if may_be_last or self._falls_on(self.step, self.config.logging_steps):
            self.log(learning_rate)
        is_best = is_eval and self.evaluate()
        due = is_best or self._falls_on(self.step, self.config.save_steps)
        if due or self.stop_signal or self.is_over:
            self.save()
        if self.stop_signal:
            self._end_early()

    def _end_early(self) -> None:
        """Stop after a signal; the state is saved."""
        self.wait_for_publication()
        name = signal.Signals(self.stop_signal).name
        with contextlib.suppress(CheckpointError):  # the checkpoint, which matters, is saved
            self.events.write("preempted", step=self.step, signal=name)
        self.watch.barrier()  # when the first rank ends, the launcher ends the others
        raise Preempted(
            f"{name}: stopped after update {self.step} of {self.num_steps}, which is saved. "
            "To continue: the same command with --resume_from_checkpoint latest"
        )

    def check_stop(self) -> None:
        """End an evaluation after a stop signal, on all ranks before the same batch. Collective."""
        (self.stop_signal,) = self.watch.all_max(self.watch.stop_signal)
        if self.stop_signal:
            if self.saved_step != self.step:
                self.eval_is_due = True
                self.save()
            self._end_early()

    def log(self, learning_rate: float) -> None:
        """Write a train event. Collective."""
        measured = self.meter.read(self.watch)
        loss = measured.pop("loss")
        self.events.write(
            "train",
            step=self.step,
            epoch=self.step / self.plan.steps_per_epoch,
            loss=loss,
            learning_rate=learning_rate,
            grad_norm=self.grad_norm,
            **measured,
        )
        shown = "-" if loss is None else f"{loss:.4f}"
        self.bar.set_postfix(loss=shown, refresh=False)
        if not TERMINAL.isatty():  # a log file has no progress bar
            logger.info(
                "update %d of %d: loss %s, learning rate %.3g, %.1f samples/s",
                self.step, self.num_steps, shown, learning_rate, measured["samples_per_second"],
            )  # fmt: skip

    def evaluate(self) -> bool:
        """Write an eval event; return whether the weights must be saved as the best. Collective."""
        self.watch.stage("eval", can_save=True)
        scores, logits = self.measure("eval", self.validation_loader)
        self.logits, self.evaluated_step = logits, self.step
        self.eval_is_due = False
        improvement = math.inf
        (value, *_) = self.watch.all_gather(self.config.best_value(scores))  # rank 0's decides
        if not math.isfinite(value):
            improvement = -math.inf
        elif self.best is not None:
            improvement = (value - self.best["value"]) * (1 if self.config.takes_highest else -1)
        is_counted = self.config.early_stopping_patience is not None
        is_worse = is_counted and improvement <= self.config.early_stopping_threshold
        self.num_worse = self.num_worse + 1 if is_worse else 0
        if improvement > 0:
            self.best = {"step": self.step, "metric": self.config.best_rule, "value": value}
        return improvement > 0 and self.config.load_best_model_at_end

    def measure(
        self, name: str, loader: Any, model_step: int | None = None
    ) -> tuple[dict[str, Any], NDArray[np.float32]]:
        """Evaluate a split, write it as event `name`, keep the time out of the training speed.

        Args:
            model_step: update whose weights are measured; None for the newest.

        Returns:
            The metrics, and the logits, [n, C].
        """
        started = time.monotonic()
        names = self.splits.label_names
        scores, logits = evaluate_split(
            self.accelerator,
            self.model,
            loader,
            names,
            self.check_stop,
            self.thresholds,
            tunes=name == "eval",
        )
        seconds = time.monotonic() - started
        self.meter.pause(seconds)
        values = {f"{name}_{key}": value for key, value in scores.items()}
        epoch = self.step / self.plan.steps_per_epoch
        about = {} if model_step is None else {"model_step": model_step}
        self.events.write(
            name, step=self.step, epoch=epoch, **about, **values,
            **{f"{name}_seconds": round(seconds, 3)},
        )  # fmt: skip
        shown = ", ".join(f"{k} {v:.4f}" for k, v in scores.items() if isinstance(v, float))
        if name == "eval" and self.config.best_label is not None:
            shown += f", {self.config.best_metric} {self.config.best_value(scores):.4f}"
        step = self.step if model_step is None else model_step
        logger.info(
            "%s after update %d (epoch %.2f): %s (%s)",
            name, step, step / self.plan.steps_per_epoch, shown, counted(len(logits), "row"),
        )  # fmt: skip
        return scores, logits

    def wait_for_publication(self) -> None:
        """Wait until the checkpoint that was written last is published. Collective."""
        if self.saved is not None:
            with state.all_or_none(self.watch, self.saved):
                if self.publication is not None:
                    self.publication.result()
        self.saved = self.publication = None

    def save(self) -> None:
        """Write a checkpoint; a thread publishes it and prunes older ones. Collective."""
        self.watch.stage("save", can_save=True)
        started = time.monotonic()
        self.wait_for_publication()
        self.events.sync()
        trainer_state = {name: getattr(self, name) for name in state.RUN_STATE} | {
            "num_processes": self.accelerator.num_processes,
            "device": self.accelerator.device.type,
            "devices": self.watch.all_gather(self.accelerator.device.index or 0),
            "validation_data": self.splits.validation.fingerprint(),
            "identity": self.identity,
            "mixed_precision": self.accelerator.mixed_precision,
            "accumulation_steps": self.accumulation_steps,
            "loss_sums": self.watch.all_gather(self.meter.loss_sum),
            "loss_weight": self.meter.loss_weight,
        }
        final = transaction.checkpoint_folder(self.checkpoints, self.step)
        model = self.unwrapped_model()
        parts = (model.config, self.tokenizer, adapters.peft_config(model))
        state.save(
            self.accelerator, self.watch, final, trainer_state, [p for p in parts if p is not None]
        )
        self.saved, self.saved_step = final, self.step
        # While updates are not finite, older checkpoints may be the only good ones.
        keep = None if self.num_nonfinite else self.config.save_total_limit
        if self.accelerator.is_main_process:
            self.publication = self.publisher.submit(
                self._publish, final, keep, self.protected_step
            )
        seconds = time.monotonic() - started
        self.events.write("save", step=self.step, seconds=round(seconds, 3))
        self.meter.pause(seconds)

    @property
    def protected_step(self) -> int | None:
        """Update of the best checkpoint if that must be kept, else None."""
        return self.best["step"] if self.best and self.config.load_best_model_at_end else None

    def _publish(self, final: Path, keep: int | None, best: int | None) -> None:
        transaction.publish(final)
        try:
            self.prune(keep, best)
        except (OSError, CheckpointError) as error:  # not fatal: the next save prunes again
            logger.warning("older checkpoints could not be removed: %s", error)

    def prune(self, keep: int | None, best: int | None) -> None:
        """Remove all checkpoints except the newest `keep` and the best. Called on rank 0."""
        self.watch.check_folder()
        published = transaction.list_published(self.checkpoints)
        if keep is not None and published:
            # A resume or rollback to the oldest one kept needs the checkpoint that was the best at
            # that time. Any best since then is among those kept, or is `best`.
            oldest = published[-keep:][0][1]
            protected = () if best is None else (best, state.best_step(oldest))
            transaction.prune(self.checkpoints, keep, protected)

    def best_is_lost(self) -> CheckpointError:
        """Return the error to raise if the best model is asked for, but its checkpoint is lost."""
        assert self.best is not None
        return CheckpointError(
            f"{self.best_folder()}: is missing or damaged, but load_best_model_at_end needs it "
            f"({self.best['metric']} {self.best['value']:.4f}); no updates are left to find "
            "another. Fix: restore a copy of it, or load_best_model_at_end: false to take the last "
            "model; to measure other rows, accel_ft.evaluate"
        )

    def best_folder(self) -> Path:
        """The best evaluation's checkpoint."""
        assert self.best is not None
        return transaction.checkpoint_folder(self.checkpoints, self.best["step"])

    def unwrapped_model(self) -> Any:
        """The model without the wrappers of DDP and compile."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
