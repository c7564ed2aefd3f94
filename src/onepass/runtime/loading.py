"""`onepass.load`: an exported program, ready to be called. Neither captures nor compiles; needs torch alone.

The order of things: the file is whole, its format is known, this machine has what it needs; then weights are read,
then machine code is mapped.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..errors import DamagedFile, IncompatibleFile, InputMismatch, UnknownTarget
from ..ir import source as ir
from ..ir.host_json import MalformedProgram
from ..ir.target import find_target
from .archive import Archive
from .entries import GraphEntry, entry_from_json
from .executable import Executable
from .kernels import build_kernels
from .launcher import provide_launcher
from .requirements import FORMAT, Requirements
from .shipped import LAUNCHER, ShippedBuilder
from .signature import Inputs, builder_of

KERNELS = "kernels/"
MANIFEST, PROGRAM = "manifest.json", "program.json"


class LoadedProgram:
    """An exported program. Takes what the exported function took and gives what it gave, without gradients.

    `weights`: its parameters, buffers and other tensors by name, on `device`; a program that changes a buffer changes
    it there. `record`: what was fused and why.
    """

    def __init__(
        self, manifest: Any, entry: GraphEntry, weights: dict[str, torch.Tensor], device: torch.device, call: Any
    ) -> None:
        self.device, self.weights, self.record = device, weights, entry.record
        self._inputs, self._call = Inputs.from_json(manifest["inputs"]), call
        self._given = [(kind == "weight", weights[x] if kind == "weight" else int(x)) for kind, x in manifest["given"]]
        self._build = builder_of(manifest["outputs"])
        self._aliases = [(int(leaf), self._given[int(k)]) for leaf, k in manifest["aliases"]]

    def __repr__(self) -> str:
        return f"<onepass program for {self.record.target} on {self.device}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        taken = self._inputs.taken(args, kwargs, self.device)
        with torch.no_grad():
            results = self._call([value if is_weight else taken[value] for is_weight, value in self._given])
        if self._aliases:
            results = list(results)
            for leaf, (is_weight, value) in self._aliases:
                results[leaf] = value if is_weight else taken[value]
        return self._build(results)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The tensors of the program by name, as of a module."""
        return dict(self.weights)


def load(
    path: str | os.PathLike[str],
    /,
    *,
    device: str | torch.device | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> LoadedProgram:
    """The program that `onepass.export` wrote, on a device: the current GPU, or the CPU if it was exported for that.

    `weights`: tensors by name, in the place of the file's own or of what was left out of it. Raises `DamagedFile`,
    `IncompatibleFile` or `InputMismatch` before anything of the file runs.
    """
    with Archive(Path(path)) as archive:
        manifest = archive.read_json(MANIFEST)
        name = str(archive.path)
        found = manifest.get("format") if isinstance(manifest, dict) else None
        if found != FORMAT:
            fix = "Load it with the version of onepass that wrote it, or export it again."
            raise IncompatibleFile(name, f"a onepass that reads format {found!r}", f"one for format {FORMAT}", fix)
        try:
            return _loaded(archive, manifest, device, weights or {})
        except (LookupError, TypeError, ValueError, AttributeError, MalformedProgram, UnknownTarget) as error:
            raise DamagedFile(name, f"{type(error).__name__}: {error}") from error


def _loaded(
    archive: Archive, manifest: Any, asked: str | torch.device | None, given: Mapping[str, torch.Tensor]
) -> LoadedProgram:
    needs = Requirements.from_json(manifest["needs"])
    target = find_target(needs.target)
    on_gpu = target.language != "c"
    device = _device(asked, on_gpu)
    with torch.cuda.device(device) if on_gpu and torch.cuda.is_available() else nullcontext():
        needs.check(str(archive.path))
    if (device.type == "cuda") != on_gpu:
        fix = "Leave device= away, or name one of that kind."
        raise IncompatibleFile(str(archive.path), "a GPU" if on_gpu else "the CPU", f"device={device}", fix)
    weights = _weights(archive, manifest["weights"], given, device)
    constants = [weights[name] for name in manifest["constants"]]
    entry = entry_from_json(archive.read_json(PROGRAM), constants)
    entry = replace(entry, host=_placed(entry.host, str(device)))
    binaries = {n.removeprefix(KERNELS): archive.read(n) for n in archive.names() if n.startswith(KERNELS)}
    if LAUNCHER in archive.names():
        provide_launcher(archive.read(LAUNCHER))
    kernels = build_kernels(entry.kernels, ShippedBuilder(target, binaries, archive.checksum))
    executable = Executable(entry.host, kernels)
    return LoadedProgram(manifest, entry, weights, device, executable.call)


def _device(asked: str | torch.device | None, on_gpu: bool) -> torch.device:
    """With its number, as tensors have it."""
    device = torch.device(asked or ("cuda" if on_gpu else "cpu"))
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _weights(
    archive: Archive, described: Any, given: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """Every tensor by each of its names; equal ones are one tensor."""
    known = {name for one in described for name in one["names"]}
    if unknown := sorted(set(given) - known):
        raise InputMismatch("a weight", unknown[0], f"the names {', '.join(sorted(known)) or '(none)'}")
    found: dict[str, torch.Tensor] = {}
    for one in described:
        names, shape, strides = one["names"], tuple(one["shape"]), tuple(one["strides"])
        dtype = getattr(torch, one["dtype"])
        own = next((given[n] for n in names if n in given), None)
        if own is not None:
            if (own.dtype, tuple(own.shape)) != (dtype, shape):
                wanted = f"{one['dtype']}{list(shape)}"
                raise InputMismatch(f"the weight {names[0]}", f"{own.dtype}{list(own.shape)}", wanted)
            tensor = own.detach()
            if tensor.device != device or tensor.stride() != strides:
                tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device).copy_(tensor)
        elif one["member"] is None:
            raise InputMismatch(f"the weight {names[0]}", "missing", "weights= given to onepass.load")
        else:
            tensor = archive.tensor(one["member"], dtype, shape, strides).to(device)
        found.update(dict.fromkeys(names, tensor))
    return found


def _placed(tree: Any, device: str) -> Any:
    """A host program, or a part of it, with its GPU being this one."""
    match tree:
        case ir.HostProgram():
            return replace(tree, instructions=_placed(tree.instructions, device), outputs=_placed(tree.outputs, device))
        case ir.Allocate(device=old) | ir.Launch(device=old) if old.startswith("cuda"):
            return replace(tree, device=device)
        case ir.Call():
            return replace(tree, args=_placed(tree.args, device), kwargs=_placed(tree.kwargs, device))
        case ir.TorchValue("device", name) if name.startswith("cuda"):
            return replace(tree, name=device)
        case list() | tuple():
            return type(tree)(_placed(x, device) for x in tree)
        case dict():
            return {key: _placed(x, device) for key, x in tree.items()}
    return tree
