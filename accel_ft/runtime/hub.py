"""Whether the Hub is reachable: one probe of a few seconds, not five retries of each request."""

import contextlib
import logging
import re
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from unittest import mock

from huggingface_hub import constants, get_session

from accel_ft.errors import ConfigError, first_line, in_one_line

logger = logging.getLogger(__name__)

PROBE_SECONDS = 8
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
QUICKSTART = (
    "accelerate launch --config_file accelerate_configs/cpu.yaml "
    "-m accel_ft.train --config examples/quickstart.yaml"
)


def is_hub_id(name: str | None) -> bool:
    """Return whether a name is a valid repository id, and not an existing file or folder."""
    return name is not None and bool(HUB_ID.fullmatch(name)) and not Path(name).exists()


@contextlib.contextmanager
def fetching(key: str, name: str) -> Iterator[None]:
    """Turn any failure to load `name`, the value of `key`, from Hub or folder into one message."""
    reachable = Path(name).exists() or hub_reachable()
    try:
        with contextlib.nullcontext() if reachable else _offline():
            yield
    except Exception as error:  # third-party files may raise anything
        if reachable:
            raise ConfigError(f"{key}={name}: cannot be loaded: {_told(error)}") from error
        hub_reachable.cache_clear()  # the next job in this process probes again
        is_told = constants.HF_HUB_OFFLINE
        why = "HF_HUB_OFFLINE is set" if is_told else "the Hub cannot be reached"
        other = "--train_file" if key == "dataset_name" else "a package:// model"
        lacks = "the local cache does not have it"
        if not any(isinstance(each, FileNotFoundError) for each in _with_causes(error)):
            lacks = f"it cannot be loaded from the local cache: {_told(error).rstrip('.')}"
        raise ConfigError(
            f"{key}={name}: {why}, and {lacks}. Fix: a local folder, or {other}. "
            f"To try accel_ft without the Hub, in a clone of its repository:\n  {QUICKSTART}"
        ) from error


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, then its chain of causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _told(error: Exception) -> str:
    """Return an error's text, shortened to one line, and the first line of its cause."""
    words = in_one_line(error)
    if "Config name is missing" in words:
        words += " Fix: --dataset_config_name"
    cause = error.__cause__
    return words if cause is None else f"{words} ({first_line(cause)})"


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Make the Hub's libraries read from their cache alone, without a request."""
    import datasets

    with (
        mock.patch.object(constants, "HF_HUB_OFFLINE", True),
        mock.patch.object(datasets.config, "HF_HUB_OFFLINE", True),
    ):
        yield


@cache
def hub_reachable() -> bool:
    """Return whether the Hub answers; cached until a load without the Hub fails."""
    if constants.HF_HUB_OFFLINE:
        return False
    answers = []

    def probe() -> None:
        try:  # any answer will do, even a refusal
            session = get_session()
            answers.append(session.head(constants.ENDPOINT, timeout=PROBE_SECONDS))
        except Exception as error:
            logger.debug("the Hub did not answer: %s", error)

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)  # a DNS lookup that hangs ignores `timeout`
    return bool(answers)
