"""Will it fit: bytes on each rank, by purpose, compared with the device's capacity."""

from accel_ft.diagnosis.finding import Finding, Verdict, check
from accel_ft.model.memory import RESERVE, Need

MIB = 2**20


@check("will it fit")
def will_it_fit(
    wanted: Need,
    strategy: str,
    num_ranks: int,
    capacity: int,
    rows: int,
    on_cpu: bool = False,
    update: int = 0,
) -> Finding:
    """Compare a job's need with a device, find the largest micro-batch, and choose a strategy.

    Args:
        wanted: from `model.memory.need`.
        strategy: the one asked for: "none", "ddp", "fsdp" or "offload".
        capacity: bytes of a rank's device (its share of a CPU's memory).
        rows: size of the micro-batch asked for.
        on_cpu: whether the device is the CPU, which leaves no memory to offload to.
        update: rows of a whole update on a rank, if it accumulates; at least `rows` is assumed.
    """
    usable, update = int(capacity * (1 - RESERVE)), max(rows, update)

    def largest(strategy: str) -> int:
        return wanted.largest(strategy, num_ranks, usable, update)

    told = {"none": "one process", "ddp": "DDP", "fsdp": "FSDP2", "offload": "FSDP2 with offload"}
    simple = "none" if num_ranks == 1 else "ddp"
    order = [simple, *["fsdp"] * (num_ranks > 1), *["offload"] * (not on_cpu)]
    fitting = [name for name in order if largest(name) >= rows]
    some = [name for name in order if largest(name) >= 1]
    now = wanted.on_rank(strategy, num_ranks, rows, rows < update)
    parts = ", ".join(
        f"{name} {value / MIB:,.0f}"
        for name, value in (
            ("parameters", wanted.parameters), ("gradients", wanted.gradients),
            ("moments", wanted.moments),
            (f"activations of {rows} rows", wanted.fixed + wanted.per_row * rows),
        )
    )  # fmt: skip
    about = (
        f"{now / MIB:,.0f} MiB of {capacity / MIB:,.0f} a rank under {told[strategy]} "
        f"({parts}, unsharded); largest micro-batch {max(largest(strategy), 0)}"
    )
    if fitting:
        why = "the simplest" if fitting[0] == simple else f"{told[simple]} does not fit"
        needed = wanted.on_rank(fitting[0], num_ranks, rows, rows < update)
        choice = f"{told[fitting[0]]} ({why}): {needed / MIB:,.0f} MiB"
    elif some:
        choice = (
            f"{told[some[0]]} with per_device_train_batch_size {largest(some[0])}: more "
            "accumulation steps, the same global batch"
        )
    else:
        choice = "a larger device, more ranks, or a smaller model: not one row fits"
    if now <= usable:
        return Verdict.PASS(f"{about}; choice: {choice}")
    return Verdict.FAIL(about, choice)
