"""The training loop: `train` is the whole run, `update` one update of the weights."""

from functools import partial
from itertools import islice
from typing import Any

import torch

from accel_ft.data.loader import Batch
from accel_ft.engine.clip import clip
from accel_ft.engine.end import finish
from accel_ft.engine.nonfinite import handle_nonfinite, may_step, skip_if_left_out
from accel_ft.engine.run import Run
from accel_ft.engine.step import forward, weighted_loss
from accel_ft.model.embedding import fill_gradient


def train(run: Run) -> None:
    """Train from update `run.step` to the last one, then write the final model."""
    run.start()
    run.model.train()
    while not run.is_over:
        update(run)
    finish(run)


def update(run: Run) -> None:
    """Do one update, and what is due after it: log, evaluate, save."""
    accelerator, model, optimizer = run.accelerator, run.model, run.optimizer
    if skip_if_left_out(run):
        return
    # Makes the gradients those of the mean over the global batch: `backward` divides by the
    # accumulation steps and the all-reduce by the ranks, so both are multiplied in. The weight of
    # the whole batch is known from the plan, without communication.
    scale = run.num_micro_batches / run.global_weight(run.step)
    losses = []
    for batch in islice(run.batches, run.accumulation_steps):
        with accelerator.accumulate(model):
            losses.append(run.graphs(partial(forward_backward, run), batch, scale))
        if accelerator.device.type == "cpu":
            fill_gradient(model)  # the word embedding's is sparse, AdamW needs a dense one
        run.meter.padded_tokens += batch["input_ids"].numel()
    grad_norm = clip(accelerator, model, optimizer, run.config.max_grad_norm or float("inf"))
    healthy = may_step(run, losses, grad_norm)  # on every rank, before the weights move
    if healthy:
        optimizer.step()
    run.graphs.clear_gradients(optimizer)
    if healthy or handle_nonfinite(run):
        run.after_update()
    else:  # rolled back: `run.step` is the checkpoint's now
        run.start()


def forward_backward(run: Run, batch: Batch, scale: Any) -> torch.Tensor:
    """Add the gradients of a micro-batch's loss times `scale`; return the loss, detached."""
    logits = forward(run.model, batch)
    smoothing = run.config.label_smoothing_factor
    loss = weighted_loss(logits, batch["labels"], batch["weights"], smoothing)
    run.accelerator.backward(loss * scale)
    return loss.detach()
