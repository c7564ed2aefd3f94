"""The page of everything public, from signatures and docstrings."""

from __future__ import annotations

import inspect
import re

import onepass

HEAD = """# API

`import onepass` makes the backend known: `torch.compile(model, backend="onepass")`. Everything else that is public is
below. This page is generated from docstrings (`pytest --update-golden tests/docs`).
"""


def api_page() -> str:
    named = {name: getattr(onepass, name) for name in onepass.__all__}
    functions = {n: v for n, v in named.items() if not inspect.isclass(v)}
    classes = {n: v for n, v in named.items() if inspect.isclass(v)}
    text = HEAD
    for name, function in sorted(functions.items()):
        text += f"\n## {name}\n\n{_signature(name, function)}\n{_doc(function)}\n"
    for name, own in sorted(classes.items()):
        text += f"\n## {name}\n\n{_doc(own)}\n" + "".join(_members(own))
    return text


def _members(own: type) -> list[str]:
    """Documented methods and properties, those of the package's own bases included."""
    bases = [b for b in own.__mro__ if b.__module__.startswith("onepass")]
    members = {name: value for base in reversed(bases) for name, value in vars(base).items() if name[0] != "_"}
    found = []
    for name, value in sorted(members.items()):
        inner = value.fget if isinstance(value, property) else value
        if inspect.isfunction(inner) and inner.__doc__:
            call = "" if isinstance(value, property) else "()"
            found.append(f"\n- `{name}{call}`: {_doc(inner)}")
    return [*found, "\n"] if found else []


def _signature(name: str, function: object) -> str:
    try:
        signature = str(inspect.signature(function))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    return f"```python\nonepass.{name}{re.sub(r'<[^>]*>', '...', signature)}\n```\n"


def _doc(value: object) -> str:
    return " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split()) + "".join(
        f"\n\n{' '.join(part.split())}" for part in (inspect.getdoc(value) or "").split("\n\n")[1:]
    )
