"""An incomplete checkpoint: what differs after save, load and one step.

Found by doing it: train, save, continue; rebuild, load, continue; then compare part by part.
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
    """A user's training, as this check drives it.

    Attributes:
        parts: by name, objects with `state_dict()`: model, optimizer, scheduler, scaler.
    """

    parts: dict[str, Any]

    def step(self) -> Any:
        """Do one update; return the ids of its samples."""

    def save(self, folder: Path) -> None:
        """Save a checkpoint."""

    def load(self, folder: Path) -> None:
        """Load that checkpoint."""


def random_state() -> dict[str, Any]:
    """Return the state of Python's, numpy's and torch's random generators."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _values(state: Any, path: str) -> dict[str, Any]:
    """Flatten nested mappings, lists and tuples to path -> value that can be compared."""
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
    if isinstance(value, np.ndarray) and value.dtype.kind not in "biufc":  # strings, say
        return value.tolist()
    is_array = isinstance(value, torch.Tensor | np.ndarray)
    return digest(torch.as_tensor(value)) if is_array else value


def snapshot(job: Job) -> dict[str, dict[str, Any]]:
    """Return, part by part, the values of a job's state and of the random generators."""
    parts = {name: part.state_dict() for name, part in job.parts.items()}
    parts[RANDOM] = random_state()
    return {name: _values(state, name) for name, state in parts.items()}


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    words = []
    for key in {**ours, **theirs}:
        one, other = ours.get(key, ...), theirs.get(key, ...)
        if one != other and repr(one) != repr(other):  # repr: NaN equals itself
            are_numbers = isinstance(one, int | float) and isinstance(other, int | float)
            words.append(f"{key} {other} instead of {one}" if are_numbers else key)
    return words


@own_random_numbers()
def resume(make: Callable[[], Job], folder: Path, steps: int = 3) -> list[Finding]:
    """Save after some updates, load into a job built anew, and compare. Collective.

    Args:
        make: builds the job from the beginning, as the program does at its start.
        folder: empty; the same on all ranks.
        steps: updates before the save. Best into the middle of the second epoch: in the first, an
            epoch counter or generator that is not saved still has its initial value.

    Returns:
        One finding for each part and for the random state, one for the samples of the next update,
        and one for the state after it.
    """
    job = make()
    for _ in range(steps):
        job.step()
    job.save(folder)
    saved = snapshot(job)
    samples = _values(job.step(), "sample")
    after = snapshot(job)
    del job  # two jobs at once may not fit on the device
    torch.manual_seed(torch.initial_seed() + 1)  # only the load restores the state now
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
        "save epoch and batch, and continue there: accelerator.skip_first_batches(loader, n), "
        "after set_epoch(epoch)"
    )
    findings.append(_part("resume: position in the data", samples, read, mend))
    mend = "see the parts above; if all pass, some state is not in `parts` or not deterministic"
    now = snapshot(again)
    del after[RANDOM], now[RANDOM]
    ours, theirs = ChainMap(*after.values()), ChainMap(*now.values())
    finding = _part("resume: the next update", ours, theirs, mend)
    if finding.verdict == Verdict.PASS and findings[-2].verdict == Verdict.FAIL:
        findings[-2] = replace(findings[-2], verdict=Verdict.WARN)  # random numbers, not needed
    sound = all(each.verdict != Verdict.FAIL for each in findings)
    if finding.verdict == Verdict.FAIL and sound and torch.accelerator.is_available():
        # On a GPU, attention's backward over more than 64 tokens sums in no fixed order.
        finding = replace(finding, verdict=Verdict.WARN)
    return [*findings, finding]


def _part(check: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], mend: str) -> Finding:
    ranks = gather(_differing(ours, theirs))
    odd = [rank for rank, words in enumerate(ranks) if words]
    if odd:
        words = ranks[odd[0]]
        about = f"{len(words)} of {len(ours)} values differ on rank {listed(odd)}: {listed(words)}"
        return Finding(check, Verdict.FAIL, about, mend)
    return Finding(check, Verdict.PASS, f"{len(ours)} values, bit for bit")
