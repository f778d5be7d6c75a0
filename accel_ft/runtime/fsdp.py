"""FSDP as it is meant: real on the CPU, the model's layers wrapped, float32 gradient sums."""

import os
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from accel_ft.errors import LaunchError


def is_asked_for() -> bool:
    """Return whether the environment asks for FSDP, for which accelerate takes one word alone."""
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"


def make_real(accelerator: Accelerator) -> None:
    """Set FSDP up by the YAML's settings, which are in the environment: on the CPU `Accelerator`
    has dropped them; elsewhere a second one has those that `configure` settled for the first's
    model.
    """
    plugin = FullyShardedDataParallelPlugin()
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    for state in (PartialState, AcceleratorState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin


def configure(accelerator: Accelerator, model: nn.Module) -> None:
    """Settle what the YAML leaves open, before `Accelerator.prepare` shards the model.

    The layers to wrap are worked out where none is named. Gradients are reduced in float32, as
    under DDP; accelerate's policy would reduce them in the compute type, and round FSDP1's buffers
    to it: rotary frequencies, which export and inference then have exact.
    """
    if accelerator.distributed_type != DistributedType.FSDP:
        return
    plugin: Any = accelerator.state.fsdp_plugin
    if plugin.state_dict_type != StateDictType.SHARDED_STATE_DICT:
        raise LaunchError(
            f"fsdp_state_dict_type={plugin.state_dict_type.name}: only FSDP could open such a "
            "checkpoint. Fix: fsdp_state_dict_type: SHARDED_STATE_DICT in fsdp_config; "
            "`accel_ft.export` makes one file of it"
        )
    if plugin.transformer_cls_names_to_wrap is None:
        plugin.transformer_cls_names_to_wrap = layer_classes(model)
    plugin.transformer_cls_names_to_wrap = [
        name.strip() for name in plugin.transformer_cls_names_to_wrap
    ]
    present = {type(module).__name__ for module in model.modules()}
    for name in set(plugin.transformer_cls_names_to_wrap) - present:
        raise LaunchError(
            f"fsdp_transformer_layer_cls_to_wrap={name}: the model has no such layer. "
            f"Allowed: {', '.join(layer_classes(model))}, or leave it out"
        )
    if plugin.mixed_precision_policy is not None:
        in_float32 = {"reduce_dtype": torch.float32}
        if plugin.fsdp_version == 1:
            in_float32["buffer_dtype"] = torch.float32
            # What it has not reduced yet, it sums up in the compute type.
            accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, **in_float32)


def leave_embedding_sharded(model: nn.Module) -> None:
    """Have FSDP2 not gather embeddings for the backward pass, which does not read them."""
    for module in model.modules():
        if isinstance(module, FSDPModule) and isinstance(module, nn.Embedding):
            module.set_unshard_in_backward(False)


def leave_overflows_to_the_scaler(accelerator: Accelerator, optimizer: Any) -> None:
    """Have fp16's loss scaler leave a step out itself, under FSDP: AdamW's fused kernel misreads
    the flag, FSDP1's sum over ranks and one that is still on its way to offloaded parameters.
    """
    if accelerator.scaler is not None and accelerator.distributed_type == DistributedType.FSDP:
        optimizer._step_supports_amp_scaling = False


def layer_classes(model: nn.Module) -> list[str]:
    """Return the class names of the model's repeated layers: of the ModuleLists of one class each,
    those that stand in no other, as long as they are of a like size.

    `_no_split_modules` is no help: BERT's names its embeddings too, which FSDP2 cannot wrap so.
    """
    sizes: dict[str, int] = {}
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and module not in inside and len(module) > 0:
            names = {type(layer).__name__ for layer in module}
            if "ModuleList" in names:  # Funnel's layers stand in lists of lists
                continue
            inside |= set(module.modules())
            if len(names) == 1:
                (name,) = names
                size = sum(parameter.numel() for parameter in module.parameters())
                sizes[name] = sizes.get(name, 0) + size
    largest = max(sizes.values(), default=0)
    return sorted(name for name, size in sizes.items() if 4 * size >= largest)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of which each rank may hold a share; then it is collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def strategy_of(model: nn.Module) -> str:
    """Return what `Accelerator.prepare` made of a model: DDP, FSDP, or one process.

    FSDP2 counts only where every trainable parameter is spread over the ranks.
    """
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        return "DDP"
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return "FSDP"
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return "one process"
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    whole = sum(not isinstance(parameter, DTensor) for parameter in trainable)
    return "FSDP" if whole == 0 else f"FSDP with {whole} parameters whole on each rank"
