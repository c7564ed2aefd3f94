"""The persistent cache under faults: damage, permissions, full disks, many processes, kills."""

from __future__ import annotations

import errno
import multiprocessing
import os
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from onepass.ir.record import CompileRecord, Decision, ExternRecord, KernelRecord
from onepass.ir.source import Call, Constant, HostProgram, Live, Ref
from onepass.runtime import cache as cache_module
from onepass.runtime.cache import Cache, CacheWarning, cache_folder, default_cache
from onepass.runtime.entries import GraphEntry, load_graph, save_graph
from tests.runtime.sample import scale_kernel, scale_program

KEY = "0a" * 32
DATA = {"numbers": [1, 2.5, None], "text": "é\n"}


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        yield


def graph_file(cache: Cache, key: str = KEY) -> Path:
    return cache.root / "graphs" / f"{key}.json"


def test_what_is_written_is_read(cache: Cache, tmp_path: Path) -> None:
    assert cache.read("graphs", KEY) is None
    assert cache.write("graphs", KEY, DATA)
    assert cache.read("graphs", KEY) == DATA
    assert cache.read_times(KEY) is None
    assert cache.write("times", KEY, [94.5, 43.6]) and cache.read_times(KEY) == (94.5, 43.6)
    built = tmp_path / "k.so"
    built.write_bytes(b"machine code")
    assert cache.kernel(KEY) is None
    stored = cache.add_kernel(KEY, built)
    assert stored is not None and cache.kernel(KEY) == stored
    assert stored.read_bytes().startswith(b"machine code")
    assert cache.count() == {"graphs": 1, "kernels": 1, "times": 1}
    files = (graph_file(cache), stored, cache.root / "times" / f"{KEY}.json")
    assert cache.size() == sum(f.stat().st_size for f in files)


def test_it_is_private(cache: Cache) -> None:
    cache.write("graphs", KEY, DATA)
    for folder in (cache.root, *(cache.root / name for name in ("graphs", "kernels", "times"))):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(graph_file(cache).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[:-1],
        lambda b: b[: len(b) // 2],
        lambda b: b"",
        lambda b: b[:3] + bytes([b[3] ^ 1]) + b[4:],
        lambda b: b[:-1] + b"!",
        lambda b: b + b"more",
        lambda b: b"\0" * len(b),
    ],
)
def test_a_damaged_entry_is_removed_not_used(cache: Cache, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    built = tmp_path / "k.so"
    built.write_bytes(b"machine code")
    cache.write("graphs", KEY, DATA)
    cache.write("times", KEY, [1.0, 2.0])
    stored = cache.add_kernel(KEY, built)
    assert stored is not None
    for path in (graph_file(cache), stored, cache.root / "times" / f"{KEY}.json"):
        path.write_bytes(damage(path.read_bytes()))
    assert cache.read("graphs", KEY) is None and cache.kernel(KEY) is None and cache.read_times(KEY) is None
    assert cache.count() == {"graphs": 0, "kernels": 0, "times": 0}
    assert cache.write("graphs", KEY, DATA) and cache.read("graphs", KEY) == DATA


@pytest.mark.parametrize("times", [[], [1.0, -1.0], [0.0], [float("nan")], [float("inf")], ["1"], [1]])
def test_times_are_times(cache: Cache, times: list[Any]) -> None:
    cache.write("times", KEY, times)
    assert cache.read_times(KEY) == (() if times == [] else None)
    assert cache.count()["times"] == (times == [])


def test_clear_frees_everything(cache: Cache) -> None:
    cache.write("graphs", KEY, DATA)
    (cache.root / "kernels" / ".half.tmp").write_bytes(b"x")
    size = cache.size()
    assert cache.clear() == size > 0
    assert cache.size() == 0 and cache.read("graphs", KEY) is None


def test_leftovers_of_killed_processes_go_by_age(cache: Cache) -> None:
    old, young = cache.root / "graphs" / ".a.1.tmp", cache.root / "graphs" / ".b.2.tmp"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 10**6,) * 2)
    assert cache.count() == {"graphs": 0, "kernels": 0, "times": 0}
    cache.write("graphs", KEY, DATA)  # the first write of a process tidies
    assert not old.exists() and young.exists()
    assert cache.read("graphs", KEY) == DATA


def test_the_bound_evicts_what_was_unused_longest(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", bound_bytes=5_000)
    keys = [f"{n:064x}" for n in range(8)]
    for age, key in enumerate(keys):
        cache.write("graphs", key, "x" * 900)
        os.utime(graph_file(cache, key), (time.time() - 10_000 * (8 - age),) * 2)
    assert cache.read("graphs", keys[0]) is not None  # used now, so it stays
    cache.trim()
    assert cache.size() <= 4_000
    assert graph_file(cache, keys[0]).exists() and not graph_file(cache, keys[1]).exists()


def test_keys_cannot_leave_the_folder(cache: Cache) -> None:
    for key in ("../x", "a/b", "", ".x"):
        with pytest.raises(ValueError, match="key"):
            cache.read("graphs", key)


# folders that cannot be used


def one_warning(action: Callable[[], Any], match: str) -> Any:
    with pytest.warns(CacheWarning, match=match) as seen:
        result = action()
    assert len(seen) == 1
    return result


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("call", ["open", "replace"])
def test_a_full_or_read_only_folder_costs_one_warning(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    cache.write("graphs", KEY, DATA)
    real = getattr(os, call)

    def fails(*args: Any, **kwargs: Any) -> Any:
        if str(args[0]).endswith(".tmp"):
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    monkeypatch.setattr(cache_module.os, call, fails)
    other = "0b" * 32
    assert (
        one_warning(lambda: [cache.write("graphs", other, DATA) for _ in range(3)], "cannot be written") == [False] * 3
    )
    assert cache.read("graphs", other) is None
    assert cache.read("graphs", KEY) == DATA  # what is there is still used
    assert not list(cache.root.rglob("*.tmp"))


def test_a_disk_that_fills_in_the_middle_of_a_write(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __init__(self, descriptor: int, mode: str) -> None:
            self.descriptor = descriptor

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *error: object) -> None:
            os.close(self.descriptor)

        def write(self, content: bytes) -> None:
            os.write(self.descriptor, content[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache_module, "open", Full, raising=False)
    assert not one_warning(lambda: cache.write("graphs", KEY, DATA), "No space left")
    monkeypatch.undo()
    assert cache.read("graphs", KEY) is None and cache.size() == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_read_only_folder(cache: Cache) -> None:
    cache.write("graphs", KEY, DATA)
    for folder in ("graphs", "kernels", "times"):
        (cache.root / folder).chmod(0o500)
    again = Cache(cache.root)
    assert again.read("graphs", KEY) == DATA
    assert not one_warning(lambda: again.write("graphs", "0b" * 32, DATA), "cannot be written")


def test_a_place_where_no_folder_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = one_warning(lambda: Cache(tmp_path / "file" / "cache"), "cannot be used")
    assert not cache.usable and not cache.write("graphs", KEY, DATA) and cache.read("graphs", KEY) is None
    assert (cache.size(), cache.clear(), cache.count()) == (0, 0, {"graphs": 0, "kernels": 0, "times": 0})


@pytest.mark.parametrize("where", ["", "graphs", "kernels", "times"])
def test_a_folder_others_can_write_to_is_refused(cache: Cache, where: str) -> None:
    cache.write("graphs", KEY, DATA)
    (cache.root / where).chmod(0o777)
    again = one_warning(lambda: Cache(cache.root), "other users")
    assert again.read("graphs", KEY) is None and not again.write("graphs", KEY, DATA)
    assert graph_file(cache).exists()  # not ours to remove


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can give files away")
def test_what_belongs_to_another_user_is_refused(cache: Cache) -> None:
    cache.write("graphs", KEY, DATA)
    os.chown(graph_file(cache), 12345, 12345)
    assert cache.read("graphs", KEY) is None
    os.chown(cache.root, 12345, 12345)
    assert not one_warning(lambda: Cache(cache.root), "another user").usable


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    assert default_cache() is default_cache() and default_cache().root == tmp_path / "own"
    monkeypatch.delenv("ONEPASS_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "onepass"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "onepass"


# several processes


def _write_and_read(root: str, rounds: int, failures: Any) -> None:
    cache = Cache(Path(root))
    for n in range(rounds):
        data = {"payload": "x" * 20_000}
        cache.write("graphs", KEY, data)
        found = cache.read("graphs", KEY)
        if found is not None and found != data:
            failures.put(n)
        if found is None:
            failures.put(-1)


def test_several_processes_write_one_key(cache: Cache) -> None:
    context = multiprocessing.get_context("fork")
    failures: Any = context.SimpleQueue()
    processes = [context.Process(target=_write_and_read, args=(str(cache.root), 100, failures)) for _ in range(4)]
    for p in processes:
        p.start()
    for p in processes:
        p.join(60)
        assert p.exitcode == 0
    assert failures.empty()
    assert cache.count() == {"graphs": 1, "kernels": 0, "times": 0} and not list(cache.root.rglob("*.tmp"))


def _write_forever(root: str) -> None:
    cache = Cache(Path(root))
    while True:
        cache.write("graphs", KEY, {"payload": "x" * 3_000_000})


def test_a_killed_writer_leaves_whole_entries(cache: Cache) -> None:
    context = multiprocessing.get_context("fork")
    for _ in range(5):
        process = context.Process(target=_write_forever, args=(str(cache.root),))
        process.start()
        time.sleep(0.15)
        process.kill()
        process.join()
        found = cache.read("graphs", KEY)
        assert found is None or found == {"payload": "x" * 3_000_000}


# one builds, others wait


def _build_once(root: str, started: Any, built: Any) -> None:
    cache = Cache(Path(root))
    started.wait()
    with cache.building(KEY):
        if cache.read("graphs", KEY) is None:
            time.sleep(0.1)
            cache.write("graphs", KEY, DATA)
            built.put(os.getpid())


def test_of_several_processes_one_builds(cache: Cache) -> None:
    context = multiprocessing.get_context("fork")
    started, built = context.Event(), context.Queue()
    processes = [context.Process(target=_build_once, args=(str(cache.root), started, built)) for _ in range(4)]
    for p in processes:
        p.start()
    started.set()
    for p in processes:
        p.join(60)
        assert p.exitcode == 0
    assert built.get(timeout=5) and built.empty()
    assert not list(cache.root.rglob("*.lock"))


def _build_forever(root: str, begun: Any) -> None:
    with Cache(Path(root)).building(KEY):
        begun.set()
        time.sleep(600)


def test_a_builder_that_dies_is_not_waited_for(cache: Cache) -> None:
    context = multiprocessing.get_context("fork")
    begun = context.Event()
    process = context.Process(target=_build_forever, args=(str(cache.root), begun))
    process.start()
    assert begun.wait(30)
    before = time.monotonic()
    with cache.building(KEY, seconds=0.2):  # it is alive: after that time nobody waits any more
        assert time.monotonic() - before >= 0.2
    assert begun.is_set() and process.is_alive()
    process.kill()
    process.join()
    before = time.monotonic()
    with cache.building(KEY, seconds=60):
        assert time.monotonic() - before < 30
    assert not list(cache.root.rglob("*.lock"))


def test_without_locks_everyone_builds(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(cache_module.fcntl, "flock", flock)
    with cache.building(KEY), cache.building(KEY):
        pass
    monkeypatch.setattr(cache_module, "fcntl", None)
    with cache.building(KEY), cache.building(KEY):
        pass


# graph entries


def entry() -> GraphEntry:
    record = CompileRecord(
        kernels=[KernelRecord("k", [{"node": "add", "op": "aten.add", "line": "f.py:1"}], 8, 8, "s", "text", 1.5)],
        externs=[ExternRecord("mm", "aten.mm", "a bare matmul", "f.py:2", 64)],
        decisions=[Decision("a", "b", "vertical", True, "why", 1.0, 8)],
        stage_seconds={"plan": 0.25},
    )
    return GraphEntry(scale_program(2), (scale_kernel(), scale_kernel(3.0)), record, ("x", "add"))


def test_graph_entries_survive(cache: Cache) -> None:
    assert save_graph(cache, KEY, entry())
    assert load_graph(cache, KEY) == entry()


def test_graph_constants_are_those_of_the_graph_at_hand(cache: Cache) -> None:
    then, now = [object(), object(), object()], [object(), object(), object()]
    call = Call("x0", "onepass.graph_constant", (Constant(0),), {})
    host = HostProgram((), (call,), (Ref("x0"),), (then[2],))
    assert save_graph(cache, KEY, GraphEntry(host, (), CompileRecord()), then)
    found = load_graph(cache, KEY, now)
    assert found is not None and found.host.constants == (now[2],)
    assert not save_graph(cache, KEY, GraphEntry(host, (), CompileRecord()), now)


def test_programs_with_live_objects_are_not_stored(cache: Cache) -> None:
    host = HostProgram((), (Call("x0", Live("l0"), (), {}),), (), (), {"l0": print})
    assert not save_graph(cache, KEY, GraphEntry(host, (), CompileRecord()))
    assert cache.count()["graphs"] == 0


@pytest.mark.parametrize("spoil", ["host", "kernels", "record", "nodes", "constants"])
def test_an_entry_of_another_form_is_removed(cache: Cache, spoil: str) -> None:
    save_graph(cache, KEY, entry())
    data = cache.read("graphs", KEY)
    data[spoil] = {"unknown": 1} if spoil in ("host", "record") else [{"unknown": 1}]
    if spoil in ("nodes", "constants"):
        del data[spoil]
    cache.write("graphs", KEY, data)
    assert load_graph(cache, KEY) is None and cache.count()["graphs"] == 0
