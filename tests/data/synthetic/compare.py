#!/usr/bin/env python3
"""Compares a pool with expandable segments on synthetic training jobs.

    python3 compare.py target/release/stitchd --seeds 0,1 --worst 5
"""

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from kinds import GIB, KINDS, make
from make import parse_seeds, write

JOBS_AT_A_TIME = 2
# From this iteration on, counted from zero, a pool should need no driver calls.
STEADY_ITERATION = 3
# Limits of the table: reserved bytes and calls of the first iteration, relative to expandable's.
RESERVED_RATIO, CALLS_RATIO = 1.005, 1.5
BANDS = {  # peak live bytes in GiB: from, to
    "below 2 GiB": (0, 2),
    "2 to 4 GiB": (2, 4),
    "4 to 8 GiB": (4, 8),
    "8 GiB and more": (8, float("inf")),
    "all": (0, float("inf")),
}
COLUMNS = [
    "peak live", "jobs", "above", ">0.5 %", "efficiency", "expandable", "1st calls", ">1.5",
    "later calls",
]
LEGEND = """\
above        jobs that reserve more bytes than expandable
>0.5 %       jobs that reserve more than 1.005 times expandable's bytes
efficiency   mean of peak live bytes / reserved bytes, and the same of expandable
1st calls    mean ratio of driver calls to expandable's, in the first iteration
>1.5         jobs with a ratio above 1.5
later calls  jobs with more driver calls than expandable from the fourth iteration on
"""


@dataclass(frozen=True)
class Usage:
    """What a pool needed for a job."""

    reserved_bytes: int
    efficiency: float
    first_calls: int  # driver calls of the first iteration
    later_calls: int  # from the fourth iteration on


@dataclass(frozen=True)
class Comparison:
    """What the pool and expandable needed for the same job."""

    name: str
    live_bytes: int  # at the peak
    pool: Usage
    expandable: Usage

    @property
    def reserved_ratio(self):
        return self.pool.reserved_bytes / self.expandable.reserved_bytes

    @property
    def calls_ratio(self):
        return self.pool.first_calls / max(1, self.expandable.first_calls)


class ReplayError(Exception):
    """A replay that failed."""


def usage(pool):
    """Reads the figures of a pool from the JSON of `stitchd replay`."""
    calls = pool["driver_calls_by_iteration"]
    later_calls = sum(calls[STEADY_ITERATION:])
    return Usage(pool["peak_reserved_bytes"], pool["efficiency"], calls[0], later_calls)


def compare(job, command, directory):
    """Writes the trace of a job, replays it by `command`, and removes the trace."""
    kind, seed = job
    path = Path(directory, f"{kind}-{seed}.csv")
    trace, _ = make(kind, seed)
    write(trace, path)
    replay = subprocess.run([*command, path], capture_output=True, text=True)
    path.unlink()
    if replay.returncode:
        why = replay.stderr.strip() or "no message"
        raise ReplayError(f"cannot replay {kind} {seed}: exit code {replay.returncode}: {why}")
    pool, expandable = json.loads(replay.stdout)["pools"]
    return Comparison(f"{kind} {seed}", trace.peak_bytes, usage(pool), usage(expandable))


def compare_all(jobs, command):
    is_terminal = sys.stderr.isatty()
    comparisons = []
    with (
        tempfile.TemporaryDirectory(prefix="stitchd-jobs-") as directory,
        ProcessPoolExecutor(JOBS_AT_A_TIME) as executor,
    ):
        try:
            results = executor.map(partial(compare, command=command, directory=directory), jobs)
            for comparison in results:
                comparisons.append(comparison)
                if is_terminal:
                    print(f"\r{len(comparisons)} of {len(jobs)} jobs", end="", file=sys.stderr)
        except BaseException:
            executor.shutdown(cancel_futures=True)
            raise
    if is_terminal:
        print(file=sys.stderr)
    return comparisons


def mean(values):
    return sum(values) / len(values)


def band_row(band, rows):
    if not rows:
        return [band, 0] + ["-"] * (len(COLUMNS) - 2)
    return [
        band,
        len(rows),
        sum(row.pool.reserved_bytes > row.expandable.reserved_bytes for row in rows),
        sum(row.reserved_ratio > RESERVED_RATIO for row in rows),
        f"{mean([row.pool.efficiency for row in rows]):.2%}",
        f"{mean([row.expandable.efficiency for row in rows]):.2%}",
        f"{mean([row.calls_ratio for row in rows]):.2f}",
        sum(row.calls_ratio > CALLS_RATIO for row in rows),
        sum(row.pool.later_calls > row.expandable.later_calls for row in rows),
    ]


def print_table(comparisons):
    def print_row(first, *others):
        print(f"{first:14}" + "".join(f"{cell:>12}" for cell in others))

    print_row(*COLUMNS)
    for band, (lowest, limit) in BANDS.items():
        rows = [row for row in comparisons if lowest <= row.live_bytes / GIB < limit]
        print_row(*band_row(band, rows))
    print(f"\n{LEGEND}", end="")


def print_worst(comparisons, count):
    """Prints the jobs with the highest ratios of reserved bytes."""
    print(f"\n{'job':20}{'live GiB':>10}{'reserved':>10}{'expandable':>12}{'ratio':>8}", end="")
    print("  driver calls, and those of expandable")
    for row in sorted(comparisons, key=lambda row: row.reserved_ratio, reverse=True)[:count]:
        pool, expandable = row.pool, row.expandable
        print(
            f"{row.name:20}{row.live_bytes / GIB:10.2f}{pool.reserved_bytes / GIB:10.2f}"
            f"{expandable.reserved_bytes / GIB:12.2f}{row.reserved_ratio:8.4f}"
            f"  first {pool.first_calls} and {expandable.first_calls},"
            f" later {pool.later_calls} and {expandable.later_calls}"
        )


def parse_arguments():
    parser = argparse.ArgumentParser(
        description="Compare a pool with expandable segments on synthetic jobs",
        epilog="Example: compare.py target/release/stitchd --seeds 0,1 --worst 5",
    )
    parser.add_argument("stitchd", type=Path, metavar="STITCHD", help="program to replay with")
    parser.add_argument("--seeds", type=parse_seeds, default=[0, 1, 2], metavar="N,...",
                        help="seeds of the jobs of each kind [default: 0,1,2]")
    parser.add_argument("--pool", choices=["stitchd", "stitchd-auto"], default="stitchd",
                        help="pool to compare [default: stitchd]")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="change a setting of the pool; may be repeated")
    parser.add_argument("--contexts", choices=["recorded-only"],
                        help="pass to replay: report contexts only until a plan exists")
    parser.add_argument("--worst", type=int, default=0, metavar="N",
                        help="print the N jobs that reserve most, relative to expandable")
    arguments = parser.parse_args()
    if not arguments.stitchd.is_file():
        parser.error(f"no program {arguments.stitchd}. Build it first")
    return arguments


def main():
    arguments = parse_arguments()
    pools = f"{arguments.pool},expandable"
    command = [arguments.stitchd.resolve(), "replay", "--pool", pools, "--json"]
    for setting in arguments.set:
        command += ["--set", setting]
    if arguments.contexts:
        command += ["--contexts", arguments.contexts]
    jobs = [(kind, seed) for seed, kind in product(arguments.seeds, KINDS)]
    try:
        comparisons = compare_all(jobs, command)
    except ReplayError as error:
        sys.exit(str(error))
    print_table(comparisons)
    if arguments.worst:
        print_worst(comparisons, arguments.worst)


if __name__ == "__main__":
    main()
