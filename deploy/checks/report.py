"""What a check says: each with its outcome, what a machine lacks with a word why, and counts at the end."""

import subprocess
import time

passed, failed, skipped = [], [], []


def check(what, is_good, said=""):
    (passed if is_good else failed).append(what)
    print(f"{'ok' if is_good else 'FAILED'}: {what}" + ("" if is_good else f"\n{said}"), flush=True)


def skip(what, why):
    skipped.append(what)
    print(f"SKIP: deploy/check: {what}: {why}", flush=True)


def ran(what, command):
    done = subprocess.run(command, capture_output=True, text=True)
    check(what, done.returncode == 0, done.stdout + done.stderr)


class Programs:
    """What runs for a check. What each says is kept, and said where something does not come."""

    def __init__(self, directory):
        self.directory, self.running = directory, []

    def start(self, *words):
        words = [str(word) for word in words]
        said = self.directory / f"program-{len(self.running)}.log"
        with said.open("wb") as out:
            self.running.append((words, subprocess.Popen(words, stdin=subprocess.PIPE, stdout=out, stderr=out), said))
        return said

    def until(self, what, done, seconds=60):
        last = "nothing was found"
        for _ in range(seconds * 5):
            try:
                if (found := done()) is not None:
                    return found
            except OSError as error:
                last = str(error)
            for words, process, said in self.running:
                if process.poll() is not None:
                    raise TimeoutError(f"{what} did not come: {' '.join(words[:2])} ended with {process.returncode}:\n{said.read_text()[-2000:]}")
            time.sleep(0.2)
        said = "\n".join(f"{' '.join(words[:2])}:\n{said.read_text()[-1000:]}" for words, _, said in self.running)
        raise TimeoutError(f"{what} did not come in {seconds} s: {last}\n{said}")

    def end(self):
        for _, process, _ in reversed(self.running):
            process.terminate()
            process.wait()
