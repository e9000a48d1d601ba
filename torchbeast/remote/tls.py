"""Who may connect: TLS between hosts of environments and learners.

There are two authorities (CA): one signs learners' certificates, one hosts'. Each side
accepts those of the other side's CA, and who dials also compares the name. So no host
can pose as a learner, whoever dials. docs/multi-machine.md has the lines that make the
certificates.

No torch in here: environment servers import this file.
"""

import argparse
import contextlib
import ipaddress
import pathlib
import ssl

from torchbeast.messages import BadInput

FILES = ("tls_cert", "tls_key", "tls_ca")
INSECURE = (
    "--insecure: whoever reaches the servers can use them, and whoever is in between "
    "can read and change everything"
)


# Flags, of servers and learner.


def parser() -> argparse.ArgumentParser:
    """Returns the flags of servers and learners, for argparse's parents=."""
    p = argparse.ArgumentParser(add_help=False)
    # fmt: off
    g = p.add_argument_group("other hosts (docs/multi-machine.md makes the files)")
    g.add_argument("--tls_cert", metavar="FILE", help="certificate of this side, PEM")
    g.add_argument("--tls_key", metavar="FILE", help="its private key")
    g.add_argument("--tls_ca", metavar="FILE",
                   help="certificate of the CA that signs the other side's")
    g.add_argument("--insecure", action="store_true",
                   help="without TLS: neither encrypted nor authenticated")
    # fmt: on
    return p


def is_local(address):
    """Tells whether only this host can be at the address: unix:PATH, or a loopback
    address."""
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
    """Raises BadInput if one of the addresses is of another host and the flags do not
    say how to connect other hosts."""
    for address in addresses:
        if not (is_local(address) or flags.tls_cert is not None or flags.insecure):
            raise BadInput(
                f"{address} is not of this host only: expected --tls_cert, --tls_key "
                "and --tls_ca, or --insecure"
            )


def load(flags, *roles):
    """Reads the files: {"tls_cert": PEM, ...}, or {} without these flags.

    roles: of this side, "server" (it listens) or "client" (it dials), or both. Raises
    BadInput if the certificate cannot be one's of these roles.
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
    for role in roles:
        _try_handshake(role, paths["tls_cert"], paths["tls_key"])
    return pem


def _try_handshake(role, cert, key):
    """Connects a server and a client, in memory, of which one has these files, and the
    other trusts the certificate. Raises BadInput if it is not accepted in that role."""
    sides = {
        "server": ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        "client": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
    }
    sides["client"].check_hostname = False
    try:
        for name, context in sides.items():
            context.load_cert_chain(cert, key, password=lambda: "none")
            context.verify_mode = ssl.CERT_NONE if name == role else ssl.CERT_REQUIRED
            context.load_verify_locations(cert)
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    except ssl.SSLError as e:
        raise BadInput(
            f"--tls_key {key}: expected the private key of --tls_cert {cert}, PEM, "
            "without a password"
        ) from e
    a, b = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = sides["client"].wrap_bio(a, b)
    server = sides["server"].wrap_bio(b, a, server_side=True)
    try:
        for side in (client, server, client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLError as e:
        raise BadInput(
            f"--tls_cert {cert}: expected a certificate for a {role}; OpenSSL says: "
            f"{getattr(e, 'verify_message', e)}"
        ) from e
