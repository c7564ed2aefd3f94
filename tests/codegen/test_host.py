"""The host program: order, allocations, frees, views, names; and its JSON form."""

from __future__ import annotations

import json
import math
import operator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onepass.codegen.host import emit_host, size_text
from onepass.errors import VerifyError
from onepass.ir.callables import callable_name, graph_constant, resolve_callable
from onepass.ir.dtypes import DType
from onepass.ir.host_json import MalformedProgram, decode_tree, encode_tree, host_from_json, host_to_json
from onepass.ir.kernel import Kernel, ScheduledGroup
from onepass.ir.plan import FusionPlan, Group
from onepass.ir.poly import Poly, Symbol
from onepass.ir.program import Buffer, Extern, HostValue, Origin, Program, View, contiguous_strides
from onepass.ir.source import (
    Allocate,
    Bind,
    Call,
    Check,
    Constant,
    Copy,
    Free,
    HostProgram,
    Launch,
    Live,
    Ref,
    SizeOf,
    TorchValue,
    WriteBack,
)

ORIGIN = Origin("node", "op", "line")
aten = torch.ops.aten


def buffer(name: str, *shape: Any, dtype: DType = DType.F32) -> Buffer:
    sizes = tuple(Poly.of(s) for s in shape)
    return Buffer(name, dtype, sizes, contiguous_strides(sizes))


def kernel(writes: tuple[Buffer, ...], reads: tuple[Buffer, ...], symbols: tuple[Symbol, ...] = ()) -> Kernel:
    return Kernel("k", reads, writes, symbols, (), (), (), (), "", Poly.ONE)


def whole(b: Buffer) -> View:
    return View(b, b.shape, b.strides, Poly.ZERO)


def emit(
    inputs: tuple[Any, ...],
    steps: list[Kernel | Extern],
    outputs: tuple[Any, ...],
    sources: dict[Symbol, tuple[Buffer, int]] | None = None,
    workspace: tuple[Buffer, ...] = (),
    **plan: Any,
) -> HostProgram:
    """A host program for steps that are kernels (each a group of its own) and externs."""
    scheduled: dict[Group, ScheduledGroup] = {}
    numbers: dict[Kernel, int] = {}
    ordered: list[Group | Extern] = []
    for step in steps:
        if isinstance(step, Kernel):
            group = Group((), ())
            scheduled[group] = ScheduledGroup((step,), workspace)
            numbers[step] = len(numbers)
            ordered.append(group)
        else:
            ordered.append(step)
    program = Program(inputs, (), outputs, sources or {})
    return emit_host(program, FusionPlan(tuple(ordered), (), **plan), scheduled, numbers)


def of_type(host: HostProgram, kind: type) -> list[Any]:
    return [i for i in host.instructions if isinstance(i, kind)]


def test_a_chain_allocates_before_the_first_write_and_frees_at_the_last_use() -> None:
    x, t, y = buffer("x", 8, 4), buffer("t", 8), buffer("y", 8, 4)
    host = emit((x,), [kernel((t,), (x,)), kernel((y,), (t, x))], (whole(y),))
    assert host.instructions == (
        Check("a0", ("8", "4"), ("4", "1")),
        Allocate("b0", ("8",), ("1",), "float32", "cpu"),
        Launch(0, ("b0", "a0"), ()),
        Allocate("b1", ("8", "4"), ("4", "1"), "float32", "cpu"),
        Launch(1, ("b1", "b0", "a0"), ()),
        Free(("a0",)),
    )
    assert host.outputs == (Ref("b1"),)


def test_a_dead_buffer_gives_its_storage_to_the_next_of_its_size() -> None:
    x, a, b, c = buffer("x", 8), buffer("a", 8), buffer("b", 8), buffer("c", 4, dtype=DType.F64)
    y = buffer("y", 2)
    steps = [kernel((a,), (x,)), kernel((b,), (a,)), kernel((c,), (b,)), kernel((y,), (c,))]
    host = emit((x,), steps, (whole(y),))
    # c has as many bytes as a, which is dead when c is first written.
    assert [i.name for i in of_type(host, Allocate)] == ["b0", "b1", "b2"]
    assert [i.buffers for i in of_type(host, Launch)][2] == ("b0", "b1")


def test_no_storage_is_kept_over_a_call_or_given_to_an_output_of_another_shape() -> None:
    x, a, b, c, h = buffer("x", 8), buffer("a", 8), buffer("b", 8), buffer("c", 8), buffer("h", 8)
    call = Extern(h, aten.sin.default, (whole(b),), {}, ORIGIN, "")
    host = emit((x,), [kernel((a,), (x,)), kernel((b,), (a,)), call, kernel((c,), (h,))], (whole(c),))
    assert len(of_type(host, Allocate)) == 3
    position = host.instructions.index(of_type(host, Call)[0])
    assert Free(("b0",)) in host.instructions[:position]

    y = buffer("y", 2, 4)
    host = emit((x,), [kernel((a,), (x,)), kernel((b,), (a,)), kernel((y,), (b,))], (whole(y),))
    assert len(of_type(host, Allocate)) == 3  # the caller would see a's shape


def test_an_output_is_never_put_where_a_buffer_of_its_layout_had_taken_another_ones_place() -> None:
    x, a, b, c, d, y = (buffer(n, *s) for n, s in zip("xabcdy", [(8,), (8,), (4,), (2, 4), (4,), (2, 4)], strict=True))
    steps = [kernel((a,), (x,)), kernel((b,), (a,)), kernel((c,), (b,)), kernel((d,), (c,)), kernel((y,), (d,))]
    host = emit((x,), steps, (whole(y),))
    launches = [i.buffers for i in of_type(host, Launch)]
    assert launches[2][0] == "b0"  # c lies in a's storage, under a tensor of a's shape
    made = {i.name: i.shape for i in of_type(host, Allocate)}
    assert made[host.outputs[0].name] == ("2", "4")


def test_a_buffer_an_operator_saw_is_never_reused() -> None:
    x, a, b, c = buffer("x", 8), buffer("a", 8), buffer("b", 8), buffer("c", 8)
    alias = HostValue("h")
    call = Extern(alias, aten.alias.default, (whole(a),), {}, ORIGIN, "")
    steps = [kernel((a,), (x,)), call, kernel((b,), (x,)), kernel((c,), (b,))]
    host = emit((x,), steps, (whole(c), alias))
    assert len({i.name for i in of_type(host, Allocate)}) == 3


def test_in_place_writes_to_the_input_and_back_to_the_callers_tensor() -> None:
    x, y, new = buffer("x", 8), buffer("y", 8), buffer("new", 8)
    host = emit((x, y), [kernel((new,), (x, y))], (), in_place={new: x})
    assert not of_type(host, Allocate)
    assert of_type(host, Launch) == [Launch(0, ("a0", "a0", "a1"), ())]
    assert of_type(host, Check)[0].original == "w0"
    assert host.instructions[-1] == WriteBack("w0", "a0")
    assert all("a0" not in i.names for i in of_type(host, Free))


def test_copies_come_last() -> None:
    x, a = buffer("x", 8), buffer("a", 8)
    host = emit((x,), [kernel((a,), (x,))], (), copies=((x, a),))
    assert Copy("a0", "b0") in host.instructions[-2:]


def test_arguments_of_a_call() -> None:
    n = Symbol("n")
    x, y, tuple_of = buffer("x", n, 4), buffer("y", n, 2), HostValue("h")
    part = View(x, (n.poly(), Poly.of(2)), (Poly.of(4), Poly.ONE), Poly.of(1))
    generator = torch.Generator()
    args = (whole(x), [part, n * 2, Poly.of(3)], slice(None, n.poly()), "text", -0.0, None)
    kwargs = {
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "layout": torch.strided,
        "memory_format": torch.channels_last,
        "generator": generator,
    }
    call = Extern(tuple_of, aten.sort.default, args, kwargs, ORIGIN, "")
    item = Extern(y, operator.getitem, (tuple_of, 1), {}, ORIGIN, "")
    host = emit((x,), [call, item, kernel((buffer("z", 1),), (y,))], (whole(y), n * 3, 2.5, None), {n: (x, 0)})
    assert host.instructions[0] == Bind("s0", "a0", 0)
    made, taken = of_type(host, Call)
    assert (made.result, made.target) == ("x0", "aten.sort.default")
    view = Ref("a0", ("s0", "2"), ("4", "1"), "1")
    assert made.args == (Ref("a0"), [view, SizeOf("s0*2"), 3], slice(None, SizeOf("s0")), "text", -0.0, None)
    assert made.kwargs == {
        "dtype": TorchValue("dtype", "bfloat16"),
        "device": TorchValue("device", "cpu"),
        "layout": TorchValue("layout", "strided"),
        "memory_format": TorchValue("memory_format", "channels_last"),
        "generator": Live("l0"),
    }
    assert host.live["l0"] is generator and not host.cacheable
    assert (taken.target, taken.args) == ("operator.getitem", (Ref("x0"), 1))
    # A kernel reads y, so what getitem gave is compared with what FX promised.
    assert Check("b0", ("s0", "2"), ("2", "1"), "float32") in host.instructions
    assert host.outputs == (Ref("b0"), SizeOf("s0*3"), 2.5, None)


def test_a_graph_constant_is_bound_not_stored() -> None:
    c, value = buffer("c", 2), torch.tensor([1.0, 2.0])
    host = emit((), [Extern(c, graph_constant, (value,), {}, ORIGIN, "")], (whole(c),))
    assert of_type(host, Call)[0].args == (Constant(0),)
    assert host.cacheable and host.constants[0] is value
    assert "1.0" not in json.dumps(host_to_json(host))


def test_what_cannot_be_named_is_called_live() -> None:
    call = Extern(HostValue("h"), lambda: 1, (), {}, ORIGIN, "")
    host = emit((), [call], ())
    assert isinstance(of_type(host, Call)[0].target, Live) and not host.cacheable
    with pytest.raises(ValueError, match="live"):
        host_to_json(host)


def test_an_integer_input_is_a_size_and_unused_inputs_are_freed_first() -> None:
    n, x, y = Symbol("n"), buffer("x", 4), buffer("y", 4)
    out = buffer("out", n)
    host = emit((n, x, y), [kernel((out,), (y,), (n,))], (whole(out),))
    assert host.inputs == ("s0", "a1", "a2")
    assert host.instructions[0] == Check("a2", ("4",), ("1",))
    assert host.instructions[1] == Free(("a1",))
    assert of_type(host, Launch) == [Launch(0, ("b0", "a2"), ("s0",))]


def test_names_of_the_user_do_not_reach_the_program() -> None:
    evil = "x'); __import__('os').system('true') #\n"
    n = Symbol(evil)
    x, y = buffer(evil, n), buffer(evil, n)
    call = Extern(HostValue(evil), aten.sin.default, (whole(x),), {}, Origin(evil, evil, evil), evil)
    host = emit((x,), [call, kernel((y,), (x,), (n,))], (whole(y),), {n: (x, 0)})
    assert "import" not in json.dumps(host_to_json(host))


def test_an_empty_buffer_without_a_kernel_is_allocated_and_other_gaps_are_errors() -> None:
    empty = buffer("e", 0, 4)
    host = emit((), [], (whole(empty),))
    assert of_type(host, Allocate) == [Allocate("b0", ("0", "4"), ("4", "1"), "float32", "cpu")]
    with pytest.raises(VerifyError, match="before anything writes"):
        emit((), [], (whole(buffer("gap", 4)),))
    with pytest.raises(VerifyError, match="no input gives"):
        emit((), [kernel((buffer("y", Symbol("q")),), ())], ())


def test_workspace_is_allocated_and_freed_like_any_buffer() -> None:
    x, partial, y = buffer("x", 64), buffer("partial", 2), buffer("y")
    host = emit((x,), [kernel((partial,), (x,)), kernel((y,), (partial,))], (whole(y),), workspace=(partial,))
    assert [type(i).__name__ for i in host.instructions] == [
        *("Check", "Allocate", "Launch", "Free", "Allocate", "Launch")
    ]


@given(st.integers(-5, 5), st.integers(-5, 5), st.integers(1, 9), st.integers(1, 9), st.integers(1, 7))
def test_size_text_computes_the_poly(a: int, b: int, n: int, m: int, d: int) -> None:
    s, t = Symbol("n"), Symbol("m")
    poly = (s * a + t * b) * s + (s * t + 1) // d + (t * 3 + s) % (d * s) - 4
    text = size_text(poly, {s: "s0", t: "s1"})
    assert eval(text, {"s0": n, "s1": m}) == poly.evaluate({s: n, t: m})


TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.complex_numbers(allow_nan=False)
    | st.builds(Ref, st.text(), st.none() | st.tuples(st.text()), st.none() | st.tuples(st.text()), st.text())
    | st.builds(SizeOf, st.text())
    | st.builds(TorchValue, st.text(), st.text())
    | st.builds(Constant, st.integers())
    | st.just(...),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | st.builds(slice, inner, inner, inner)
    ),
    max_leaves=12,
)


@given(TREES)
def test_trees_survive_json(tree: Any) -> None:
    again = decode_tree(json.loads(json.dumps(encode_tree(tree))))
    assert again == tree and repr(again) == repr(tree)  # repr tells 1 from True and 0.0 from -0.0


def test_special_floats_survive_json() -> None:
    nan, inf, zero = decode_tree(json.loads(json.dumps(encode_tree([math.nan, -math.inf, -0.0]))))
    assert math.isnan(nan) and inf == -math.inf and math.copysign(1, zero) == -1


def test_programs_survive_json() -> None:
    n = Symbol("n")
    x, a, y, h = buffer("x", n, 4), buffer("a", n, 4), buffer("y", n, 4), buffer("h", n, 4)
    call = Extern(h, aten.mul.Tensor, (whole(a), 2.5), {"k": [1, (None, True)]}, ORIGIN, "")
    steps = [kernel((a,), (x,), (n,)), call, kernel((y,), (h,), (n,))]
    host = emit((x,), steps, (whole(h), n * 2), {n: (x, 0)}, in_place={y: x}, copies=((x, a),))
    again = host_from_json(json.loads(json.dumps(host_to_json(host))))
    assert again == host
    assert {type(i) for i in host.instructions} >= {Bind, Check, Allocate, Launch, Call, Copy, WriteBack}


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        [],
        {"t": "tuple", "v": []},
        {"t": "HostProgram", "v": []},
        {"t": "HostProgram", "v": [{"t": "tuple", "v": [{"t": "Explode", "v": []}]}, (), ()]},
        {"t": "HostProgram", "v": [(), {"t": "tuple", "v": [{"t": "Copy", "v": ["a0"]}]}, ()]},
        {"t": "HostProgram", "v": [(), (), {"t": "tuple", "v": [{"t": "pickle", "v": ["x"]}]}]},
    ],
)
def test_malformed_data_is_refused(data: Any) -> None:
    with pytest.raises(MalformedProgram):
        host_from_json(data)


@pytest.mark.parametrize("target", [aten.mm.default, aten.add.Tensor, operator.getitem, math.floor, torch.sym_max])
def test_callables_are_found_by_name(target: Any) -> None:
    name = callable_name(target)
    assert name is not None and resolve_callable(name) is target


def test_custom_operators_are_found_by_name() -> None:
    with torch.library._scoped_library("onepass_test_host", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        target = torch.ops.onepass_test_host.twice.default
        assert callable_name(target) == "onepass_test_host.twice.default"
        assert resolve_callable("onepass_test_host.twice.default") is target


@pytest.mark.parametrize("name", ["os.system", "aten.no_such.default", "operator.attrgetter", "builtins.eval", "x"])
def test_no_other_function_has_a_name(name: str) -> None:
    with pytest.raises(LookupError):
        resolve_callable(name)
    assert callable_name(eval) is None
