"""Runs scripts with a real PyTorch on a device. `STITCHD_TEST_RUNTIME` names what stands for CUDA's runtime on a pretended one (tests/standin-driver/runtime), where every allocation, stream, event and copy is made and kernels do nothing; or it is `device`, where there is a GPU."""

import os
import subprocess
import sys
import unittest
from importlib.util import find_spec
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]
RUNTIME = os.environ.get("STITCHD_TEST_RUNTIME")

MIB = 1 << 20


def has(*packages):
    """All of them are installed."""
    return all(find_spec(name) is not None for name in packages)


def run(script, *arguments, **environment):
    """A Python process on the device, under stitchd unless STITCHD_TORCH says otherwise."""
    kept = {name: value for name, value in os.environ.items() if name != "STITCHD_TORCH"}
    # The package is found as an installed one is: by its entry point.
    paths = [str(PACKAGE / "stitchd" / "boot"), str(PACKAGE)]
    kept.update({"PYTHONPATH": os.pathsep.join(paths), "STITCHD_TORCH": "1", "HF_HUB_OFFLINE": "1", **environment})
    if RUNTIME != "device":
        kept["LD_PRELOAD"] = str(RUNTIME)
    command = [sys.executable, "-W", "ignore", "-c", script, *arguments] if "\n" in script else [sys.executable, "-W", "ignore", script, *arguments]
    return subprocess.run(command, env=kept, capture_output=True, text=True, timeout=300)


@unittest.skipUnless(RUNTIME and has("torch"), "there is no PyTorch for CUDA, or nothing that stands for its runtime")
class OnDevice(unittest.TestCase):
    """Tests of scripts on the device."""

    def said(self, script, *arguments, **environment):
        """What a script prints, line by line. It must end well."""
        done = run(script, *arguments, **environment)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout.splitlines(), done.stderr
