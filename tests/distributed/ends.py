"""Programs on 2 ranks that hang, or end without a message: python tests/distributed/ends.py FOLDER FAULT...

Each rank is forked from one process that has imported torch; FOLDER/codes.json holds the exit codes by fault and rank.
"""

import contextlib
import ctypes
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

from accel_ft.diagnosis.postmortem import Stages


def build_model(rank, fault):
    if rank == 1 and fault == "segmentation fault":
        ctypes.string_at(0)
    if rank == 1 and fault == "hidden exit":
        os._exit(0)
    if rank == 1 and fault == "exception":
        raise ValueError("no such layer")


def train(stage, rank, fault):
    for step in range(4):
        stage(f"step {step}")
        with (
            contextlib.suppress(ValueError)
            if fault == "swallowed exception"
            else contextlib.nullcontext()
        ):
            if fault == "swallowed exception" and rank == 1 and step == 2:
                raise ValueError("a row that cannot be read")
            if fault == "out of data early" and rank == 1 and step == 2:
                break
            if fault == "different collectives" and rank == 1 and step == 2:
                dist.broadcast(torch.ones(2), 0)
            if fault == "state dict on rank 0 alone" and step == 2:
                if rank == 0:
                    dist.all_gather_object([None, None], 0)
                time.sleep(60)
            dist.all_reduce(torch.ones(1))


def program(folder, rank, fault):
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with Stages(folder, rank, limit_seconds=5) as stage:
        store, limit = f"file://{folder.absolute()}/store", timedelta(seconds=60)
        dist.init_process_group("gloo", store, limit, world_size=2, rank=rank)
        stage("model")
        build_model(rank, fault)
        train(stage, rank, fault)


if __name__ == "__main__":
    torch.set_num_threads(1)
    root, *faults = sys.argv[1:]
    pids = {}
    for fault in faults:
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    program(Path(root) / fault, rank, fault)
                    code = 0
                finally:
                    os._exit(code)
            pids[pid] = fault, rank
    codes = {fault: {} for fault in faults}
    for _ in pids:
        pid, status = os.wait()
        fault, rank = pids[pid]
        codes[fault][rank] = os.waitstatus_to_exitcode(status)
    (Path(root) / "codes.json").write_text(json.dumps(codes))
