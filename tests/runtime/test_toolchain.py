"""The C toolchain: found, named, and building complete files or nothing."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

import onepass
from onepass.errors import CompilerNotFound, KernelBuildError
from onepass.runtime import toolchain as module
from onepass.runtime.toolchain import find_toolchain

PARALLEL = """
#include <stdint.h>
extern int omp_get_num_threads(void);
int threads(void) {
  int seen = 0;
#pragma omp parallel
  {
#pragma omp single
    seen = omp_get_num_threads();
  }
  return seen;
}
"""


def _program(folder: Path, name: str, text: str = "#!/bin/sh\nexit 0\n") -> Path:
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


def _system_compiler() -> str:
    found = subprocess.run(["sh", "-c", "command -v cc || command -v gcc"], capture_output=True, text=True)
    return found.stdout.strip()


def test_builds_a_shared_object_and_nothing_else(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "kernel.so"
    find_toolchain().compile_c("int answer(void) { return 42; }", output)
    assert ctypes.CDLL(str(output)).answer() == 42
    assert [p.name for p in output.parent.iterdir()] == ["kernel.so"]


BOTH = """
#include "prelude.h"
void both(float *x, float *y, float *z) {
#pragma omp simd
  for (int i = 0; i < 4096; i++) {
    const float angle = x[i];
    y[i] = op_sin_f32(angle), z[i] = op_cos_f32(angle);
  }
}
"""


@pytest.mark.skipif(platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc", reason="glibc's vector code")
@pytest.mark.skipif("sanitize" in os.environ.get("CC", ""), reason="a sanitizer looks at each access")
def test_a_sine_and_a_cosine_of_one_number_are_computed_on_vectors(tmp_path: Path) -> None:
    output = tmp_path / "kernel.so"
    toolchain = find_toolchain(Path(onepass.__file__).parent / "codegen")
    toolchain.compile_c(BOTH, output)
    called = output.read_bytes()
    assert "clang" in toolchain.version or all(re.search(rb"_ZGV\w+_" + f, called) for f in (b"sinf", b"cosf"))
    assert b"sincosf" not in called


def test_a_rejected_kernel_names_message_and_source(tmp_path: Path) -> None:
    output = tmp_path / "kernel.so"
    with pytest.raises(KernelBuildError) as caught:
        find_toolchain().compile_c("int broken(void) { return nonsense; }", output)
    assert "nonsense" in str(caught.value)
    kept = tmp_path / "kernel.failed.c"
    assert str(kept) in str(caught.value)
    assert "broken" in kept.read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["kernel.failed.c"]


def test_a_failed_build_leaves_the_old_file(tmp_path: Path) -> None:
    output = tmp_path / "kernel.so"
    output.write_text("old")
    with pytest.raises(KernelBuildError):
        find_toolchain().compile_c("#error no", output)
    assert output.read_text() == "old"


def test_the_environment_chooses_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = _program(tmp_path, "mycc")
    monkeypatch.setenv("CC", str(mine))
    assert find_toolchain().command == (str(mine),)
    real = _system_compiler()
    monkeypatch.setenv("CC", f"{mine} {real} -pipe")
    toolchain = find_toolchain()
    assert toolchain.command == (str(mine), real, "-pipe")
    assert toolchain.path == Path(real).resolve()


def test_no_compiler_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompilerNotFound, match="cc, gcc, clang"):
        find_toolchain()
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(CompilerNotFound, match="no-such-compiler"):
        find_toolchain()


def test_candidates_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    clang = _program(tmp_path, "clang")
    assert find_toolchain().command == (str(clang),)
    gcc = _program(tmp_path, "gcc")
    assert find_toolchain().command == (str(gcc),)


def test_clang_gets_no_second_openmp_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(_program(tmp_path, "clang-17")))
    toolchain = find_toolchain()
    assert "-fopenmp-simd" in toolchain.flags
    assert "-fopenmp" not in toolchain.flags
    assert "-lmvec" not in toolchain.libraries


def test_fingerprint_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert find_toolchain().fingerprint() == find_toolchain().fingerprint()


def test_fingerprint_follows_compiler_flags_headers_and_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = _program(tmp_path, "mycc")
    monkeypatch.setenv("CC", str(compiler))
    headers = tmp_path / "headers"
    headers.mkdir()
    header = headers / "prelude.h"
    header.write_text("1")
    seen = [find_toolchain(headers).fingerprint()]
    header.write_text("2")
    seen.append(find_toolchain(headers).fingerprint())
    compiler.write_text("#!/bin/sh\nexit 1\n# another version\n")
    seen.append(find_toolchain(headers).fingerprint())
    seen.append(find_toolchain(None).fingerprint())
    monkeypatch.setattr(module, "_COMMON_FLAGS", (*module._COMMON_FLAGS, "-g"))
    seen.append(find_toolchain(None).fingerprint())
    monkeypatch.setattr(module, "cpu_features", lambda: "another processor")
    seen.append(find_toolchain(None).fingerprint())
    assert len(set(seen)) == len(seen)


def test_version_is_the_compilers_first_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(_program(tmp_path, "mycc", "#!/bin/sh\necho 'mycc 1.2.3'\necho more\n")))
    assert find_toolchain().version == "mycc 1.2.3"


def test_one_openmp_runtime_beside_torch(tmp_path: Path) -> None:
    """In a fresh process, so that only torch and the kernel decide what is mapped."""
    output = tmp_path / "kernel.so"
    find_toolchain().compile_c(PARALLEL, output)
    script = (
        "import torch, ctypes\n"
        "torch.set_num_threads(2)\n"
        f"kernel = ctypes.CDLL({str(output)!r})\n"
        "print(kernel.threads())\n"
        "maps = open('/proc/self/maps').read().split()\n"
        "print(len({w for w in maps if 'libgomp' in w or 'libomp' in w or 'libiomp' in w}))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["2", "1"], done.stderr


def test_prelude_compiles_without_warnings_and_as_scalar_code(tmp_path: Path) -> None:
    prelude = Path(module.__file__).parent.parent / "codegen"
    toolchain = find_toolchain(prelude)
    text = '#include "prelude.h"\nfloat f(float x) { return op_exp_f32(op_tanh_f32(x)); }\n'
    for extra in ([], ["-DONEPASS_SCALAR_MATH"], ["-fno-openmp"]):
        flags = [f for f in toolchain.flags if f != "-w"]
        command = [
            *toolchain.command,
            *flags,
            *extra,
            "-Wall",
            "-Werror",
            "-Wno-psabi",
            "-I",
            str(prelude),
            "-x",
            "c",
            "-",
        ]
        command += ["-o", str(tmp_path / "f.so"), "-lm"]
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
