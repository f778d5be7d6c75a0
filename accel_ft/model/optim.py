"""AdamW's parameter groups, the learning rate and its schedule, counted in updates."""

from typing import Any

import torch
from torch import nn

from accel_ft.config import TrainConfig


def scaled_learning_rate(config: TrainConfig) -> float:
    """Return the peak learning rate after `lr_scaling` by global batch / reference batch.

    Source: linear, Goyal et al., arXiv:1706.02677; square root, Krizhevsky, arXiv:1404.5997.
    """
    assert config.global_batch_size is not None
    ratio = config.global_batch_size / config.lr_reference_batch_size
    return float(
        config.learning_rate * {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[config.lr_scaling]
    )


def make_optimizer(
    model: nn.Module, learning_rate: float, weight_decay: float
) -> torch.optim.AdamW:
    """Return a fused AdamW; vectors (biases, norms) are not decayed."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, fused=True)


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the moments of an optimizer that has none yet, as they are before the first update.

    torch does so itself when it saves or loads a sharded one, by a step that it then counts.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        state["step"].zero_()


def make_scheduler(config: TrainConfig, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
    """Return the schedule, to be stepped once an update (accelerate would step a prepared one once
    a rank).

    Args:
        num_steps: updates of the whole run; `warmup_steps` below 1 is a share of them.
    """
    from transformers import get_scheduler

    warmup = config.warmup_steps if config.warmup_steps >= 1 else config.warmup_steps * num_steps
    return get_scheduler(config.lr_scheduler_type, optimizer, round(warmup), num_steps)
