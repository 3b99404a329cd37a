"""Rules, alerts and the dashboard, against a Prometheus that scrapes a daemon at work and tells an Alertmanager."""

import http.server
import json
import pathlib
import re
import shutil
import socket
import subprocess
import threading
import urllib.parse
import urllib.request

from . import DEPLOY
from .browser import page
from .grpc import example
from .report import Programs, check, ran, skip

RULES = [DEPLOY / "prometheus" / name for name in ("alerts.yaml", "rules.yaml")]
DASHBOARD = DEPLOY / "grafana" / "stitchd.json"
# Jobs of the demo that are there until half of it is over.
JOBS = ("moe", "gpt2-pipeline", "gpt2-medium")
# Rates take two scrapes, and rules are worked out between them.
SCRAPES = 8


def free_port():
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return any_port.getsockname()[1]


def read(url, accept="*/*"):
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode()


def expressions():
    """Every rule by its name, with its expression as Prometheus itself reads the files."""
    for path in RULES:
        text = path.read_text()
        for name, body in re.findall(r"- (?:alert|record): (\S+)\n\s+expr: (.*?)(?=\n\s+(?:for|labels):|\n\s+- |\n\s+#|\Z)", text, re.S):
            body = body.strip()
            if body.startswith("'"):
                body = body[1:-1].replace("''", "'")
            yield name, " ".join(body.removeprefix("|").split())


def panels():
    """Every panel of the dashboard that shows something, also of rows that are folded."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        yield from [panel, *panel.get("panels", [])] if panel["type"] == "row" else [panel]


def dashboard_queries():
    """What each panel, variable and annotation asks, as Grafana would with everything chosen."""
    dashboard = json.loads(DASHBOARD.read_text())
    chosen = {variable["name"]: ".*" for variable in dashboard["templating"]["list"]}

    def filled(text):
        text = text.replace("$__rate_interval", "10s").replace("$__range", "1m")
        return re.sub(r"\$(\w+)", lambda word: chosen[word.group(1)], text)

    for panel in panels():
        for target in panel.get("targets", []):
            yield f"panel '{panel['title']}' ({target['refId']})", filled(target["expr"])
    for variable in dashboard["templating"]["list"]:
        found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]) if variable["type"] == "query" else None
        if found:
            yield f"variable '{variable['name']}'", f"count by ({found[2]}) ({filled(found[1])})"
    for annotation in dashboard["annotations"]["list"]:
        yield f"annotation '{annotation['name']}'", always(filled(annotation["expr"]))


def dashboard_rules():
    """What a dashboard must be that others import: no two panels of one number or place, no panel type of before Grafana 8, no server of ours."""
    dashboard = json.loads(DASHBOARD.read_text())
    known = {"row", "stat", "timeseries", "bargauge", "table", "heatmap", "gauge"}
    numbers, taken, wrong = set(), {}, []
    for panel in panels():
        title = panel["title"]
        if panel["id"] in numbers:
            wrong.append(f"{title}: its number is another's")
        numbers.add(panel["id"])
        if panel["type"] not in known:
            wrong.append(f"{title}: type {panel['type']}")
        place = panel["gridPos"]
        if place["x"] + place["w"] > 24:
            wrong.append(f"{title}: beyond the right edge")
        for cell in [(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])]:
            if cell in taken:
                wrong.append(f"{title}: where {taken[cell]} is")
                break
            taken[cell] = title
        if panel["type"] != "row":
            wrong += [f"{title}: no unit" for _ in [0] if "unit" not in panel["fieldConfig"]["defaults"]]
            uids = {panel["datasource"]["uid"], *(target["datasource"]["uid"] for target in panel["targets"])}
            wrong += [f"{title}: a data source that is not chosen"] if uids != {"${datasource}"} else []
    if dashboard["schemaVersion"] < 39 or dashboard.get("id") is not None:
        wrong.append("an old schema, or the number that one server has given it")
    check("the dashboard can be imported", not wrong, "\n".join(wrong))


def always(expression):
    """The same, with comparisons that say 0 or 1 instead of leaving out what does not fire: then what it looks at must be there. Of what must not be absent that it is there."""
    expression = re.sub(r"^absent\((.*)\)$", r"\1", expression)
    parts = re.split(r"(\{[^}]*\})", expression)
    outside = [re.sub(r"(==|!=|>=|<=|>|<)\s*(?=[\d(])", r"\1 bool ", part) if at % 2 == 0 else part for at, part in enumerate(parts)]
    return "".join(outside)


class Webhook(http.server.BaseHTTPRequestHandler):
    """Hears what an Alertmanager tells people."""

    heard = []

    def do_POST(self):
        self.heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def alertmanager(programs, directory):
    """An Alertmanager that tells a webhook of ours; nothing where there is none. Its address, and who hears it."""
    if not shutil.which("prometheus-alertmanager"):
        skip("an alert that reaches a webhook", "prometheus-alertmanager is not installed")
        return None
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Webhook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config, port = directory / "alertmanager.yml", free_port()
    receiver = {"name": "us", "webhook_configs": [{"url": f"http://127.0.0.1:{server.server_port}/"}]}
    config.write_text(json.dumps({"route": {"receiver": "us", "group_wait": "0s", "group_interval": "1s"}, "receivers": [receiver]}))
    words = ["prometheus-alertmanager", f"--config.file={config}", f"--storage.path={directory / 'alertmanager'}", f"--web.listen-address=127.0.0.1:{port}"]
    programs.start(*words, "--cluster.listen-address=")
    return f"127.0.0.1:{port}"


def offline():
    """What needs no daemon."""
    if shutil.which("promtool"):
        for path in RULES:
            ran(f"promtool check rules {path.name}", ["promtool", "check", "rules", str(path)])
        ran("promtool test rules", ["promtool", "test", "rules", str(DEPLOY / "prometheus" / "tests.yaml")])
    else:
        skip("rules and their tests", "promtool is not installed")
    dashboard_rules()


def live(stitchd, directory, screenshots):
    port, other, own = free_port(), free_port(), free_port()
    programs = Programs(directory)
    told = alertmanager(programs, directory)
    # One that fires at once of a daemon that is well: what reaches people is tested, not when.
    probe = directory / "probe.yaml"
    probe.write_text("groups: [{name: probe, rules: [{alert: Probe, expr: 'stitchd_ready == 1', labels: {severity: info}}]}]\n")
    config = directory / "prometheus.yml"
    rules = json.dumps([str(path) for path in [*RULES, probe]])
    config.write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
        f"rule_files: {rules}\n"
        + (f"alerting: {{alertmanagers: [{{static_configs: [{{targets: ['{told}']}}]}}]}}\n" if told else "") +
        f"scrape_configs: [{{job_name: stitchd, static_configs: [{{targets: ['127.0.0.1:{port}', '127.0.0.1:{other}']}}]}}]\n"
    )
    base = f"http://127.0.0.1:{own}/api/v1"

    def query(text):
        return json.loads(read(f"{base}/query?query={urllib.parse.quote(text)}"))["data"]["result"]

    daemon = None
    try:
        # So often that it is not over before this is.
        said = programs.start(stitchd, "demo", "--repeat", 20_000, "--http", f"127.0.0.1:{port}")
        programs.until("the daemon", lambda: read(f"http://127.0.0.1:{port}/readyz"))
        # The demo's daemon has no keeper, as nobody follows it. This one has, and makes a fleet of it.
        programs.start(stitchd, "serve", "--driver", "host", "--device", "0=1GiB", "--runtime-dir", directory / "run", "--http", f"127.0.0.1:{other}")
        programs.until("another daemon", lambda: read(f"http://127.0.0.1:{other}/readyz"))
        daemon = pathlib.Path(programs.until("where it is", lambda: re.search(r"--socket (\S+)", said.read_text()))[1])
        programs.start("prometheus", f"--config.file={config}", f"--storage.tsdb.path={directory / 'tsdb'}", f"--web.listen-address=127.0.0.1:{own}")
        programs.until("a scrape of trainers at work", lambda: query(f'count_over_time(stitchd_session_bytes{{session="{JOBS[-1]}"}}[1m]) > {SCRAPES}') or None)
        for name, expression in expressions():
            text = always(expression)
            found = query(text)
            check(f"{name} looks at something", bool(found), text)
        for name, _ in expressions():
            if ":" in name:
                check(f"{name} is recorded", bool(query(name)), name)
        for name, text in dashboard_queries():
            check(f"{name} shows something", bool(query(text)), text)
        if told:
            heard = lambda: any(alert["labels"]["alertname"] == "Probe" for message in Webhook.heard for alert in message["alerts"])
            try:
                programs.until("an alert at the webhook", lambda: heard() or None)
                check("an alert reaches a webhook", True)
            except TimeoutError as error:
                check("an alert reaches a webhook", False, str(error))
        # Of a daemon that is well none fires that would get somebody up.
        critical = query('ALERTS{severity="critical"}')
        check("nothing critical of a daemon at work", not critical, json.dumps(critical))
        example(daemon, JOBS, directory)
        page(f"http://127.0.0.1:{port}/", JOBS, directory, screenshots)
        if screenshots:
            top = subprocess.run([stitchd, "top", "--once", "--map", JOBS[0], "--socket", daemon], capture_output=True, text=True)
            (screenshots / "top.txt").write_text(top.stdout)
        text = read(f"http://127.0.0.1:{port}/metrics")
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
        check("promtool check metrics", done.returncode == 0, done.stdout + done.stderr)
        strict(read(f"http://127.0.0.1:{port}/metrics", "application/openmetrics-text;version=1.0.0"))
    finally:
        programs.end()
        if daemon:
            # One that is ended in the middle leaves its traces and plans.
            shutil.rmtree(daemon.parent, ignore_errors=True)


def strict(text):
    try:
        from prometheus_client.openmetrics.parser import text_string_to_metric_families
    except ImportError:
        skip("OpenMetrics, strictly", "the Python package prometheus-client is not installed")
        return
    try:
        count = len(list(text_string_to_metric_families(text)))
        check("OpenMetrics, strictly", count > 30, f"{count} families")
    except ValueError as error:
        check("OpenMetrics, strictly", False, str(error))
