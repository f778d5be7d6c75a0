"""Interpret label cells: a cell is one label, a set of labels, or a number.

Legend: K distinct label cells of a source, C outputs of the model.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from accel_ft.config import DataConfig
from accel_ft.errors import DataError, listed, nearest

if TYPE_CHECKING:
    from accel_ft.data.tokenize import TokenStore

GREATEST = 1e18  # bound of numbers to predict: its square still fits a float32
INTEGER = re.compile(r"-?[0-9]{1,4000}")
LABELS_SHOWN, FAULTS_SHOWN = 20, 10


def output_names(store: TokenStore, config: DataConfig) -> list[str]:
    """Return the names of the model's outputs, by id: in the source's own order, else integers by
    value, text alphabetically. For regression, the label column.

    Raises:
        DataError: there are fewer than two distinct label cells.
    """
    if config.problem_type == "regression":
        return [config.label_column]
    many = config.problem_type == "multi_label_classification"
    cells = store.labels
    names = sorted({name for cell in cells for name in json.loads(cell)} if many else cells)
    if len(cells) < 2:
        same = "labels " + cells[0] if many else f"label {names[0]!r}"
        what = f"every row has the {same}" if names else "no row has a label"
        raise DataError(f"{store.name}: {what}: a classifier needs two labels")
    declared, found = store.label_names or [], {*names}
    if {*declared} >= found:
        return [name for name in declared if name in found]
    if all(INTEGER.fullmatch(name) for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return names


def targets(store: TokenStore, names: list[str], config: DataConfig) -> NDArray[Any] | None:
    """Return the target of each of the store's distinct label cells; None for regression, whose
    store holds the target of each row.

    Args:
        store: of the rows.
        names: of the outputs, by id.
        config: says what the cells mean.

    Returns:
        label ids, int64 [K]; multi-label: whether the cell has each label, bool [K, C].

    Raises:
        DataError: a label is not among `names`; gives the place of its first occurrence.
    """
    if config.problem_type == "regression":
        return None
    many = config.problem_type == "multi_label_classification"
    sets = [json.loads(label) if many else [label] for label in store.labels]
    id_of = {name: label_id for label_id, name in enumerate(names)}
    if names == [f"LABEL_{label_id}" for label_id in range(len(names))]:  # default names
        id_of |= {str(label_id): label_id for label_id in range(len(names))}
    faults = [
        (place, label)
        for labels, place in zip(sets, store.label_places, strict=True)
        for label in labels
        if label not in id_of
    ]
    if faults:
        allowed, more = listed([*map(cut, names)], LABELS_SHOWN), len(faults) - FAULTS_SHOWN
        shown = [
            f"{place}: label {cut(label)!r} is none of these.{nearest(label, id_of)}"
            for place, label in faults[:FAULTS_SHOWN]
        ]
        if are_amounts(names):
            shown.append("Fix, if they are values to predict: --problem_type regression")
        shown += [f"... and {more} more"] * (more > 0)
        raise DataError("\n  ".join([f"{store.name}: unknown labels. Allowed: {allowed}", *shown]))
    if not many:
        return np.array([id_of[label] for (label,) in sets], np.int64)
    table = np.zeros((len(sets), len(names)), np.bool_)
    for row, labels in enumerate(sets):
        table[row, [id_of[label] for label in labels]] = True
    return table


def are_amounts(names: list[str]) -> bool:
    """Whether all labels are numbers and some have fractions: probably regression values."""
    return all(map(_number, names)) and not all(float(name).is_integer() for name in names)


def canonical(value: Any, config: DataConfig, names: tuple[str, ...] | None) -> str | None:
    """Return a label cell as canonical text, equal for equal meanings; None if it is invalid.

    Args:
        value: of the cell.
        config: says what it means.
        names: of integer labels where the source declares them.
    """
    if config.problem_type == "regression":
        is_named = names is not None and type(value) is int
        return _number(_label(value, names) if is_named else value)
    if config.problem_type == "single_label_classification":
        return _label(value, names)
    if isinstance(value, str):
        if value.strip()[:1] + value.strip()[-1:] in ("[]", "()", "{}"):
            return None  # a list written as text, as pandas does
        value = [part.strip() for part in value.split(config.label_separator) if part.strip()]
    if not isinstance(value, list | tuple):
        return None
    if len(set(map(str, value))) < len(value):
        return None  # a repeated label, or a multi-hot row of 0 and 1
    labels = [_label(part, names) for part in value]
    return None if None in labels else json.dumps(sorted(set(map(str, labels))))


def _label(value: Any, names: tuple[str, ...] | None) -> str | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int) and names is not None:
        return names[value] if 0 <= value < len(names) else None
    if isinstance(value, int):
        return str(value)
    return value if isinstance(value, str) and value.strip() and is_encodable(value) else None


def is_encodable(text: str) -> bool:
    """Whether a text can be encoded as UTF-8: from JSON, it may hold an unpaired surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _number(value: Any) -> str | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    is_number = not isinstance(value, bool) and abs(number) < GREATEST  # false for NaN
    is_number = is_number and "_" not in str(value)  # float() accepts 1_000
    return repr(number) if is_number else None


MEANT = {
    "single_label_classification": "a text or an integer",
    "multi_label_classification": "a list of different labels (jsonl, json, parquet; their names, "
    "not a 0 or 1 for each), or text with label_separator (not a list written as text)",
    "regression": "a finite number below 1e18",
}
FIXES = {  # by problem_type and type of the cell
    ("single_label_classification", bool): "cast it to an integer or a text",
    ("single_label_classification", float): "for classes cast it to an integer or a text; for "
    "values to predict --problem_type regression",
    ("single_label_classification", list): "--problem_type multi_label_classification",
    ("regression", str): "for names --problem_type single_label_classification",
    ("regression", list): "--problem_type multi_label_classification",
}


def meant(cell: Any, problem_type: str) -> str:
    """Return what a label may be, and what to do about a cell that is none."""
    fix = FIXES.get((problem_type, type(cell)))
    return MEANT[problem_type] + (f". Fix: {fix}" if fix else "")


def cut(words: str) -> str:
    """Shorten a label or value for messages: a wrong column may hold whole texts."""
    return words if len(words) <= 40 else words[:37] + "..."
