"""A run's parts, and what happens between two updates: log, evaluate, save."""

import logging
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from accel_ft.checkpoint import convert, state, transaction
from accel_ft.config import TrainConfig
from accel_ft.data.loader import Batches, make_loader
from accel_ft.data.plan import Plan
from accel_ft.data.splits import Split, Splits
from accel_ft.engine.evaluation import evaluate
from accel_ft.errors import UserError
from accel_ft.runtime.logging import EventLog, progress_bar

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Run:
    """Everything the loop works with."""

    config: TrainConfig
    accelerator: Accelerator
    model: nn.Module
    tokenizer: Any
    optimizer: Any
    scheduler: Any
    train_batches: Batches
    validation_loader: Any
    test_loader: Any | None
    splits: Splits
    plan: Plan
    num_steps: int
    accumulation_steps: int
    identity: dict[str, Any]
    """What must not differ at a resume."""
    events: EventLog
    step: int = 0
    """Updates made."""
    best: dict[str, Any] | None = None
    """Step and value of the best evaluation."""
    loss_sum: torch.Tensor = field(init=False)
    """This rank's sum of weighted losses since the last train event; on the device, read at the
    event only.
    """
    loss_weight: float = 0.0
    """Weight of all ranks' losses since then."""
    timed_samples: int = 0
    timed_tokens: int = 0
    timed_since: float = 0.0
    bar: Any = None

    def __post_init__(self) -> None:
        device = self.accelerator.device
        self.loss_sum = torch.zeros(
            (), device=device, dtype=torch.float32 if device.type == "mps" else torch.float64
        )

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

    def start(self) -> Any:
        """Return the prepared loader of the remaining micro-batches; the clock runs from here."""
        self.bar = progress_bar(self.step, self.num_steps, shown=self.accelerator.is_main_process)
        self.timed_since = time.monotonic()
        start = self.step * self.num_micro_batches
        workers = self.config.dataloader_num_workers
        return make_loader(self.accelerator, self.train_batches, start, workers)

    def resume(self, folder: Path) -> None:
        """Continue from a verified checkpoint. Collective."""
        saved = state.read_trainer_state(folder)
        state.check_same_run(folder, saved["identity"], self.identity)
        state.load(self.accelerator, folder, saved, self.config.seed)
        self.scheduler.load_state_dict(saved["scheduler"])
        self.step, self.best, self.loss_weight = saved["step"], saved["best"], saved["loss_weight"]
        if self.best is not None and not self._best_folder().is_dir():
            logger.warning(
                "the best checkpoint, %s, is gone: best starts anew", self._best_folder()
            )
            self.best = None
        sums, rank = saved["loss_sums"], self.accelerator.process_index
        if len(sums) == self.accelerator.num_processes:
            self.loss_sum.fill_(sums[rank])
        elif rank == 0:
            self.loss_sum.fill_(math.fsum(sums))

    def global_weight(self) -> float:
        """Return the weight of the coming update's whole global batch."""
        return float(self.splits.train.weights(self.plan.global_batch(self.step)).sum())

    def add_loss(self, loss: torch.Tensor) -> None:
        """Count a micro-batch's weighted loss, without waiting for the device."""
        self.loss_sum += loss.detach()

    def after_update(self, learning_rate: float, grad_norm: torch.Tensor) -> None:
        """Count an update, and log, evaluate and save where they are due. Collective."""
        ids = self.plan.global_batch(self.step)
        self.loss_weight += self.global_weight()
        self.timed_samples += len(ids)
        self.timed_tokens += int(self.plan.lengths(ids).sum())
        self.step += 1
        self.bar.update()
        last = self.step == self.num_steps
        if last or self.step % self.config.logging_steps == 0:
            self.log(learning_rate, grad_norm)
        is_best = False
        if last or self.step % (self.config.eval_steps or self.plan.steps_per_epoch) == 0:
            is_best = self.evaluate()
        if last or is_best or self.step % self.config.save_steps == 0:
            self.save()

    def log(self, learning_rate: float, grad_norm: torch.Tensor) -> None:
        """Write a train event; between two of them nothing waits for the device."""
        loss = math.fsum(self._loss_sums()) / self.loss_weight
        norm = float(grad_norm.full_tensor() if hasattr(grad_norm, "full_tensor") else grad_norm)
        seconds = time.monotonic() - self.timed_since
        self.events.write(
            "train",
            step=self.step,
            epoch=self.step / self.plan.steps_per_epoch,
            loss=loss,
            learning_rate=learning_rate,
            grad_norm=norm
            if math.isfinite(norm)
            else None,  # fp16 skips an update whose gradients overflow
            samples_per_second=round(self.timed_samples / seconds, 2),
            tokens_per_second=round(self.timed_tokens / seconds, 1),
        )
        self.bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        self.loss_sum.zero_()
        self.loss_weight = 0.0
        self.timed_samples = self.timed_tokens = 0
        self.timed_since = time.monotonic()

    def _loss_sums(self) -> list[float]:
        """Every rank's loss sum, which must be finite. Collective."""
        sums: list[float] = self.accelerator.gather(self.loss_sum.reshape(1)).tolist()
        if not all(map(math.isfinite, sums)):
            raise UserError(
                f"the loss is {sum(sums)} by update {self.step}: training has diverged. Fix: a "
                "lower learning_rate, more warmup_steps, or mixed_precision bf16 or no, not fp16"
            )
        return sums

    def evaluate(self) -> bool:
        """Write an eval event; return whether it is to be kept as the best one. Collective."""
        scores = self._measure("eval", self.validation_loader, self.splits.validation)
        if not self.config.load_best_model_at_end:
            return False
        key = self.config.metric_for_best_model
        value = -scores[key] if key == "loss" else scores[key]
        if self.best is not None and value <= self.best["value"]:
            return False
        self.best = {"step": self.step, "value": value}
        return True

    def _measure(self, name: str, loader: Any, split: Split) -> dict[str, Any]:
        """Evaluate a split, write it as event `name`, and keep the time out of the training
        speed.
        """
        started = time.monotonic()
        scores = evaluate(self.accelerator, self.model, loader, split, self.splits.label_names)
        seconds = time.monotonic() - started
        self.timed_since += seconds
        values = {f"{name}_{key}": value for key, value in scores.items()}
        epoch = self.step / self.plan.steps_per_epoch
        self.events.write(
            name, step=self.step, epoch=epoch, **values, **{f"{name}_seconds": round(seconds, 3)}
        )
        logger.info(
            "%s after update %d: accuracy %.4f, macro F1 %.4f, loss %.4f (%d rows)",
            name, self.step, scores["accuracy"], scores["f1_macro"], scores["loss"], len(split),
        )  # fmt: skip
        return scores

    def save(self) -> None:
        """Publish a checkpoint of this update, then prune. Collective."""
        started = time.monotonic()
        self.events.sync()
        trainer_state = {
            "step": self.step,
            "num_processes": self.accelerator.num_processes,
            "identity": self.identity,
            "scheduler": self.scheduler.state_dict(),
            "loss_sums": self._loss_sums(),
            "loss_weight": self.loss_weight,
            "best": self.best,
        }
        final = transaction.checkpoint_folder(self.checkpoints, self.step)
        state.save(
            self.accelerator, final, trainer_state, self._plain_model().config, self.tokenizer
        )
        if self.accelerator.is_main_process:
            protected = self.best["step"] if self.best else None
            transaction.prune(self.checkpoints, self.config.save_total_limit, protected)
        self.timed_since += time.monotonic() - started

    def finish(self) -> None:
        """Leave the final (or best) model, and measure it on the test rows. Collective."""
        self.bar.close()
        model_step = self.step
        if self.config.load_best_model_at_end and self.best is not None:
            if state.is_sound(self.accelerator, self._best_folder()):
                convert.load_any(self.accelerator, self._best_folder())
                model_step = self.best["step"]
            logger.info("the model is that of update %d", model_step)
        self._export(self.output_dir / "model")
        if self.test_loader is not None and self.splits.test is not None:
            self._measure("test", self.test_loader, self.splits.test)
        self.events.write("end", step=self.step, model_step=model_step)

    def _best_folder(self) -> Path:
        assert self.best is not None
        return transaction.checkpoint_folder(self.checkpoints, self.best["step"])

    def _plain_model(self) -> Any:
        """The model without what DDP and compile put around it."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    def _export(self, final: Path) -> None:
        """Write the model as a Hugging Face folder, whole or not at all. Collective."""
        weights = self.accelerator.get_state_dict(self.model)
        if self.accelerator.is_main_process:
            weights = {name.removeprefix("_orig_mod."): value for name, value in weights.items()}
            staging = transaction.start(final)
            self._plain_model().save_pretrained(staging, state_dict=weights)
            self.tokenizer.save_pretrained(staging)
            transaction.publish(final, with_manifest=False)  # users may add to this folder
        self.accelerator.wait_for_everyone()
