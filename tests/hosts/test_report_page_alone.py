"""The page of `samebits report` in a real browser: it asks for nothing, runs nothing, and fits a phone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from bake import ROOT
from baked import InstalledProject
from browser import Browser

HANDMADE = ROOT / "tests" / "library" / "handmade.py"
PHONE, PAPER, DESK = 390, 720, 1280  # pixels
IMAGE = "<img src=x onerror=alert(1)>"
LEAK = "http://127.0.0.1:9/leak"
# What a report must not be: the same marks, without the policy and without escapes.
PLANTED = f"""<!DOCTYPE html><title>calm</title><p style="width: 2000px">wide</p><img src="{LEAK}">
<svg><script>document.title = 'taken'</script></svg>"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests."""
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def report(project: InstalledProject, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report on a run whose every word is an attack, and on a real one."""
    folder = tmp_path_factory.mktemp("report")
    hostile = project.run(project.python, HANDMADE, folder).rstrip("\n")
    words = ["--set", "train.epochs=1", "--set", "tracking.enabled=false", "--out", folder / "run"]
    project.run(project.python, "-m", "samebits", "train", *words)
    project.run(project.python, "-m", "samebits", "report", folder / "run", hostile, "--out", folder / "page.html")
    return folder / "page.html"


def width(browser: Browser) -> int:
    """How wide the page would like to be, in pixels."""
    return int(browser.value("document.documentElement.scrollWidth"))


def test_detectors_find_what_is_planted(browser: Browser, tmp_path: Path) -> None:
    """A page that loads, runs and is too wide is seen to do so."""
    page = tmp_path / "planted.html"
    page.write_text(PLANTED)
    browser.requests()
    browser.open(page, PHONE)
    assert LEAK in browser.requests()
    assert browser.value("document.title") == "taken" and width(browser) > PHONE
    page.write_text("<!DOCTYPE html><script>setTimeout(() => alert(1))</script>")
    browser.open(page)
    assert browser.has_dialog()
    browser.dismiss()


def test_page_asks_for_nothing_and_runs_nothing(browser: Browser, report: Path) -> None:
    """Its words stand there as words."""
    browser.requests()
    browser.open(report)
    others = [url for url in browser.requests() if url != report.as_uri()]
    assert others and all(url.startswith("data:image/") for url in others), others
    assert not browser.has_dialog() and browser.value("document.title") == "2 runs"
    assert browser.value("document.scripts.length") == 0
    assert browser.value("document.querySelectorAll('iframe, object, embed, link, form, a').length") == 0
    images = "[...document.querySelectorAll('img')]"
    assert browser.value(f"{images}.every(e => e.src.startsWith('data:') && e.complete && e.naturalWidth > 0)")
    shown = browser.value("document.body.innerText")
    assert IMAGE in shown and r"$\alpha$ and $x" in shown and "</style><script>document.title='taken'</script>" in shown


@pytest.mark.parametrize("pixels", [PHONE, DESK])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page_fits_and_follows_the_scheme(browser: Browser, report: Path, pixels: int, dark: bool) -> None:
    """No page is wider than its window, nor is a picture; words stand out from the paper in either scheme."""
    browser.open(report, pixels, dark)
    assert width(browser) <= pixels
    edges = "[...document.querySelectorAll('svg, img')].map(e => e.getBoundingClientRect().right)"
    assert browser.value(f"Math.max(...{edges})") <= pixels
    tables = "[...document.querySelectorAll('.table')]"
    assert browser.value(f"{tables}.length") > 4
    lightness = "(e => getComputedStyle(document.body)[e].match(/\\d+/g).map(Number).reduce((a, b) => a + b) / 765)"
    paper, ink = (browser.value(f"{lightness}('{name}')") for name in ("backgroundColor", "color"))
    assert (paper < 0.2 and ink > 0.8) if dark else (paper > 0.9 and ink < 0.2)


def test_folded_parts_are_open_in_print(browser: Browser, report: Path) -> None:
    """On paper nothing can be clicked."""
    browser.open(report, PAPER, dark=True)
    shown = "document.querySelector('details table').checkVisibility()"
    height = "document.querySelector('details').getBoundingClientRect().height"
    assert browser.value(shown) is False and browser.value(height) < 100
    browser.devtools("Emulation.setEmulatedMedia", media="print")
    assert browser.value(shown) is True and browser.value(height) > 500
    assert width(browser) <= PAPER
    assert browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    browser.devtools("Emulation.setEmulatedMedia", media="")
