"""The page of `orthoconv serve` in a browser: a real upload, a drawing, a slider."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from chromium import PROGRAM, Browser
from PIL import Image
from small_runs import LAYERS, encoded

from orthoconv import models, predict
from orthoconv.data import load
from orthoconv.data.names import class_names
from orthoconv.lab.serving.server import Server
from orthoconv.lab.serving.service import Service
from orthoconv.train import hinge_loss

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason="chromium is not installed")]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The page of a network that has learnt digits for a moment."""
    torch.manual_seed(0)
    model = models.build(LAYERS, in_channels=1, image_size=8)
    optimizer, (images, labels) = torch.optim.Adam(model.parameters(), lr=0.01), load("digits")[0]
    for k in range(40):
        part = slice(32 * k, 32 * (k + 1))
        optimizer.zero_grad()
        hinge_loss(model(images[part]), labels[part], 0.5).backward()
        optimizer.step()
    with Server(Service(models.describe(model, (1, 8, 8), class_names("digits")), "digits"), port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def digit(tmp_path: Path) -> Path:
    path = tmp_path / "digit.png"
    pixels = (255 * load("digits")[1].images[0, 0]).round().byte().numpy()
    path.write_bytes(encoded(Image.fromarray(pixels).resize((40, 40), Image.Resampling.NEAREST)))
    return path


def text(browser: Browser, name: str) -> str:
    return browser.run(f"document.getElementById('{name}').textContent")


def slide(browser: Browser, radii: float) -> None:
    """Move the slider, and wait for the attack."""
    browser.run(f"at('eps').value = Math.round(1000 * {radii} * facts.radius / limit)")
    browser.run("at('eps').dispatchEvent(new Event('input'))")
    browser.wait("tried.length && tried[tried.length - 1].eps === eps() && !document.querySelector('.busy')")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1300, 400])
def test_an_upload_is_certified_and_attacked(
    server: Server, browser: Browser, digit: Path, width: int, dark: bool, tmp_path: Path
) -> None:
    browser.open(server.url, width, dark=dark)
    browser.upload("#file", digit)
    browser.wait("tried.length === 1 && !document.querySelector('.busy')")
    (one,) = predict(server.service.model, digit, resize=True)
    assert text(browser, "class") == one.name
    assert float(text(browser, "margin")) == pytest.approx(one.margin, abs=0.01), "of an image rounded to bytes"
    assert float(text(browser, "radius")) == pytest.approx(one.radius, abs=0.01)
    assert browser.run("document.querySelectorAll('#bars .bar').length") == 6
    slide(browser, 0.98)
    assert "the attack fails, and so does any other" in text(browser, "verdict")
    assert text(browser, "attacked-class") == one.name
    slide(browser, 3)
    assert f"The attack succeeds: {one.name} became" in text(browser, "verdict")
    assert text(browser, "attacked-class") != one.name
    assert browser.run("document.querySelectorAll('#chart circle.hit').length") == 1
    loaded = "[...document.querySelectorAll('img')].every((i) => i.complete && i.naturalWidth === 8)"
    assert browser.run(loaded)
    assert browser.run("document.documentElement.scrollWidth") == width, "nothing is wider than the window"
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 200) == dark
    browser.screenshot(tmp_path / "page.png")
    with Image.open(tmp_path / "page.png") as picture:
        assert picture.width == width
    assert browser.messages == [], "no error, and nothing that the page's policy refuses"


def test_a_drawing(server: Server, browser: Browser) -> None:
    browser.open(server.url)
    browser.run("document.getElementById('by-hand').click()")
    box = browser.run("JSON.parse(JSON.stringify(canvas.getBoundingClientRect()))")
    x, top = box["x"] + box["width"] / 2, box["y"]
    browser.drag([(x, top + 40), (x, top + 120), (x, top + 230)])
    browser.wait("tried.length === 1")
    assert float(text(browser, "radius")) > 0
    seen = server.service.model
    assert text(browser, "class") in seen.class_names
    middle, side = browser.run(
        "(() => { const c = document.createElement('canvas'); c.width = c.height = 8; const p = c.getContext('2d');"
        "p.drawImage(document.getElementById('seen'), 0, 0); const d = p.getImageData(0, 0, 8, 8).data;"
        "return [d[4 * (8 * 4 + 4)], d[4 * (8 * 4)]]; })()"
    )
    assert middle > 100 > side == 0, "a white stroke in the middle of black"


def test_what_is_refused_is_said(server: Server, browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "no.png").write_text("no image")
    browser.open(server.url)
    browser.upload("#file", tmp_path / "no.png")
    browser.wait("!document.getElementById('problem').hidden")
    assert "cannot be read as an image" in text(browser, "problem")
    assert browser.run("document.getElementById('answer').hidden")
    browser.messages.clear()  # the browser logs that a request was refused
