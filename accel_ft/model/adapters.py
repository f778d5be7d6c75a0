"""Chooses what is trained: the whole model, its head, or low-rank adapters (LoRA, through peft)."""

import json
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from accel_ft.config import TrainConfig
from accel_ft.errors import (
    CheckpointError,
    ConfigError,
    first_line,
    in_one_line,
    listed,
    nearest,
    require,
)
from accel_ft.model import load
from accel_ft.runtime.guest import without_bars

ADAPTER_CONFIG = "adapter_config.json"
READ_KEYS = (
    "r", "lora_alpha", "target_modules", "modules_to_save", "use_rslora",
    "target_parameters", "rank_pattern", "alpha_pattern",  # set by peft for layers of experts
)  # fmt: skip


def choose_trained(model: Any, config: TrainConfig, new_parameters: Sequence[str] = ()) -> Any:
    """Freeze the encoder or add adapters, and enable gradient checkpointing, as configured. Call
    before the optimizer is made.

    Args:
        model: loaded, not wrapped.
        config: of the job.
        new_parameters: names of newly initialized parameters, which are always trained.

    Raises:
        ConfigError: the model does not support a setting.
    """
    if config.gradient_checkpointing and config.freeze is None:  # frozen: no backward there
        if not model.supports_gradient_checkpointing:
            raise ConfigError(
                f"gradient_checkpointing=true: {type(model).__name__} does not support it"
            )
        older = "gradient_checkpointing_enable"  # its name before transformers 5.20
        enable = getattr(model, "activation_checkpointing_enable", None) or getattr(model, older)
        enable({"use_reentrant": False})
    if config.freeze == "encoder":
        if model.base_model is model:
            raise ConfigError(f"freeze=encoder: {type(model).__name__} has no separate encoder")
        model.base_model.requires_grad_(False)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad or name in new_parameters)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError(
                f"freeze=encoder: {type(model).__name__} has its head in its encoder: nothing "
                "would be trained. Fix: --freeze none"
            )
    if config.lora_r is not None:
        whole = [*new_parameters, *_outside(model)]
        heads = {name.rpartition(".")[0] for name in whole if not _is_head(name)}
        targets = _lora_targets(model, config.lora_target_modules, heads)
        own = ",".join(config.lora_target_modules)
        key = f"lora_target_modules={own}" if own else f"lora_r={config.lora_r}"
        model = _with_adapters(
            model,
            key,
            base_model_name_or_path=config.model_name_or_path,
            r=config.lora_r,
            lora_alpha=config.lora_alpha,
            lora_dropout=config.lora_dropout,
            target_modules=targets,
            modules_to_save=sorted(heads) or None,
        )
        _keep_the_trained_alone(model)
    return model


def _outside(model: Any) -> list[str]:
    """Return the names of the parameters that a classifier has outside its encoder."""
    if model.base_model is model:
        return []
    inside = {id(parameter) for parameter in model.base_model.parameters()}
    return [name for name, parameter in model.named_parameters() if id(parameter) not in inside]


def _lora_targets(model: Any, wanted: Sequence[str], heads: set[str]) -> list[str]:
    """Return the names, or suffixes of names, of the layers that get adapters.

    Args:
        wanted: names or suffixes set by the user; if empty, all linear layers outside the head.
        heads: names of the modules that are trained in full.
    """
    holders = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    shared = [  # tied: each module would get an adapter, and merging add all to the one weight
        name
        for name, module in model.named_modules()
        if holders[id(getattr(module, "weight", None))] > 1
    ]
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D)
        and "Router" not in type(module).__name__  # a router may return a tuple
        and name not in shared
        and not _is_head(name)
        and not any(f"{name}.".startswith(f"{head}.") for head in heads)
    ]
    every = [name for name, _ in model.named_modules()]
    ends = sorted({name.rpartition(".")[2] for name in linear})
    for target in wanted:  # peft matches suffixes, and raises only if no target matches
        meant = [name for name in every if f".{name}".endswith(f".{target}")]
        why = "" if meant else "no layer's name ends in it"
        if several := [name for name in meant if name in shared]:
            why = f"{several[0]} shares its weight with another layer"
        if meant and all(_is_head(name) or name in heads for name in meant):
            why = "the head is trained in full"
        if why:
            raise ConfigError(
                f"lora_target_modules={target}: {why}.{nearest(target, ends)} "
                f"Allowed: {', '.join(ends)}"
            )
    return list(wanted) or linear


def _is_head(name: str) -> bool:
    """Whether peft trains a module in full by default: it decides by the suffix of its name."""
    return any(part.endswith(("classifier", "score")) for part in name.split("."))


def _with_adapters(model: Any, key: str, **settings: Any) -> Any:
    require("lora", "LoRA", "peft")
    from peft import LoraConfig, TaskType, get_peft_model

    try:  # for SEQ_CLS peft trains the head in full
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft and transformers warn of each other
            made = get_peft_model(model, LoraConfig(task_type=TaskType.SEQ_CLS, **settings))
    except ValueError as error:
        raise ConfigError(f"{key}: {in_one_line(error)}") from error
    written = made.peft_config["default"]  # peft makes a set: its order would vary when saved
    if isinstance(written.target_modules, set):
        written.target_modules = sorted(written.target_modules)
    return made


def _keep_the_trained_alone(model: Any) -> None:
    """Restrict the model's state dict to trained parameters, under every strategy: checkpoints stay
    small, and a resume takes frozen weights from the pretrained model.
    """
    every = model.named_parameters(remove_duplicate=False)  # all names of tied parameters
    frozen = {name for name, parameter in every if not parameter.requires_grad}

    def drop(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        for key in [key for key in state if load.plain_name(key) in frozen]:
            del state[key]

    def forgive(module: Any, keys: Any) -> None:
        missing = [key for key in keys.missing_keys if load.plain_name(key) not in frozen]
        keys.missing_keys[:] = missing

    model.register_state_dict_post_hook(drop)
    model.register_load_state_dict_post_hook(forgive)


def peft_config(model: Any) -> Any | None:
    """Return a model's adapter configuration; None if it has no adapters."""
    return getattr(model, "peft_config", {}).get("default")


def merged(
    model_config: Any,
    adapters: dict[str, Any],
    weights: dict[str, torch.Tensor],
    pretrained: dict[str, str] | None = None,
) -> Any:
    """Merge adapters into their pretrained model; return the classifier, on the CPU in float32.

    Args:
        model_config: of the classifier.
        adapters: content of adapter_config.json; only the keys that affect the result are read.
        weights: of the adapters and the head, by name.
        pretrained: provenance of the model that the adapters were trained on, if known.

    Raises:
        ConfigError, CheckpointError: the pretrained model cannot be loaded, or is not the one that
            the adapters were trained on.
    """
    name = str(adapters["base_model_name_or_path"])
    pretrained = pretrained or {}
    try:
        folder = load.resolve(name, "base_model_name_or_path")
        found = load.provenance(name) if pretrained else {}
    except ConfigError as error:
        raise ConfigError(
            f"base_model_name_or_path={name}: the adapters' pretrained model cannot be loaded. "
            "Fix: start from the folder of the training command, or restore the model "
            f"({first_line(error)})"
        ) from error
    for part, known in pretrained.items() if found else ():
        now = found.get(part, "not there")
        if known != now:
            raise CheckpointError(
                f"base_model_name_or_path={name}: the adapters were trained on other weights: "
                f"{part} was {known[:12]}..., is {now[:12]}..."
            )
    with without_bars():
        logging.set_verbosity_error()  # it would report a random head, which is loaded below
        base, new_parameters = load.load_for_training(folder, model_config, None)
    settings = {key: adapters[key] for key in READ_KEYS if key in adapters}
    model = _with_adapters(base, ADAPTER_CONFIG, **settings)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    buffers = {name for name, _ in model.named_buffers()}  # some models save theirs
    saved = {name.replace(".modules_to_save.default", "") for name in weights}
    lost = {name for name in new_parameters if f"base_model.model.{name}" not in saved}
    if strange := sorted(trained ^ (weights.keys() - buffers) | lost):
        raise CheckpointError(
            f"the checkpoint's adapters do not fit {folder}: {listed(strange, 5)}"
        )
    model.load_state_dict(weights, strict=False)
    return model.merge_and_unload()


def read_adapters(folder: Path) -> dict[str, Any] | None:
    """Read a checkpoint's adapter_config.json; return None if there is none.

    Raises:
        CheckpointError: it cannot be read.
    """
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        return None
    try:
        adapters: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        adapters["base_model_name_or_path"], adapters["r"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error!r}") from error
    return adapters
