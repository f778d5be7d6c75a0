"""The loop: one pass of the outer `for` is one update of the weights."""

from itertools import islice

from accel_ft.engine.run import Run
from accel_ft.engine.step import forward, weighted_loss


def train(run: Run) -> None:
    """Train from update `run.step` to the last one, then leave the final model."""
    accelerator, model, optimizer = run.accelerator, run.model, run.optimizer
    max_grad_norm = run.config.max_grad_norm or float("inf")
    micro_batches = iter(run.start())
    model.train()
    while run.step < run.num_steps:
        # The weight of the whole global batch is known from the plan, without asking the other
        # ranks. The factor
        # cancels what is divided by later: accumulation steps in `backward`, ranks in the gradient
        # all-reduce.
        scale = run.num_micro_batches / run.global_weight()
        for batch in islice(micro_batches, run.accumulation_steps):
            with accelerator.accumulate(model):
                logits = forward(model, batch)
                loss = weighted_loss(
                    logits, batch["labels"], batch["weights"], run.config.label_smoothing_factor
                )
                accelerator.backward(loss * scale)
                if accelerator.sync_gradients:
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            run.add_loss(loss)
        learning_rate = run.scheduler.get_last_lr()[0]
        run.scheduler.step()
        run.after_update(learning_rate, grad_norm)
    run.finish()
