"""What a check returns, and how the ranks exchange what they found."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, wraps
from typing import Any, ParamSpec

from torch import distributed as dist

from accel_ft.errors import listed
from accel_ft.runtime.watch import new_host_group

P = ParamSpec("P")


class Verdict(StrEnum):
    """How a check ended, the worst last. Calling one makes a Finding, which `check` names."""

    SKIP = "SKIP"
    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"

    def __call__(self, measured: str, mend: str = "") -> "Finding":
        return Finding("", self, measured, mend)


@dataclass(frozen=True)
class Finding:
    """The outcome of one check; the same on every rank if the check is collective.

    Attributes:
        check: its name.
        verdict: PASS, WARN, FAIL or SKIP.
        measured: what was seen, with numbers and names; for SKIP the reason.
        mend: what to do about it; empty for PASS.
    """

    check: str
    verdict: Verdict
    measured: str
    mend: str = ""


def check(name: str) -> Callable[[Callable[P, Finding]], Callable[P, Finding]]:
    """Return a decorator that puts `name` into the finding that a function returns."""

    def named(judge: Callable[P, Finding]) -> Callable[P, Finding]:
        @wraps(judge)
        def judged(*args: P.args, **kwargs: P.kwargs) -> Finding:
            return replace(judge(*args, **kwargs), check=name)

        return judged

    return named


def num_ranks() -> int:
    """Return the world size; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


@cache
def _host_group(world: Any) -> Any:
    """Return a gloo group of all ranks: objects go through host memory, not a rank's device."""
    return world if dist.get_backend(world) == "gloo" else new_host_group()


def gather(value: Any) -> list[Any]:
    """Return every rank's value, by rank; [value] without a process group. Collective."""
    values: list[Any] = [value] * num_ranks()
    if len(values) > 1:
        dist.all_gather_object(values, value, group=_host_group(dist.group.WORLD))
    return values


def agreed(finding: Finding) -> Finding:
    """Return the worst finding of all ranks, with the ranks that found it. Collective."""
    ranks: list[Finding] = gather(finding)
    worst = max(ranks, key=lambda one: list(Verdict).index(one.verdict))
    if all(one.verdict == worst.verdict for one in ranks):
        return ranks[0]
    where = listed([rank for rank, one in enumerate(ranks) if one.verdict == worst.verdict], 8)
    return Finding(worst.check, worst.verdict, f"on rank {where}: {worst.measured}", worst.mend)


def line(finding: Finding) -> str:
    """Return a finding as one line of text, with its mend on a second line, called Fix as in
    error messages.
    """
    mend = f"\n{'':32}        Fix: {finding.mend}" if finding.mend else ""
    return f"{finding.check:32}  {finding.verdict:4}  {finding.measured}{mend}"
