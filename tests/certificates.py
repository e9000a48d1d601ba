"""Certificates for tests, made by openssl as docs/multi-machine.md does it.

<directory>/ca.pem, ca.key           the authority
<directory>/hosts/<host>/            cert.pem, key.pem, ca.pem: for servers there
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
    directory.mkdir(parents=True)
    new_key(directory / "ca.key")
    openssl("req", "-x509", "-new", "-key", directory / "ca.key", "-days", 3650,
            "-subj", "/CN=a CA of tests", "-out", directory / "ca.pem",
            "-addext", "basicConstraints=critical,CA:TRUE",
            "-addext", "keyUsage=critical,keyCertSign")  # fmt: skip
    for host in hosts:
        sign(directory, directory / "hosts" / host, server_extensions(host))
    sign(directory, directory / "learner", "extendedKeyUsage=clientAuth")


def server_extensions(host):
    try:
        name = f"IP:{ipaddress.ip_address(host)}"
    except ValueError:
        name = f"DNS:{host}"
    return f"extendedKeyUsage=serverAuth\nsubjectAltName={name}"


def sign(ca, path, extensions, days=3650):
    """Makes the directory path, with a key and a certificate that the CA has signed."""
    path.mkdir(parents=True)
    new_key(path / "key.pem")
    (path / "extensions").write_text(extensions)
    openssl("req", "-new", "-key", path / "key.pem", "-subj", f"/CN={path.name}",
            "-out", path / "request")  # fmt: skip
    openssl("x509", "-req", "-in", path / "request", "-days", days,
            "-CA", ca / "ca.pem", "-CAkey", ca / "ca.key", "-CAcreateserial",
            "-extfile", path / "extensions", "-out", path / "cert.pem")  # fmt: skip
    shutil.copy(ca / "ca.pem", path)
