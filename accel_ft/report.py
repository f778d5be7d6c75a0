"""Write report.html of runs: accel_ft.report RUN [RUN ...]; or compare two: --diff RUN RUN."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from accel_ft.errors import printable, run_command


def main(argv: Sequence[str] | None = None) -> None:
    """Write the report, or print the differences."""
    parser = argparse.ArgumentParser(
        prog="python -m accel_ft.report", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", type=_folder, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--output",
        type=_folder,
        metavar="FOLDER",
        help="where to write report.html, and its pictures into report/ (default: the first run)",
    )
    parser.add_argument(
        "--diff",
        action="store_true",
        help="print what differs between two runs: settings, data, versions, first update",
    )
    options = parser.parse_intermixed_args(argv)
    if options.diff:
        if len(options.runs) != 2:
            parser.error("--diff needs two runs")
        if options.output is not None:
            parser.error("--diff prints, and writes nothing to --output")
        from accel_ft.reporting.compare import differences, table
        from accel_ft.reporting.record import read_record

        one, other = map(read_record, options.runs)
        print(printable(table(list(differences(one, other)))))
        return
    from accel_ft.reporting.report import write_report

    print(f"report: {write_report(options.runs, options.output or options.runs[0])}")


def _folder(word: str) -> Path:
    return Path(os.path.expanduser(word))


if __name__ == "__main__":
    run_command(main)
