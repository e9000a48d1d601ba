"""Certificates for tests.

<directory>/authorities/learners/    ca.pem, ca.key: who signs learners' certificates
<directory>/authorities/hosts/       the same for hosts
<directory>/hosts/<host>/            cert.pem, key.pem, ca.pem: for environments there
<directory>/learner/                 the same for the learner
"""

import ipaddress
import pathlib
import re
import shutil
import subprocess
import tempfile

from tests.programs import ROOT


def openssl(*args):
    subprocess.run(["openssl", *map(str, args)], check=True, capture_output=True)


def new_key(path):
    openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", path)


def make(directory, *hosts, learners="127.0.0.1,localhost"):
    """Runs the block of docs/multi-machine.md."""
    text = (ROOT / "docs/multi-machine.md").read_text()
    block = text.partition("<!-- certificates -->\n```bash\n")[2].partition("```")[0]
    names = {"learners": learners, "hosts": " ".join(hosts)}
    for name, x in names.items():
        block, n = re.subn(f"^{name}=.*", f'{name}="{x}"', block, flags=re.M)
        assert n == 1
    directory.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as cwd:
        run = dict(cwd=cwd, check=True, capture_output=True)
        subprocess.run(["bash", "-ec", block], **run)
        subprocess.run(["bash", "-ec", block], **run)  # Changes nothing.
        (pathlib.Path(cwd) / "certs").rename(directory)


def sign(directory, authority, path, host, uses="serverAuth,clientAuth", days=3650):
    """Makes the directory path, with a key and a host's certificate that the authority
    "learners" or "hosts" has signed, and the certificate of the other authority."""
    ca = directory / "authorities" / authority
    other = {"learners": "hosts", "hosts": "learners"}[authority]
    try:
        name = f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        name = f"DNS:{host}"
    extensions = f"extendedKeyUsage={uses}\nsubjectAltName={name}"
    path.mkdir(parents=True)
    new_key(path / "key.pem")
    (path / "extensions").write_text(extensions)
    openssl("req", "-new", "-key", path / "key.pem", "-subj", f"/CN={path.name}",
            "-out", path / "request")  # fmt: skip
    openssl("x509", "-req", "-in", path / "request", "-days", days,
            "-CA", ca / "ca.pem", "-CAkey", ca / "ca.key", "-CAcreateserial",
            "-extfile", path / "extensions", "-out", path / "cert.pem")  # fmt: skip
    shutil.copy(directory / "authorities" / other / "ca.pem", path)
