"""Bad options are errors that say what to write instead."""

from __future__ import annotations

import pytest
import torch

import onepass
from onepass.backend import record_compilations
from onepass.errors import InvalidOption, UnknownOption, UnknownTarget
from onepass.ir.options import Options, options_of_mode
from onepass.ir.target import find_target


def messages(error: BaseException | None) -> str:
    """Everything an error chain says: dynamo wraps what a backend raises."""
    parts = []
    while error is not None:
        parts.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(parts)


def failed(**options: object) -> str:
    with pytest.raises(Exception) as caught:
        torch.compile(lambda x: x + 1, backend="onepass", options=options)(torch.ones(3))
    return messages(caught.value)


def test_unknown_option_names_the_nearest() -> None:
    text = failed(stict=True)
    assert "unknown option 'stict'" in text and "did you mean 'strict'" in text


def test_bad_value() -> None:
    assert "precision" in (text := failed(precision="double")) and "'fused'" in text and "'eager'" in text


def test_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Options.make().tune == "quick" and Options.make({"tune": "max"}).tune == "max"
    assert "'off'" in (text := failed(tune="plenty")) and "'quick'" in text and "'max'" in text
    assert len({Options.make({"tune": t}).code_key() for t in ("off", "quick", "max")}) == 3
    monkeypatch.setenv("ONEPASS_TUNE", "off")
    assert Options.make().tune == "off"
    monkeypatch.setenv("ONEPASS_TUNE", "loud")
    assert "tune" in (text := failed()) and "'loud'" in text


def test_bad_type() -> None:
    assert "debug" in failed(debug="loud")


def test_unknown_target_lists_the_known() -> None:
    text = failed(target="abacus", strict=True)
    assert "unknown target 'abacus'" in text and "cpu" in text
    with pytest.raises(UnknownTarget):
        onepass.explain(lambda x: x + 1, torch.ones(3), target="abacus")


def test_chips_are_targets() -> None:
    names = {"A100": "sm_80", "h100": "sm_90", "h200": "sm_90", "b200": "sm_100", "mi300x": "gfx942"}
    assert {name: find_target(name).name for name in names} == names
    assert "did you mean 'h200'" in failed(target="h2000")


def test_modes() -> None:
    """They are options, or refused aloud."""
    assert options_of_mode("default") == options_of_mode(None) == {}
    assert options_of_mode("max-autotune") == {"tune": "max"}
    assert options_of_mode("reduce-overhead") == {"graphs": "on"}
    for refused in (
        lambda: torch.compile(lambda x: x + 1, backend="onepass", mode="max-overhead")(torch.ones(3)),
        lambda: onepass.jit(lambda x: x, mode="max-overhead"),
    ):
        with pytest.raises(Exception) as caught:
            refused()
        assert "option 'mode' cannot be 'max-overhead'" in messages(caught.value)


def test_jit_takes_options_by_name() -> None:
    with record_compilations() as records:
        found = onepass.jit(lambda x: torch.sin(x) + 1, fuse=False, cache=False)(torch.ones(3))
    torch.testing.assert_close(found, torch.ones(3).sin() + 1)
    assert len(records[0].kernels) == 2
    with pytest.raises(InvalidOption):
        onepass.jit(fuse="maybe")


def test_jit_refuses_at_once() -> None:
    with pytest.raises(UnknownOption):
        onepass.jit(lambda x: x, options={"fus": True})
    with pytest.raises(InvalidOption):
        onepass.jit(lambda x: x, options={"fuse": "maybe"})


def test_bad_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEPASS_DEBUG", "plenty")
    assert "ONEPASS_DEBUG" in failed() and "0 to 5" in failed()
