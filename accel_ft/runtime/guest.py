"""Save and restore the global state of a process that belongs to the caller's program."""

import contextlib
import csv
import os
import random
from collections.abc import Iterator
from logging import getLogger

import numpy as np
import torch
from accelerate.state import GradientState
from transformers.utils import logging

GPUS = "CUDA_VISIBLE_DEVICES"


@contextlib.contextmanager
def own_random_numbers() -> Iterator[None]:
    """Restore the random number generators of Python, numpy and torch on exit."""
    python, numpy = random.getstate(), np.random.get_state()
    has_gpus = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count() if has_gpus else 0)  # reading states starts CUDA
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextlib.contextmanager
def as_a_guest() -> Iterator[None]:
    """Restore the caller's global state on exit: random number generators, grad mode, gradient
    accumulation (all Accelerators share it, and a run that ends in mid-update changes it), the
    accel_ft logger, transformers' verbosity and bars, torch's CUDA switches, csv's field limit, and
    CUDA_VISIBLE_DEVICES. Meanwhile no other thread may train or draw random numbers.
    """
    sdp = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    tf32 = None
    with contextlib.suppress(RuntimeError):  # if set by torch's newer name, the old one raises
        tf32 = torch.backends.cudnn.allow_tf32
    visible = {name: value for name, value in os.environ.items() if name == GPUS}
    gradients, ours = GradientState(), getLogger("accel_ft")
    steps, steps_now = dict(gradients.plugin_kwargs), gradients.sync_gradients
    longest = csv.field_size_limit()
    handlers, level, propagate = ours.handlers, ours.level, ours.propagate
    try:
        with own_random_numbers(), without_bars():
            yield
    finally:
        gradients.plugin_kwargs = steps or gradients.plugin_kwargs
        gradients._set_sync_gradients(steps_now)
        csv.field_size_limit(longest)
        ours.handlers, ours.propagate = handlers, propagate
        ours.setLevel(level)
        torch.backends.cuda.enable_cudnn_sdp(sdp)
        if tf32 is not None:
            torch.backends.cudnn.allow_tf32 = tf32
        os.environ.pop(GPUS, None)
        os.environ.update(visible)


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Hide transformers' bars, leave inference mode (so that models can train); restore on exit."""
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    try:
        with torch.inference_mode(False):  # also turns grad mode on
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
