"""torch's profiler over a few updates; open the trace at ui.perfetto.dev or chrome://tracing."""

import logging
from pathlib import Path

import torch
from torch.profiler import profile, schedule

logger = logging.getLogger(__name__)

SKIPPED, RECORDED = 5, 5  # updates: the first ones allocate and compile


def make_profiler(folder: Path, rank: int, num_steps: int) -> profile:
    """Return a profiler whose `step` is to be called after each update.

    It writes updates 6 to 10 to `folder`: a trace as rank_00000.trace.json.gz, and a table of
    operations, sorted by self time, as rank_00000.txt.

    Args:
        num_steps: number of updates that the run still has to make.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if num_steps < SKIPPED + RECORDED:
        logger.warning(
            "profile: it needs %d updates, this start has %d", SKIPPED + RECORDED, num_steps
        )

    def write(profiler: profile) -> None:
        trace = folder / f"rank_{rank:05d}.trace.json.gz"
        profiler.export_chrome_trace(str(trace))
        key = f"self_{'device' if torch.cuda.is_available() else 'cpu'}_time_total"
        table = profiler.key_averages().table(sort_by=key, row_limit=40)
        trace.with_name(f"rank_{rank:05d}.txt").write_text(table, encoding="utf-8")
        logger.info("profile: %s", trace)

    return profile(
        schedule=schedule(wait=SKIPPED - 1, warmup=1, active=RECORDED, repeat=1),
        on_trace_ready=write,
        record_shapes=True,
        acc_events=True,  # no effect on our one cycle; without it torch 2.11 warns
    )
