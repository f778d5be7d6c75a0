"""AdamW's parameter groups, the learning rate and its schedule, counted in updates."""

import math
import re
from typing import Any

import torch
from torch import nn

from accel_ft.config import TrainConfig

# Parameters below the layers though declared after them, and above them though declared before.
BELOW = re.compile(
    r"embed|encoder\.relative_attention_bias\.|^deberta\.encoder\.(LayerNorm|conv)\."
)
ABOVE = re.compile(r"pooler|final_layer_?norm|final_norm")


def scaled_learning_rate(config: TrainConfig) -> float:
    """Return the peak learning rate after `lr_scaling` by global batch / reference batch.

    Source: linear, Goyal et al., arXiv:1706.02677; square root, Krizhevsky, arXiv:1404.5997.
    """
    assert config.global_batch_size is not None
    ratio = config.global_batch_size / config.lr_reference_batch_size
    factors: dict[str, float] = {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}
    return config.learning_rate * factors[config.lr_scaling]


def make_optimizer(
    model: nn.Module,
    learning_rate: float,
    weight_decay: float,
    layer_decay: float | None = None,
) -> torch.optim.AdamW:
    """Return a fused AdamW; biases and norms are not decayed.

    Args:
        model: its trainable parameters are optimized; the groups of the head come first.
        learning_rate: of the head.
        weight_decay: of matrices, except biases (of relative positions), as in the Trainer.
        layer_decay: factor of the learning rate per layer below the head; None for the same rate
            everywhere. Source: Howard and Ruder, arXiv:1801.06146.
    """
    depth_of = layer_depths(model) if layer_decay is not None else {}
    by_group: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            key = depth_of.get(name, 0), parameter.ndim < 2 or "bias" in name
            by_group.setdefault(key, []).append(parameter)
    groups = [
        {
            "params": by_group[depth, is_vector],
            "lr": learning_rate * (layer_decay or 1.0) ** depth,
            "weight_decay": 0.0 if is_vector else weight_decay,
        }
        for depth, is_vector in sorted(by_group)
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, fused=True)


def layer_depths(model: nn.Module) -> dict[str, int]:
    """Return how many layers each parameter stands below the head: 0 for head and pooler, 1 for the
    uppermost of L layers, L for the lowest, L + 1 for the embeddings.
    """
    inside = f"{getattr(model, 'base_model_prefix', '')}."
    names = [name for name, _ in model.named_parameters()]
    numbers = {name: re.search(r"\.(\d+)\.", name) for name in names if inside in name}
    layers = {name: int(match[1]) for name, match in numbers.items() if match}
    stack_of = {name: name[: match.start()] for name, match in numbers.items() if match}
    num_layers = max(layers.values(), default=-1) + 1
    heights = dict.fromkeys(stack_of.values(), num_layers)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):  # depths may differ
        for stack in heights:
            heights[stack] = max(layers[name] for name in layers if stack_of[name] == stack) + 1
    first = next((position for position, name in enumerate(names) if name in layers), 0)
    below = {name for name in names[:first] if inside in name and not ABOVE.search(name)}
    below |= {name for name in names if inside in name and BELOW.search(name)}
    return {
        name: heights[stack_of[name]] - layers[name]
        if name in layers
        else (num_layers + 1) * (name in below)
        for name in names
    }


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the state of an optimizer that has none, as it is before the first update.

    torch does so itself when it saves or loads a sharded optimizer, but by a step that it counts.
    Empty parameters, as FSDP1's outside a rank's shard are, get none: torch loads none for them.
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
    for parameter, state in list(optimizer.state.items()):
        state["step"].zero_()
        if parameter.numel() == 0:
            del optimizer.state[parameter]


def make_scheduler(config: TrainConfig, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
    """Return the schedule. Step it once per update, and do not prepare it: accelerate would step a
    prepared one once per rank.

    Args:
        num_steps: updates of the whole run; `warmup_steps` below 1 is a share of them.
    """
    from transformers import get_scheduler

    warmup = round(config.warmup_steps)
    if config.warmup_steps < 1:  # leave one update: the first of warmup has rate 0
        warmup = min(math.ceil(round(config.warmup_steps * num_steps, 6)), num_steps - 1)
    # If the first update is skipped, torch would warn that the scheduler steps first.
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return get_scheduler(config.lr_scheduler_type, optimizer, warmup, num_steps)
