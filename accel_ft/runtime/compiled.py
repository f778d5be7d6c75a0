"""torch.compile, as accelerate's YAML (`dynamo_config`) or command line requests it."""

import os
from pathlib import Path

import torch
from accelerate.utils import parse_flag_from_env

from accel_ft.errors import LaunchError, stop_signals_blocked

COMPILATIONS = 256  # limit per function, above 192: 24 widths up to 4,096 tokens, times 2 (train,
# evaluate), times 2 (FSDP2: the last layer, the others), times 2 sizes of micro-batch


def is_compiled() -> bool:
    """Return whether the YAML or command line asks for compiled models."""
    return os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no"


def compiles_each_width() -> bool:
    """Return whether shapes are static, so that each new batch width costs a compilation."""
    return is_compiled() and not parse_flag_from_env("ACCELERATE_DYNAMO_USE_DYNAMIC")


def compiles_layers() -> bool:
    """Return whether layers are compiled one by one (identical layers share a compilation)."""
    return is_compiled() and parse_flag_from_env("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION")


def can_record_compiled() -> bool:
    """Return whether our CUDA graphs can record the model, uncompiled or compiled as requested."""
    return not is_compiled() or (dynamo_settings()[0] == "INDUCTOR" and not _records_itself())


def refuse_cuda_graphs(device: torch.device) -> None:
    """Refuse a compile mode that uses CUDA graphs with gradient accumulation: gradients lie in the
    graphs' memory, which the next micro-batch's forward pass overwrites.

    Raises:
        LaunchError: such a mode is requested.
    """
    if is_compiled() and device.type == "cuda" and _records_itself():
        backend, mode = dynamo_settings()
        raise LaunchError(
            f"dynamo_backend: {backend}, dynamo_mode: {mode}: its CUDA graphs overwrite "
            "gradients that are accumulated over micro-batches. Fix: dynamo_backend: INDUCTOR in "
            "dynamo_mode: default, without TORCHINDUCTOR_CUDAGRAPHS, or a "
            "per_device_train_batch_size that needs no accumulation"
        )


def _records_itself() -> bool:
    """Return whether the requested backend and mode record CUDA graphs themselves."""
    backend, mode = dynamo_settings()
    are_on = os.environ.get("TORCHINDUCTOR_CUDAGRAPHS") == "1"  # as inductor reads it
    return are_on or backend == "CUDAGRAPHS" or mode in ("reduce-overhead", "max-autotune")


def dynamo_settings() -> tuple[str, str]:
    """Return the requested backend, in capitals, and mode."""
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").upper()
    return backend, os.environ.get("ACCELERATE_DYNAMO_MODE", "default")


def configure(mixed_precision: str) -> None:
    """Set up dynamo and inductor, after accelerate has: too many recompilations of a function are
    an error, and float32 does not become TF32.

    Raises:
        LaunchError: torch has no such backend, or code from another user's cache would run.
    """
    backend = dynamo_settings()[0]
    if backend.lower() not in torch._dynamo.list_backends(()):
        allowed = ", ".join(torch._dynamo.list_backends())
        raise LaunchError(
            f"dynamo_backend: {backend}: torch has no such backend here. Allowed: {allowed}"
        )
    if backend == "INDUCTOR":
        _refuse_cache_of_another()
    torch._dynamo.config.recompile_limit = COMPILATIONS
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # no silent eager fallback
    if not compiles_each_width():
        # Widths are multiples of 8 already: padding gains nothing. Its check puts an upper bound on
        # a dynamic width, and inductor then makes softmax as wide as the bound: minutes in ptxas.
        from torch._inductor import config as inductor  # takes a second

        inductor.shape_padding = False
    if mixed_precision == "no":
        torch.backends.cuda.matmul.allow_tf32 = False  # accelerate has just enabled it


def _refuse_cache_of_another() -> None:
    """Refuse a cache in /tmp that another user created: inductor runs any code in it."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    place = Path(default_cache_dir())
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:  # the user's choice
        return
    try:
        place.mkdir(mode=0o700)
    except FileExistsError:
        if place.lstat().st_uid != os.getuid():
            raise LaunchError(
                f"{place}: belongs to another user, and its code would be run. Fix: set "
                "TORCHINDUCTOR_CACHE_DIR to a folder of your own"
            ) from None


def start_compile_workers() -> None:
    """Start inductor's workers, stop signals blocked: compiling waits for ever for a killed one."""
    with stop_signals_blocked():
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.warm_pool()
