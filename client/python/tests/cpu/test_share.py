"""Modules whose weights lie once in memory, whoever uses them: over the driver that the daemon uses, with a real PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
import unittest

import stitchd
import stitchd.torch

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

DRIVER = os.environ.get("STITCHD_TEST_DRIVER", "host")


def model(device: str = "cpu") -> "torch.nn.Module":
    with torch.device(device):
        made = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 8, dtype=torch.bfloat16)
        )
        # Two names for one tensor.
        made.append(torch.nn.Linear(64, 64))
        made[4].weight = made[0].weight
        # What is in no state_dict, and a forward pass needs.
        made[3].register_buffer("scale", torch.arange(8.0), persistent=False)
    return made


#: What another process does: attaches, checks, and says what it has seen.
READER = """
import sys, torch, stitchd.torch
sys.path.insert(0, {tests!r})
from tests.cpu.test_share import model
shared = stitchd.torch.attach("model")
made = shared.load_into(model("meta"))
for name, tensor in made.state_dict().items():
    assert not tensor.is_meta and not tensor.requires_grad, name
assert made[3].scale.tolist() == list(range(8))
print(sorted((name, float(tensor.double().sum())) for name, tensor in made.state_dict().items()))
print(made[0].weight.data_ptr() == made[4].weight.data_ptr(), shared.sealed)
"""


def seen(module: "torch.nn.Module") -> str:
    return str(sorted((name, float(tensor.detach().double().sum())) for name, tensor in module.state_dict().items()))


@unittest.skipIf(torch is None, "there is no PyTorch")
@unittest.skipUnless(DRIVER == "host", "tensors of the CPU lie in memory of the host driver only")
class Share(unittest.TestCase):
    def test_a_second_process_has_the_same_module_without_a_copy(self) -> None:
        torch.manual_seed(1)
        made = model()
        made[2].running_mean.normal_()
        with stitchd.torch.publish(made, "model") as published:
            self.assertTrue(published.sealed)
            self.assertFalse(published.writable)
            tests = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
            output = subprocess.run([sys.executable, "-c", READER.format(tests=tests)], capture_output=True, text=True, cwd=tests)
            self.assertEqual(output.returncode, 0, output.stderr)
            self.assertEqual(output.stdout.splitlines(), [seen(made), "True True"])

    def test_a_model_that_goes_over_to_the_shared_tensors_computes_the_same(self) -> None:
        torch.manual_seed(2)
        made = torch.nn.Linear(32, 32)
        given = torch.randn(4, 32)
        before = made(given).detach()
        published = stitchd.torch.publish(made, "linear", use=True)
        self.assertTrue(torch.equal(made(given), before))
        self.assertEqual(made.weight.data_ptr(), published.state_dict()["weight"].data_ptr())
        del made
        published.close()

    def test_a_later_version_takes_the_place_of_the_first_and_a_key_keeps_others_out(self) -> None:
        first = torch.nn.Linear(4, 4)
        with stitchd.torch.publish(first, "versions", linger=0) as one:
            with stitchd.torch.publish(first, "versions", linger=0) as two:
                self.assertGreater(two.version, one.version)
                with stitchd.torch.attach("versions") as newest:
                    self.assertEqual(newest.version, two.version)
                with self.assertRaises(stitchd.StitchdError):
                    stitchd.torch.attach("versions", version=one.version)
        with stitchd.torch.publish(first, "keyed", key=b"k" * 16, linger=0):
            with self.assertRaises(stitchd.StitchdError):
                stitchd.torch.attach("keyed")
            attached = stitchd.torch.attach("keyed", key=b"k" * 16)
            attached.close()
            attached.close()

    def test_what_is_no_module_is_told(self) -> None:
        library = stitchd.library()
        draft = library.share_create(1 << 20)
        shared = library.share_publish(draft, "bytes", content=draft.size, linger=0)
        with self.assertRaisesRegex(stitchd.StitchdError, "holds no module"):
            stitchd.torch.attach("bytes")
        library.share_close(shared)
        with self.assertRaisesRegex(stitchd.StitchdError, "no shared range"):
            library.share_close(shared)
        with self.assertRaisesRegex(stitchd.StitchdError, "no shared range 'missing'"):
            stitchd.torch.attach("missing")
        with self.assertRaisesRegex(stitchd.StitchdError, "meta device"):
            stitchd.torch.publish(model("meta"), "meta")

    def test_a_writable_module_is_written_by_whoever_has_it(self) -> None:
        made = torch.nn.Linear(4, 4)
        with stitchd.torch.publish(made, "writable", writable=True, linger=0) as published:
            with stitchd.torch.attach("writable") as attached:
                attached.state_dict()["bias"].fill_(3.0)
                self.assertTrue(torch.equal(published.state_dict()["bias"], torch.full((4,), 3.0)))


if __name__ == "__main__":
    unittest.main()
