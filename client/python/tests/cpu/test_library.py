"""The library through ctypes, with a daemon (`STITCHD_SOCKET`). The library is the one that `STITCHD_LIBRARY` names."""

import os
import tempfile
import unittest

import stitchd

MIB = 1 << 20


@unittest.skipUnless(os.environ.get("STITCHD_LIBRARY"), "STITCHD_LIBRARY names no library")
class OfLibrary(unittest.TestCase):
    def setUp(self):
        self.library = stitchd.library()
        self.library.open(0)

    def test_memory_comes_and_goes_and_is_counted(self):
        library = self.library
        before = library.memory_stats(0)["allocated_bytes.all.current"]
        address = library.malloc(4 * MIB)
        self.assertEqual(address % 512, 0)
        self.assertEqual(library.memory_stats(0)["allocated_bytes.all.current"], before + 4 * MIB)
        segments = library.memory_snapshot(0)
        blocks = [block for segment in segments for block in segment["blocks"] if block["address"] == address]
        self.assertEqual([(block["state"], block["requested_size"]) for block in blocks], [("active_allocated", 4 * MIB)])
        library.free(address, 4 * MIB)
        self.assertEqual(library.memory_stats(0)["allocated_bytes.all.current"], before)
        counters = library.counters(0)
        self.assertGreaterEqual(counters["peak_live_bytes"], 4 * MIB)
        self.assertEqual(counters["failures"], 0)
        self.assertIn("deviations_late", counters)

    def test_nothing_is_zero_bytes_and_too_much_is_an_error_with_numbers(self):
        self.assertEqual(self.library.malloc(0), 0)
        with self.assertRaises(stitchd.StitchdError) as caught:
            self.library.malloc(1 << 40)
        self.assertIn("1024.00 GiB asked for", str(caught.exception))

    def test_a_device_that_there_is_not_is_an_error_and_has_no_figures(self):
        with self.assertRaises(stitchd.StitchdError):
            self.library.open(7)
        self.assertEqual((self.library.memory_stats(7), self.library.counters(7), self.library.memory_snapshot(7)), ({}, {}, []))

    def test_the_driver_is_that_of_the_daemon(self):
        self.assertEqual(self.library.driver(), os.environ.get("STITCHD_TEST_DRIVER", "host"))

    def test_contexts_lie_inside_each_other_and_iterations_end(self):
        before = self.library.counters(0)["iterations"]
        with stitchd.context("forward", module="layers.0", microbatch=1):
            with stitchd.context("recompute", dynamic=True):
                address = self.library.malloc(512)
        self.library.free(address, 512)
        stitchd.mark_iteration()
        self.assertEqual(self.library.counters(0)["iterations"], before + 1)
        with self.assertRaises(KeyError):
            with stitchd.context("sideways"):
                pass

    def test_a_plan_that_is_none_is_told_of_before_the_first_allocation(self):
        with tempfile.NamedTemporaryFile(suffix=".plan") as file:
            file.write(b"no plan")
            file.flush()
            os.environ["STITCHD_PLAN"] = file.name
            try:
                with self.assertRaises(stitchd.StitchdError) as caught:
                    self.library.open()
                self.assertIn(f"STITCHD_PLAN: {file.name}", str(caught.exception))
            finally:
                del os.environ["STITCHD_PLAN"]
        self.library.open()


if __name__ == "__main__":
    unittest.main()
