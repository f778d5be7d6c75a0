"""torch.compile, as accelerate's YAML or command asks for it: `dynamo_config`."""

import os
from pathlib import Path

import torch
from accelerate.utils import parse_flag_from_env

from accel_ft.errors import LaunchError, stop_signals_blocked

COMPILATIONS = 256  # of one function: 24 widths up to 4,096 tokens, trained and evaluated, under
# FSDP2 for the last layer and the others, with micro-batches of two sizes


def is_compiled() -> bool:
    """Return whether the YAML or command asks for compiled models."""
    return os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no"


def compiles_each_width() -> bool:
    """Return whether what is compiled is of one width of batch, and another costs a compilation."""
    return is_compiled() and not parse_flag_from_env("ACCELERATE_DYNAMO_USE_DYNAMIC")


def compiles_layers() -> bool:
    """Return whether layers are compiled one by one, so that those that are alike share one."""
    return is_compiled() and parse_flag_from_env("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION")


def can_record_compiled() -> bool:
    """Return whether what is compiled as asked for, if anything, can be part of a CUDA graph."""
    return not is_compiled() or (dynamo_settings()[0] == "INDUCTOR" and not _records_itself())


def refuse_cuda_graphs(device: torch.device) -> None:
    """Refuse a compile mode with CUDA graphs where gradients add up over micro-batches: they lie in
    the graphs' memory, which the next micro-batch's forward pass takes back.

    Raises:
        LaunchError: it is asked for.
    """
    if is_compiled() and device.type == "cuda" and _records_itself():
        backend, mode = dynamo_settings()
        raise LaunchError(
            f"dynamo_backend: {backend}, dynamo_mode: {mode}, whose CUDA graphs overwrite "
            "gradients that add up over several micro-batches. Fix: inductor in dynamo_mode "
            "default, without TORCHINDUCTOR_CUDAGRAPHS, or a per_device_train_batch_size that "
            "takes the update at once"
        )


def _records_itself() -> bool:
    """Return whether the compiler that is asked for records CUDA graphs."""
    backend, mode = dynamo_settings()
    are_on = os.environ.get("TORCHINDUCTOR_CUDAGRAPHS") == "1"  # as inductor reads it
    return are_on or backend == "CUDAGRAPHS" or mode in ("reduce-overhead", "max-autotune")


def dynamo_settings() -> tuple[str, str]:
    """Return the backend and mode that are asked for."""
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").upper()
    return backend, os.environ.get("ACCELERATE_DYNAMO_MODE", "default")


def configure(mixed_precision: str) -> None:
    """Set dynamo and inductor up, once accelerate has: a function that is compiled too often is an
    error, and float32 stays float32.

    Raises:
        LaunchError: torch has no such backend, or another user's cache would be run.
    """
    backend = dynamo_settings()[0]
    if backend.lower() not in torch._dynamo.list_backends(()):
        allowed = ", ".join(torch._dynamo.list_backends())
        raise LaunchError(
            f"dynamo_backend: {backend}: torch has none of that name here. Allowed: {allowed}"
        )
    if backend == "INDUCTOR":
        _refuse_cache_of_another()
    torch._dynamo.config.recompile_limit = COMPILATIONS
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # not on in eager mode, unsaid
    if not compiles_each_width():
        # Widths are multiples of 8 as they are. To ask whether to pad them bounds them, and for a
        # bounded width inductor makes a softmax over the bound, which takes ptxas minutes.
        from torch._inductor import config as inductor  # takes a second

        inductor.shape_padding = False
    if mixed_precision == "no":
        torch.backends.cuda.matmul.allow_tf32 = False  # which accelerate has just set


def _refuse_cache_of_another() -> None:
    """Inductor runs what its cache holds, whoever has made the folder of that name in /tmp."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    place = Path(default_cache_dir())
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:  # where it is, the user has said
        return
    try:
        place.mkdir(mode=0o700)
    except FileExistsError:
        if place.lstat().st_uid != os.getuid():
            raise LaunchError(
                f"{place}: is another user's, and what it holds would be run. Fix: set "
                "TORCHINDUCTOR_CACHE_DIR to a folder of your own"
            ) from None


def start_compile_workers() -> None:
    """Start inductor's processes: a compilation waits for ever for one that a signal has ended."""
    with stop_signals_blocked():
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.warm_pool()
