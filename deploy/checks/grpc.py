"""The example in another language, against a daemon at work."""

import importlib.util
import os
import subprocess
import sys

from . import DEPLOY
from .report import check, skip

# Calls that are refused, one of them with a large answer: what a client of another language hears.
REFUSED = '''
import sys
import grpc
from stitchd.v1 import stitchd_pb2 as messages, stitchd_pb2_grpc as services
with grpc.insecure_channel(f"unix:{sys.argv[1]}", options=[("grpc.default_authority", "localhost")]) as channel:
    for call in (
        lambda: services.PlansStub(channel).Get(messages.GetPlanRequest(plan_id=5), timeout=5),
        lambda: services.PlansStub(channel).Delete(messages.DeletePlanRequest(plan_id=5), timeout=5),
        lambda: services.LeasesStub(channel).Acquire(messages.AcquireRequest(), timeout=5),
    ):
        try:
            call()
        except grpc.RpcError as error:
            print(error.code().name, error.details())
'''


def example(socket, jobs, directory):
    if not all(importlib.util.find_spec(name) for name in ("grpc", "grpc_tools")):
        skip("the gRPC example in Python", "the Python packages grpcio and grpcio-tools are not installed")
        return
    stubs = directory / "stubs"
    stubs.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(stubs), *sys.path]), "PYTHONDONTWRITEBYTECODE": "1"}
    proto = DEPLOY.parent / "proto"
    words = [sys.executable, "-m", "grpc_tools.protoc", "-I", proto, f"--python_out={stubs}", f"--grpc_python_out={stubs}", "stitchd/v1/stitchd.proto"]
    made = subprocess.run([str(word) for word in words], capture_output=True, text=True, env=environment)
    check("stubs in Python of stitchd.proto", made.returncode == 0, made.stderr)
    run = lambda path: subprocess.run([sys.executable, str(DEPLOY / "examples" / "grpc_client.py"), str(path)], capture_output=True, text=True, env=environment, timeout=60)
    done = run(socket)
    sees = all(word in done.stdout for word in (f"{len(jobs)} sessions", "device 0: ", *(f"  {job} (session " for job in jobs)))
    check("the gRPC example in Python sees the daemon", done.returncode == 0 and sees, done.stdout + done.stderr)
    said = subprocess.run([sys.executable, "-c", REFUSED, str(socket)], capture_output=True, text=True, env=environment, timeout=60)
    lines = said.stdout.splitlines()
    heard = len(lines) == 3 and all(line.startswith("NOT_FOUND there is no plan") for line in lines[:2]) and lines[2].startswith("INVALID_ARGUMENT ")
    check("a refusal is what it is in Python, too", heard, said.stdout + said.stderr)
    done = run(directory / "nobody.sock")
    check("the gRPC example in Python says that nobody is there", done.returncode == 1 and "does not answer" in done.stderr, done.stderr)
