#!/usr/bin/env python3
"""Makes allocation traces of synthetic training jobs.

    python3 make.py lora 3 -o lora-3.csv           # one job
    python3 make.py --all /tmp/jobs --seeds 0,1,2  # three jobs of each kind
"""

import argparse
import signal
import sys
from pathlib import Path

from kinds import GIB, KINDS, make

EXAMPLE = "Example: make.py lora 3 -o lora-3.csv"


def parse_seeds(text):
    """Parses numbers that commas separate."""
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        message = f"invalid seeds {text!r}. Separate numbers by commas"
        raise argparse.ArgumentTypeError(message) from None


def write(trace, path, has_record_stream=True):
    """Writes a trace; None is the standard output."""
    if path is None:
        trace.write(sys.stdout, has_record_stream)
        return
    with open(path, "w") as file:
        trace.write(file, has_record_stream)


def make_file(kind, seed, path, has_record_stream):
    trace, scale = make(kind, seed)
    write(trace, path, has_record_stream)
    peak = trace.peak_bytes / GIB
    summary = f"peak {peak:.2f} GiB, {trace.requests} requests, batch scale {scale:g}"
    print(f"{kind} {seed}: {summary}", file=sys.stderr, flush=True)


def parse_arguments():
    parser = argparse.ArgumentParser(
        description="Make allocation traces of synthetic training jobs", epilog=EXAMPLE
    )
    parser.add_argument("kind", nargs="?", metavar="KIND", help="kind of job; --list has them")
    parser.add_argument("seed", nargs="?", type=int, metavar="SEED", help="number of the job")
    parser.add_argument("-o", dest="output", type=Path, metavar="FILE",
                        help="trace to write [default: standard output]")
    parser.add_argument("--all", type=Path, metavar="DIR",
                        help="make the jobs of all kinds, as DIR/KIND-SEED.csv")
    parser.add_argument("--seeds", type=parse_seeds, default=[0, 1, 2], metavar="N,...",
                        help="seeds of --all [default: 0,1,2]")
    parser.add_argument("--no-record-stream", action="store_true",
                        help="leave out uses on other streams")
    parser.add_argument("--list", action="store_true", help="list the kinds of jobs")
    arguments = parser.parse_args()
    if not arguments.list and not arguments.all:
        if arguments.seed is None:
            parser.error("no job. Give KIND and SEED, --all DIR, or --list")
        if arguments.kind not in KINDS:
            parser.error(f"no kind {arguments.kind!r}. List the kinds with --list")
    return arguments


def main():
    # A reader such as `head` may close the standard output early.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    arguments = parse_arguments()
    has_record_stream = not arguments.no_record_stream
    if arguments.list:
        for name, kind in KINDS.items():
            print(f"{name:15} {kind.description}")
    elif arguments.all:
        arguments.all.mkdir(parents=True, exist_ok=True)
        for seed in arguments.seeds:
            for kind in KINDS:
                make_file(kind, seed, arguments.all / f"{kind}-{seed}.csv", has_record_stream)
    else:
        make_file(arguments.kind, arguments.seed, arguments.output, has_record_stream)


if __name__ == "__main__":
    main()
