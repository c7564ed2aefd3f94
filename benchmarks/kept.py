"""Measurements kept in a file as they are made: a run that is cut short goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_ANY_TIME = ("date", "environment")  # of the facts: may differ between two parts of one table


class Kept:
    """The rows of one table, by name. `settings`: what must be the same for all of them."""

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        facts = {k: v for k, v in settings["facts"].items() if k not in _ANY_TIME}
        self._path, self._settings = path, json.loads(json.dumps({**settings, "facts": facts}))
        self.rows: dict[str, Row] = {}
        if path is None or not path.exists():
            return
        try:
            found = json.loads(path.read_text("utf-8"))
            other, self.rows = found["settings"], found["rows"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{path} holds no measurements: {error}") from error
        if differing := [k for k, v in self._settings.items() if other.get(k) != v]:
            raise SystemExit(f"{path} was made with other {', '.join(differing)}; measure into another file")

    def row(self, name: str, measure: Callable[[], Row]) -> Row:
        """A row that is there, or a new one, written before it is given."""
        if name not in self.rows:
            self.rows[name] = measure()
            if self._path is not None:
                new = self._path.with_name(f"{self._path.name}.new")
                new.write_text(json.dumps({"settings": self._settings, "rows": self.rows}), "utf-8")
                new.replace(self._path)
        return self.rows[name]
