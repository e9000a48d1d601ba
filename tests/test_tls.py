"""Who may connect: real certificates, and the real programs."""

import argparse
import contextlib
import pathlib
import re
import socket

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests import certificates
from tests.programs import refusal
from tests.test_polybeast_env import free_port
from tests.test_polybeast_faults import (
    CARTPOLE,
    FakeGrpcServer,
    learn,
    learned,
    serve,
    wait_for_steps,
)
from torchbeast.messages import BadInput
from torchbeast.remote import tls
from torchbeast.remote.server import MAX_CONNECTIONS

OTHER_HOSTS = "expected --tls_cert, --tls_key and --tls_ca, or --insecure"


@pytest.fixture(scope="module")
def certs(tmp_path_factory):
    """ours, and the others', who are not trusted."""
    path = tmp_path_factory.mktemp("certs")
    ours, others = path / "ours", path / "others"
    certificates.make(ours, "127.0.0.1", "elsewhere")
    certificates.make(others, "127.0.0.1")
    for authority, name, file in (
        ("hosts", "127.0.0.1", "hosts/127.0.0.1"),
        ("learners", "127.0.0.1", "learner"),
    ):
        certificates.sign(ours, authority, ours / f"{file}-expired", name, days=-1)
    for use in ("serverAuth", "clientAuth"):
        certificates.sign(ours, "hosts", ours / use, "127.0.0.1", use)
    return path


def files(path, **others):
    """{flag: file} of a directory with cert.pem, key.pem and ca.pem."""
    names = {"tls_cert": "cert.pem", "tls_key": "key.pem", "tls_ca": "ca.pem"}
    return {flag: path / name for flag, name in names.items()} | others


def args(path, **others):
    return [x for flag, f in files(path, **others).items() for x in (f"--{flag}", f)]


# Certificates.


def bad_files(certs):
    """(of a server, its files, what is said)."""
    host = certs / "ours/hosts/127.0.0.1"
    other = certs / "others/hosts/127.0.0.1"
    nothing, empty = certs / "nothing", pathlib.Path("/dev/null")
    a_key = "expected the private key of --tls_cert"
    return [
        ("server", files(host, tls_cert=nothing), "--tls_cert .*/nothing: No such f"),
        ("server", files(host, tls_key=nothing), "--tls_key .*/nothing: No such f"),
        ("server", files(host, tls_ca=certs), "--tls_ca .*certs.*: Is a directory"),
        ("server", files(host, tls_cert=empty), "--tls_cert /dev/null: expected a ce"),
        ("server", files(host, tls_ca=empty), "--tls_ca /dev/null: expected a certif"),
        ("server", files(host, tls_key=empty), f"--tls_key /dev/null: {a_key}"),
        ("server", files(host, tls_key=other / "key.pem"), f"--tls_key .*: {a_key}"),
        ("server", files(certs / "ours/hosts/127.0.0.1-expired"), "has expired"),
        ("client", files(certs / "ours/learner-expired"), "has expired"),
        ("server", files(certs / "ours/clientAuth"), "certificate for a server.*purp"),
        ("client", files(certs / "ours/serverAuth"), "certificate for a client.*purp"),
        ("server", files(host, tls_key=None), "all three"),
        ("server", files(host, insecure=True), "all three, or --insecure"),
        ("server", files(host, tls_cert=""), "--tls_cert : "),
    ]


def test_bad_files_are_told_by_their_names(certs):
    for role, paths, message in bad_files(certs):
        flags = argparse.Namespace(**{"insecure": False, **paths})
        with pytest.raises(BadInput, match=message) as e:
            tls.load(flags, role)
        assert "\n" not in str(e.value)


@pytest.mark.parametrize("module", ["polybeast_env", "polybeast"])
def test_bad_files_end_the_programs_with_one_line(module, certs):
    path = certs / "ours/hosts/127.0.0.1"
    flags = args(path, tls_key="/dev/null")
    line = refusal("--env", CARTPOLE, *flags, module=module)
    assert f"{module}: error: --tls_key /dev/null: expected the private key" in line


# Addresses.


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("unix:/tmp/x", True),
        ("127.0.0.1:50051", True),
        ("127.1.2.3:50051", True),
        ("localhost:50051", True),
        ("[::1]:50051", True),
        ("0.0.0.0:50051", False),
        ("[::]:50051", False),
        ("10.0.0.1:50051", False),
        ("hostA:50051", False),
        ("localhost.example:50051", False),
        ("127.0.0.1.example:50051", False),
        ("dns:///localhost:50051", False),
        ("dns://10.0.0.1/localhost:50051", False),
        ("::1:5005", False),  # gRPC takes it for an IPv6 address without a port.
        ("unix-abstract:x", False),
        ("hostA", False),
        ("", False),
    ],
)
def test_only_sockets_and_loopback_addresses_are_of_this_host(address, local):
    assert tls.is_local(address) == local
    flags = argparse.Namespace(tls_cert=None, insecure=False)
    with contextlib.nullcontext() if local else pytest.raises(BadInput):
        tls.check(flags, ["localhost:1", address])
    for flag in ({"tls_cert": "x"}, {"insecure": True}):
        tls.check(argparse.Namespace(**{**vars(flags), **flag}), [address])


@pytest.mark.parametrize("address", ["0.0.0.0:50051", "[::]:50051", "hostA:50051"])
def test_other_hosts_without_tls_are_refused_before_anything_is_started(
    address, tmp_path
):
    (tmp_path / "hosts").write_text(f"localhost:1\n{address}")
    savedir = tmp_path / "savedir"
    learner = ["--savedir", savedir, "--server_addresses"]
    for module, flags in [
        ("polybeast_env", ["--address", address]),
        ("polybeast", [*learner, f"localhost:1,{address}"]),
        ("polybeast", [*learner, f"@{tmp_path / 'hosts'}"]),
    ]:
        line = refusal("--env", CARTPOLE, *flags, module=module)
        assert line.endswith(f"{address} is not of this host only: {OTHER_HOSTS}")
    assert not savedir.exists()


@pytest.mark.slow
def test_a_file_that_changes_brings_no_other_host_in(tmp_path):
    local = f"127.0.0.1:{free_port()}"
    path = tmp_path / "hosts.txt"
    path.write_text(local)
    with (
        socket.create_server(("0.0.0.0", 0)) as other,
        serve(local),
        learn(tmp_path, f"@{path}") as learner,
    ):
        wait_for_steps(tmp_path, 200)
        address = f"0.0.0.0:{other.getsockname()[1]}"
        path.with_suffix(".new").write_text(f"{local}\n{address}")
        path.with_suffix(".new").rename(path)
        refusal = f"{path}: {address} is not of this host only: {OTHER_HOSTS}"
        learner.wait_for(refusal, timeout_s=60)
        wait_for_steps(tmp_path, 2000)
        learner.stop()
        other.settimeout(0)
        with pytest.raises(BlockingIOError):  # Nobody has connected.
            other.accept()
    assert learner.output.count("is not of this host only") == 1


def test_insecure_serves_other_hosts_and_warns_in_one_line(tmp_path):
    address = f"0.0.0.0:{free_port()}"
    with serve(address, "--insecure") as server:
        result = learned(tmp_path, address, "--insecure", "--total_steps", 400)
        assert result.returncode == 0, result.stderr
        server.stop()
    for output in (server.output, result.stderr):
        assert output.count(tls.INSECURE) == 1


# TLS.


def read(path):
    return {flag: f.read_bytes() for flag, f in files(path).items()}


def health(address, credentials=None):
    """What the server answers. RpcError if it does not."""
    with (
        grpc.insecure_channel(address)
        if credentials is None
        else grpc.secure_channel(address, credentials)
    ) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        return check(health_pb2.HealthCheckRequest(), timeout=10).status


@pytest.mark.slow
@pytest.mark.survives("no-certificate")
def test_learners_train_over_tls_and_nobody_else_is_let_in(certs, tmp_path):
    ours, others = certs / "ours", certs / "others"
    address = f"127.0.0.1:{free_port()}"
    ca = read(ours / "learner")["tls_ca"]

    def credentials(path):
        pem = read(path)
        return grpc.ssl_channel_credentials(ca, pem["tls_key"], pem["tls_cert"])

    with serve(address, *args(ours / "hosts/127.0.0.1")) as server:
        with learn(tmp_path, address, *args(ours / "learner")) as learner:
            wait_for_steps(tmp_path, 1000)
            for stranger in (
                None,
                grpc.ssl_channel_credentials(ca),
                credentials(others / "learner"),
                credentials(ours / "learner-expired"),
                credentials(ours / "hosts/elsewhere"),  # A host is no learner.
                credentials(ours / "hosts/127.0.0.1"),
            ):
                with pytest.raises(grpc.RpcError) as e:
                    health(address, stranger)
                assert e.value.code() == grpc.StatusCode.UNAVAILABLE
            ok = health(address, credentials(ours / "learner"))
            assert ok == health_pb2.HealthCheckResponse.SERVING
            wait_for_steps(tmp_path, 1000)
            learner.stop()
        server.wait_for("disconnected after")
    assert "no stream" not in learner.output


@pytest.mark.slow
@pytest.mark.survives("no-certificate")
def test_the_learner_says_why_it_does_not_connect_and_trains_with_the_others(
    certs, tmp_path
):
    ours, others = certs / "ours", certs / "others"

    def server(path=None, client_ca=None):
        if path is None:
            return FakeGrpcServer()
        pem = read(path)
        key_and_cert = pem["tls_key"], pem["tls_cert"]
        credentials = grpc.ssl_server_credentials(
            [key_and_cert], client_ca, require_client_auth=client_ca is not None
        )
        return FakeGrpcServer(credentials=credentials)

    host = ours / "hosts/127.0.0.1"
    not_ours = "the server's certificate is not signed by tls_ca, has expired, or is "
    fakes = [
        (server(), "the server speaks no TLS"),
        (server(others / "hosts/127.0.0.1"), not_ours),
        (server(ours / "hosts/127.0.0.1-expired"), not_ours),
        (server(ours / "learner"), not_ours),
        (server(ours / "hosts/elsewhere"), "Peer name 127.0.0.1 is not in peer"),
        (
            server(host, read(others / "learner")["tls_ca"]),
            "its log says if it refuses",
        ),
    ]
    good = f"127.0.0.1:{free_port()}"
    addresses = ",".join([good, *(fake.address for fake, _ in fakes)])
    with (
        serve(good, *args(host)),
        learn(tmp_path, addresses, *args(ours / "learner")) as learner,
    ):
        missing = {fake.address: message for fake, message in fakes}
        while missing:
            line = learner.wait_for(": no stream (reconnects: ")
            bad = re.search(r"(\S+): no stream", line)[1]
            assert missing.pop(bad) in line, line
        wait_for_steps(tmp_path, 1000)
        learner.stop()
    for fake, _ in fakes:
        fake.close()
    lines = learner.output.splitlines()
    assert all(line.startswith("[") for line in lines), lines  # And not gRPC's own.


@pytest.mark.survives("no-certificate")
def test_a_learner_without_tls_is_told_that_the_server_may_expect_it(certs, tmp_path):
    address = f"127.0.0.1:{free_port()}"
    with serve(address, *args(certs / "ours/hosts/127.0.0.1")):
        result = learned(tmp_path, address, "--connect_timeout_seconds", 2)
    assert result.returncode == 1
    assert f"{address}: the server hangs up: does it expect TLS?" in result.stderr


@pytest.mark.survives("too-many-connections")
def test_a_server_hangs_up_on_connections_that_are_too_many():
    port = free_port()
    with serve(f"127.0.0.1:{port}"), contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
            for _ in range(MAX_CONNECTIONS + 10)
        ]
        for connection in connections[-10:]:
            assert connection.recv(1000) == b""  # Not even HTTP/2's settings.


@pytest.mark.survives("silent-connection")
def test_who_connects_and_says_nothing_is_hung_up_on(certs):
    plain, secure = (f"127.0.0.1:{free_port()}" for _ in range(2))
    with (
        serve(plain),
        serve(secure, *args(certs / "ours/hosts/127.0.0.1")),
        contextlib.ExitStack() as stack,
    ):
        silent = []
        for address in (plain, secure):
            host, port = address.split(":")
            connection = socket.create_connection((host, int(port)), timeout=30)
            silent.append(stack.enter_context(connection))
        for connection in silent:
            while connection.recv(1000):
                pass  # A server without TLS says something itself.
