"""The cache directory: nothing is taken from it that was not put there whole, and by this user."""

import os
import subprocess
import sys
import warnings

import pytest
from kernels.jobs.compilers import build_library

import aotc
from aotc import pipeline
from aotc.diagnostics import AotcWarning
from aotc.driver import bundle_cache
from aotc.ir.loop.parser import parse_kernel
from aotc.kernels.cpu.build import build_executor
from aotc.kernels.jobs import cache, run, store
from aotc.options import Options
from aotc.targets import host_target

pytestmark = pytest.mark.cpu

KEY, OTHER = "ab" * 32, "cd" * 32
DATA = bytes(range(256)) * 8
KERNEL = """def double(a: "f32[8]", /, o: "f32[8]", *, grid: "1", flops: "8", bytes: "64"):
    for i in range(0, 8):
        o[i] = a[i] + a[i]
"""
MODEL = "func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {\n return %x : tensor<4xf32>\n}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache of the test's own."""
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_reported", set())
    return tmp_path / "cache"


def entries(folder):
    """The files of a cache that are entries."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and len(p.name) == 64)


def test_every_flipped_bit_and_every_cut_is_a_miss(folder):
    cache.write_cached_object(KEY, DATA[:64])
    (path,) = entries(folder)
    good = path.read_bytes()
    for at in range(len(good)):
        for bad in (good[:at], good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :]):
            path.write_bytes(bad)
            assert cache.read_cached_object(KEY) is None
    path.write_bytes(good + b"x")
    assert cache.read_cached_object(KEY) is None
    path.write_bytes(good)
    assert cache.read_cached_object(KEY) == DATA[:64]


@pytest.mark.parametrize("content", [b"", b"\x7fELF" + bytes(400), DATA, None], ids=["empty", "bare", "raw", "other's"])
def test_other_contents_are_a_miss_and_are_replaced(folder, content):
    cache.write_cached_object(KEY, DATA)
    cache.write_cached_object(OTHER, DATA[::-1])
    path, other = entries(folder)
    path.write_bytes(other.read_bytes() if content is None else content)
    assert cache.read_cached_object(KEY) is None
    cache.write_cached_object(KEY, DATA)
    assert cache.read_cached_object(KEY) == DATA


def test_links_pipes_and_folders_are_a_miss(folder):
    cache.write_cached_object(KEY, DATA)
    (path,) = entries(folder)
    for make in (lambda: path.symlink_to(folder / "copy"), lambda: os.mkfifo(path), path.mkdir):
        path.rename(folder / "copy") if path.is_file() else None
        make()
        assert cache.read_cached_object(KEY) is None
        path.rmdir() if path.is_dir() else path.unlink()
    path.mkdir()
    cache.write_cached_object(KEY, DATA)  # a folder cannot be replaced: nothing is kept, nothing fails
    assert cache.read_cached_object(KEY) is None


def test_a_damaged_kernel_is_compiled_again(folder, monkeypatch):
    kernel = parse_kernel(KERNEL)
    first = build_library([kernel], host_target(), Options())
    build_executor(host_target(), Options())  # the process keeps that one
    asked, plain = [], run.WaitingRequests.worker_counts
    monkeypatch.setattr(
        run.WaitingRequests, "worker_counts", lambda one, jobs: asked.append(len(one.requests)) or plain(one, jobs)
    )
    assert build_library([kernel], host_target(), Options()) == first
    assert asked == [0]
    for path in entries(folder):
        data = bytearray(path.read_bytes())
        data[-200] ^= 4
        path.write_bytes(data)
    assert build_library([kernel], host_target(), Options()) == first
    assert asked == [0, 1]
    assert build_library([kernel], host_target(), Options()) == first
    assert asked == [0, 1, 0]


def test_a_damaged_bundle_is_compiled_again(folder, monkeypatch):
    monkeypatch.setattr(pipeline, "WORTH_SECONDS", 0)
    first = aotc.compile(MODEL)
    (path,) = (folder / "bundles").iterdir()
    path.write_bytes(path.read_bytes()[:-9])
    assert aotc.compile(MODEL) == first
    assert bundle_cache.read_cached_bundle(path.name) == first


# ---------------------------------------------------------------- strangers


def refused(call):
    """The warning of a call that must work all the same."""
    with pytest.warns(AotcWarning, match="the cache is not used") as caught:
        call()
    (warning,) = caught
    return str(warning.message)


def test_a_folder_that_others_may_write_to(folder):
    cache.write_cached_object(KEY, DATA)
    folder.chmod(0o777)
    text = refused(lambda: aotc.compile(MODEL))
    assert f"{folder} may be written to by others (mode 777)" in text
    assert "AOTC_CACHE_DIR" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.read_cached_object(KEY) is None  # the user was told
    folder.chmod(0o700)
    assert cache.read_cached_object(KEY) == DATA


@pytest.mark.parametrize("part", ["entry", "folder"])
def test_a_part_that_others_may_write_to(folder, part):
    cache.write_cached_object(KEY, DATA)
    (path,) = entries(folder)
    if part == "entry":
        path.chmod(0o666)
        assert "may be written to" in refused(lambda: cache.read_cached_object(KEY))
    else:
        path.parent.chmod(0o777)
        assert "may be written to" in refused(lambda: cache.write_cached_object(KEY, DATA))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("part", ["entry", "folder"])
def test_entries_of_another_user_are_refused(folder, part):
    cache.write_cached_object(KEY, DATA)
    os.chown(entries(folder)[0] if part == "entry" else folder, 12345, 12345)
    assert "belongs to user 12345, not to you" in refused(lambda: cache.read_cached_object(KEY))
    assert cache.read_cached_object(KEY) is None
    if part == "entry":
        cache.write_cached_object(KEY, DATA)
        assert cache.read_cached_object(KEY) == DATA


def test_a_warning_that_is_to_be_an_error_is_the_users(folder):
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(AotcWarning):
            aotc.compile(MODEL)


def test_the_command_line_says_it_in_a_sentence(folder, tmp_path):
    folder.mkdir()
    folder.chmod(0o777)
    (tmp_path / "m.mlir").write_text(MODEL)
    command = [sys.executable, "-m", "aotc_cli.main", "compile", "m.mlir", "-o", "m.vmfb"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reason = f"{folder} may be written to by others (mode 777)"
    assert done.stderr.splitlines()[0] == f"warning: the cache is not used: {reason}"
    assert done.stderr.count("warning") == 1


# ---------------------------------------------------------------- room


def test_kernels_and_bundles_share_one_limit(folder, monkeypatch):
    monkeypatch.setenv("AOTC_CACHE_LIMIT_MB", "1")
    part = bytes(300 << 10)
    names = [f"{n:02x}" * 32 for n in range(4)]
    for n, key in enumerate(names):
        (bundle_cache.write_cached_bundle if n % 2 else cache.write_cached_object)(key, part)
        for m, path in enumerate(sorted(entries(folder), key=lambda p: p.name)):
            os.utime(path, (1000 + m, 1000 + m))
        assert cache.read_cached_object(names[0]) == part  # the oldest is in use
    assert sorted(p.name for p in entries(folder)) == sorted([names[0], *names[2:]])
    monkeypatch.setenv("AOTC_CACHE_LIMIT_MB", "0")
    cache.write_cached_object(OTHER, b"x")
    assert cache.read_cached_object(OTHER) is None
    assert cache.read_cached_object(names[0]) is None


def test_eviction_removes_only_cache_entries(folder, monkeypatch):
    monkeypatch.setenv("AOTC_CACHE_LIMIT_MB", "1")
    others = [folder / "kernels" / "notes.txt", folder / "mine" / KEY, folder / KEY, folder / "kernels" / "tmp"]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1 << 20))
    for n in range(8):
        cache.write_cached_object(f"{n:02x}" * 32, bytes(400 << 10))
    assert all(p.stat().st_size == 1 << 20 for p in others)
    assert len(entries(folder)) == 2 + 2


WRITER = """
import sys
from aotc.kernels.jobs import cache
for n in range(40):
    key = f"{n % 16:02x}" * 32
    cache.write_cached_object(key, key.encode() * 1000)
    found = cache.read_cached_object(key)
    assert found in (None, key.encode() * 1000)
"""


def test_many_processes_write_and_sweep_at_once(folder):
    environment = {**os.environ, "AOTC_CACHE_LIMIT_MB": "1"}
    running = [subprocess.Popen([sys.executable, "-c", WRITER], env=environment) for _ in range(4)]
    assert [p.wait(120) for p in running] == [0] * 4
    assert sum(p.stat().st_size for p in entries(folder)) <= 1 << 20
    assert list((folder / "tmp").iterdir()) == []


def test_a_killed_writers_file_goes_with_the_next_run(folder):
    code = (
        "import os, signal; from aotc.kernels.jobs import cache, store\n"
        "import aotc.vmfb.host.files as files\n"
        "files.os.O_TMPFILE = os.O_DIRECTORY\n"  # a file system whose files have names from the start
        "files.os.replace = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"cache.write_cached_object({KEY!r}, b'x')"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert len(list((folder / "tmp").iterdir())) == 1
    store._seen.discard(str(folder))
    assert cache.read_cached_object(KEY) is None
    assert list((folder / "tmp").iterdir()) == []


@pytest.mark.parametrize("place", ["/proc/nowhere", "/dev/null", "/dev/null/x", "x" * 5000])
def test_places_that_cannot_be_are_a_warning(place, monkeypatch):
    monkeypatch.setattr(os, "environ", {**os.environ, "AOTC_CACHE_DIR": place})
    monkeypatch.setattr(store, "_reported", set())
    with pytest.warns(AotcWarning, match="the cache is not written to: "):
        cache.write_cached_object(KEY, DATA)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.write_cached_object(OTHER, DATA)  # the user was told
        assert cache.read_cached_object(KEY) is None


def test_a_home_that_cannot_be_written_to_is_nobodys_fault(monkeypatch):
    monkeypatch.delenv("AOTC_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.write_cached_object(KEY, DATA)
        assert cache.read_cached_object(KEY) is None


def test_a_full_disk_is_no_error(folder, monkeypatch):
    def full(descriptor, data):
        raise OSError(28, "No space left on device")

    cache.write_cached_object(OTHER, DATA)
    monkeypatch.setattr(os, "write", full)
    with pytest.warns(AotcWarning, match="the cache is not written to: .* No space left on device"):
        cache.write_cached_object(KEY, DATA)
    assert cache.read_cached_object(KEY) is None
    assert cache.read_cached_object(OTHER) == DATA
    assert list((folder / "tmp").iterdir()) == []


def test_a_user_without_a_home(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    for name in ("AOTC_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(store.Path, "home", homeless)
    cache.write_cached_object(KEY, DATA)
    assert cache.read_cached_object(KEY) is None


@pytest.mark.parametrize("text", ["many", "-1", "1e3", "²", "٣", "9" * 5000])
def test_limits_that_are_no_numbers(folder, monkeypatch, text):
    monkeypatch.setenv("AOTC_CACHE_LIMIT_MB", text)
    with pytest.raises(aotc.CompileError, match="expected a number of megabytes"):
        aotc.compile(MODEL)
