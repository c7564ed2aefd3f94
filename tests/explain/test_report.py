"""The three reports of an explanation, from records written by hand."""

from __future__ import annotations

import base64
import gzip
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

import onepass
from onepass.explain import Explanation
from onepass.explain.flow import peak_of
from onepass.explain.text import REJECTED_SHOWN, byte_text
from onepass.ir.record import CompileRecord, DataFlow, Decision, ExternRecord, FlowStep, KernelRecord

HOSTILE = "</pre><script>alert('x')</script>\"'\n$body"


def _kernel(name: str = "k0", line: str = "model.py:3") -> KernelRecord:
    operations = [
        {"node": "add", "op": "aten.add.Tensor", "line": line},
        {"node": "gelu", "op": "aten.gelu.default", "line": line},
    ]
    return KernelRecord(name, operations, 64 << 20, 32 << 20, "grid i x tile j", "void k0(void) {}", 8400.0)


def _record(**changes: object) -> CompileRecord:
    record = CompileRecord(
        direction="forward",
        kernels=[_kernel()],
        externs=[
            ExternRecord(
                "x1",
                "aten.mm.default",
                "a matmul goes to the library, what is around it is fused",
                "model.py:9",
                1 << 20,
            )
        ],
        decisions=[
            Decision("b0", "b1", "vertical", True, "saves a round trip", 3.0, 4096),
            Decision("b1", "b2", "sibling", False, "49 buffers, limit 48", 1.5, 2048),
        ],
        bytes_moved=97 << 20,
        bytes_unfused=291 << 20,
        bytes_minimum=97 << 20,
        saved_bytes=1 << 20,
    )
    for name, value in changes.items():
        setattr(record, name, value)
    return record


def test_totals_are_sums_over_graphs() -> None:
    explanation = Explanation([_record(), _record(direction="backward", saved_bytes=0)])
    assert explanation.bytes_moved == 2 * (97 << 20)
    assert explanation.bytes_unfused == 2 * (291 << 20)
    assert explanation.bytes_minimum == 2 * (97 << 20)
    assert explanation.saved_bytes == 1 << 20
    assert [len(explanation.kernels), len(explanation.externs), len(explanation.decisions)] == [2, 2, 4]
    assert [d.reason for d in explanation.rejected] == ["49 buffers, limit 48"] * 2


def test_text_names_what_a_reader_asks_for() -> None:
    text = str(Explanation([_record()]))
    for expected in (
        "1 graph, 1 kernel, 1 extern",
        "3.00x of moved",
        "kernel k0: reads 64.0 MiB, writes 32.0 MiB, predicted 8.4 ms",
        "schedule  grid i x tile j",
        "add, gelu  model.py:3",
        "extern mm: moves 1.0 MiB; a matmul goes to the library",
        "1 made, 1 rejected",
        "b1 -> b2 (sibling): 49 buffers, limit 48 [+1.5 us, 2.0 KiB]",
    ):
        assert expected in text


def test_text_says_when_a_graph_runs_as_eager_and_when_nothing_was_compiled() -> None:
    assert "runs as eager: no C compiler" in str(Explanation([_record(fallback="no C compiler")]))
    assert "nothing was compiled" in str(Explanation([]))


def test_text_shows_the_largest_rejections_and_counts_the_rest() -> None:
    many = [Decision(f"p{i}", "c", "vertical", False, "too wide", 0.0, i) for i in range(100)]
    text = str(Explanation([_record(decisions=many)]))
    assert "p99 -> c" in text and "p0 -> c" not in text
    assert f"and {100 - REJECTED_SHOWN} smaller ones" in text


def test_hostile_names_stay_on_their_line() -> None:
    text = str(Explanation([_record(kernels=[_kernel(line="a\nkernel fake: reads 0 B")])]))
    assert "\nkernel fake" not in text
    assert r"a\x0akernel fake" in text


def test_json_has_every_record() -> None:
    record = _record()
    data = json.loads(Explanation([record]).to_json())
    assert data["bytes_moved"] == record.bytes_moved
    assert CompileRecord.from_json(data["graphs"][0]) == record


class _Page(HTMLParser):
    """Collects tags and their attributes, and checks that what opens closes."""

    void = frozenset({"meta", "br", "input", "line", "circle", "polyline"})

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.extend(attrs)
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.void:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def _parse(page: str) -> _Page:
    parser = _Page()
    parser.feed(page)
    assert parser.open == []
    return parser


def test_html_is_well_formed_and_self_contained() -> None:
    page = _parse(Explanation([_record(program="b0 = x + 1", stage_seconds={"plan": 0.1})]).to_html())
    assert page.tags.count("script") == 2 and "link" not in page.tags  # the page's own and its data
    assert not {"src", "href"} & {name for name, _ in page.attributes}
    assert page.tags.count("svg") == 0 and page.tags.count("h3") == 3
    assert "void k0(void) {}" in page.text
    assert "b0 = x + 1" in page.text


@pytest.mark.parametrize("where", ["name", "schedule", "source", "line", "why", "reason", "fallback", "flow"])
def test_html_escapes_everything(where: str) -> None:
    record, kernel = _record(), _kernel()
    match where:
        case "name" | "schedule" | "source":
            setattr(kernel, where, HOSTILE)
        case "line":
            kernel = _kernel(line=HOSTILE)
        case "why":
            record.externs[0].why = HOSTILE
        case "reason":
            record.decisions[1] = replace(record.decisions[1], reason=HOSTILE)
        case "fallback":
            record.fallback = HOSTILE
        case "flow":
            record.flow.steps = [FlowStep(HOSTILE, "kernel", HOSTILE, HOSTILE, {HOSTILE: 1}, {HOSTILE: 2})]
    record.kernels = [kernel]
    page = _parse(Explanation([record]).to_html())
    assert page.tags.count("script") == 2 and any("alert('x')" in text for text in page.text)


def _many(count: int, distinct: int) -> list[CompileRecord]:
    """A graph of many kernels, some of them equal but for their names."""
    kernels = []
    for n in range(count):
        kernel = _kernel(f"k{n}_add_gelu", f"model.py:{n}")
        body = f"void run(float *x) {{ x[0] = {n % distinct}; }}\n" * 60
        kernels.append(
            replace(kernel, source=f"// k{n}_add_gelu: rows\n//   aten.add\n{body}", work=float(n % distinct))
        )
    decisions = [Decision(f"b{n}", f"b{n + 1}", "vertical", n % 2 == 0, "saves a round trip") for n in range(count)]
    return [_record(kernels=kernels, decisions=decisions, program="b0 = x\n" * 50 * count)]


def test_equal_kernels_are_one_and_their_source_is_there_once() -> None:
    text = Explanation(_many(24, 3)).to_html()
    page = _parse(text)
    assert page.tags.count("article") == 3 and "k0_add_gelu x 8" in page.text
    assert sum("x[0] = 1;" in t for t in page.text) == 1
    assert "equal: k3_add_gelu, k6_add_gelu" in text and "model.py:0; model.py:3; model.py:6 and 5 more" in page.text
    assert "8 x k0_add_gelu (2 ops)" in page.text
    same = replace(_many(1, 1)[0].kernels[0], name="k9", bytes_read=1)
    other = Explanation([_record(kernels=[_many(1, 1)[0].kernels[0], same])]).to_html()
    assert other.count("x[0] = 0;") == 60 and "source: as of k0_add_gelu" in other


def test_a_page_of_a_thousand_kernels_is_below_a_megabyte() -> None:
    page = Explanation(_many(1000, 1000)).to_html()
    assert len(page.encode()) < 1 << 20
    _parse(page)
    packed = re.search(r'id="packed">([^<]*)<', page)
    assert packed is not None
    body = gzip.decompress(base64.b64decode(packed[1])).decode()
    assert body.count("<article") == 1000 and _parse(body).text.count("x[0] = 7;") == 0 and "x[0] = 7;" in body


def _step(name: str, reads: dict[str, int], writes: dict[str, int], kind: str = "kernel") -> FlowStep:
    return FlowStep(name, kind, "aten.add.Tensor", "model.py:3", reads, writes)


def flowing() -> CompileRecord:
    """Two kernels around a product; the first result is read by the last one, too."""
    steps = [
        _step("k0", {"a0": 400}, {"b0": 400, "b1": 100}),
        _step("mm", {"b0": 400, "a1": 80}, {"b2": 200}, "extern"),
        _step("k1", {"b1": 100, "b2": 200}, {"b3": 300}),
    ]
    unfused = [_step(n, s.reads, s.writes, "operation") for n, s in zip(("add", "mm", "gelu"), steps, strict=True)]
    return _record(flow=DataFlow(steps, unfused, {"a0": 400, "a1": 80}, ["b3"]), kernels=[_kernel("k0"), _kernel("k1")])


def test_the_most_memory_and_what_holds_it() -> None:
    found = peak_of(flowing())
    assert found is not None and found[0].name == "mm" and found[1] == {"b0": 400, "b1": 100, "b2": 200}
    text = str(Explanation([flowing()]))
    assert "memory: at most 700 B beside inputs of 480 B, during mm; results of k0 400 B, mm 200 B, k0 100 B" in text
    kept = flowing()
    kept.flow.results = ["b0", "b3"]
    assert (found := peak_of(kept)) is not None and found[0].name == "k1" and sum(found[1].values()) == 1000
    kept.flow.steps[2].writes, kept.flow.inputs = {"a0": 400}, {"a0": 400}  # in place
    assert (found := peak_of(kept)) is not None and found[0].name == "mm"
    assert peak_of(_record()) is None and CompileRecord.from_json(kept.to_json()) == kept


def test_what_each_step_reads_and_writes_is_recorded() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.sin(x) @ w, -1)

    (graph,) = onepass.explain(function, torch.randn(64, 32), torch.randn(32, 16)).graphs
    first, product, last = graph.flow.steps
    (size_x, size_w), (sine,), (scores,) = graph.flow.inputs.values(), first.writes, product.writes
    assert [first.kind, product.kind, last.kind] == ["kernel", "extern", "kernel"] and (size_x, size_w) == (8192, 2048)
    assert list(first.reads.values()) == [8192] and product.reads[sine] == 8192 and last.reads == {scores: 4096}
    assert [*last.writes] == graph.flow.results and {s.kind for s in graph.flow.unfused} == {"operation", "extern"}
    fused = sum(sum(s.reads.values()) + sum(s.writes.values()) for s in graph.flow.steps)
    assert fused == graph.bytes_moved and len(graph.flow.unfused) > 5
    assert sum(sum(s.reads.values()) + sum(s.writes.values()) for s in graph.flow.unfused) == graph.bytes_unfused


def test_bytes_fall_from_unfused_to_moved_to_the_minimum() -> None:
    record = _record(bytes_moved=60, bytes_unfused=100, bytes_minimum=40, saved_bytes=0, kernels=[], externs=[])
    page = Explanation([record]).to_html()
    widths = [
        (kind, float(width)) for kind, width in re.findall(r'<i(?: class="(\w+)")? style="width:([\d.]+)%">', page)
    ]
    assert widths == [
        ("unfused", 100.0), ("", 60.0), ("less", 40.0), ("moved", 60.0), ("", 40.0), ("less", 20.0), ("minimum", 40.0),
    ]  # fmt: skip


def test_rows_can_be_sorted_without_a_script() -> None:
    small, large = _kernel("small"), _kernel("large")
    small.predicted_us, large.bytes_read = 9e9, 1 << 40
    page = Explanation([_record(kernels=[small, large], externs=[])]).to_html()
    places = re.findall(r'style="--o0:(\d);--o1:(\d);--o2:(\d)".*?title="(\w+)', page)
    assert places == [("0", "1", "0", "small"), ("1", "0", "1", "large")]  # as they run, by bytes, by predicted time
    assert page.count("type=radio") == 3 and page.count("checked>") == 1
    assert ".by1:checked ~ .rows > .row { order: var(--o1); }" in page


def test_the_roofline_has_every_kernel_below_the_roof() -> None:
    kernel = replace(_kernel(), work=float(96 << 20), predicted_us=1e5)
    page = Explanation([_record(kernels=[kernel], externs=[])]).to_html()
    corners = re.search(r'<polyline class=roof points="([^"]*)"', page)
    point = re.search(r'<circle class="kernel" cx="([\d.]+)" cy="([\d.]+)"', page)
    assert corners is not None and point is not None
    roof = [tuple(map(float, c.split(","))) for c in corners[1].split()]
    assert len(roof) == 3 and roof[0][1] > roof[1][1] == roof[2][1]  # rises, then is flat; y counts downwards
    x, y = float(point[1]), float(point[2])
    assert roof[0][0] < x < roof[2][0] and y > roof[1][1]
    assert "1 per byte" in page.split("<circle")[1]
    assert "<circle" not in Explanation([_record(kernels=[_kernel()])]).to_html()  # nothing is known of its work


def test_the_roof_is_that_of_matrix_units_where_a_kernel_needs_them() -> None:
    lanes, units = (replace(_kernel(), work=work, predicted_us=100.0) for work in (1e6, 1e10))
    for kernel, what in ((lanes, "operations of lanes"), (units, "operations of matrix units")):
        page = Explanation([_record(kernels=[kernel], target="sm_90")]).to_html()
        assert f"bytes and {what} that sm_90 is planned with" in page


def test_a_notebook_shows_the_page_in_a_frame() -> None:
    shown = Explanation([_record()])._repr_html_()
    page = _parse(shown)
    assert page.tags == ["iframe"] and "sandbox" in dict(page.attributes)
    assert dict(page.attributes)["srcdoc"] == Explanation([_record()]).to_html()


def test_the_page_has_the_advice() -> None:
    record = _record(externs=[], bytes_unfused=97 << 20)
    assert any("nothing is saved by fusing" in text for text in _parse(Explanation([record]).to_html()).text)


def test_html_of_nothing() -> None:
    assert "Nothing was compiled" in Explanation([]).to_html()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1 << 20, "1.0 MiB"),
        ((1 << 20) - 1, "1.0 MiB"),
    ],
)
def test_byte_text(count: int, text: str) -> None:
    assert byte_text(count) == text


def test_rejections_show_the_numbers_they_have_and_each_is_shown_once() -> None:
    illegal = Decision("p", "c", "rows", False, "its reductions run over different axes")
    slower = Decision("p", "d", "rows", False, "predicted 3.0 us together, 2.0 us apart", -1.0, 0)
    lines = str(Explanation([CompileRecord(decisions=[illegal, slower, illegal])])).splitlines()
    shown = [line.strip() for line in lines if line.strip().startswith("p -> ")]
    assert shown == [
        "p -> c (rows): its reductions run over different axes",
        "p -> d (rows): predicted 3.0 us together, 2.0 us apart [-1 us]",
    ]
    assert any("0 made, 2 rejected" in line for line in lines)


def test_a_cache_hit_says_that_it_was_compiled_before() -> None:
    seconds = {"plan": 0.25}
    found = {c: str(Explanation([_record(cache=c, stage_seconds=seconds)])) for c in ("hit", "miss")}
    assert "cache hit, compiled before, in 0.25 s" in found["hit"]
    assert "cache miss, compiled in 0.25 s" in found["miss"]
