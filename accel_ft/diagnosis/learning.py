"""Does the model learn at all: overfitting a few samples, and what the first steps show."""

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from accel_ft.diagnosis.finding import Finding, Verdict, check
from accel_ft.errors import listed
from accel_ft.runtime.fsdp import whole

ENOUGH_UPDATES = 20  # to judge that a loss does not fall
FALLING = 0.9  # of the first loss
LEARNT = 0.6  # of the loss of predicting the label frequencies
ENOUGH_ROWS = 8  # to judge duplicates
LOWEST_RATE, HIGHEST_RATE = 1e-7, 1e-2


@check("initial loss")
def initial_loss(loss: float, num_labels: int, is_fresh: bool = True) -> Finding:
    """Compare the first loss with that of a classifier that knows nothing, ln(num_labels).

    Args:
        loss: mean cross-entropy in nats, before the first update.
        num_labels: C.
        is_fresh: whether the head is newly initialised; a trained one starts lower.
    """
    expected = math.log(num_labels)
    about = f"{loss:.4f}, ln({num_labels}) is {expected:.4f}"
    if not math.isfinite(loss):
        return Verdict.FAIL(about, "check the inputs and the precision: it is not finite")
    if loss > 2 * expected + 0.5 or (is_fresh and loss < expected / 2):
        return Verdict.WARN(
            about,
            "a new head should begin near it: check the labels, the size of the head's weights, "
            "and whether the loss is a mean",
        )
    return Verdict.PASS(about)


@check("learning rate")
def usual_rate(learning_rate: float, highest: float = HIGHEST_RATE) -> Finding:
    """Compare an AdamW learning rate with the usual range for fine-tuning.

    Args:
        learning_rate: at its peak.
        highest: the limit; a head on a frozen encoder, or adapters, tolerate a higher one.
    """
    if LOWEST_RATE <= learning_rate <= highest:
        return Verdict.PASS(f"{learning_rate:g}")
    about = f"{learning_rate:g} is not between {LOWEST_RATE:g} and {highest:g}"
    return Verdict.WARN(about, "try 2e-5 to 1e-4 for a whole encoder, 1e-3 for adapters or a head")


@check("gradient norms")
def gradient_norms(model: nn.Module) -> Finding:
    """Check that the gradients that a backward pass has left are finite, and not all zero.

    One of LoRA's two factors starts at zero, so the other one's gradient is zero at first.
    Collective where FSDP2 has sharded the model.
    """
    norms = {
        n: float(whole(p.grad).float().norm())
        for n, p in model.named_parameters()
        if p.grad is not None
    }
    if not norms:
        return Verdict.FAIL("no parameter has a gradient", "check loss.backward(), requires_grad")
    sick = [name for name, norm in norms.items() if not math.isfinite(norm)]
    if sick:
        return Verdict.FAIL(
            f"not finite: {listed(sick)}", "check inputs, precision and learning rate"
        )
    still = [name for name, norm in norms.items() if norm == 0.0 and "lora_" not in name]
    total = math.sqrt(sum(norm**2 for norm in norms.values()))
    if total == 0.0:
        return Verdict.FAIL("all are zero", "make the loss depend on the weights")
    about = f"{total:.4f} in all, {len(norms)} parameters"
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    if frozen:
        about += f"; {len(frozen)} are frozen, the last one {frozen[-1]}"
    if still:
        return Verdict.WARN(f"{about}; zero: {listed(still)}", "does the loss depend on them?")
    return Verdict.PASS(about)


@check("overfits")
def overfits(
    step: Callable[[], float],
    steps: int = 200,
    seconds: float = 15.0,
    goal: float | None = 0.1,
    chance: float = 0.0,
) -> Finding:
    """Train on the same few samples again and again: the loss must come near zero.

    Args:
        step: one update on the samples, all of them; returns its loss.
        steps: most updates to do.
        seconds: time limit. When it is reached, a loss that has halved is a PASS; one that falls
            less, or too few updates, are a SKIP.
        goal: loss in nats that counts as near zero, above what label smoothing leaves; None for a
            third of the first loss, for losses without a scale. Three updates in a row must be
            below it.
        chance: loss in nats of predicting the label frequencies. A loss far below it, but not
            below `goal`, is a WARN: something was learnt.
    """
    losses: list[float] = []
    started = time.monotonic()
    while len(losses) < steps and time.monotonic() - started < seconds:
        losses.append(step())
        goal = losses[0] / 3 if goal is None else goal
        is_near = len(losses) >= 3 and max(losses[-3:]) < goal
        if is_near or not math.isfinite(losses[-1]):
            break
    about = f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} updates"
    if is_near:
        return Verdict.PASS(about)
    if len(losses) < steps and losses[-1] < losses[0] / 2:
        return Verdict.PASS(f"{about}, in the {seconds:.0f} s allowed: below half is enough")
    about = f"{about}, not below {goal:.3g}"
    falls = losses[-1] < FALLING * losses[0]
    if len(losses) < (steps if falls else min(steps, ENOUGH_UPDATES)) and math.isfinite(losses[-1]):
        return Verdict.SKIP(f"{about}: too slow a device to tell in {seconds:.0f} s")
    verdict = Verdict.WARN if max(losses[-3:]) < LEARNT * chance else Verdict.FAIL
    return verdict(
        about,
        "do labels and texts belong together? is a layer frozen that should learn (see `gradient "
        "norms`)? does the optimizer hold the parameters, and is the learning rate in its usual "
        "range (1e-5 to 1e-3 for AdamW)?",
    )


@check("texts")
def varied_texts(rows: Sequence[NDArray[np.int32]]) -> Finding:
    """Check that the model does not see the same few texts again and again.

    Args:
        rows: token ids of each text, truncated as in training.
    """
    count = len({row.tobytes() for row in rows})
    about = f"{count} different ones in {len(rows)} rows, tokenised and truncated"
    if count <= len(rows) / 2 and len(rows) >= ENOUGH_ROWS:
        return Verdict.WARN(
            about,
            "remove duplicates; a tokenizer that knows their words; a max_seq_length "
            "beyond the beginning that they share",
        )
    return Verdict.PASS(about)


@check("predictions")
def varied_predictions(logits: torch.Tensor) -> Finding:
    """Check that the predictions are not one class for all rows, after some training.

    Args:
        logits: [n, C].
    """
    if logits.shape[-1] == 1:
        return Verdict.SKIP("one logit: there are no classes to count")
    counts = torch.bincount(logits.argmax(-1).flatten().cpu(), minlength=logits.shape[-1])
    about = f"of {len(logits)} rows by class: {counts.tolist()}"
    if not torch.isfinite(logits).all():
        return Verdict.FAIL("logits are not finite", "check the inputs and the precision")
    if len(logits) >= 8 and int((counts > 0).sum()) == 1:
        return Verdict.WARN(f"{about}: one class for all", "train longer, or see `overfits`")
    return Verdict.PASS(about)
