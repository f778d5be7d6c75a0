"""FSDP without accelerate's gaps: real on the CPU, layers wrapped, gradients reduced in float32."""

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
    """Return whether the environment asks for FSDP; accelerate accepts only the word `true`."""
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"


def make_real(accelerator: Accelerator) -> None:
    """Set up FSDP from the YAML's settings, which are in the environment. On the CPU `Accelerator`
    has dropped them; elsewhere a second `Accelerator` in the process shares the first one's plugin,
    which `configure` has changed for the first one's model.
    """
    plugin = FullyShardedDataParallelPlugin()
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    for state in (PartialState, AcceleratorState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin


def configure(accelerator: Accelerator, model: nn.Module) -> None:
    """Set what the YAML leaves open, before `Accelerator.prepare` shards the model.

    If the YAML names no layers to wrap, they are derived from the model. Gradients are reduced in
    float32, as under DDP. Accelerate's policy would reduce them in the compute dtype, and round
    FSDP1's buffers to it: rotary frequencies, which are exact in export and inference.
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
            # Without this, FSDP1 accumulates unreduced gradients in the compute dtype.
            accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, **in_float32)


def leave_embedding_sharded(model: nn.Module) -> None:
    """Stop FSDP2 from gathering embeddings for the backward pass, which does not read them."""
    for module in model.modules():
        if isinstance(module, FSDPModule) and isinstance(module, nn.Embedding):
            module.set_unshard_in_backward(False)


def leave_overflows_to_the_scaler(accelerator: Accelerator, optimizer: Any) -> None:
    """Let fp16's loss scaler, not AdamW's fused kernel, skip a step under FSDP. The kernel misreads
    the overflow flag: FSDP1 sums it over ranks, and its copy to offloaded parameters may be late.
    """
    if accelerator.scaler is not None and accelerator.distributed_type == DistributedType.FSDP:
        optimizer._step_supports_amp_scaling = False


def layer_classes(model: nn.Module) -> list[str]:
    """Return the class names of the model's repeated layers: those of the outermost ModuleLists of
    layers, each of a single class, with at least a quarter of the largest class's parameters.

    `_no_split_modules` does not help: BERT's lists its embeddings, and FSDP2 cannot wrap them as a
    layer.
    """
    sizes: dict[str, int] = {}
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and module not in inside and len(module) > 0:
            names = {type(layer).__name__ for layer in module}
            if "ModuleList" in names:  # Funnel has lists of lists of layers
                continue
            inside |= set(module.modules())
            if len(names) == 1:
                (name,) = names
                size = sum(parameter.numel() for parameter in module.parameters())
                sizes[name] = sizes.get(name, 0) + size
    largest = max(sizes.values(), default=0)
    return sorted(name for name, size in sizes.items() if 4 * size >= largest)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor; collective if it is a DTensor, which the ranks hold in shards."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def strategy_of(model: nn.Module) -> str:
    """Return what `Accelerator.prepare` made of a model: DDP, FSDP, or one process.

    "FSDP" for FSDP2 only if every trainable parameter is sharded over the ranks.
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
