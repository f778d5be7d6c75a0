"""What differs between two runs: settings, data, versions, and the first update that does."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from accel_ft.reporting.record import Record, scores_of

COMPARED = ("loss", "learning_rate", "grad_norm")
IDLE_SETTINGS = {"output_dir", "reproduce", "report_to", "push_to_hub", "hub_model_id"}
IDLE_RECEIPT = {"starts", "identity"}

Difference = tuple[str, Any, Any]  # what, in the first run, in the second


def differences(one: Record, other: Record) -> Iterator[Difference]:
    """Yield what differs, causes before effects."""
    for name, a, b, idle in (
        ("setting", one.settings, other.settings, IDLE_SETTINGS),
        ("receipt", _flat(one.receipt), _flat(other.receipt), IDLE_RECEIPT),
    ):
        for key in sorted(a.keys() | b.keys()):
            if key.partition(".")[0] not in idle and a.get(key) != b.get(key):
                yield f"{name} {key}", a.get(key), b.get(key)
    yield from curves(one, other)


def curves(one: Record, other: Record) -> Iterator[Difference]:
    """Yield the first update whose logged values differ, bit for bit, and the final scores where
    they do.
    """
    first, second = _logged(one), _logged(other)
    both = sorted(first.keys() & second.keys())
    differing = (
        (f"update {step}: {key}", first[step].get(key), second[step].get(key))
        for step in both
        for key in COMPARED
        if first[step].get(key) != second[step].get(key)
    )
    yield from islice(differing, 1)
    last, other_last = (max(logged, default=0) for logged in (first, second))
    if last != other_last:
        yield "last update", last, other_last
    for event in ("eval", "test"):
        ours, theirs = (scores_of((record.of(event) or [{}])[-1]) for record in (one, other))
        for key, value in ours.items():
            if value != theirs.get(key):
                yield f"{event}_{key}", value, theirs.get(key)


def _logged(record: Record) -> dict[int, dict[str, Any]]:
    return {event["step"]: event for event in record.of("train")}


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def table(found: list[Difference], names: tuple[str, str]) -> str:
    """Return the differences as lines of text."""
    if not found:
        return f"{names[0]} and {names[1]} do not differ"
    return "\n".join(f"{what}: {_short(a)} | {_short(b)}" for what, a, b in found)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
