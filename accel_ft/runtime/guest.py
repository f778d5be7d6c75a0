"""A process that is somebody else's: what is put back as it was."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from accelerate.state import GradientState
from transformers.utils import logging


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
    Accelerator's accumulation steps, which another one replaces, and what transformers tells.
    """
    gradients, bars = GradientState(), logging.is_progress_bar_enabled()
    steps, verbosity = gradients.plugin_kwargs, logging.get_verbosity()
    try:
        with own_random_numbers(), torch.inference_mode(False):  # which has gradients on, too
            yield
    finally:
        gradients.plugin_kwargs = steps or gradients.plugin_kwargs
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
