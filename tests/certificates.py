"""Certificates for tests, made by openssl as docs/multi-machine.md does it.

<directory>/authorities/learners/    ca.pem, ca.key: who signs learners' certificates
<directory>/authorities/hosts/       the same for hosts
<directory>/hosts/<host>/            cert.pem, key.pem, ca.pem: for environments there
<directory>/learner/                 the same for the learner
"""

import ipaddress
import shutil
import subprocess


def openssl(*args):
    subprocess.run(["openssl", *map(str, args)], check=True, capture_output=True)


def new_key(path):
    openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", path)


def make(directory, *hosts):
    for name in ("learners", "hosts"):
        path = directory / "authorities" / name
        path.mkdir(parents=True)
        new_key(path / "ca.key")
        openssl("req", "-x509", "-new", "-key", path / "ca.key", "-days", 3650,
                "-subj", f"/CN=a CA of tests for {name}", "-out", path / "ca.pem",
                "-addext", "basicConstraints=critical,CA:TRUE",
                "-addext", "keyUsage=critical,keyCertSign")  # fmt: skip
    for host in hosts:
        sign(directory, "hosts", directory / "hosts" / host, host)
    sign(directory, "learners", directory / "learner", "127.0.0.1")


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
