#!/usr/bin/env python3
"""Makes the allocation traces of this directory from PyTorch models on meta tensors.

    pip install torch zstandard
    python3 tests/data/models/make.py --output /tmp/models gpt-eval vit-l16

`recorder.py` says what a trace records. No weights are needed and nothing is computed. A trace
takes from some seconds to a minute. Making a trace again gives the same rows with the same PyTorch
version; those of this directory are from PyTorch 2.15.
"""

import argparse
import csv
import gc
import io
import random
import sys
import textwrap
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

# PyTorch warns when it is imported without NumPy, which no job needs.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import zstandard

from jobs import JOBS, describe
from recorder import Recorder

GIB = 1 << 30
# Limits that each trace keeps, so that planning it is neither trivial nor slow.
REQUESTS = (2_000, 120_000)
PEAK_BYTES = (8_000_000_000, 70_000_000_000)


def make(name, path):
    """Runs a job and writes its trace."""
    # Objects are freed when their last reference goes, never by a cycle collection in between.
    gc.disable()
    Recorder.current = Recorder()
    with Recorder.current as recorder:
        JOBS[name](random.Random(name))
        recorder.is_recording = False
    data = zstandard.ZstdCompressor(level=12).compress(recorder.text().encode())
    partial = path.with_name(path.name + ".part")
    partial.write_bytes(data)
    partial.replace(path)
    gc.collect()


@dataclass
class Summary:
    """What a trace contains."""

    requests: int = 0
    peak: int = 0
    sizes: frozenset = frozenset()
    ends: tuple = ()  # live requests and bytes at the end of each iteration


def require(condition, path, why):
    if not condition:
        sys.exit(f"cannot use trace {path}: {why}")


def check(path):
    """Reads a trace, exits if it is invalid, and returns its summary."""
    live, freed, sizes, ends = {}, set(), set(), []
    live_bytes = peak = last_tick = 0
    require(path.exists(), path, "no such file. Make it first")
    with open(path, "rb") as file:
        rows = csv.DictReader(io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file)))
        for number, row in enumerate(rows, start=2):
            line, tick, request = f"line {number}", int(row["tick"]), row["id"]
            require(tick >= last_tick, path, f"{line}: tick {tick} follows {last_tick}")
            last_tick = tick
            if row["event"] == "mark":
                expected = len(ends)
                require(int(row["iteration"]) == expected, path, f"{line}: not mark {expected}")
                ends.append((len(live), live_bytes))
            elif row["event"] == "alloc":
                size = int(row["bytes"])
                require(size > 0, path, f"{line}: {size} bytes")
                require(request not in live and request not in freed, path, f"{line}: id reused")
                live[request] = size
                sizes.add(size)
                live_bytes += size
                peak = max(peak, live_bytes)
            else:
                require(row["event"] == "free", path, f"{line}: event {row['event']!r}")
                require(request in live, path, f"{line}: free of {request}, which is not live")
                live_bytes -= live.pop(request)
                freed.add(request)
    requests = len(live) + len(freed)
    require(ends, path, "no mark")
    require(len(set(ends)) == 1, path, f"live requests differ at the ends of iterations: {ends}")
    limits = ("requests", requests, REQUESTS), ("peak bytes", peak, PEAK_BYTES)
    for what, value, (low, high) in limits:
        require(low <= value <= high, path, f"{value:,} {what}, outside {low:,} to {high:,}")
    return Summary(requests, peak, frozenset(sizes), tuple(ends))


def table_row(name, summary):
    requests, live_bytes = summary.ends[-1]
    return (
        f"| {name} | {len(summary.ends)} | {summary.requests:,} | {len(summary.sizes):,} "
        f"| {summary.peak:,} | {requests:,} | {live_bytes / GIB:.2f} |"
    )


def print_table(paths):
    """Prints the list of jobs and the table of their traces, as in the README."""
    for name in paths:
        print(textwrap.fill(f"* {name}: {describe(name)}.", 120, subsequent_indent="  "))
    columns = [
        "trace", "iterations", "requests", "sizes", "peak live bytes", "persistent requests",
        "persistent GiB",
    ]
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for name, path in paths.items():
        print(table_row(name, check(path)))


def main():
    parser = argparse.ArgumentParser(description="Make allocation traces of training jobs")
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help="trace to make [default: those that the directory lacks]")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, metavar="DIR",
                        help="directory of the traces [default: the directory of this program]")
    parser.add_argument("--check", action="store_true",
                        help="check the traces in the directory and print their table")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in JOBS]
    if unknown:
        parser.error(f"no job {', '.join(unknown)}. Jobs: {', '.join(JOBS)}")
    paths = {name: arguments.output / f"{name}.csv.zst" for name in JOBS}
    existing = {name: path for name, path in paths.items() if path.exists()}
    if arguments.check:
        names = arguments.names or existing
        print_table({name: paths[name] for name in names})
        return
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or [name for name in paths if name not in existing]:
        start = time.monotonic()
        make(name, paths[name])
        seconds = time.monotonic() - start
        print(f"{name}: {seconds:.0f} s\n{table_row(name, check(paths[name]))}", flush=True)


if __name__ == "__main__":
    main()
