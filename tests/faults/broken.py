"""accel_ft.train with a fault on one rank, some updates after the start: BROKEN_RANK=1 broken.py ..."""

import os

from accel_ft.engine import loop
from accel_ft.errors import run_command
from accel_ft.train import main

forward, calls = loop.forward, 0


def broken_forward(model, batch):
    """Fail in the 200th call."""
    global calls  # noqa: PLW0603
    calls += 1
    if calls == 200 and os.environ["RANK"] == os.environ["BROKEN_RANK"]:
        raise ValueError("the moon is not made of cheese")
    return forward(model, batch)


if __name__ == "__main__":
    loop.forward = broken_forward
    run_command(main)
