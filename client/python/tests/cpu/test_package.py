"""The package by itself: what it imports, what it reads, what it says where something is missing. No library and no torch is needed."""

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from stitchd._config import Config
from stitchd._library import StitchdError, find_library

PACKAGE = Path(__file__).resolve().parents[2]


def python(script, **environment):
    """Runs a script in a process of its own, with nothing in its environment but this."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STITCHD_")}
    kept.update({"PYTHONPATH": str(PACKAGE), **environment})
    return subprocess.run([sys.executable, "-c", script], env=kept, capture_output=True, text=True, timeout=120)


class Package(unittest.TestCase):
    def test_importing_it_imports_neither_torch_nor_the_library(self):
        done = python("import sys, stitchd; print(sorted(name for name in ('torch', 'numpy') if name in sys.modules))")
        self.assertEqual((done.returncode, done.stdout), (0, "[]\n"), done.stderr)

    def test_what_the_environment_says(self):
        for text, expected in [("", (False, False)), ("0", (False, False)), ("1", (True, False)), ("require", (True, True)), ("nonsense", (False, False))]:
            config = Config.read({"STITCHD_TORCH": text})
            self.assertEqual((config.is_on, config.is_required), expected, text)
        config = Config.read({"RANK": "3", "LOCAL_RANK": "x", "STITCHD_PLAN": "auto"})
        self.assertEqual((config.rank, config.local_rank, config.plan), (3, None, "auto"))

    def test_a_library_that_is_not_there_is_an_error_that_says_where(self):
        with self.assertRaises(StitchdError) as caught:
            find_library("/nowhere/lib.so")
        self.assertIn("/nowhere/lib.so", str(caught.exception))

    def test_a_file_that_is_no_library_is_an_error_that_names_it(self):
        from stitchd import Library

        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            with self.assertRaises(StitchdError) as caught:
                Library(Path(file.name))
            self.assertIn(file.name, str(caught.exception))

    def test_autoload_does_nothing_unless_asked_and_never_raises(self):
        done = python("from stitchd._autoload import autoload; import sys; autoload(); print('stitchd.torch' in sys.modules)")
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "False\n", ""))
        # There is no torch in sys.modules at all, as where something else calls it.
        done = python("from stitchd._autoload import autoload; autoload(); print('lives')", STITCHD_TORCH="1")
        self.assertEqual((done.returncode, done.stdout), (0, "lives\n"))
        self.assertIn("PyTorch keeps its own allocator", done.stderr)


if __name__ == "__main__":
    unittest.main()
