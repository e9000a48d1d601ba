"""Who may connect: TLS between environment servers and the learner.

    python -m tls certs host1 host2

makes, in a new directory certs, a private certificate authority (CA), a certificate
for each host and one for the learner. A server accepts learners whose certificate the
CA has signed, and a learner such servers. No host can pass for another, or for the
learner. The system's openssl (3.0 or newer) does the work.

No torch in here: environment servers import this file.
"""

import argparse
import contextlib
import ipaddress
import pathlib
import re
import shutil
import ssl
import subprocess
import sys

from command_line import Parser
from environment import BadInput

FILES = ("tls_cert", "tls_key", "tls_ca")
INSECURE = (
    "--insecure: whoever reaches the servers can use them, and whoever is in between "
    "can read and change everything"
)
VALID_DAYS = 3650


# Flags, of servers and learner.


def parser() -> argparse.ArgumentParser:
    """For argparse's parents=."""
    p = argparse.ArgumentParser(add_help=False)
    # fmt: off
    g = p.add_argument_group("other hosts (python -m tls makes the files)")
    g.add_argument("--tls_cert", metavar="FILE", help="certificate of this side, PEM")
    g.add_argument("--tls_key", metavar="FILE", help="its private key")
    g.add_argument("--tls_ca", metavar="FILE",
                   help="certificate of the CA that signed the other side's")
    g.add_argument("--insecure", action="store_true",
                   help="without TLS: neither encrypted nor authenticated")
    # fmt: on
    return p


def is_local(address):
    """Whether only this host can be there: unix:PATH, or a loopback address."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0]
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        return False  # Not the host that it seems to be: gRPC takes ::1:50 for an IPv6.
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check(flags, addresses):
    """BadInput if the flags do not say how to connect other hosts, and one of the
    addresses is of another host."""
    for address in addresses:
        if not (is_local(address) or flags.tls_cert is not None or flags.insecure):
            raise BadInput(
                f"{address} is not of this host only: expected --tls_cert, --tls_key "
                "and --tls_ca, or --insecure"
            )


def load(flags, role):
    """What is in the files: {"tls_cert": PEM, ...}, or {} without these flags.

    role: "server" or "learner". BadInput if the other side would not accept them.
    """
    paths = {name: getattr(flags, name) for name in FILES}
    missing = [path is None for path in paths.values()]
    if all(missing):
        return {}
    if any(missing) or flags.insecure:
        raise BadInput(
            "expected --tls_cert, --tls_key and --tls_ca, all three, or --insecure"
        )
    pem = {}
    for name, path in paths.items():
        try:
            pem[name] = pathlib.Path(path).read_bytes()
            if name != "tls_key":
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.load_verify_locations(path)
        except ssl.SSLError as e:  # An OSError, too.
            raise BadInput(f"--{name} {path}: expected a certificate, PEM") from e
        except OSError as e:
            raise BadInput(f"--{name} {path}: {e.strerror}") from e
    _try_handshake(role, *paths.values())
    return pem


def _try_handshake(role, cert, key, ca):
    """Servers and learners with these files, in memory. BadInput if one of the role is
    not accepted."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_REQUIRED if role == "server" else ssl.CERT_NONE
    server.verify_mode = ssl.CERT_REQUIRED if role == "learner" else ssl.CERT_NONE
    try:
        for context in (server, client):
            context.load_verify_locations(ca)
            context.load_cert_chain(cert, key, password=lambda: "none")
    except ssl.SSLError as e:
        raise BadInput(
            f"--tls_key {key}: expected the private key of --tls_cert {cert}, PEM, "
            "without a password"
        ) from e
    a, b = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client.wrap_bio(a, b)
    server = server.wrap_bio(b, a, server_side=True)
    try:
        for side in (client, server, client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLError as e:
        raise BadInput(
            f"--tls_cert {cert}: expected a {role}'s certificate, signed by --tls_ca "
            f"{ca}; OpenSSL says: {getattr(e, 'verify_message', e)}"
        ) from e


# Certificates.


def make_certificates(directory, hosts):
    """Those that are not there yet, with a CA of their own. Returns the directories
    that go to other hosts, each with cert.pem, key.pem and ca.pem: {path: whether it
    was there already}. BadInput if it cannot.

    hosts: names or IP addresses; several of one host between commas.
    """
    directory = pathlib.Path(directory)
    extensions = {directory / "learner": "extendedKeyUsage = clientAuth"}
    for host in hosts:
        names = host.split(",")
        path = directory / "hosts" / names[0]
        if path in extensions:
            raise BadInput(f"{names[0]} comes twice, expected its names between commas")
        extensions[path] = f"extendedKeyUsage = serverAuth\n{alternative_names(names)}"
    ca = directory / "ca.pem", directory / "ca.key"
    try:
        directory.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        if not all(path.is_file() for path in ca):
            raise BadInput(
                f"{directory} has no ca.pem and ca.key: expected a new directory, or "
                "one that this command has made"
            ) from None
    except OSError as e:
        raise BadInput(f"{directory}: {e.strerror}") from e
    else:
        try:
            openssl(*ca, "CA", "basicConstraints = critical, CA:TRUE\n"
                    "keyUsage = critical, keyCertSign")  # fmt: skip
        except BadInput:
            shutil.rmtree(directory)
            raise
    result = {}
    for path, extension in extensions.items():
        cert, key = path / "cert.pem", path / "key.pem"
        result[path] = all(p.exists() for p in (cert, key, path / "ca.pem"))
        if result[path]:
            continue
        path.mkdir(parents=True, exist_ok=True)
        shutil.copy(ca[0], path)
        openssl(cert, key, path.name, extension,
                "-CA", ca[0], "-CAkey", ca[1])  # fmt: skip
    return result


def alternative_names(names):
    """As openssl takes them: those that a host's certificate is for."""
    result = []
    for name in names:
        try:
            ipaddress.ip_address(name)
            kind, pattern = "IP", r"[0-9A-Fa-f.:]+"  # Without a zone.
        except ValueError:
            kind, pattern = "DNS", r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?"
        if not re.fullmatch(pattern, name):
            raise BadInput(f"{name}: expected a host's name or IP")
        result.append(f"{kind}:{name}")
    return "subjectAltName = " + ", ".join(result)


def openssl(cert, key, name, extensions, *signer):
    """Makes a key and its certificate. BadInput if that fails."""
    config = f"""
[req]
distinguished_name = none
[none]
[extensions]
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
{extensions}
"""
    command = ["openssl", "req", "-x509", "-config", "/dev/stdin", "-extensions",
               "extensions", "-subj", f"/O=TorchBeast/CN={name:.64}",
               "-days", str(VALID_DAYS), "-newkey", "ec", "-pkeyopt",
               "ec_paramgen_curve:P-256", "-noenc", "-keyout", key, "-out", cert,
               *signer]  # fmt: skip
    try:
        subprocess.run(
            command, input=config, check=True, capture_output=True, text=True
        )
    except FileNotFoundError as e:
        raise BadInput("openssl is not installed: apt-get install openssl") from e
    except subprocess.CalledProcessError as e:
        raise BadInput("openssl: " + " ".join(e.stderr.split())) from e


def main(argv=None):
    p = Parser(prog="tls", description="Certificates for PolyBeast on many hosts.")
    # fmt: off
    p.add_argument("directory", metavar="DIR",
                   help="new, or made by this command: then hosts are added")
    p.add_argument("hosts", metavar="HOST", nargs="+",
                   help="of servers: the name or IP address in --server_addresses; "
                   "several of one host between commas")
    # fmt: on
    flags = p.parse_args(argv)
    try:
        directories = make_certificates(flags.directory, flags.hosts)
    except BadInput as e:
        p.error(str(e))
    for path, there in directories.items():
        unchanged = ", unchanged (to have it made anew, delete it)" if there else ""
        print(f"{path}/ goes to {path.name}{unchanged}")
    print("in each: --tls_cert cert.pem --tls_key key.pem --tls_ca ca.pem")
    print(f"{flags.directory}/ca.key stays here: whoever has it can let others in")


if __name__ == "__main__":
    sys.exit(main())
