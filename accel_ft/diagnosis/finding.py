"""What a check says, and how the checks of several ranks hear of each other."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from torch import distributed as dist


class Verdict(StrEnum):
    """How a check ended."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"


@dataclass(frozen=True)
class Finding:
    """The outcome of one check, the same on every rank.

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

    def as_dict(self) -> dict[str, str]:
        """Return it as JSON takes it."""
        return {key: str(value) for key, value in asdict(self).items()}


def passed(check: str, measured: str) -> Finding:
    """Return a PASS."""
    return Finding(check, Verdict.PASS, measured)


def warned(check: str, measured: str, mend: str) -> Finding:
    """Return a WARN."""
    return Finding(check, Verdict.WARN, measured, mend)


def failed(check: str, measured: str, mend: str) -> Finding:
    """Return a FAIL."""
    return Finding(check, Verdict.FAIL, measured, mend)


def skipped(check: str, reason: str) -> Finding:
    """Return a SKIP."""
    return Finding(check, Verdict.SKIP, reason)


def gather(value: Any) -> list[Any]:
    """Return every rank's value, in order; a list of one where there is no group. Collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def this_rank() -> int:
    """Return this process's rank, 0 where there is no group."""
    return dist.get_rank() if dist.is_initialized() else 0


def listed(names: Sequence[Any], limit: int = 3) -> str:
    """Return the first few of `names`, and how many more there are."""
    words = ", ".join(map(str, names[:limit]))
    return words + (f" and {len(names) - limit} more" if len(names) > limit else "")


def table(findings: Sequence[Finding], width: int = 0) -> str:
    """Return the findings as lines to read, the mend under what it mends.

    Args:
        findings: of some checks.
        width: least of the first column, in characters.
    """
    width = max([width, *(len(finding.check) for finding in findings)])
    lines = []
    for finding in findings:
        lines.append(f"{finding.check:{width}}  {finding.verdict:4}  {finding.measured}")
        if finding.mend:
            lines.append(f"{'':{width}}        mend: {finding.mend}")
    return "\n".join(lines)
