#!/usr/bin/env python3
"""Holes of which none is large enough, on a whole device: how much can be live until memory runs out. One JSON object.

Nine tenths of the device were used in pieces of 1 GiB and are idle. Each piece gets a tensor of 400 MiB that stays and one that does not; then tensors of 700 MiB are asked for until there is no more. PyTorch's own
allocator has 624 MiB idle in each piece, and can use none of it.
"""
import json

import torch

MIB = 1 << 20


def empty(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def main():
    empty(1)
    free, total = torch.cuda.mem_get_info()
    count = int(0.9 * free) // (1024 * MIB)
    pieces = [empty(1024) for _ in range(count)]
    del pieces
    kept = [empty(400) for _ in range(count)]
    others = [empty(400) for _ in range(count)]
    del others
    late = []
    try:
        while True:
            late.append(empty(700))
            late[-1].fill_(len(late) % 251)
    except torch.OutOfMemoryError as error:
        said = str(error)
    wrong = sum(int(one[place]) != number % 251 for number, one in enumerate(late, 1) for place in (0, -1))
    figures = {"kept": len(kept), "late": len(late), "wrong": wrong, "said": said, "total_bytes": total}
    figures |= {"live_bytes": torch.cuda.memory_allocated(), "reserved_bytes": torch.cuda.memory_reserved()}
    figures["backend"] = torch.cuda.memory.get_allocator_backend()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
