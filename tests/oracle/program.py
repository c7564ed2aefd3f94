"""A program of the corpus."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Arguments = Callable[[], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Program:
    """`train`: gradients of every float argument; `recorded`: of those arguments that ask for one."""

    name: str
    function: Callable[..., Any]
    arguments: Arguments
    train: bool = False
    recorded: bool = False
