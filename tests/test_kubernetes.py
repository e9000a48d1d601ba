"""examples/kubernetes: the manifest against Kubernetes' schemas, and what is in it
against the programs. No cluster is at hand."""

import re
import subprocess

import pytest

from tests import certificates
from tests.programs import ROOT, Program, wait_for_steps
from tests.test_dialing import CARTPOLE, here
from tests.test_docker import stages

PATH = ROOT / "examples/kubernetes"
pytestmark = pytest.mark.slow  # PyYAML comes with what make test-slow installs.


@pytest.fixture(scope="module")
def manifest():
    """{kind: it}."""
    import yaml

    found = yaml.safe_load_all((PATH / "torchbeast.yaml").read_text())
    return {x["kind"]: x for x in found}


def pod(manifest, kind):
    return manifest[kind]["spec"]["template"]["spec"]


def args(manifest, kind):
    """The flags of its program."""
    module, *flags = pod(manifest, kind)["containers"][0]["args"]
    assert module == {"Job": "polybeast", "Deployment": "polybeast_env"}[kind]
    return flags


@pytest.mark.parametrize("version", ["1.31", "1.34"])
def test_the_manifest_is_kubernetes_own(manifest, version):
    import kubernetes_validate

    assert set(manifest) == {"PersistentVolumeClaim", "Service", "Job", "Deployment"}
    for resource in manifest.values():
        kubernetes_validate.validate(resource, version, strict=True)


def test_what_the_manifest_names_is_there(manifest):
    service, claim = manifest["Service"], manifest["PersistentVolumeClaim"]
    [port] = (p["port"] for p in service["spec"]["ports"])
    learner, host = (
        dict(a.removeprefix("--").split("=") for a in args(manifest, kind))
        for kind in ("Job", "Deployment")
    )
    assert host["learner"] == f"{service['metadata']['name']}:{port}"
    assert learner["listen"] == f"0.0.0.0:{port}" and host["env"] == learner["env"]
    for kind in ("Job", "Deployment"):
        template = manifest[kind]["spec"]["template"]
        [container] = template["spec"]["containers"]
        volumes = {v["name"]: v for v in template["spec"]["volumes"]}
        mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
        assert volumes.keys() == mounts.keys()
        paths = [a.partition("=")[2] for a in args(manifest, kind) if "=/" in a]
        assert all(p.startswith(tuple(mounts.values())) for p in paths) and paths
        if kind == "Job":
            assert template["metadata"]["labels"] == service["spec"]["selector"]
            claimed = volumes["logs"]["persistentVolumeClaim"]["claimName"]
            assert claimed == claim["metadata"]["name"]
            assert container["ports"] == [{"containerPort": port}]
            assert container["readinessProbe"]["tcpSocket"]["port"] == port
    images = [pod(manifest, k)["containers"][0]["image"] for k in ("Deployment", "Job")]
    comments = re.findall("^# .*", (ROOT / "Dockerfile").read_text(), re.M)
    tags = [re.findall(r"-t ([a-z-]+) \.$", line) for line in comments]
    assert sorted(images, key=len) == [tag for [tag] in filter(None, tags)]
    assert {"environments", "torchbeast"} < stages().keys()


def test_the_programs_run_with_the_manifests_flags_and_its_probe_tells(
    manifest, tmp_path, savedir
):
    certificates.make(tmp_path / "certs", "fleet")
    address = here()
    port = int(address.rpartition(":")[2])
    [probe] = (
        c["readinessProbe"]["exec"]["command"]
        for c in pod(manifest, "Deployment")["containers"]
    )
    probe = [word.replace(f"{50050:X}", f"{port:04X}") for word in probe]

    def start(kind, module, certs):
        flags = [
            a.replace("/certificates", f"{tmp_path}/certs/{certs}")
            .replace("/logs", f"{savedir}")
            .replace("learner:50050", f"localhost:{port}")
            .replace(":50050", f":{port}")
            .replace("=pong", "=x")
            for a in args(manifest, kind)
        ]
        return Program(*flags, "--env", CARTPOLE, module=module)

    with start("Deployment", "polybeast_env", "hosts/fleet") as host:
        host.wait_for("no stream, dials again")
        assert subprocess.run(probe).returncode == 1
        with start("Job", "polybeast", "learner") as learner:
            wait_for_steps(savedir, 400)
            assert subprocess.run(probe).returncode == 0
            learner.stop()
        host.stop()
