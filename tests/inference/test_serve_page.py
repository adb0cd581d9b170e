"""The page in a browser: an image is chosen, classes and a map are seen; what strangers named is
text, never HTML.
"""

import pytest
from support.browser import CHROMIUM, browsing, pictured
from support.servers import serving

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium here")
TEXT = "document.getElementById('{}').textContent"
SHARES = "[...document.querySelectorAll('.fill')].map((bar) => parseFloat(bar.style.width))"
NAMES = (
    "[...document.querySelectorAll('#classes .row span:first-child')].map((one) => one.textContent)"
)
WIDER = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def browser():
    with browsing() as browser:
        yield browser


@pytest.fixture
def photograph(photographs, tmp_path):
    file = tmp_path / "<img src=x onerror=alert(2)>.jpg"
    file.write_bytes(photographs[0])
    return file


@pytest.mark.parametrize("width", [390, 1280])
def test_a_picture_is_dropped_and_its_classes_and_map_are_seen(
    server, browser, photograph, photographs, width
):
    browser.said.clear()
    browser.open(f"http://127.0.0.1:{server.port}/", width)
    pictured(browser, f"first-{width}")
    browser.choose("#file", photograph)
    browser.wait("!document.getElementById('found').hidden")
    headers = {"Content-Type": "image/jpeg"}
    [found] = server.ask("POST", "/predict", photographs[0], headers)[1]["predictions"]
    assert browser.value(NAMES) == found["classes"]
    assert browser.value(SHARES) == pytest.approx(
        [100 * share for share in found["probabilities"]], abs=1e-3
    )
    assert browser.value(TEXT.format("said")) == f"Most probable: {found['classes'][0]}"
    assert browser.value(TEXT.format("name")) == photograph.name
    pictured(browser, f"classes-{width}")
    browser.value("document.getElementById('map').click()")
    browser.wait("document.getElementById('map').getAttribute('aria-pressed') === 'true'")
    browser.wait("document.getElementById('shown').naturalWidth >= 224")
    sides = "[document.getElementById('shown').naturalWidth, document.getElementById('shown').naturalHeight]"
    width, height = browser.value(sides)
    assert width == height  # (the photograph itself is wider)
    pictured(browser, f"map-{width}")
    assert not browser.value(WIDER)
    # none of those that names spell
    assert browser.value("document.querySelectorAll('main img:not([hidden])').length") == 1
    assert browser.said == []


def test_a_long_name_leaves_the_buttons_below_the_picture(server, browser, photographs, tmp_path):
    (tmp_path / ("W" * 200 + ".jpg")).write_bytes(photographs[0])
    browser.open(f"http://127.0.0.1:{server.port}/", 360)
    browser.choose("#file", tmp_path / ("W" * 200 + ".jpg"))
    browser.wait("!document.getElementById('found').hidden")
    assert browser.value("document.getElementById('name').offsetHeight") < 30  # pixels: a line
    assert browser.value("document.getElementById('name').title") == "W" * 200 + ".jpg"
    assert not browser.value(WIDER)


def test_what_cant_be_read_is_told_in_the_page(server, browser, tmp_path):
    (tmp_path / "text.png").write_bytes(b"text")
    browser.open(f"http://127.0.0.1:{server.port}/", 390)
    browser.choose("#file", tmp_path / "text.png")
    browser.wait(f"{TEXT.format('said')}.includes('format is unknown')")
    assert browser.value(TEXT.format("said")).startswith("text.png: its format is unknown")
    assert browser.value("document.getElementById('said').className") == "bad"
    assert browser.value("document.getElementById('found').hidden")
    pictured(browser, "refused-390")


def test_keys_reach_everything_and_all_has_a_name(server, browser, photograph):
    browser.open(f"http://127.0.0.1:{server.port}/")
    browser.choose("#file", photograph)
    browser.wait("!document.getElementById('found').hidden")
    reached = []
    for _ in range(4):
        browser.press("Tab", 9)
        reached.append(browser.value("document.activeElement.id || document.activeElement.tagName"))
        if reached[-1] == "map":
            browser.press("Enter", 13)
    assert reached == ["file", "plain", "map", "A"]
    browser.wait("document.getElementById('map').getAttribute('aria-pressed') === 'true'")
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    named = {"button", "link", "image", "textbox", "list"}
    roles = [
        (node["role"]["value"], node.get("name", {}).get("value"))
        for node in tree
        if "role" in node
    ]
    nameless = [role for role, name in roles if role in named and not name]
    assert nameless == []


def test_the_page_asks_for_the_servers_token(server, browser, photograph):
    """(As it does after a 401: the server of this test has none.)"""
    browser.open(f"http://127.0.0.1:{server.port}/")
    answer = (
        """new Response('{"error": "a token"}', {status: how.headers.Authorization ? 500 : 401})"""
    )
    browser.value(f"window.fetch = async (path, how) => {answer}")
    assert browser.value("document.getElementById('asks').hidden")
    browser.choose("#file", photograph)
    browser.wait("!document.getElementById('asks').hidden")
    assert browser.value(TEXT.format("said")) == f"{photograph.name}: a token"


def test_a_picture_is_sent_again_until_the_model_is_loaded(
    checkpoint, browser, photograph, tmp_path
):
    with serving(checkpoint, folder=tmp_path) as server:
        browser.open(f"http://127.0.0.1:{server.port}/")
        browser.choose("#file", photograph)
        browser.wait(f"{TEXT.format('said')}.includes('is sent again')")
        assert (
            browser.value(TEXT.format("said"))
            == f"{photograph.name} is sent again in 2 s: the model is being loaded"
        )
        browser.wait("!document.getElementById('found').hidden", 60)
        assert browser.value(TEXT.format("said")).startswith("Most probable: ")
    (tmp_path / "second.jpg").write_bytes(photograph.read_bytes())
    browser.choose("#file", tmp_path / "second.jpg")  # the server has gone
    browser.wait(f"{TEXT.format('said')}.includes('reached')")
    assert browser.value(TEXT.format("said")) == "second.jpg: the server can't be reached."


def test_the_list_of_paths_fits_a_phone(server, browser):
    browser.said.clear()
    browser.open(f"http://127.0.0.1:{server.port}/docs", 390)
    assert browser.value("document.querySelectorAll('h2').length") == 5
    assert not browser.value(WIDER)
    assert browser.said == []
    pictured(browser, "docs-390")
