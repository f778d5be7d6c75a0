"""What the plan costs as the data grow: python examples/benchmarks/growth.py [--samples N ...]

For each number of samples, in a separate process: seconds to make the plan and its first batch,
seconds to a batch in the middle of epoch 2 (as in a resume), milliseconds per batch over the next
1,000, and the memory used. Lengths are a hash of the sample id. As with a memory map, they are
looked up by id, never all at once.
"""

import argparse
import resource
import subprocess
import sys
import time

import numpy as np

from accel_ft.data.plan import Ids, Plan, mix

GLOBAL_BATCH, BATCHES = 32, 1000


def lengths(ids: Ids) -> Ids:
    """Return the length of each sample, 8 to 128 tokens, from its id."""
    return (8 + mix(ids.astype(np.uint64)) % np.uint64(121)).astype(np.int64)


def memory() -> int:
    """Return this process's peak memory in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(num_samples: int) -> str:
    """Measure one number of samples; return its row of the table."""
    before = memory()
    start = time.perf_counter()
    plan = Plan(num_samples, GLOBAL_BATCH, 42, lengths)
    plan.global_batch(0)
    first = time.perf_counter()
    middle = plan.steps_per_epoch + plan.steps_per_epoch // 2
    plan = Plan(num_samples, GLOBAL_BATCH, 42, lengths)
    plan.global_batch(middle)
    seek = time.perf_counter()
    for step in range(middle + 1, middle + 1 + BATCHES):
        plan.global_batch(step)
    batches = time.perf_counter()
    grown = (memory() - before) / 2**20
    return (
        f"| {num_samples:,} | {first - start:.3f} s | {seek - first:.3f} s | "
        f"{(batches - seek) / BATCHES * 1e3:.3f} ms | {grown:.1f} MiB |"
    )


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, nargs="+", default=[10**6, 10**8, 10**9])
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(measure(options.measure))
        return
    print("| samples | first batch | batch at 1.5 epochs | each batch | memory |")
    print("|---" * 5 + "|", flush=True)
    for num_samples in options.samples:
        subprocess.run([sys.executable, __file__, "--measure", str(num_samples)], check=True)


if __name__ == "__main__":
    main()
