"""A process that is somebody else's: what is put back as it was."""

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
    """Put the random numbers of Python, numpy and torch back as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    has_gpus = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count() if has_gpus else 0)  # to ask others would start them
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextlib.contextmanager
def as_a_guest() -> Iterator[None]:
    """Leave to the caller's process what is its own: random numbers, whether gradients are made, an
    Accelerator's accumulation, which another one's steps and an end in mid-update change, how
    accel_ft's messages go, what transformers tells, torch's switches for CUDA, how long a csv's
    field may be, and which GPUs its children see. No other thread may train, or draw, meanwhile.
    """
    sdp = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    tf32 = None
    with contextlib.suppress(RuntimeError):  # the caller has set it by torch's newer names
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
    """Load models without transformers' bars, to be trained too; put back how much it tells."""
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    try:
        with torch.inference_mode(False):  # which has gradients on, too
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
