"""Is the Hub there? Asked once, in seconds, in place of five retries of every request."""

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
    """Whether a name can be a repository's on the Hub, and is no file or folder here."""
    return name is not None and bool(HUB_ID.fullmatch(name)) and not Path(name).exists()


@contextlib.contextmanager
def fetching(key: str, name: str) -> Iterator[None]:
    """Load `name`, the value of `key`, from Hub or folder; make one message of what goes wrong."""
    reachable = Path(name).exists() or hub_reachable()
    try:
        with contextlib.nullcontext() if reachable else _offline():
            yield
    except Exception as error:  # other people's files fail in any way
        if reachable:
            raise ConfigError(f"{key}={name}: cannot be loaded: {_told(error)}") from error
        hub_reachable.cache_clear()  # the next job in this process asks anew
        is_told = constants.HF_HUB_OFFLINE
        why = "HF_HUB_OFFLINE is set" if is_told else "the Hub cannot be reached"
        other = "--train_file" if key == "dataset_name" else "a package:// model"
        lacks = "its cache here does not hold it"
        if not any(isinstance(each, FileNotFoundError) for each in _with_causes(error)):
            lacks = (
                f"from what its cache here holds it cannot be loaded: {_told(error).rstrip('.')}"
            )
        raise ConfigError(
            f"{key}={name}: {why}, and {lacks}. Fix: a local folder, or {other}. "
            f"To try accel_ft without the Hub:\n  {QUICKSTART}"
        ) from error


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and those it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _told(error: Exception) -> str:
    """What an error says, as far as a message has room for it, and what it came from."""
    words = in_one_line(error)
    if "Config name is missing" in words:
        words += " Fix: --dataset_config_name"
    cause = error.__cause__
    return words if cause is None else f"{words} ({first_line(cause)})"


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Have the Hub's libraries take what is in their cache, without asking."""
    import datasets

    with (
        mock.patch.object(constants, "HF_HUB_OFFLINE", True),
        mock.patch.object(datasets.config, "HF_HUB_OFFLINE", True),
    ):
        yield


@cache
def hub_reachable() -> bool:
    """Return whether the Hub answers; asked once, until something could not be had."""
    if constants.HF_HUB_OFFLINE:
        return False
    answers = []

    def probe() -> None:
        try:  # any answer will do, also one that refuses
            session = get_session()
            answers.append(session.head(constants.ENDPOINT, timeout=PROBE_SECONDS))
        except Exception as error:
            logger.debug("the Hub did not answer: %s", error)

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)  # a name server that hangs heeds no time limit of ours
    return bool(answers)
