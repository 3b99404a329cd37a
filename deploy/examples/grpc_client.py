#!/usr/bin/env python3
"""What a node's devices hold, and for whom, over the daemon's gRPC API: a beginning for tools in Python.

    pip install grpcio grpcio-tools
    python -m grpc_tools.protoc -I proto --python_out=. --grpc_python_out=. stitchd/v1/stitchd.proto
    python deploy/examples/grpc_client.py /run/stitchd/stitchd.sock

Everything of the API that needs no descriptors is there: sessions, plans, shared ranges, what administrators do. Memory itself comes over the chunk socket, for which there is the client library.
"""

import sys

import grpc

from stitchd.v1 import stitchd_pb2, stitchd_pb2_grpc

# Without it the library sends the socket's path as the name of the server, which HTTP/2 does not allow there: every call would fail with RST_STREAM.
OPTIONS = [("grpc.default_authority", "localhost")]


def gib(count):
    return f"{count / 2**30:.2f} GiB"


def main(socket):
    with grpc.insecure_channel(f"unix:{socket}", options=OPTIONS) as channel:
        status = stitchd_pb2_grpc.AdminStub(channel).Status(stitchd_pb2.StatusRequest(), timeout=5)
        print(f"stitchd {status.version} on the {status.driver} driver, {len(status.sessions)} sessions")
        for device in status.devices:
            print(f"device {device.device.ordinal}: {gib(device.leased_bytes)} of {gib(device.budget_bytes)} leased, {gib(device.available_bytes)} available")
        for session in sorted(status.sessions, key=lambda session: -session.leased_bytes):
            live = session.counters.get("live_bytes", 0)
            print(f"  {session.name} (session {session.session_id}, {session.tenant}): {gib(session.leased_bytes)} leased, {gib(live)} in use")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        main(sys.argv[1])
    except grpc.RpcError as error:
        sys.exit(f"the daemon at {sys.argv[1]} does not answer: {error.details()}")
