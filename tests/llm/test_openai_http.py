"""What `OpenAIChat` promises of its connections: proxies, certificates, forks, large requests, an
end in silence.
"""

import asyncio
import base64
import logging
import os
import socketserver
import ssl
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from agentic_prompting.llm import BadRequest, Misconfigured, OpenAIChat, Unreachable, complete
from support.misbehaving import MisbehavingServer
from support.servers import LoopbackServer, unused_url

# Of this test alone: for 127.0.0.1, signed by itself.
CERTIFICATE = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgGIzJaFdz0fu4Qfvd
hs+hJWVH3vcnUeGHTRWwTzPVrg+hRANCAASaDoeef/RBHUxFptuNxFhctou2Zabx
GVa341BWN9CMDNur0LlEjT2R2l3FVaTwd/YlohcXCkAvNnIrth4Eoftd
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBmzCCAUGgAwIBAgIUbDvkvpWheZpBzcQRcr0k5xlJ1wcwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyMzE1MTIxOFoYDzIxMjYxMDMw
MTUxMjE4WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAASaDoeef/RBHUxFptuNxFhctou2ZabxGVa341BWN9CMDNur0LlEjT2R
2l3FVaTwd/YlohcXCkAvNnIrth4Eoftdo28wbTAdBgNVHQ4EFgQUOm6KQuA96G1m
VfMonyDdLlP7vQkwHwYDVR0jBBgwFoAUOm6KQuA96G1mVfMonyDdLlP7vQkwGgYD
VR0RBBMwEYIJbG9jYWxob3N0hwR/AAABMA8GA1UdEwEB/wQFMAMBAf8wCgYIKoZI
zj0EAwIDSAAwRQIgWU4UnvyR5DdSLgnxzTFfEtRE9Y7dQRrCefjs9lm8N9oCIQD0
ThEn3udpTsi1lVjFmvhKCDzH00VMkS9Of6ftTXCdmQ==
-----END CERTIFICATE-----
"""
NAME_IN_FOLDER = "ce275665.0"  # by `openssl x509 -hash`
PASSWORD = "planted-0123456789"


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setattr("agentic_prompting.llm.openai_http._FIRST_WAIT", 0.01)
    for name in (
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "NO_PROXY",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
    ):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


# --- certificates ---------------------------------------------------------------------------------


@pytest.fixture
def certificate(tmp_path):
    file = tmp_path / NAME_IN_FOLDER
    file.write_text(CERTIFICATE)
    return file


@pytest.fixture
def https(certificate):
    """A server whose certificate no authority has signed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = LoopbackServer()
    server._server.socket = context.wrap_socket(server._server.socket, server_side=True)
    server.base_url = server.base_url.replace("http:", "https:")
    with server:
        yield server


def test_a_certificate_that_nobody_vouches_for_is_refused(https):
    with OpenAIChat("m", https.base_url, max_retries=1) as chat:
        reply = complete(chat, "x")
    assert isinstance(reply.error, Unreachable) and "certificate" in str(reply.error).lower()
    assert not https.requests


def test_certificates_that_the_environment_names_are_trusted(https, certificate, monkeypatch):
    for name, value in (("SSL_CERT_FILE", certificate), ("SSL_CERT_DIR", certificate.parent)):
        monkeypatch.setenv(name, str(value))
        with OpenAIChat("m", https.base_url) as chat:
            assert complete(chat, "x").text == "ok", name
        monkeypatch.delenv(name)


# --- proxies --------------------------------------------------------------------------------------


async def pump(reader, writer):
    """Hand on all bytes until the reader's side is closed."""
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()


async def tunnel(connection, host, port):
    """Hand on bytes between a client's connection and a server, in both directions."""
    client_reader, client_writer = await asyncio.open_connection(sock=connection)
    server_reader, server_writer = await asyncio.open_connection(host, port)
    await asyncio.gather(
        pump(client_reader, server_writer),
        pump(server_reader, client_writer),
        return_exceptions=True,  # either side may reset its connection
    )


@contextmanager
def proxy(status="200 OK"):
    """A proxy that answers CONNECT with a status and tunnels if it is 200; yields its address and
    what it was asked.
    """
    heads = []

    class Tunnel(socketserver.StreamRequestHandler):
        def handle(self):
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += self.rfile.readline()
            heads.append(head.decode())
            self.wfile.write(f"HTTP/1.1 {status}\r\n\r\n".encode())
            if status.startswith("200"):
                host, _, port = head.split()[1].decode().partition(":")
                asyncio.run(tunnel(self.connection, host, int(port)))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Tunnel) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://user:{PASSWORD}@127.0.0.1:{server.server_address[1]}", heads
        server.shutdown()


BASIC = "Basic " + base64.b64encode(f"user:{PASSWORD}".encode()).decode()


def test_a_proxy_of_the_environment_is_used(monkeypatch):
    with (
        LoopbackServer() as server,
        OpenAIChat("m", "http://model.invalid/v1", api_key="the-key") as chat,
    ):
        monkeypatch.setenv(
            "HTTP_PROXY", server.base_url.replace("//", f"//user:{PASSWORD}@").removesuffix("/v1")
        )
        replies = [complete(chat, text) for text in "xy"]
        assert [reply.text for reply in replies] == ["ok", "ok"]
        assert [headers["host"] for headers in server.headers] == ["model.invalid"] * 2
        assert [one["proxy-authorization"] for one in server.headers] == [BASIC] * 2
        assert [one["authorization"] for one in server.headers] == ["Bearer the-key"] * 2


def test_hosts_without_a_proxy(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", unused_url())
    monkeypatch.setenv("NO_PROXY", "example.com,127.0.0.1")
    with LoopbackServer() as server, OpenAIChat("m", server.base_url, max_retries=0) as chat:
        assert complete(chat, "x").text == "ok"
    monkeypatch.delenv("NO_PROXY")
    with LoopbackServer() as server, OpenAIChat("m", server.base_url, max_retries=0) as chat:
        assert isinstance(complete(chat, "x").error, Unreachable) and not server.requests


def test_an_address_or_a_proxy_that_is_none(monkeypatch):
    with OpenAIChat("m", "http://127.0.0.1:port/v1") as chat:
        error = complete(chat, "x").error
        assert isinstance(error, BadRequest) and error.attempts < 2
    monkeypatch.setenv("HTTP_PROXY", f"socks5://user:{PASSWORD}@127.0.0.1:1")
    with OpenAIChat("m", "http://model.invalid/v1") as chat:
        error = complete(chat, "x").error
        assert isinstance(error, Misconfigured)
        assert "not an HTTP proxy" in str(error)
        assert PASSWORD not in str(error)
    monkeypatch.setenv("HTTP_PROXY", unused_url().removeprefix("http://").removesuffix("/v1"))
    with OpenAIChat("m", "http://model.invalid/v1", max_retries=0) as chat:
        assert isinstance(complete(chat, "x").error, Unreachable), (
            "an address without a scheme is one of HTTP"
        )


def test_a_tunnel_shows_the_proxy_no_key(https, certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with proxy() as (address, heads), OpenAIChat("m", https.base_url, api_key="the-key") as chat:
        monkeypatch.setenv("HTTPS_PROXY", address)
        assert complete(chat, "x").text == "ok"
    assert heads[0].startswith("CONNECT 127.0.0.1:") and "the-key" not in "".join(heads)
    assert f"proxy-authorization: {BASIC}".lower() in heads[0].lower()


def test_error_of_a_proxy_hides_its_password(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    with proxy("407 Proxy Authentication Required") as (address, heads):
        monkeypatch.setenv("HTTPS_PROXY", address)
        with OpenAIChat("m", "https://model.invalid/v1", max_retries=1) as chat:
            error = complete(chat, "x").error
    assert isinstance(error, Unreachable)
    assert "Proxy Authentication Required" in str(error)
    assert len(heads) == 2
    assert PASSWORD not in f"{error} {caplog.text}" and BASIC[6:] not in f"{error} {caplog.text}"


# --- what is sent and kept ------------------------------------------------------------------------


def test_password_of_the_address_replaces_the_key():
    with LoopbackServer() as server:
        with OpenAIChat(
            "m", server.base_url.replace("//", f"//user:{PASSWORD}@"), api_key="the-key"
        ) as chat:
            assert complete(chat, "x").text == "ok"
        assert server.headers[0]["authorization"] == BASIC


@pytest.mark.filterwarnings("error")
def test_a_request_of_many_megabytes_is_sent():
    text = "x" * (5 << 20)
    with LoopbackServer() as server, OpenAIChat("m", server.base_url) as chat:
        reply = complete(chat, text)
        assert (reply.text, reply.error) == ("ok", None)
        assert server.requests[0]["messages"][0]["content"] == text
        assert server.headers[0]["content-type"] == "application/json"
        assert "content-length" in server.headers[0]


# --- forks and the end ----------------------------------------------------------------------------


def run_python(code, *args, warnings="default"):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-W", warnings, "-c", code, *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


FORK = """
import os, sys
from agentic_prompting.llm import OpenAIChat, complete
chat = OpenAIChat("m", sys.argv[1], max_retries=0, timeout=5)
assert complete(chat, "before").text == "reply to before"
child = os.fork()
if child == 0:
    assert sys.argv[2] == "idle" or complete(chat, "child").text == "reply to child"
    sys.exit(0)  # with the end of an interpreter, which collects every object
assert os.waitpid(child, 0)[1] == 0
assert complete(chat, "after").text == "reply to after"
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize(("child", "connections"), [("idle", 1), ("asks", 2)])
def test_a_forked_child_leaves_the_parents_connections_alone(child, connections):
    with MisbehavingServer() as server:
        # Python itself warns of the inherited sockets that the child never closes.
        ended = run_python(
            FORK, server.base_url, child, warnings="ignore:unclosed transport:ResourceWarning"
        )
        assert (ended.returncode, ended.stderr) == (0, "")
        assert server.connections == connections, (
            "the parent goes on with the connection that it had"
        )


END = """
import gc, sys
from agentic_prompting.llm import OpenAIChat, complete
kept, forgotten, closed = (OpenAIChat("m", sys.argv[1]) for _ in range(3))
for chat in (kept, forgotten, closed):
    assert complete(chat, "x").error is None
closed.close()
del chat, forgotten
gc.collect()
"""


def test_connections_end_without_a_warning(https, certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    for address in (https.base_url, None):
        with MisbehavingServer() as server:
            ended = run_python(END, address or server.base_url)
            assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


ENDED = """
import gc, sys
from agentic_prompting.llm import OpenAIChat, complete
from agentic_prompting.llm.loop import background_loop, loop_error
forgotten, kept = OpenAIChat("m", sys.argv[1]), OpenAIChat("m", sys.argv[1])
assert complete(forgotten, "x").text and complete(kept, "x").text
background_loop().call_soon_threadsafe(sys.exit)
while loop_error() is None:
    pass
del forgotten
gc.collect()
"""


def test_connections_of_an_ended_loop_end_silently():
    with MisbehavingServer() as server:
        ended = run_python(
            ENDED, server.base_url, warnings="ignore:unclosed transport:ResourceWarning"
        )
    assert (
        ended.returncode == 0 and ended.stderr.count("\n") == 1 and "event loop" in ended.stderr
    ), ended.stderr
