"""A checkpoint that does not come back: what differs after save, load and one step.

It is found by doing it: train, save, go on; build anew, load, go on; and comparing part by part.
"""

import random
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from accel_ft.diagnosis.finding import Finding, Verdict, gather
from accel_ft.engine.agreement import digest
from accel_ft.errors import listed
from accel_ft.runtime.guest import own_random_numbers

RANDOM = "random numbers"


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


def _values(state: Any, path: str) -> dict[str, Any]:
    """What a nest of mappings, lists and tuples holds, by the way to it, as what compares."""
    parts: dict[str, Any] = {}
    if isinstance(state, Mapping):
        for key, each in state.items():
            parts |= _values(each, f"{path}.{key}")
    elif isinstance(state, list | tuple):
        for number, each in enumerate(state):
            parts |= _values(each, f"{path}[{number}]")
    elif not callable(state):
        parts[path] = _comparable(state)
    return parts


def _comparable(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind not in "biufc":  # words, say
        return value.tolist()
    is_array = isinstance(value, torch.Tensor | np.ndarray)
    return digest(torch.as_tensor(value)) if is_array else value


def snapshot(job: Job) -> dict[str, dict[str, Any]]:
    """Return, part by part, the values of a job's state and of the random numbers."""
    parts = {name: part.state_dict() for name, part in job.parts.items()}
    parts[RANDOM] = random_state()
    return {name: _values(state, name) for name, state in parts.items()}


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    words = []
    for key in {**ours, **theirs}:
        one, other = ours.get(key, ...), theirs.get(key, ...)
        if one != other and repr(one) != repr(other):  # not equal to itself: NaN
            are_numbers = isinstance(one, int | float) and isinstance(other, int | float)
            words.append(f"{key} {other} in place of {one}" if are_numbers else key)
    return words


@own_random_numbers()
def resume(make: Callable[[], Job], folder: Path, steps: int = 3) -> list[Finding]:
    """Save after some updates, load into a job built anew, and compare. Collective.

    Args:
        make: builds the job from the beginning, as the program does at its start.
        folder: an empty one; on several ranks the same.
        steps: updates before the save. More than an epoch's, and into the middle of the next, tell
            most: in the first, an epoch or a generator that is not saved is as it begins.

    Returns:
        One finding for each part that is there after the load, one for the samples of the next
        update, and one for the state after it.
    """
    job = make()
    for _ in range(steps):
        job.step()
    job.save(folder)
    saved = snapshot(job)
    samples = _values(job.step(), "sample")
    after = snapshot(job)
    del job  # two at once may be more than the device holds
    torch.manual_seed(torch.initial_seed() + 1)  # a load must bring the random numbers back
    random.seed(1), np.random.seed(1)
    again = make()
    again.load(folder)
    loaded = snapshot(again)
    findings = [
        _part(f"resume: {part}", values, loaded.get(part, {}), f"save {part} and load it back")
        for part, values in saved.items()
    ]
    read = _values(again.step(), "sample")
    mend = (
        "save epoch and batch, and go on there: accelerator.skip_first_batches(loader, n), with "
        "the epoch's own order (set_epoch)"
    )
    findings.append(_part("resume: position in the data", samples, read, mend))
    mend = "see the parts above; where all pass: something is not in `parts`, or not deterministic"
    now = snapshot(again)
    del after[RANDOM], now[RANDOM]
    ours, theirs = ChainMap(*after.values()), ChainMap(*now.values())
    finding = _part("resume: the next update", ours, theirs, mend)
    if finding.verdict == Verdict.PASS and findings[-2].verdict == Verdict.FAIL:
        findings[-2] = replace(findings[-2], verdict=Verdict.WARN)  # numbers that it did not need
    sound = all(each.verdict != Verdict.FAIL for each in findings)
    if finding.verdict == Verdict.FAIL and sound and torch.accelerator.is_available():
        # Attention of more than 64 tokens adds up in any order there, backward.
        finding = replace(finding, verdict=Verdict.WARN)
    return [*findings, finding]


def _part(check: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], mend: str) -> Finding:
    ranks = gather(_differing(ours, theirs))
    odd = [rank for rank, words in enumerate(ranks) if words]
    if odd:
        words = ranks[odd[0]]
        about = f"{len(words)} of {len(ours)} values differ on rank {listed(odd)}: {listed(words)}"
        return Finding(check, Verdict.FAIL, about, mend)
    return Finding(check, Verdict.PASS, f"{len(ours)} values, the same bits")
