"""Compare two runs: settings, data, versions, and the first update at which they differ."""

from collections.abc import Iterator
from itertools import groupby, islice
from typing import Any

from accel_ft.config import HUB_KEYS
from accel_ft.reporting.record import Record, scores_of

CURVES = ("loss", "learning_rate", "grad_norm")
IDLE_SETTINGS = HUB_KEYS | {"output_dir", "reproduce", "report_to"}
IDLE_RECEIPT = {"starts", "identity", "warnings"}

Difference = tuple[str, Any, Any]  # what differs, its value in the first run, in the second
Updates = tuple[int, int]  # train: after the first update, up to the second; others: (0, step)


def differences(one: Record, other: Record) -> Iterator[Difference]:
    """Yield the differences, causes before effects."""
    for name, a, b, idle in (
        ("setting", one.settings, other.settings, IDLE_SETTINGS),
        ("receipt", _flat(one.receipt), _flat(other.receipt), IDLE_RECEIPT),
    ):
        for key in sorted(a.keys() | b.keys()):
            if key.partition(".")[0] not in idle and not _same(a.get(key), b.get(key)):
                yield f"{name} {key}", a.get(key), b.get(key)
    first, second = (_over_starts(record.receipt["starts"]) for record in (one, other))
    for key in sorted(first.keys() & second.keys()):  # the fields above: last start only
        if first[key] != second[key] and max(len(first[key]), len(second[key])) > 1:
            yield f"{key}, over all starts", first[key], second[key]
    yield from curves(one, other)
    if not shared(one, other):
        what = "number of train events, none for the same updates, so no losses are compared"
        yield what, len(one.of("train")), len(other.of("train"))
    ended = bool(one.of("end")), bool(other.of("end"))
    if ended[0] != ended[1]:
        yield "reached its end", *ended
    for event, rows in (("end", "validation"), ("test", "test")):
        a, b = (scores_of((record.of(event) or [{}])[-1], True) for record in (one, other))
        for key in a:
            if key in b and not _same(a[key], b[key]):
                yield f"final {key} on the {rows} rows", a[key], b[key]


def _over_starts(starts: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return each field's values over the starts of a run; consecutive equal values count once."""
    flat = [_flat({**each, "time": None, "step": None}) for each in starts]
    keys = dict.fromkeys(key for each in flat for key in each)
    return {key: [value for value, _ in groupby(each.get(key) for each in flat)] for key in keys}


def curves(one: Record, other: Record) -> Iterator[Difference]:
    """Yield the first train, eval and test event whose values are not exactly equal; and the last
    update, if both runs ended, at different ones.
    """
    for event in ("train", "eval", "test"):
        first, second = _by_updates(one, event), _by_updates(other, event)
        differing = (
            (f"{_words(event, updates)}: {key}", value, _values(second[updates]).get(key))
            for updates in shared(one, other, event)
            for key, value in _values(first[updates]).items()
            if not _same(value, _values(second[updates]).get(key))
        )
        yield from islice(differing, 1)
    last, other_last = ([e["step"] for e in record.of("end")] for record in (one, other))
    if last and other_last and last != other_last:
        yield "last update", last[0], other_last[0]


def _values(event: dict[str, Any]) -> dict[str, Any]:
    """Return the values of an event that are compared."""
    if event["event"] == "train":
        return {key: event.get(key) for key in CURVES}
    return scores_of(event, with_unknown=True)


def shared(one: Record, other: Record, event: str = "train") -> list[Updates]:
    """Return the ranges of updates for which both runs have an event, in order."""
    return sorted(_by_updates(one, event).keys() & _by_updates(other, event).keys())


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are exactly equal; NaN equals NaN."""
    return bool(one == other) or repr(one) == repr(other)


def _by_updates(record: Record, event: str) -> dict[Updates, dict[str, Any]]:
    events = record.of(event)
    befores = [0, *(each["step"] for each in events)] if event == "train" else [0] * len(events)
    return {(before, each["step"]): each for before, each in zip(befores, events, strict=False)}


def _words(event: str, updates: Updates) -> str:
    before, step = updates
    if event != "train":
        return f"{event} after update {step}"
    return f"update {step}" if step == before + 1 else f"updates {before + 1} to {step}"


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def table(found: list[Difference]) -> str:
    """Return the differences as lines of text."""
    if not found:
        return "they do not differ"
    return "\n".join(f"{what}: {a} | {b}" for what, a, b in found)
