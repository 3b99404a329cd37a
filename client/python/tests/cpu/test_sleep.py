"""Sleep and wake, by tag, over the driver that the daemon uses: without PyTorch."""

from __future__ import annotations

import ctypes
import os
import unittest

import stitchd
import stitchd.torch

DRIVER = os.environ.get("STITCHD_TEST_DRIVER", "host")
MIB = 1 << 20


@unittest.skipUnless(DRIVER == "host", "the CPU may touch memory of the host driver only")
class Sleep(unittest.TestCase):
    def setUp(self) -> None:
        self.library = stitchd.library()
        self.blocks: list[tuple[int, int]] = []

    def tearDown(self) -> None:
        stitchd.wake()
        for address, size in self.blocks:
            self.library.free(address, size)
        self.library.trim()

    def take(self, mib: int, byte: int) -> int:
        address = self.library.malloc(mib * MIB)
        self.blocks.append((address, mib * MIB))
        ctypes.memset(address, byte, mib * MIB)
        return address

    def holds(self, address: int, mib: int, byte: int) -> bool:
        return ctypes.string_at(address, mib * MIB) == bytes([byte]) * (mib * MIB)

    def test_everything_comes_back_and_nothing_is_served_meanwhile(self) -> None:
        address = self.take(4, 7)
        self.assertGreaterEqual(stitchd.sleep(), 4 * MIB)
        self.assertEqual(stitchd.sleep(), 0)
        with self.assertRaisesRegex(stitchd.StitchdError, "asleep"):
            self.library.malloc(MIB)
        stitchd.wake(wait=0)
        stitchd.wake()
        self.assertTrue(self.holds(address, 4, 7))

    def test_a_tag_sleeps_by_itself(self) -> None:
        outside = self.take(4, 1)
        with stitchd.tag("weights"):
            weights = self.take(8, 2)
            with stitchd.torch.memory_saver.region("kv_cache"):
                self.take(8, 3)
        self.assertGreaterEqual(stitchd.torch.memory_saver.pause("kv_cache"), 8 * MIB)
        self.assertTrue(self.holds(outside, 4, 1) and self.holds(weights, 8, 2))
        self.assertGreaterEqual(stitchd.torch.sleep(level=1), 12 * MIB)
        stitchd.torch.wake_up(tags=["weights"])
        self.assertTrue(self.holds(weights, 8, 2))
        stitchd.torch.wake_up()
        stitchd.torch.memory_saver.resume()
        self.assertTrue(self.holds(outside, 4, 1))

    def test_what_makes_no_sense_is_told(self) -> None:
        with self.assertRaises(ValueError):
            stitchd.torch.sleep(level=3)
        with self.assertRaisesRegex(stitchd.StitchdError, "under a tag 'nobody'"):
            stitchd.sleep("nobody")
        with self.assertRaisesRegex(stitchd.StitchdError, "under a tag 'nobody'"):
            stitchd.wake("nobody")


if __name__ == "__main__":
    unittest.main()
