"""Reports in a real browser, where ``scripts/browser-deps`` has brought one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from report_kit import batches, store_in, train

from tierbed.report import Report

TOO_WIDE = (
    "() => [...document.querySelectorAll('body *')].filter((of) => "
    "of.getBoundingClientRect().right > innerWidth + 0.5).map((of) => of.outerHTML.slice(0, 99))"
)
# Texts that stand in each other's way.
OVERLAPPING = """() => {
  const boxes = [...document.querySelectorAll('h1, h2, td, th, .value, .note, .scale span')]
    .filter((of) => !of.querySelector('span') && of.textContent.trim())
    .map((of) => { const range = document.createRange(); range.selectNodeContents(of);
      return [of.textContent, range.getBoundingClientRect()]; });
  return boxes.flatMap(([text, a], at) => boxes.slice(at + 1)
    .filter(([, b]) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3
      && b.top < a.bottom - 3).map(([other]) => [text, other]));
}"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    with store_in(tmp_path_factory.mktemp("pages") / "store") as (store, emb):
        store.record()
        for at in range(4):
            train(emb, batches(20, seed=at))
        # A machine may be too quick for a line over time.
        store._observer.history.columns["at_s"][:] = [
            float(at) for at in range(len(store._observer.history))
        ]
        train(emb, batches(1))
        return store.report()


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("where", ["page", "notebook"])
def test_a_report_fits_its_window(
    browser: Any, report: Report, tmp_path: Path, width: int, scheme: str, where: str
) -> None:
    view = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    complaints: list[str] = []
    view.on("console", lambda message: complaints.append(message.text))
    view.on("request", lambda request: complaints.append(request.url))
    if where == "page":
        view.set_content(report.to_html())
    else:
        style = "table { font-size: 12px; margin-left: auto; } td { text-align: right; }"
        cell = f'<div style="margin-left: 5%; width: 90%">{report._repr_html_()}</div>'
        view.set_content(f"<style>{style}</style><body>{cell}</body>")
    assert view.evaluate("document.documentElement.scrollWidth") <= width
    assert view.evaluate(TOO_WIDE) == []
    assert view.evaluate(OVERLAPPING) == []
    assert "Another budget" in view.inner_text("main")
    card = view.evaluate("getComputedStyle(document.querySelector('section')).backgroundColor")
    assert card == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(24, 29, 35)")
    if folder := os.environ.get("TIERBED_SCREENSHOTS"):
        view.screenshot(path=f"{folder}/report-{where}-{width}-{scheme}.png", full_page=True)
    view.close()
    assert complaints == []
