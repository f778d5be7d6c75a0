"""Prove a set-up before spending on it.

accelerate launch --config_file STRATEGY.yaml -m accel_ft.doctor [--config JOB.yaml] [--json FILE]

Prints a line a check: its name, PASS, WARN, FAIL or SKIP, what was measured, and how to fix it.
"""

import os
import sys
from collections.abc import Sequence

from accel_ft.config import DoctorConfig
from accel_ft.errors import Preempted, UserError, close_process_group, leave_last_words, run_command
from accel_ft.runtime.memory import restart_with_better_malloc
from accel_ft.settings import parse, settings_to_reproduce


def main(argv: Sequence[str] | None = None) -> None:
    """Examine the set-up; exit with 1 where a check fails."""
    config = parse(DoctorConfig, argv, "doctor", settings_to_reproduce)

    from accel_ft.diagnosis.finding import Finding, Verdict, line
    from accel_ft.diagnosis.job import examine
    from accel_ft.runtime.files import to_json, writing
    from accel_ft.runtime.logging import setup_logging

    is_main = os.environ.get("RANK", "0") == "0"
    setup_logging(False)  # print only the findings
    # Stays the last finding until the end: a report that is cut short must not look like a pass.
    unfinished = "did not finish", "see standard error for the reason"
    findings = [Finding("examination", Verdict.FAIL, *unfinished)]

    def write() -> None:
        if is_main and config.json is not None:
            about = [vars(finding) for finding in findings]
            with writing(str(config.json)) as file:  # atomic: it may be read meanwhile
                file.write(to_json(about, indent=1) + "\n")

    def note(finding: Finding) -> None:
        findings.insert(-1, finding)
        if is_main:
            print(line(finding), flush=True)
        write()

    try:
        write()
        for finding in examine(config):
            note(finding)
    except Preempted as error:
        raise Preempted("the examination was stopped before its end") from error
    except (UserError, OSError) as error:  # OSError: a folder that cannot be made
        note(Finding("set-up", Verdict.FAIL, str(error)))
        if not is_main:
            raise  # rank 0 may not meet this fault: this rank prints it
    findings.pop()
    write()
    counts = {verdict: sum(f.verdict is verdict for f in findings) for verdict in Verdict}
    if is_main:
        print(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count))
    if counts[Verdict.FAIL]:
        if findings[-1].check != "set-up":  # else the rank at fault has left better words
            leave_last_words(f"error: {counts[Verdict.FAIL]} checks of the doctor FAIL")
        close_process_group()
        sys.exit(1)


if __name__ == "__main__":
    restart_with_better_malloc("accel_ft.doctor")
    run_command(main)
