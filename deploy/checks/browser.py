"""The live page in a browser."""

import json
import re
import shutil
import subprocess
import urllib.request

from .report import check, skip


def page(url, jobs, directory, screenshots):
    """The live page in a browser: that it shows who is there, complains of nothing, and asks nobody else. Pictures of it, light and dark, where they are wanted."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not chromium:
        skip("the live page in a browser", "chromium is not installed")
        return

    def browse(url, *flags):
        # Time goes as fast as the page lets it: it looks several times.
        words = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,1250", "--virtual-time-budget=8000"]
        profile = directory / f"browser-{len(list(directory.glob('browser-*')))}"
        done = subprocess.run([*words, f"--user-data-dir={profile}", *flags, url], capture_output=True, text=True, timeout=120)
        return done.stdout, done.stderr

    text, said = browse(url, "--enable-logging=stderr", "--dump-dom")
    complaints = [line for line in said.splitlines() if "CONSOLE" in line]
    check("the live page complains of nothing", not complaints, "\n".join(complaints))
    for what, found in [
        ("is live", '<span id="state" role="status" class="soft">live</span>' in text),
        ("shows the device", "Device 0 · " in text and text.count("<canvas") == 2),
        ("shows all sessions", text.count('class="name') == len(jobs) and all(f">{name} <" in text for name in jobs)),
        ("says whose the chunks are", bool(re.search(rf'aria-label="Chunks of device 0: [^"]* leased · ({"|".join(jobs)})', text))),
        ("shows what happened", ">opened<" in text),
    ]:
        check(f"the live page {what}", found, text[-6000:])
    with urllib.request.urlopen(url + "live.json", timeout=10) as answer:
        session = next(session for session in json.load(answer)["sessions"] if session["name"] == jobs[0])
    shown = f"{url}#session={session['session']}"
    text, said = browse(shown, "--enable-logging=stderr", "--dump-dom")
    complaints = [line for line in said.splitlines() if "CONSOLE" in line]
    check("the live page complains of no addresses", not complaints, "\n".join(complaints))
    check("the live page shows where the memory of a session lies", f"Where the memory of {session['name']} #" in text and text.count("<canvas") > 2, text[-6000:])
    if screenshots:
        screenshots.mkdir(parents=True, exist_ok=True)
        for name, flags in [("light", []), ("dark", ["--blink-settings=preferredColorScheme=0"])]:
            browse(shown, *flags, f"--screenshot={screenshots.resolve() / f'live-{name}.png'}")
