"""Fresh processes that compile in threads, in forked children, and call across them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.scripts import environment, run


def test_first_compilation_in_a_thread(tmp_path: Path) -> None:
    body = """
import threading
errors = []
def work():
    try:
        check()
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=work) for _ in range(3)]
[t.start() for t in threads]; [t.join() for t in threads]
assert not errors, errors
print("right")
"""
    assert "right" in run(body, environment(tmp_path / "cache"))


@pytest.mark.rotating
def test_backward_on_another_thread(tmp_path: Path) -> None:
    body = """
import threading
y = torch.randn(50, 60, requires_grad=True)
out = torch.compile(lambda y: (y.sin().softmax(-1) * y).sum(), backend="onepass")(y)
thread = threading.Thread(target=out.backward)
thread.start(); thread.join()
mine = y.grad.clone(); y.grad = None
(y.sin().softmax(-1) * y).sum().backward()
torch.testing.assert_close(mine, y.grad, rtol=1e-4, atol=1e-6)
print("right")
"""
    assert "right" in run(body, environment(tmp_path / "cache"))


def test_fork_before_and_after_compiling(tmp_path: Path) -> None:
    """A child compiles for itself and calls what its parent compiled, with the parent's threads gone."""
    body = """
import os
import numpy
big = torch.randn(900, 1100)
run = torch.compile(lambda v: (v.exp() * 2).sum(0), backend="onepass")
expected, cosine = run(big), big.cos() + 3
def close(a, b):  # not torch's: its own thread pool does not survive a fork
    return numpy.allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-5)
for _ in range(2):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert close(run(big), expected)
            other = torch.compile(lambda v: v.cos() + 3, backend="onepass")
            assert close(other(big), cosine)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(run(big), expected)
print("right")
"""
    assert "right" in run(body, environment(tmp_path / "cache"))


@pytest.mark.rotating
def test_data_loader_workers(tmp_path: Path) -> None:
    """Forked loader workers that call a compiled function."""
    body = """
run = torch.compile(lambda v: v.sin() * 2 + 1, backend="onepass")
run(torch.ones(64))
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return run(torch.full((64,), float(i)))
for i, batch in enumerate(torch.utils.data.DataLoader(Data(), num_workers=2)):
    torch.testing.assert_close(batch[0], torch.full((64,), float(i)).sin() * 2 + 1)
print("right")
"""
    assert "right" in run(body, environment(tmp_path / "cache"))


@pytest.mark.rotating
def test_fork_while_another_thread_compiles(tmp_path: Path) -> None:
    """The child has none of the locks that the thread held."""
    body = """
import os, signal, threading
import onepass
from onepass.ir import interning
from onepass.runtime import triton_private
held = threading.Event()
def compile():
    with interning._lock, triton_private._reading:
        held.set()
        threading.Event().wait()
threading.Thread(target=compile, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(60)
    try:
        found = onepass.explain(lambda v: v.sin() * 2, x, target="sm_90", options={"strict": True, "cache": False})
        os._exit(0 if found.kernels[0].registers else 1)
    finally:
        os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("right")
"""
    pytest.importorskip("triton")
    assert "right" in run(body, environment(tmp_path / "cache"))
