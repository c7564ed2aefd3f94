"""The page in a real Chromium: the picture, memory, linked lines, dark and narrow; and nothing on the console."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.browser import CHROMIUM, DRIVER, Browser
from torch import Tensor, nn

import onepass
from onepass.explain import Explanation
from onepass.ir.record import CompileRecord, DataFlow, FlowStep, KernelRecord

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")
COUNT = "document.querySelectorAll('{}').length"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = F.gelu(self.up(y))
        return x + self.down(y)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    made = Browser()
    yield made
    made.close()


@pytest.fixture(scope="module")
def report() -> Explanation:
    return onepass.explain(nn.Sequential(Block(), Block()), torch.randn(64, 32))


@pytest.fixture
def page(browser: Browser, report: Explanation, tmp_path: Path) -> Iterator[Browser]:
    browser.resize(1100, 900)
    browser.dark(False)
    path = tmp_path / "page.html"
    path.write_text(report.to_html())
    browser.open(path)
    yield browser
    assert browser.console() == []


def count(page: Browser, selector: str) -> int:
    return int(page.run(f"return {COUNT.format(selector)}"))


def middle(page: Browser, selector: str) -> tuple[float, float]:
    """Where the first such element is on the screen, after it was brought there."""
    script = f"""const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}});
    const r = e.getBoundingClientRect(); return [r.left + r.width / 2, r.top + r.height / 2]"""
    x, y = page.run(script)
    return float(x), float(y)


def test_both_pictures_have_every_step_and_bytes_on_edges(page: Browser, report: Explanation) -> None:
    forward = report.graphs[0].flow
    nodes = page.run("return [...document.querySelectorAll('.picture[data-graph=\"0\"] svg')].map(s => "
                     "s.querySelectorAll('.node').length)")  # fmt: skip
    assert nodes == [len(forward.steps), len(forward.unfused)]
    labels = page.run("return [...document.querySelectorAll('.picture[data-graph=\"0\"] svg')[0]"
                      ".querySelectorAll('text.bytes')].map(t => t.textContent)")  # fmt: skip
    edges = sum(
        any(b in p.writes for b in s.reads) for n, s in enumerate(forward.steps) for p in forward.steps[:n]
    )  # each buffer here is written once
    assert len(labels) == edges and "16.0 KiB" in labels
    captions = page.run("return [...document.querySelectorAll('figcaption')].map(c => c.textContent)")
    assert captions[0].startswith("after fusion: ") and captions[1].startswith("before fusion: ")


def test_before_fusion_can_be_hidden(page: Browser) -> None:
    figures = count(page, ".picture figure")
    page.run("document.querySelector('.bar button').click()")
    assert count(page, ".picture figure") == figures - 1


def test_the_wheel_zooms_and_the_mouse_drags(page: Browser) -> None:
    box = "return document.querySelector('svg.flow').getAttribute('viewBox').split(' ').map(Number)"
    x, y = middle(page, "svg.flow")
    before = page.run(box)
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-200)
    page.run("return new Promise(done => setTimeout(done, 100))")
    near = page.run(box)
    assert near[2] < 0.8 * before[2] and near[0] > before[0]
    page.mouse("mousePressed", x, y + 60, button="left", buttons=1)
    page.mouse("mouseMoved", x + 50, y + 60, button="left", buttons=1)
    page.mouse("mouseReleased", x + 50, y + 60, button="left")
    assert page.run(box)[0] < near[0]
    page.run("[...document.querySelectorAll('.bar button')].find(b => b.textContent === 'all').click()")
    assert page.run(box)[3] > near[3]


def test_a_kernel_under_the_mouse_tells_of_itself_and_marks_its_operations(page: Browser) -> None:
    x, y = middle(page, ".node.kernel")
    page.mouse("mouseMoved", x, y)
    tip = page.run("return document.querySelector('.tip').textContent")
    assert "test_browser.py" in tip and "reads " in tip and "predicted" in tip
    assert count(page, ".node.operation.marked") >= 5
    page.mouse("mousePressed", x, y, button="left", clickCount=1)
    page.mouse("mouseReleased", x, y, button="left", clickCount=1)
    assert page.run("return document.querySelector('article.flash h3').textContent").startswith("k0")


def test_search_finds_kernels_operations_and_lines(page: Browser) -> None:
    search = """const i = document.querySelector('.bar input'); i.value = arguments_;
    i.dispatchEvent(new Event('input')); return document.querySelector('.found').textContent"""
    assert page.run(search.replace("arguments_", "'GELU'")) == "8 found"  # GELU and the product on its line
    assert count(page, ".node.hit") == 8 and count(page, "svg.searched") == 2
    assert page.run(search.replace("arguments_", "'no such thing'")) == "0 found"
    assert page.run(search.replace("arguments_", "''")) == "" and count(page, ".hit.node") == 0


def test_memory_names_the_peak_and_each_step(page: Browser, report: Explanation) -> None:
    said = "return document.querySelector('.held p').textContent"
    text = page.run(said)
    assert text.startswith("peak: ") and "held: " in text
    line = next(s for s in str(report).splitlines() if "memory: at most" in s)
    assert text.split(" beside")[0].removeprefix("peak: ") in line  # the same as in the text
    middle(page, "svg.memory")
    box = page.run("const r = document.querySelector('svg.memory').getBoundingClientRect(); return [r.left, r.top]")
    page.mouse("mouseMoved", box[0] + 3, box[1] + 20)
    assert page.run(said).startswith("step 1: ")


def test_lines_are_linked_both_ways(page: Browser) -> None:
    page.run("document.querySelectorAll('article')[0].querySelector('details.generated').open = true")
    page.run("return new Promise(done => setTimeout(done, 100))")
    shown = page.run("return [...document.querySelectorAll('article')[0].querySelectorAll('.line.linked')]"
                     ".map(e => e.textContent)")  # fmt: skip
    assert any("rsqrt" in line for line in shown)
    high, lines = page.run("const p = document.querySelector('pre.source'); return [p.scrollHeight, p.children.length]")
    assert lines > 20 and high > 12 * lines  # each line is one
    x, y = middle(page, 'tr.linked[data-op="rsqrt"]')
    page.mouse("mouseMoved", x, y)
    marked = page.run("return [...document.querySelectorAll('.line.marked')].map(e => e.textContent)")
    assert marked and all("rsqrt" in line for line in marked)
    x, y = middle(page, ".line.linked")
    page.mouse("mouseMoved", x, y)
    assert count(page, "tr.marked") >= 1


@pytest.mark.parametrize("width", [400, 1100])
def test_dark_and_narrow(page: Browser, width: int, tmp_path: Path) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    light = page.run(background)
    page.dark(True)
    page.resize(width, 800)
    assert page.run(background) != light
    assert page.run("return document.documentElement.scrollWidth") <= width
    columns = page.run("return getComputedStyle(document.querySelector('.panes.both')).gridTemplateColumns")
    assert len(columns.split()) == (1 if width == 400 else 2)
    page.screenshot(tmp_path / "page.png", whole=False)
    assert (tmp_path / "page.png").stat().st_size > 5000


def thousand() -> CompileRecord:
    """A chain of a thousand distinct kernels of five operations."""
    kernels, steps, unfused = [], [], []
    for n in range(1000):
        line = f"model.py:{n}: y = y + {n}"
        nodes = [{"node": f"add_{n}_{k}", "op": "aten.add.Tensor", "line": line} for k in range(5)]
        source = "".join(f"    float add_{k} = load{k} + {n}.{k}f;\n" for k in range(60))
        kernels.append(KernelRecord(f"k{n}_add", nodes, 4096, 4096, "grid", source, 10.0 + n, work=float(n)))
        steps.append(FlowStep(f"k{n}_add", "kernel", "aten.add.Tensor", line, {f"b{n}": 4096}, {f"b{n + 1}": 4096}))
        for k, node in enumerate(nodes):
            reads = {f"b{n}" if not k else f"v{n}_{k - 1}": 4096}
            writes = {f"b{n + 1}" if k == 4 else f"v{n}_{k}": 4096}
            unfused.append(FlowStep(node["node"], "operation", "aten.add.Tensor", line, reads, writes))
    flow = DataFlow(steps, unfused, {"b0": 4096}, ["b1000"])
    return CompileRecord(kernels=kernels, flow=flow, bytes_moved=1 << 23, bytes_unfused=5 << 23, bytes_minimum=8192)


def test_a_notebook_has_it_in_a_frame(browser: Browser, report: Explanation, tmp_path: Path) -> None:
    path = tmp_path / "notebook.html"
    ready = "<script>document.documentElement.dataset.ready = 1</script>"
    path.write_text(f"<!doctype html><meta charset=utf-8>{ready}<body>{report._repr_html_()}")
    browser.open(path)
    browser.frame(0)
    wait = "return new Promise(done => { const ask = () => document.documentElement.dataset.ready ? done(1) : "
    assert browser.run(f"{wait} setTimeout(ask, 50); ask() }})") == 1
    nodes = count(browser, ".node")
    browser.frame(None)
    assert nodes > 10 and browser.console() == []


@pytest.mark.rotating
def test_a_thousand_kernels(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "large.html"
    path.write_text(Explanation([thousand()]).to_html())
    assert path.stat().st_size < 1 << 20
    browser.open(path)
    assert count(browser, ".node") == 1000 and count(browser, "article") == 1000
    browser.run("document.querySelector('.bar button').click()")
    assert count(browser, ".node") == 6000 and browser.console() == []


def test_names_never_become_scripts(browser: Browser, report: Explanation, tmp_path: Path) -> None:
    hostile = "</script><img src=x onerror='window.bad=1'><script>window.bad=1</script>"
    graph = report.graphs[0]
    kernels = [replace(k, name=hostile + k.name, schedule=hostile, source=hostile) for k in graph.kernels]
    steps = [replace(s, name=hostile + s.name, op=hostile, line=hostile) for s in graph.flow.steps]
    changed: Any = replace(graph, kernels=kernels, flow=replace(graph.flow, steps=steps), program=hostile)
    path = tmp_path / "hostile.html"
    path.write_text(Explanation([changed]).to_html())
    browser.open(path)
    assert browser.run("return window.bad === undefined") and browser.console() == []
    assert count(browser, "img") == 0
