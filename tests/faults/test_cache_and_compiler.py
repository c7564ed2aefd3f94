"""No compiler, no usable cache, damaged entries, several processes, a kill in the middle of a build."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.faults.scripts import builds, environment, finish, logging_compiler, run, start

ONE_CHECK = 'found = check()\nprint(len(found)); print("\\n".join(found))'


@pytest.mark.parametrize("how", ["CC names nothing", pytest.param("empty PATH", marks=pytest.mark.rotating)])
def test_no_compiler(tmp_path: Path, how: str) -> None:
    change = {"CC": "no-such-compiler"} if how == "CC names nothing" else {"PATH": str(tmp_path), "CC": ""}
    out = run(ONE_CHECK, environment(tmp_path / "cache", **change))
    assert out.splitlines()[0] == "1", f"one warning, not {out}"
    assert "no C compiler" in out and "Install gcc or clang" in out


@pytest.mark.rotating
def test_no_compiler_training(tmp_path: Path) -> None:
    body = """
layer = torch.nn.Linear(8, 8)
run = torch.compile(lambda x: layer(x).relu().sum(), backend="onepass")
y = torch.randn(4, 8)
run(y).backward()
mine = layer.weight.grad.clone(); layer.zero_grad()
layer(y).relu().sum().backward()
torch.testing.assert_close(mine, layer.weight.grad)
print("right")
"""
    assert "right" in run(body, environment(tmp_path / "cache", CC="no-such-compiler"))


@pytest.mark.rotating
def test_compiler_that_fails(tmp_path: Path) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'internal compiler error' >&2\nexit 4\n")
    broken.chmod(0o755)
    out = run(ONE_CHECK, environment(tmp_path / "cache", CC=str(broken)))
    assert out.splitlines()[0] == "1", out


def test_warm_cache_starts_no_compiler(tmp_path: Path) -> None:
    program, log = logging_compiler(tmp_path)
    env = environment(tmp_path / "cache", CC=str(program))
    assert run(ONE_CHECK, env).startswith("0")
    first = builds(log)
    assert first >= 1
    assert run(ONE_CHECK, env).startswith("0")
    assert builds(log) == first, "the second process built nothing"


@pytest.mark.rotating
def test_cache_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for folder in (tmp_path / "file" / "cache", Path("/proc/onepass")):
        out = run(ONE_CHECK, environment(folder))
        assert int(out.splitlines()[0]) <= 1, out


@pytest.mark.rotating
@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_read_only_cache_folder(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o500)
    out = run(ONE_CHECK, environment(folder))
    assert int(out.splitlines()[0]) <= 1, out


@pytest.mark.rotating
def test_read_only_cache_is_still_read(tmp_path: Path) -> None:
    """Entries made before are used; that nothing can be written costs one warning at most."""
    program, log = logging_compiler(tmp_path)
    env = environment(tmp_path / "cache", CC=str(program))
    run(ONE_CHECK, env)
    before = builds(log)
    body = """
import os
def refuse(*args, **kwargs):
    raise OSError(30, "Read-only file system")
os.replace = os.rename = os.mkdir = refuse
"""
    assert int(run(body + ONE_CHECK, env).splitlines()[0]) <= 1
    assert builds(log) == before


@pytest.mark.rotating
def test_full_disk(tmp_path: Path) -> None:
    body = """
import os
def full(*args, **kwargs):
    raise OSError(28, "No space left on device")
os.replace = os.rename = full
"""
    out = run(body + ONE_CHECK, environment(tmp_path / "cache"))
    assert int(out.splitlines()[0]) <= 1, out


@pytest.mark.rotating
def test_nothing_can_be_written_anywhere(tmp_path: Path) -> None:
    """A file-size limit of zero: not even the compiler can write; the program runs as eager does."""
    body = """
import resource, signal
onepass.jit  # torch's own compiler looks for a folder when it is imported
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
"""
    process = start(body + "check()\nsys.exit(0)", environment(tmp_path / "cache"))
    finish(process)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cache that has the program's entries, and the compiler that made them."""
    folder = tmp_path_factory.mktemp("warm")
    program, _ = logging_compiler(folder)
    run(ONE_CHECK, environment(folder / "cache", CC=str(program)))
    return folder


@pytest.mark.rotating
@pytest.mark.parametrize("damage", ["truncate", "garbage", "empty", "flip", "swap"])
def test_damaged_entries_are_rebuilt(tmp_path: Path, warm: Path, damage: str) -> None:
    cache, program, log = tmp_path / "cache", warm / "cc", warm / "started"
    shutil.copytree(warm / "cache", cache)
    env = environment(cache, CC=str(program))
    before = builds(log)
    files = [p for p in cache.rglob("*") if p.is_file()]
    assert len(files) >= 2
    contents = [p.read_bytes() for p in files]
    for number, path in enumerate(files):
        content = contents[number]
        middle = len(content) // 2
        path.write_bytes(
            {
                "truncate": content[:middle],
                "garbage": b'{"host": "__import__(\\"os\\").abort()"}',
                "empty": b"",
                "flip": content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :],
                "swap": contents[(number + 1) % len(contents)],
            }[damage]
        )
    assert int(run(ONE_CHECK, env).splitlines()[0]) <= 1
    again = builds(log)
    assert again > before, "what was damaged was built again"
    if damage == "flip":
        run(ONE_CHECK, env)
        assert builds(log) == again, "and stored again"


@pytest.mark.rotating
def test_undamaged_entries_are_used(tmp_path: Path, warm: Path) -> None:
    """The counterpart: the copy alone does not make a compiler start."""
    shutil.copytree(warm / "cache", tmp_path / "cache")
    before = builds(warm / "started")
    run(ONE_CHECK, environment(tmp_path / "cache", CC=str(warm / "cc")))
    assert builds(warm / "started") == before


@pytest.mark.rotating
def test_several_processes_at_once(tmp_path: Path) -> None:
    env = environment(tmp_path / "cache")
    running = [start(ONE_CHECK, env) for _ in range(4)]
    for process in running:
        assert finish(process).startswith("0")
    assert run(ONE_CHECK, env).startswith("0")


def test_killed_in_the_middle_of_a_build(tmp_path: Path) -> None:
    """The compiler hangs; kill -9 takes the process; the next one finds nothing wrong."""
    marker, slow = tmp_path / "building", tmp_path / "cc"
    slow.write_text(
        f'#!/bin/sh\ncase "$*" in *-shared*) gcc "$@"; touch "{marker}"; exec sleep 8;; esac\nexec gcc "$@"\n'
    )
    slow.chmod(0o755)
    cache = tmp_path / "cache"
    process = start(ONE_CHECK, environment(cache, CC=str(slow)))
    deadline = time.monotonic() + 120
    while not marker.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert marker.exists(), process.communicate()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    out = run(ONE_CHECK, environment(cache))
    assert out.startswith("0"), out


def test_cache_is_private(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    run(ONE_CHECK, environment(cache))
    for path in [cache, *cache.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.rotating
def test_cache_open_to_others_is_not_trusted(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    out = run(ONE_CHECK, environment(cache))
    assert out.splitlines()[0] == "1", out
    assert not [p for p in cache.rglob("*") if p.is_file()]


@pytest.mark.rotating
def test_cache_off_writes_nothing(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    body = 'found = check(options={"cache": False})\nprint(len(found))'
    assert run(body, environment(cache)).startswith("0")
    assert not [p for p in cache.rglob("*") if p.is_file()]
