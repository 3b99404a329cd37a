"""The units of systemd: read by systemd itself, and in one that was really started, with a client whose daemon it starts again."""

import os
import pathlib
import re
import shutil
import subprocess
import time

from . import DEPLOY
from .report import check, ran, skip

UNITS = DEPLOY / "systemd"
# Of 10; systemd calls what is below 2 "OK". In its own tenths of that.
EXPOSURE_MAX = 20
# Where each file belongs on a machine.
PLACES = {
    "stitchd.service": "usr/lib/systemd/system/stitchd.service",
    "stitchd.socket": "usr/lib/systemd/system/stitchd.socket",
    "sysusers.conf": "usr/lib/sysusers.d/stitchd.conf",
    "tmpfiles.conf": "usr/lib/tmpfiles.d/stitchd.conf",
    "stitchd.toml": "etc/stitchd/stitchd.toml",
}
# Runs inside, after the boot: a client works, the daemon is killed, hangs, and is restarted, and the client has what it had. Then everything is switched off.
SCRIPT = """#!/bin/bash
exec > /var/log/check.log 2>&1
set -x
state() { echo "RESULT $1 $2"; }
pid() { systemctl show -p MainPID --value stitchd.service; }
leased() { stitchd status --json | tr -d ' \\n' | grep -o '"leased_bytes":[0-9]*' | head -n1 | cut -d: -f2; }
attached() { stitchd sessions --json | tr -d ' \\n' | grep -o '"is_attached":true' | wc -l; }
until_is() { for _ in $(seq 200); do [ "$($1)" = "$2" ] && return 0; sleep 0.1; done; return 1; }
served() { stitchd health >/dev/null 2>&1 && echo yes; }
wrong_configuration() { cp /etc/stitchd/stitchd.toml /var/log/good.toml; echo 'no_such_key = 1' >> /etc/stitchd/stitchd.toml; systemctl restart stitchd; sleep 8; cp /var/log/good.toml /etc/stitchd/stitchd.toml; }
changed() { now=$(pid); [ "$now" != 0 ] && [ "$now" != "$old" ] && echo yes; }
[ "$(systemctl is-active stitchd.socket)" = active ] && [ "$(pid)" = 0 ]; state "the sockets are there before the daemon" $?
stitchd trainer --socket /run/stitchd/stitchd.sock --name job --wait 60 --trace /check/trace.csv.zst --endless < <(sleep 600) > /var/log/trainer.log 2>&1 &
trainer=$!
until_is served yes; state "a client that connects has the daemon started" $?
sleep 5
[ "$(stat -c %U:%G:%a /run/stitchd/stitchd.sock)" = stitchd:stitchd-clients:660 ]; state "the socket is for the group" $?
[ "$(stat -c %U "/proc/$(pid)")" = stitchd ]; state "the daemon is not root" $?
holds() { [ "$(leased)" -gt 0 ] && [ "$(attached)" = 1 ] && echo yes; }
for how in "systemctl restart stitchd" "kill -9" "kill -STOP" wrong_configuration; do
    old=$(pid)
    case $how in kill*) $how "$old" ;; *) $how ;; esac
    until_is changed yes && until_is served yes && until_is holds yes
    state "after '$how' another daemon has what the client has" $?
    kill -0 $trainer && ! grep -qi "differs\\|error" /var/log/trainer.log; state "after '$how' the client goes on" $?
done
[ "$(attached)" = 1 ]; state "it is one session" $?
journalctl -u stitchd --no-pager | grep -i "lost\\|cannot be kept" ; [ $? = 1 ]; state "the log speaks of nothing lost" $?
kill $trainer
systemctl stop stitchd.service
[ -S /run/stitchd/stitchd.sock ]; state "stopping the service leaves its sockets" $?
journalctl -u stitchd --no-pager | tail -60
systemctl poweroff
"""
SERVICE = """[Unit]
After=multi-user.target
[Service]
Type=oneshot
ExecStart=/check/check.sh
[Install]
WantedBy=multi-user.target
"""


def checks(stitchd, directory, root):
    if not shutil.which("systemd-analyze"):
        skip("the units of systemd", "systemd-analyze is not installed")
        return
    units(stitchd, directory)
    if root is None:
        skip("a daemon that systemd starts again", "no root file system was named (--systemd-root DIR; --install makes it with debootstrap)")
    elif os.geteuid() != 0 or not shutil.which("systemd-nspawn"):
        skip("a daemon that systemd starts again", "needs root and systemd-nspawn")
    elif not stitchd:
        skip("a daemon that systemd starts again", "the program is not built")
    else:
        booted(stitchd, root)


def units(stitchd, directory):
    # The program has to be where the unit says: it is, in a copy.
    copy = directory / "units"
    copy.mkdir()
    for name in ("stitchd.service", "stitchd.socket"):
        text = (UNITS / name).read_text()
        (copy / name).write_text(text.replace("/usr/bin/stitchd", str(pathlib.Path(stitchd).resolve() if stitchd else "/bin/true")).replace("file:/usr/share/doc/stitchd/README.md", f"file:{DEPLOY / 'README.md'}"))
    # It ends well whatever it says.
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", *(str(copy / name) for name in ("stitchd.service", "stitchd.socket"))], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if "stitchd" in line]
    check("systemd-analyze verify has nothing to say of the units", not said and done.returncode == 0, done.stderr)
    score = subprocess.run(["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE_MAX}", str(copy / "stitchd.service")], capture_output=True, text=True)
    found = re.search(r"Overall exposure level[^:]*: (\S+)", score.stdout)
    check(f"systemd-analyze security: exposure {found[1] if found else 'unknown'}, at most {EXPOSURE_MAX / 10}", score.returncode == 0, score.stdout[-1500:] + score.stderr)


def make_root(root):
    """A small Debian with systemd in it."""
    if not (root / "usr/lib/systemd/systemd").exists():
        include = "systemd,systemd-sysv,dbus"
        subprocess.run(["debootstrap", "--variant=minbase", f"--include={include}", "bookworm", str(root)], check=True, stdout=subprocess.DEVNULL)


def booted(stitchd, root):
    for name, place in PLACES.items():
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        text = (UNITS / name).read_text()
        if name == "stitchd.toml":
            # No GPU in there.
            text = text.replace('driver = "cuda"', 'driver = "host"') + '\n[[device]]\nordinal = 0\nbytes = "32GiB"\n'
        if name == "stitchd.service":
            # It is told to be quick about a daemon that hangs.
            text = text.replace("WatchdogSec=30s", "WatchdogSec=3s").replace("DeviceAllow=char-nvidia", "#DeviceAllow=char-nvidia")
        path.write_text(text)
    shutil.copy(stitchd, root / "usr/bin/stitchd")
    inside = root / "check"
    inside.mkdir(exist_ok=True)
    shutil.copy(DEPLOY.parent / "tests" / "data" / "varying.csv.zst", inside / "trace.csv.zst")
    (inside / "check.sh").write_text(SCRIPT)
    (inside / "check.sh").chmod(0o755)
    (root / "etc/systemd/system/check.service").write_text(SERVICE)
    wanted = root / "etc/systemd/system/multi-user.target.wants"
    wanted.mkdir(parents=True, exist_ok=True)
    sockets = root / "etc/systemd/system/sockets.target.wants"
    sockets.mkdir(parents=True, exist_ok=True)
    for link, target in [(wanted / "check.service", "/etc/systemd/system/check.service"), (sockets / "stitchd.socket", "/usr/lib/systemd/system/stitchd.socket")]:
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    log = root / "var/log/check.log"
    log.unlink(missing_ok=True)
    try:
        words = ["systemd-nspawn", "--quiet", "-D", str(root), "--register=no", "--keep-unit", "--boot"]
        ran_for = time.monotonic()
        done = subprocess.run(words, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL)
        said = done.stdout[-3000:] + done.stderr[-1000:]
    except subprocess.TimeoutExpired as error:
        said = f"not over after {time.monotonic() - ran_for:.0f} s\n" + (error.stdout or b"").decode(errors="replace")[-3000:]
    text = log.read_text(errors="replace") if log.exists() else ""
    results = re.findall(r"^RESULT (.*) (\d+)$", text, re.M)
    for what, outcome in results:
        check(f"systemd: {what}", outcome == "0", text[-6000:])
    check("systemd: the machine came up and the check came to its end", len(results) == 15, f"{len(results)} results\n{said}\n{text[-3000:]}")
