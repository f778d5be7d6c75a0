"""accel_ft.train with a fault on one rank once the file FAULT exists: BROKEN_RANK=1 FAULT=file broken.py ..."""

import os

from accel_ft.engine import loop
from accel_ft.errors import run_command
from accel_ft.train import main

forward = loop.forward


def broken_forward(model, batch):
    """Fail once the file exists."""
    if os.environ["RANK"] == os.environ["BROKEN_RANK"] and os.path.exists(os.environ["FAULT"]):
        raise ValueError("the moon is not made of cheese")
    return forward(model, batch)


if __name__ == "__main__":
    loop.forward = broken_forward
    run_command(main)
