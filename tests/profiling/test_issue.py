"""Issue time: instructions by the lines they come from, their cycles, and the turns of the loops around them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass.ir.target import find_target
from onepass.profiling.issue import (
    CONVERSIONS,
    FOREIGN,
    MEMORY,
    POSITIONS,
    PRODUCTS,
    STATES,
    instructions,
    issue_shares,
)
from onepass.runtime.triton_private import find_assembler

SOURCE = """# k0: rows
def onepass_exp(out0, in1):
    g0 = tl.program_id(0)
    for i0 in tl.range(0, 10, num_stages=3):
        load0 = tl.load(in1 + i0)
        exp_0 = op_exp(load0)
        sum_acc0_0 = sum_acc0_0 + exp_0
    div_0 = sum_acc0_0 / 2
    product0 = tl.dot(a, b)
"""
CODE = """
        /*0000*/                   S2R R0, SR_CTAID.X ;
	//## File "/a/prelude.py", line 3 inlined at "/a/k.py", line 3
	//## File "/a/k.py", line 3
        /*0010*/                   MOV R1, R0 ;
.L_x_1:
	//## File "/a/k.py", line 5
        /*0020*/                   LDG.E.64 R2, [R0] ;
	//## File "/a/prelude.py", line 8 inlined at "/a/k.py", line 6
	//## File "/a/k.py", line 6
        /*0030*/                   MUFU.EX2 R2, R2 ;
	//## File "/a/k.py", line 7
        /*0040*/                   FADD R3, R3, R2 ;
        /*0050*/              @!P0 BRA `(.L_x_1) ;
	//## File "/a/k.py", line 8
        /*0060*/                   BSSY B0, `(.L_x_2) ;
        /*0070*/                   FMUL R9, R9, R9 ;
.L_x_2:
        /*0080*/                   FMUL R3, R3, 0.5 ;
	//## File "/a/k.py", line 9
        /*0090*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
"""


def test_instructions_have_the_outermost_line_and_jumps() -> None:
    code, labels = instructions(CODE)
    assert [i.line for i in code] == [0, 3, 5, 6, 7, 7, 8, 8, 8, 9]
    assert labels == {".L_x_1": 0x20, ".L_x_2": 0x80}
    assert [(i.opcode, i.target) for i in code if i.target] == [("BRA", ".L_x_1"), ("BSSY", ".L_x_2")]


def test_lines_of_another_file_without_their_caller_are_nobodys() -> None:
    """Triton 3.6 leaves the callers out where nothing puts them in."""
    without = CODE.replace(' inlined at "/a/k.py", line 6\n\t//## File "/a/k.py", line 6', "")
    code, _ = instructions(without, "k")
    assert [i.line for i in code] == [0, 3, 5, FOREIGN, 7, 7, 8, 8, 8, 9]
    assert issue_shares(without, SOURCE, file="k") == {}
    assert issue_shares(CODE, SOURCE, file="k") == issue_shares(CODE, SOURCE) != {}


def test_cycles_are_counted_as_often_as_loops_turn() -> None:
    shares = issue_shares(CODE, SOURCE)
    # Load: 8 x 10, exp: 8 x 10, the sum and the jump back: 2 x 10, product: 64 / 2, the rest once; no slow path.
    cycles = {MEMORY: 80, "exp": 80, STATES: 20, PRODUCTS: 32, POSITIONS: 2, "div": 2}
    whole = sum(cycles.values())
    assert shares == pytest.approx({name: c / whole for name, c in cycles.items()})
    assert [*shares][:3] == [MEMORY, "exp", PRODUCTS]


def test_names_are_those_of_users_and_conversions_are_apart() -> None:
    source = "normal_16_0 = op_normal_16(x)\nwelford_0_mean = y\nwiden_0 = x\nout = tl.dot(a, b, out)\ntl.store(o, y)"
    opcodes = [("FFMA", 1), ("FADD", 2), ("SHF.L.U32", 3), ("LOP3.LUT", 4), ("FMUL", 4), ("F2FP", 5), ("FMUL", 5)]
    rows = [f'//## File "k.py", line {line}\n/*{k:04x}*/ {opcode} R0 ;' for k, (opcode, line) in enumerate(opcodes)]
    shares = issue_shares("\n".join([*rows, "/*0090*/ EXIT ;", "/*00a0*/ NOP ;"]), source)
    cycles = {"gelu": 1, "var_mean": 1, CONVERSIONS: 2 + 2 + 2, STATES: 1, POSITIONS: 1}
    assert shares == pytest.approx({name: c / 10 for name, c in cycles.items()})


def test_a_kernel_for_a_chip_that_is_absent() -> None:
    pytest.importorskip("triton")

    def softmax(x: Tensor) -> Tensor:
        return torch.softmax(x.float(), -1).to(torch.bfloat16)

    with FakeTensorMode():
        report = onepass.explain(
            softmax, torch.empty(512, 20000, dtype=torch.bfloat16), target="sm_90", operations=True
        )
    (kernel,) = report.kernels
    if find_assembler(find_target("sm_90")) is None:
        pytest.skip("no disassembler")
    assert sum(kernel.issue.values()) == pytest.approx(1.0)
    assert kernel.issue["exp"] > 0.15 and kernel.issue[MEMORY] > 0.1 and kernel.issue[POSITIONS] < 0.3
    assert kernel.issue[STATES] > 0.1  # the maximum and the sum, folded by functions that are inlined
    assert "issue     " in str(report) and "exp" in str(report) and "Issue: " in report.to_html()
    assert report.to_dict()["graphs"][0]["kernels"][0]["issue"] == kernel.issue


def test_other_chips_have_none() -> None:
    (kernel,) = onepass.explain(torch.sin, torch.randn(64), operations=True).kernels
    assert kernel.issue == {}
