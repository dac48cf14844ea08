"""Writing: whole or not at all, through what cannot be replaced, and nothing left behind by who was killed."""

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from aotc.vmfb.host import files
from aotc.vmfb.host.files import append_all_or_none, remove_stale_temporaries, write_atomically

pytestmark = pytest.mark.ir

KILLED = """
import os, signal, sys
from aotc.vmfb.host import files

def parts():
    yield b"half"
    os.kill(os.getpid(), signal.SIGKILL)

{}
"""


def kill_while(code, *arguments):
    """Run code that kills itself in the middle."""
    done = subprocess.run([sys.executable, "-c", KILLED.format(code), *map(str, arguments)], check=False)
    assert done.returncode == -signal.SIGKILL


NAMED = "import os; os.O_TMPFILE = os.O_DIRECTORY; "  # a file system whose files have names from the start


@pytest.mark.parametrize("exists", [False, True])
def test_a_killed_writer_leaves_nothing(tmp_path, exists):
    path = tmp_path / "m.vmfb"
    if exists:
        path.write_bytes(b"old")
    kill_while("files.write_atomically(sys.argv[1], parts())", path)
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"old"] * exists


def test_a_killed_writers_file_goes_with_the_next_write(tmp_path):
    path = tmp_path / "m.vmfb"
    path.write_bytes(b"old")
    others = [tmp_path / ".aotc-00000000-somebody", tmp_path / "m.vmfb.123.456.tmp"]
    for other in others:
        other.touch()
    kill_while(NAMED + "files.write_atomically(sys.argv[1], parts())", path)
    assert path.read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 4
    write_atomically(str(path), [b"new"])
    assert sorted(tmp_path.iterdir()) == sorted([*others, path])
    assert path.read_bytes() == b"new"


def test_what_a_living_process_writes_stays(tmp_path, monkeypatch):
    """The file of a writer that is at work looks like a dead one's, but for its lock."""
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # a file system whose files have names from the start
    path = str(tmp_path / "m.vmfb")

    def parts():
        yield b"first"
        write_atomically(path, [b"second"])  # another writer of the same place, who looks for stale files
        assert len(list(tmp_path.iterdir())) == 2

    write_atomically(path, parts())
    assert Path(path).read_bytes() == b"first"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_nothing(tmp_path, error):
    def parts():
        yield b"half"
        raise error

    for write in (write_atomically, append_all_or_none):
        with pytest.raises(type(error)) as caught:
            write(str(tmp_path / "m"), parts())
        if isinstance(error, OSError):
            assert caught.value.filename == str(tmp_path / "m")
            assert list(tmp_path.iterdir()) == []


def test_appending_is_whole_too(tmp_path):
    path = tmp_path / "x.npy"
    append_all_or_none(str(path), [b"one", b" two"])

    def parts():
        yield b" three"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        append_all_or_none(str(path), parts())
    assert path.read_bytes() == b"one two"


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path):
    (tmp_path / "far").mkdir()
    link, target = tmp_path / "link", tmp_path / "far" / "m"
    link.symlink_to("far/m")
    for data in (b"first", b"second"):  # a link that leads to nothing yet, then to a file
        write_atomically(str(link), [data])
        assert link.is_symlink()
        assert target.read_bytes() == data
    assert [p.name for p in (tmp_path / "far").iterdir()] == ["m"]


def test_the_mode_of_the_old_file_stays(tmp_path):
    path = tmp_path / "m"
    path.touch()
    path.chmod(0o600)
    write_atomically(str(path), [b"x"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_pipes_and_devices_are_written_through(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    write_atomically(str(pipe), [b"a", b"b"])
    reader.join(30)
    assert found == [b"ab"]
    assert pipe.is_fifo()
    null = tmp_path / "null"
    null.symlink_to("/dev/null")
    write_atomically(str(null), [b"x"])
    assert Path("/dev/null").is_char_device()
    for write in (write_atomically, append_all_or_none):
        with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
            write("/dev/full", [b"x"])
    assert Path("/dev/full").is_char_device()


@pytest.mark.parametrize("place", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_standard_output_is_written_where_it_is(tmp_path, place):
    """Behind what stands there: opened anew it would begin again at the first byte."""
    write = f"write_atomically({place!r}, [b'b'])"
    code = f"from aotc.vmfb.host.files import write_atomically; print('a', flush=True); {write}; print('c')"
    path = tmp_path / "out"
    with path.open("wb") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
    assert path.read_bytes() == b"a\nbc\n"


def test_a_name_of_any_length(tmp_path):
    path = tmp_path / ("n" * 255)
    write_atomically(str(path), [b"x"])
    assert path.read_bytes() == b"x"
    write_atomically(os.fsdecode(bytes(tmp_path) + b"/\xff\xfe"), [b"x"])
    assert len(list(tmp_path.iterdir())) == 2


def test_only_our_own_files_are_removed(tmp_path):
    (tmp_path / ".aotc-x").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / ".aotc-y")
    (tmp_path / "aotc-z").touch()
    (tmp_path / ".aotc-old").touch()
    remove_stale_temporaries(str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == [".aotc-x", ".aotc-y", "aotc-z"]


# ---------------------------------------------------------------- folders


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The system's folder of temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path / f"aotc-{os.geteuid()}"


def test_a_work_folder_that_is_taken_for_a_stale_one_is_made_again(temporary, monkeypatch):
    made, mkdir = [], os.mkdir

    def made_late(path, mode=0o777):
        mkdir(path, mode)
        made.append(path)
        if len(made) == 2:
            files.remove_stale_temporaries(str(temporary), "work-")  # another process, between the folder and its lock

    monkeypatch.setattr(os, "mkdir", made_late)
    with files.temporary_folder() as folder:
        assert made == [str(temporary), str(folder), str(folder)]
        assert folder.is_dir()


def test_a_work_folder_is_made_when_it_is_used(temporary):
    path = files.temporary_path()
    assert not temporary.exists()
    with files.temporary_folder(path) as folder:
        assert str(folder) == path
        assert list(temporary.iterdir()) == [folder]
    assert list(temporary.iterdir()) == []


def test_a_work_folder_goes_with_its_process(temporary):
    kill_while("with files.temporary_folder() as folder: (folder / 'x').touch(); list(parts())")
    assert len(list(temporary.iterdir())) == 1
    with files.temporary_folder() as folder, files.temporary_folder() as other:
        assert sorted(temporary.iterdir()) == sorted([folder, other])
        (folder / "below").mkdir()
    assert list(temporary.iterdir()) == []
    assert stat.S_IMODE(temporary.stat().st_mode) == 0o700


def test_the_last_reports_stay(temporary):
    made = []
    for number in range(5):
        made.append(files.report_folder(2))
        os.utime(made[-1], (number, number))
    assert sorted(map(str, temporary.iterdir())) == sorted(made[-3:])


def test_a_folder_that_others_may_write_to_is_not_used(temporary):
    temporary.mkdir()
    temporary.chmod(0o777)
    folder = Path(files.report_folder(2))
    assert folder.is_dir()
    assert list(temporary.iterdir()) == []
    with pytest.raises(PermissionError, match=r"may be written to by others .mode 777"):
        files.ensure_private_folder(str(temporary))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path):
    os.chown(tmp_path, 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to user 12345, not to you"):
        files.ensure_private_folder(str(tmp_path))
