"""`orthoconv serve`: real HTTP on the loopback address, by clients that ask well, badly and with ill will."""

import base64
import http.client
import io
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_runs import bomb, encoded, picture, run_folder

from orthoconv import models, predict
from orthoconv.lab.serving import server as serving
from orthoconv.lab.serving.server import MOST_BYTES, Server
from orthoconv.lab.serving.service import Service

NAMES = ["ant", "bee", "cow"]
PNG = encoded(picture(8, 8))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    torch.manual_seed(0)
    run = run_folder(tmp_path_factory.mktemp("served") / "run", data="folder", classes=NAMES)
    with Server(Service(models.load(run), "run"), port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


def ask(server: Server, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any, Any]:
    """Status, headers and content of the answer; JSON is read."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    if body is not None:
        fields.setdefault("Content-Type", "image/png")
    connection.request(method, path, body, fields)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    is_json = answer.headers.get_content_type() == "application/json"
    return answer.status, answer.headers, json.loads(text) if is_json and text else text


def shown(url: str) -> np.ndarray:
    head, _, data = url.partition(",")
    assert head == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


def test_the_certificate_is_that_of_the_image_that_is_shown(server: Server) -> None:
    model = server.service.model
    for data in (PNG, encoded(picture(20, 30, 3), "JPEG")):
        status, _, answer = ask(server, "POST", "/certify", data)
        assert status == 200
        pixels = shown(answer["image"])
        assert pixels.shape == (8, 8)
        (one,) = predict(model, pixels)
        assert (answer["index"], answer["name"], answer["margin"]) == (one.index, NAMES[one.index], one.margin)
        assert answer["radius"] == one.radius
        assert [row["name"] for row in answer["logits"]] == NAMES
        again = ask(server, "POST", "/certify", encoded(pixels))[2]
        assert again == answer, "and it may be sent back"
    assert np.array_equal(shown(ask(server, "POST", "/certify", PNG)[2]["image"]), picture(8, 8))


def test_the_attack_fails_inside_the_radius_and_succeeds_outside(server: Server) -> None:
    certificate = ask(server, "POST", "/certify", PNG)[2]
    radius = certificate["radius"]
    inside = ask(server, "POST", f"/attack?eps={0.999 * radius:.9f}", PNG)[2]
    outside = ask(server, "POST", f"/attack?eps={5 * radius:.9f}", PNG)[2]
    assert (inside["changed"], outside["changed"]) == (False, True)
    assert inside["attacked"]["index"] == certificate["index"] != outside["attacked"]["index"]
    for answer in (inside, outside):
        assert 0 < answer["norm"] <= answer["eps"] * (1 + 1e-5)
        assert answer["radius"] == radius
        line = certificate["margin"] * (1 - answer["eps"] / radius)
        assert answer["lead"] >= line - 1e-5, "the line of the page is below every attack"
    assert certificate["margin"] > inside["lead"] > 0 > outside["lead"]
    shift = shown(inside["perturbation"]["image"]).astype(float) / 255 - 0.5
    measured = np.linalg.norm(shift) / inside["perturbation"]["factor"]
    assert measured == pytest.approx(inside["norm"], rel=0.05), "a picture of bytes"
    nothing = ask(server, "POST", "/attack?eps=0", PNG)[2]
    assert nothing["norm"] == 0
    assert nothing["lead"] == certificate["margin"]


class Resources(HTMLParser):
    """Addresses that a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]


def test_the_page_needs_nothing_from_outside(server: Server) -> None:
    status, headers, page = ask(server, "GET", "/")
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    resources = Resources()
    resources.feed(page.decode())
    assert resources.found == ["data:,"]
    assert set(re.findall(r"https?://[^\"' ]*", page.decode())) <= {"http://www.w3.org/2000/svg"}
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert ask(server, "HEAD", "/")[2] == b""
    about = ask(server, "GET", "/about")[2]
    assert (about["name"], about["channels"], about["height"], about["width"]) == ("run", 1, 8, 8)
    assert about["lipschitz"] == pytest.approx(1, abs=1e-4)
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "message"),
    [
        ("GET", "/nothing", None, {}, 404, "nothing else"),
        ("GET", "/../../etc/passwd", None, {}, 404, "nothing else"),
        ("GET", "/%2e%2e/%2e%2e/etc/passwd", None, {}, 404, "nothing else"),
        ("GET", "/page.html", None, {}, 404, "nothing else"),
        ("GET", "/certify", None, {}, 405, "/certify takes POST, not GET"),
        ("POST", "/", PNG, {}, 405, "/ takes GET and HEAD, not POST"),
        ("DELETE", "/about", None, {}, 405, "not DELETE"),
        ("BREW", "/certify", PNG, {}, 405, "not BREW"),
        ("POST", "/certify", PNG, {"Content_Type": "text/html"}, 415, "send an image as it is, of the type"),
        ("POST", "/certify", PNG, {"Content_Type": "application/x-www-form-urlencoded"}, 415, "send an image"),
        ("POST", "/certify", PNG, {"Content_Encoding": "gzip"}, 415, "send an image as it is"),
        ("POST", "/certify", PNG, {"Transfer_Encoding": "chunked"}, 411, "send a Content-Length"),
        ("POST", "/certify", b"", {}, 400, "cannot be read as an image"),
        ("POST", "/certify", b"<svg onload='alert(1)'/>", {}, 400, "not in a format that is known"),
        ("POST", "/certify", PNG[:-30], {}, 400, "cannot be read as an image"),
        ("POST", "/certify", bomb(6000), {}, 400, "6000 x 6000 pixels, more than 25000000"),
        ("POST", "/certify", bomb(60_000), {}, 400, "pixels"),
        ("POST", "/certify", bytes(MOST_BYTES + 1), {}, 413, f"an image may have {MOST_BYTES} bytes"),
        ("POST", "/attack", PNG, {}, 400, "needs one number ?eps="),
        ("POST", "/attack?eps=nan", PNG, {}, 400, "needs one number ?eps="),
        ("POST", "/attack?eps=-1", PNG, {}, 400, "needs one number ?eps="),
        ("POST", "/attack?eps=1&eps=2", PNG, {}, 400, "needs one number ?eps="),
        ("POST", "/attack?eps=1e9", PNG, {}, 400, "eps must be from 0 to 1000"),
        ("POST", "/attack?" + "&".join(["a=1"] * 9), PNG, {}, 400, "Max number of fields"),
        ("GET", "/", None, {"Host": "evil.example"}, 403, "only, not at ['evil.example']"),
        ("POST", "/certify", PNG, {"Origin": "https://evil.example"}, 403, "other pages are refused"),
        ("POST", "/certify", PNG, {"Origin": "null"}, 403, "other pages are refused"),
        ("POST", "/certify", PNG, {"Sec_Fetch_Site": "cross-site"}, 403, "other pages are refused"),
        ("POST", "/certify", PNG, {"Sec_Fetch_Site": "same-site"}, 403, "other pages are refused"),
    ],
    ids=lambda v: repr(v)[:40],
)
def test_refusals(
    server: Server, method: str, path: str, body: bytes | None, headers: dict[str, str], status: int, message: str
) -> None:
    got, fields, answer = ask(server, method, path, body, **headers)
    assert got == status
    assert fields.get_content_type() == "application/json"
    assert list(answer) == ["error"]
    assert message in answer["error"]
    assert str(Path(__file__).parents[1]) not in answer["error"], "nothing of this machine"
    assert status != 405 or fields["Allow"]
    assert ask(server, "POST", "/certify", PNG)[0] == 200, "and the next one is answered"


def test_a_failure_is_answered_as_well(server: Server, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("not enough memory in /home/ada")

    with monkeypatch.context() as patch:
        patch.setattr(server.service, "certify", fail)
        status, fields, answer = ask(server, "POST", "/certify", PNG)
    assert (status, fields.get_content_type()) == (500, "application/json")
    assert answer == {"error": "the image could not be certified: RuntimeError; the terminal of the server has more"}
    assert "not enough memory in /home/ada" in capfd.readouterr().err
    assert ask(server, "POST", "/certify", PNG)[0] == 200


def test_our_own_page_may_ask(server: Server) -> None:
    for host in ("127.0.0.1", "localhost"):
        place = f"{host}:{server.server_port}"
        headers = {"Origin": f"http://{place}", "Host": place, "Sec_Fetch_Site": "same-origin"}
        assert ask(server, "POST", "/certify", PNG, **headers)[0] == 200
    other = f"http://127.0.0.1:{server.server_port % 65535 + 1}"
    assert ask(server, "POST", "/certify", PNG, Origin=other)[0] == 403, "a page of another port"


def raw(server: Server, *parts: bytes, end: bool = True) -> bytes:
    """What the server answers to these bytes; with `end` nothing more is sent."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as connection:
        for part in parts:
            connection.sendall(part)
        if end:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    return answer


def test_what_is_no_http(server: Server) -> None:
    host = f"Host: 127.0.0.1:{server.server_port}\r\n".encode()
    post = b"POST /certify HTTP/1.1\r\n" + host + b"Content-Type: image/png\r\n"
    cases = {
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n": b"414",
        b"GET / HTTP/1.1\r\n" + host + b"X: " + b"a" * 70_000 + b"\r\n\r\n": b"431",
        b"GET / HTTP/1.1\r\n" + host + b"X: a\r\n" * 200 + b"\r\n": b"431",
        b"nonsense\r\n\r\n": b"400",
        b"GET / HTTP/9.9\r\n\r\n": b"505",
        b"GET / HTTP/1.1\r\n" + host + b"Host: evil.example\r\n\r\n": b"403",
        b"GET / HTTP/1.1\r\n\r\n": b"403",
        post + b"Content-Length: 1000\r\n\r\nabc": b"400",
        post + b"Content-Length: -5\r\n\r\nabc": b"411",
        post + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd": b"411",
        post + b"Content-Length: 99999999999999999\r\n\r\nabc": b"413",
    }
    for request, status in cases.items():
        answer = raw(server, request)
        assert answer.split(b" ", 2)[1] == status, request[:60]
        assert list(json.loads(answer.partition(b"\r\n\r\n")[2])) == ["error"], request[:60]


def test_a_client_that_is_silent_is_left(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving.Handler, "timeout", 0.2)
    head = f"POST /certify HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\nContent-Type: image/png\r\n"
    answer = raw(server, head.encode() + b"Content-Length: 9\r\n\r\nabc", end=False)
    assert b" 408 " in answer.splitlines()[0]
    assert raw(server, b"GET / HT", end=False) == b""


def test_too_many_at_once(server: Server) -> None:
    places = [server.places.acquire(blocking=False) for _ in range(100)]
    try:
        status, _, answer = ask(server, "POST", "/certify", PNG)
        assert status == 503
        assert "questions are being answered" in answer["error"]
        assert ask(server, "GET", "/")[0] == 200
    finally:
        for taken in places:
            if taken:
                server.places.release()
    assert ask(server, "POST", "/certify", PNG)[0] == 200


def test_many_threads_get_the_same_answer(server: Server) -> None:
    expected, answers = ask(server, "POST", "/certify", PNG)[2], []
    threads = [
        threading.Thread(target=lambda: answers.append(ask(server, "POST", "/certify", PNG)[2])) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == [expected] * 6


def test_what_cannot_be_served(server: Server) -> None:
    with pytest.raises(ValueError, match=r"port must be from 0 to 65535, got 65536"):
        Server(server.service, 65536)
    with pytest.raises(OSError, match=r"in use"):
        Server(server.service, server.server_port)
    with pytest.raises(ValueError, match=r"grey or coloured images of a known size, got \(2, 8, 8\)"):
        Service(models.describe(torch.nn.Flatten(), (2, 8, 8)), "two")


def test_local_certificates() -> None:
    torch.manual_seed(0)
    words = ["downsample 2", "conv 8 k3", "maxmin", "flatten", "linear 8", "maxmin", "head normalized"]
    options = {"in_channels": 3, "image_size": 8, "classes": 3, "members": 2, "mirror": True}
    model = models.describe(models.build(words, **options), (3, 8, 8), NAMES)
    plain, local = (Service(model, "small", local=choice).certify(PNG)["radius"] for choice in (False, True))
    assert local > plain > 0
    softened = models.describe(torch.nn.Sequential(model, torch.nn.Tanh()), (3, 8, 8), NAMES)
    with pytest.raises(TypeError, match="got Tanh"):
        Service(softened, "soft", local=True)


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", data="folder", classes=NAMES)
    command = [sys.executable, "-m", "orthoconv", "serve", str(run), "--port", "0"]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # which a shell ignores in the background
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heard) as process:
        try:
            assert process.stdout is not None
            found = re.search(
                r"is served at http://127.0.0.1:(\d+)/ \(stop it with Ctrl-C\)", process.stdout.readline()
            )
            assert found
            connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=30)
            connection.request("GET", "/about")
            assert json.loads(connection.getresponse().read())["name"] == "run"
            connection.close()
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
            assert process.stdout.read() == "stopped\n"
        finally:
            process.kill()
