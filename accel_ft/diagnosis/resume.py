"""A checkpoint that does not come back: what differs after save, load and one step.

It is found by doing it: train, save, go on; build anew, load, go on; and comparing part by part.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from accel_ft.diagnosis.finding import Finding, Verdict, failed, gather, listed, passed
from accel_ft.diagnosis.replicas import digest


class Job(Protocol):
    """Somebody's training, as this check drives it.

    Attributes:
        parts: by name, objects with `state_dict()`: model, optimizer, scheduler, scaler.
    """

    parts: dict[str, Any]

    def step(self) -> Any:
        """Do one update; return what tells its samples apart: their ids."""

    def save(self, folder: Path) -> None:
        """Save a checkpoint."""

    def load(self, folder: Path) -> None:
        """Load it."""


def random_state() -> dict[str, Any]:
    """Return the state of Python's, numpy's and torch's random numbers."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield every value below `value` as something that compares, with the way to it."""
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        yield path, digest(local)
    elif isinstance(value, np.ndarray):
        yield path, digest(torch.from_numpy(value))
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(each, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _leaves(each, f"{path}[{number}]")
    elif not callable(value):
        yield path, value


def snapshot(job: Job) -> dict[str, dict[str, Any]]:
    """Return, part by part, the values of a job's state and of the random numbers."""
    parts = {name: part.state_dict() for name, part in job.parts.items()}
    parts["random numbers"] = random_state()
    return {name: dict(_leaves(state, name)) for name, state in parts.items()}


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    def differ(one: Any, other: Any) -> bool:
        return bool(one != other and repr(one) != repr(other))  # not equal to itself: NaN

    return [key for key in {**ours, **theirs} if differ(ours.get(key, ...), theirs.get(key, ...))]


def resume(make: Callable[[], Job], folder: Path, steps: int = 3) -> list[Finding]:
    """Save after some updates, load into a job built anew, and compare. Collective.

    Args:
        make: builds the job from the beginning, as the program does at its start.
        folder: an empty one; on several ranks the same.
        steps: updates before the save; an odd number, in the middle of an epoch, tells most.

    Returns:
        One finding for each part that is there after the load, one for the samples of the next
        update, and one for the state after it.
    """
    job = make()
    for _ in range(steps):
        job.step()
    job.save(folder)
    saved = snapshot(job)
    samples = job.step()
    after = snapshot(job)
    del job  # two at once may be more than the device holds
    torch.manual_seed(torch.initial_seed() + 1)  # a load must bring the random numbers back
    random.seed(1), np.random.seed(1)
    again = make()
    again.load(folder)
    loaded = snapshot(again)
    findings = []
    for part in saved:
        ours = _differing(saved[part], loaded.get(part, {}))
        findings.append(
            _part(f"resume: {part}", ours, len(saved[part]), f"save {part} and load it back")
        )
    read = again.step()
    check = "resume: position in the data"
    if any(gather(list(_leaves(read, "")) != list(_leaves(samples, "")))):
        findings.append(
            failed(
                check,
                f"the next update reads {str(read)[:60]}, it should be {str(samples)[:60]}",
                "save epoch and batch, and go on there: accelerator.skip_first_batches(loader, n), "
                "with the epoch's own order (set_epoch)",
            )
        )
    else:
        findings.append(passed(check, "the next update reads the samples that were next"))
    now = snapshot(again)
    differing = [key for part in after for key in _differing(after[part], now.get(part, {}))]
    count = sum(map(len, after.values()))
    mend = "see the parts above; where all pass: something is not in `parts`, or not deterministic"
    finding = _part("resume: the next update", differing, count, mend)
    sound = all(each.verdict == Verdict.PASS for each in findings)
    if finding.verdict == Verdict.FAIL and sound and torch.accelerator.is_available():
        # Attention of more than 64 tokens adds up in any order there, backward.
        finding = replace(finding, verdict=Verdict.WARN)
    return [*findings, finding]


def _part(check: str, differing: list[str], count: int, mend: str) -> Finding:
    ranks = gather(differing)
    odd = [rank for rank, names in enumerate(ranks) if names]
    if odd:
        names = ranks[odd[0]]
        words = f"{len(names)} of {count} values differ on rank {listed(odd)}: {listed(names)}"
        return failed(check, words, mend)
    return passed(check, f"{count} values, the same bits")
