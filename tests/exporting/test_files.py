"""Files that are damaged, of another version or for another machine: one clear error each, and nothing of them runs."""

from __future__ import annotations

import ctypes
import json
import random
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import onepass
from onepass.errors import DamagedFile, IncompatibleFile, InputMismatch, OnepassError
from onepass.ir.target import find_target
from onepass.runtime import loading, requirements
from onepass.runtime.archive import Archive, write_archive
from onepass.runtime.entries import entry_from_json
from onepass.runtime.kernels import build_kernels
from onepass.runtime.requirements import Requirements
from onepass.runtime.shipped import ShippedBuilder
from onepass.runtime.triton_kernels import TileKernel, variants_of
from tests.checking import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="tests/gpu has those of a GPU")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a kernel, a library call, weights and a range of sizes."""
    path: Path = tmp_path_factory.mktemp("files") / "whole.onepass"
    module = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.GELU())
    rows = torch.export.Dim("rows", min=1, max=9)
    onepass.export(module, torch.randn(3, 6), path=path, dynamic_shapes=({0: rows},))
    return path


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """What was mapped, in the order."""
    mapped: list[Path] = []
    own = loading.build_kernels
    monkeypatch.setattr(loading, "build_kernels", lambda *args: mapped.append(args[0]) or own(*args))
    yield mapped


def refused(path: Path, kind: type[OnepassError], match: str | None = None) -> None:
    with pytest.raises(kind, match=match) as caught:
        onepass.load(path)
    assert str(path) in str(caught.value)


def test_any_changed_bit_is_seen(whole: Path, tmp_path: Path, nothing_runs: list[Path]) -> None:
    content, damaged = whole.read_bytes(), tmp_path / "damaged"
    drawn = random.Random(0)
    places = [*range(0, 64, 5), *range(len(content) - 256, len(content), 7), *drawn.sample(range(len(content)), 100)]
    for place in places:
        changed = bytearray(content)
        changed[place] ^= 1 << drawn.randrange(8)
        damaged.write_bytes(changed)
        refused(damaged, DamagedFile)
    assert not nothing_runs


def test_any_cut_is_seen(whole: Path, tmp_path: Path, nothing_runs: list[Path]) -> None:
    content, damaged = whole.read_bytes(), tmp_path / "damaged"
    drawn = random.Random(0)
    for length in [0, 1, 10, len(content) - 1, *drawn.sample(range(len(content)), 100)]:
        damaged.write_bytes(content[:length])
        refused(damaged, DamagedFile)
        damaged.write_bytes(content[length:] + b"x" * (length == 0))
        refused(damaged, DamagedFile)
    damaged.write_bytes(content + content)  # the end is right, the beginning is not
    refused(damaged, DamagedFile, "checksum")
    assert not nothing_runs


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None and archive.comment.startswith(b"onepass sha256 ")
        return {name: archive.read(name) for name in archive.namelist()}


def rewritten(path: Path, content: dict[str, bytes]) -> Path:
    """A whole file of these members, with a right checksum."""
    write_archive(path, content.items())
    return path


OTHERS = [None, -1, 2**70, "os.system", [], {}, [[]], "s0", {"t": "Call", "v": []}, 1.5]


def mutants(data: Any, drawn: random.Random, count: int) -> Iterator[Any]:
    """Copies of JSON data in which one value is another or missing."""

    def places(value: Any, at: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        yield at
        if isinstance(value, dict | list):
            for key in value if isinstance(value, dict) else range(len(value)):
                yield from places(value[key], (*at, key))

    for place in drawn.choices([p for p in places(data, ()) if p], k=count):
        copy = json.loads(json.dumps(data))
        inner = copy
        for key in place[:-1]:
            inner = inner[key]
        if drawn.random() < 0.3:
            del inner[place[-1]]
        else:
            inner[place[-1]] = drawn.choice(OTHERS)
        yield copy


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.rotating) for n in range(2, 12))])
@pytest.mark.parametrize("member", ["manifest.json", "program.json"])
def test_other_data_with_a_right_checksum(whole: Path, tmp_path: Path, member: str, seed: int) -> None:
    """Such a file was made on purpose: an error of ours, or a program that loads, and nothing else."""
    content, drawn, seen = members(whole), random.Random(seed), set()
    for other in mutants(json.loads(content[member]), drawn, 100):
        if member == "program.json" and other.get("host") == json.loads(content[member])["host"]:
            continue  # sources and records are not read here
        path = rewritten(tmp_path / "other", {**content, member: json.dumps(other).encode()})
        try:
            onepass.load(path)
        except (DamagedFile, IncompatibleFile, InputMismatch) as error:
            seen.add(type(error))
    assert DamagedFile in seen


def test_missing_members(whole: Path, tmp_path: Path) -> None:
    content = members(whole)
    for name in content:
        left = {n: c for n, c in content.items() if n != name}
        with pytest.raises(OnepassError):
            onepass.load(rewritten(tmp_path / "less", left))
    weight = next(n for n in content if n.startswith("weights/"))
    refused(rewritten(tmp_path / "short", {**content, weight: content[weight][:-4]}), DamagedFile, "bytes instead of")


def test_what_is_no_such_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"PK\x03\x04" + b"\0" * 4000)
    refused(path, DamagedFile, "does not end as such a file")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", "{}")
    refused(path, DamagedFile)
    refused(rewritten(path, {}), DamagedFile, "manifest.json")
    with pytest.raises(FileNotFoundError):
        onepass.load(tmp_path / "none")


def test_another_format(whole: Path, tmp_path: Path, nothing_runs: list[Path]) -> None:
    content = members(whole)
    manifest = json.loads(content["manifest.json"])
    for number in (2, 0, "1", None):
        path = rewritten(
            tmp_path / "x", {**content, "manifest.json": json.dumps({**manifest, "format": number}).encode()}
        )
        refused(path, IncompatibleFile, "a onepass that reads format")
    assert not nothing_runs


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"system": "Plan9"}, "needs Plan9 on"),
        ({"machine": "vax"}, "needs Linux on vax"),
        ({"instructions": ("avx512f", "avx2048")}, "a processor with .*avx2048"),
        ({"glibc": (9, 9)}, "needs glibc 9.9; here is 2"),
        ({"openmp": "libgomp-000.so"}, "a torch that comes with libgomp-000.so"),
        ({"operators": {"aten.mm.default": "aten::mm(Tensor x) -> Tensor"}}, r"the operator aten.mm.default"),
        ({"operators": {"mine.own.default": "mine::own(Tensor x) -> Tensor"}}, r"none of that name.*load_library"),
        ({"target": "sm_90"}, "needs a GPU of the kind sm_90; here is none"),
        ({"target": "gfx942"}, "needs a GPU of the kind gfx942"),
    ],
)
def test_another_machine(
    whole: Path, tmp_path: Path, changes: dict[str, Any], said: str, nothing_runs: list[Path]
) -> None:
    content = members(whole)
    manifest = json.loads(content["manifest.json"])
    manifest["needs"] = replace(Requirements.from_json(manifest["needs"]), **changes).to_json()
    path = rewritten(tmp_path / "x", {**content, "manifest.json": json.dumps(manifest).encode()})
    refused(path, IncompatibleFile, said)
    assert not nothing_runs


def test_an_older_driver_and_another_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = Requirements("sm_90", *requirements.machine_here(), (), "", {}, cuda=(13, 1))
    monkeypatch.setattr(requirements, "_chip_here", lambda: "sm_90")
    monkeypatch.setattr(requirements, "_driver_version", lambda: (12, 8))
    with pytest.raises(IncompatibleFile, match=r"a driver for CUDA 13; here is one for 12\.8"):
        needs.check("x")
    monkeypatch.setattr(requirements, "_driver_version", lambda: (13, 0))
    needs.check("x")
    monkeypatch.setattr(requirements, "_chip_here", lambda: "sm_100")
    with pytest.raises(IncompatibleFile, match=r"sm_90; here is sm_100. .*target='sm_100'"):
        needs.check("x")


def test_a_device_of_another_kind(whole: Path) -> None:
    with pytest.raises(IncompatibleFile, match="needs the CPU; here is device=cuda"):
        onepass.load(whole, device="cuda:0")


def test_the_file_is_the_same_for_the_same_program(whole: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    for name in "ab":
        onepass.export(lambda x: x.sin() * 2, torch.ones(4), path=tmp_path / name)
    first, second = (members(tmp_path / name) for name in "ab")
    assert first.keys() == second.keys() and first["manifest.json"] == second["manifest.json"]
    with Archive(whole) as archive:
        assert archive.names()[:2] == ["manifest.json", "program.json"]


def test_a_processor_can_be_named(tmp_path: Path) -> None:
    x, path = torch.randn(50), tmp_path / "x"
    onepass.export(lambda x: x.sin() * 2, x, path=path, march="x86-64-v2")
    needs = json.loads(members(path)["manifest.json"])["needs"]["instructions"]
    assert "sse4_2" in needs and "avx" not in needs
    torch.testing.assert_close(onepass.load(path)(x), x.sin() * 2)


def test_a_file_for_an_absent_chip(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    path = tmp_path / "x"
    x = torch.randn(64, 130)
    onepass.export(lambda x: x.softmax(-1)[:, None, 1:], x, path=path, target="sm_90")
    content = members(path)
    kernels = [name for name in content if name.startswith("kernels/")]
    assert len(kernels) >= 2 and all(b"\x7fELF" in content[name] for name in kernels)  # and for any pointers
    assert content["launcher"].startswith(b"\x7fELF")
    needs = json.loads(content["manifest.json"])["needs"]
    assert needs["target"] == "sm_90" and needs["instructions"] == [] and needs["cuda"] > [0, 0]
    host = json.dumps(json.loads(content["program.json"])["host"])
    assert '"cuda:0"' in host and '"cpu"' not in host
    refused(path, IncompatibleFile, "needs a GPU of the kind sm_90")
    (tmp_path / "launcher.so").write_bytes(content["launcher"])
    assert ctypes.CDLL(str(tmp_path / "launcher.so")).onepass_launch
    entry = entry_from_json(json.loads(content["program.json"]))
    binaries = {name.removeprefix("kernels/"): content[name] for name in kernels}
    builder = ShippedBuilder(find_target("sm_90"), binaries, "checksum")
    for source, kernel in zip(entry.kernels, build_kernels(entry.kernels, builder), strict=True):
        assert isinstance(kernel.function, TileKernel) and kernel.function.built.registers > 0
        for variant in variants_of(source):
            assert variant.key in binaries
