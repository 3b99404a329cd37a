"""Two containers that share nothing but a directory: a daemon in one, without root and without a capability, and a job in the other, which mounts the directory read-only."""

import json
import os
import pathlib
import resource
import shutil
import subprocess
import time

from . import DEPLOY
from .report import check, skip

# Who the daemon is, who the job is, and the group that both have.
DAEMON, JOB, GROUP = 65532, 1000, 2000


def spec(root, user, groups, words, mounts):
    """What runc runs: namespaces of its own for everything but users and the network, no capability, a root file system that nobody writes."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    namespaces = [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "cgroup")]
    usual = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
        {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev"]},
    ]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": user, "gid": user, "additionalGids": groups},
            "args": [str(word) for word in words],
            "env": ["PATH=/usr/bin:/bin"],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": {kind: [] for kind in ("bounding", "effective", "permitted", "inheritable", "ambient")},
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": files, "soft": files}],
        },
        "root": {"path": str(root), "readonly": True},
        "mounts": usual + mounts,
        "linux": {"namespaces": namespaces},
    }


def bind(source, destination, *options):
    return {"destination": destination, "type": "bind", "source": str(source), "options": ["bind", *options]}


def checks(stitchd, directory, root):
    missing = [what for what, is_there in [("runc", shutil.which("runc")), ("root", os.geteuid() == 0), ("a root file system (--systemd-root DIR)", root), ("the program", stitchd)] if not is_there]
    if missing:
        skip("two containers that share a directory", f"needs {', '.join(missing)}")
        return
    shared, files = directory / "shared", directory / "files"
    for path in (shared, files, root / "run/stitchd", root / "files"):
        path.mkdir(parents=True, exist_ok=True)
    os.chown(shared, DAEMON, GROUP)
    shared.chmod(0o750)
    shutil.copy(stitchd, files / "stitchd")
    shutil.copy(DEPLOY.parent / "tests" / "data" / "varying.csv.zst", files / "trace.csv.zst")
    (files / "stitchd.toml").write_text(f'driver = "host"\nsocket_group = "{GROUP}"\n[[device]]\nordinal = 0\nbytes = "16GiB"\n')
    running = []

    def start(name, user, groups, words, *mounts):
        bundle = directory / name
        bundle.mkdir()
        (bundle / "config.json").write_text(json.dumps(spec(root, user, groups, words, [bind(files, "/files", "ro"), *mounts])))
        log = (bundle / "log").open("wb")
        process = subprocess.Popen(["runc", "run", "--bundle", str(bundle), f"stitchd-check-{os.getpid()}-{name}"], stdin=subprocess.PIPE, stdout=log, stderr=log)
        running.append((name, process))
        return bundle / "log"

    def until(done, seconds=30):
        for _ in range(seconds * 10):
            if done():
                return True
            time.sleep(0.1)
        return False

    def said(*words):
        done = subprocess.run([str(files / "stitchd"), *words, "--socket", str(shared / "stitchd.sock"), "--json"], capture_output=True, text=True)
        return json.loads(done.stdout) if done.returncode == 0 else {"sessions": [], "devices": [{"leased_bytes": 0}]}

    try:
        words = ["/files/stitchd", "serve", "--config", "/files/stitchd.toml", "--runtime-dir", "/run/stitchd"]
        log = start("daemon", DAEMON, [GROUP], words, bind(shared, "/run/stitchd", "rw"))
        check("runc: a daemon without root or a capability", until(lambda: (shared / "stitchd.sock").exists()), log.read_text())
        words = ["/files/stitchd", "trainer", "--socket", "/run/stitchd/stitchd.sock", "--name", "job", "--trace", "/files/trace.csv.zst", "--endless"]
        log = start("job", JOB, [GROUP], words, bind(shared, "/run/stitchd", "ro"))
        has_leased = until(lambda: said("status")["devices"][0]["leased_bytes"] > 1 << 30)
        check("runc: a job in another container leases through a directory that it cannot write", has_leased, log.read_text())
        before = len(said("sessions")["sessions"])
        log = start("stranger", JOB + 1, [], words, bind(shared, "/run/stitchd", "ro"))
        check("runc: who is not in the group is kept out", until(lambda: running[-1][1].poll() not in (None, 0)) and before == len(said("sessions")["sessions"]) == 1, log.read_text())
        subprocess.run(["runc", "kill", f"stitchd-check-{os.getpid()}-job", "KILL"], capture_output=True)
        check("runc: what it had is back when it is killed", has_leased and until(lambda: not said("sessions")["sessions"] and said("status")["devices"][0]["leased_bytes"] == 0), json.dumps(said("status")))
    finally:
        for name, process in reversed(running):
            subprocess.run(["runc", "delete", "--force", f"stitchd-check-{os.getpid()}-{name}"], capture_output=True)
            process.wait()
