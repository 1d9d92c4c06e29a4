"""Control groups in a folder with the kernel's layout: the group that is used, the files written, the groups removed."""

import os
from pathlib import Path

import pytest

from tokenmill.engine.limits import cgroup
from tokenmill.engine.limits.cgroup import (
    COMMAND,
    ENGINES,
    Cgroup,
    Home,
    find_home,
    make_group,
    memory_limit_of,
    sweep,
)
from tokenmill.engine.process.identity import Pid
from tokenmill.units import GIB


class Tree:
    """/proc and /sys/fs/cgroup as files."""

    def __init__(self, folder: Path, path: str, *, controllers: str = "cpuset cpu memory") -> None:
        self.proc, self.mount, self.managed = folder / "proc", folder / "cgroup", folder / "run"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "self/mountinfo").write_text(f"30 1 0:26 / {self.mount} rw - cgroup2 cgroup2 rw\n")
        self.controllers = controllers
        self.group("/")
        (self.mount / "cgroup.type").unlink()
        self.enter(path)

    def group(self, path: str, *pids: int, delegated: bool = False) -> Path:
        folder = self.mount / path.strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup.controllers").write_text(self.controllers + "\n")
        (folder / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
        (folder / "cgroup.subtree_control").write_text("")
        (folder / "cgroup.type").write_text("domain\n")
        if delegated:
            os.setxattr(folder, "user.delegate", b"1")
        return folder

    def enter(self, path: str) -> None:
        (self.proc / "self/cgroup").write_text(f"1:name=systemd:/x\n0::{path}\n")

    def home(self) -> Home | str:
        return find_home(self.proc, self.managed)


def test_a_delegated_group_is_left_before_it_is_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "descendants", lambda _pid: ())  # what other tests have left behind
    tree = Tree(tmp_path, "/user.slice/mill.scope")
    own = tree.group("/user.slice/mill.scope", os.getpid(), delegated=True)
    home = tree.home()
    assert home == Home(own, occupied=True)
    made = make_group(home, "kimi", memory_max_bytes=700 * GIB, cpus=(0, 1, 2))
    assert isinstance(made, Cgroup)
    assert (made.memory_max_bytes, made.cpuset) == (700 * GIB, False)  # a plain folder has no controllers
    assert (own / COMMAND / "cgroup.procs").read_text() == str(os.getpid())
    assert (own / ENGINES / "memory.max").read_text() == str(700 * GIB)
    assert made.folder.parent == own / ENGINES
    assert made.folder.name.startswith("kimi.")
    tree.enter(f"/user.slice/mill.scope/{COMMAND}")
    (own / "cgroup.procs").write_text("")
    assert tree.home() == Home(own, occupied=False)


def test_cpus_are_the_groups_where_it_was_given_them(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "/mill")
    home = tree.group("/mill", delegated=True)
    tree.group(f"/mill/{ENGINES}")
    made = make_group(Home(home, occupied=False), "kimi", memory_max_bytes=None, cpus=(0, 1, 2, 5))
    assert isinstance(made, Cgroup)
    assert made.cpuset
    assert (made.folder / "cpuset.cpus").read_text() == "0-2,5"
    assert (home / "cgroup.subtree_control").read_text() == "+cpuset"
    assert (home / ENGINES / "memory.max").read_text() == "max"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/user.slice/session-1.scope", "/user.slice/session-1.scope is not delegated"),
        ("/../../outside", "not visible"),
        ("/nowhere", "not visible"),
    ],
)
def test_groups_of_others_are_left_alone(tmp_path: Path, path: str, why: str) -> None:
    tree = Tree(tmp_path, path)
    tree.group("/user.slice/session-1.scope", os.getpid())
    tree.managed.mkdir()
    assert why in str(tree.home())


def test_others_in_the_group_are_not_moved(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "/mill")
    tree.group("/mill", os.getpid(), 1, os.getppid(), delegated=True)
    assert str(tree.home()).startswith("2 other processes")


def test_without_the_memory_controller_there_is_no_home(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "/", controllers="hugetlb")
    assert "no memory controller" in str(tree.home())
    (tree.proc / "self/mountinfo").write_text("")
    assert "cgroup v2 is not available" in str(tree.home())


def test_the_root_is_ours_where_nobody_manages_it(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "/")
    (tree.mount / "cgroup.procs").write_text("1\n2\n")
    assert tree.home() == Home(tree.mount, occupied=False)
    tree.managed.mkdir()
    assert "/ is not delegated" in str(tree.home())


def test_groups_of_dead_engines_are_removed_at_the_next_start(tmp_path: Path) -> None:
    me = Pid.here(os.getpid())
    assert me is not None
    alive, dead = f"a.0.{me.pid}.{me.ticks}", f"b.0.{me.pid}.{me.ticks + 1}"
    for name in (alive, dead, "detached.0.1.1", "anybody's"):
        (tmp_path / name).mkdir()
    (tmp_path / "detached.0.1.1/cgroup.procs").touch()  # as the kernel does, a folder with something in it refuses
    (tmp_path / "memory.max").touch()
    sweep(tmp_path)
    assert sorted(folder.name for folder in tmp_path.iterdir() if folder.is_dir()) == sorted(
        [alive, "anybody's", "detached.0.1.1"]
    )


def test_engines_together_leave_the_largest_reserve_of_those_that_run(tmp_path: Path) -> None:
    home = Home(Tree(tmp_path, "/mill").group("/mill", delegated=True), occupied=False)
    limits = []
    for wanted in (500 * GIB, 400 * GIB, 600 * GIB, None):
        made = make_group(home, "kimi", memory_max_bytes=wanted, cpus=None)
        assert isinstance(made, Cgroup)
        limits.append(made.memory_max_bytes)
    assert limits == [500 * GIB, 400 * GIB, 400 * GIB, 400 * GIB]


def test_a_refusal_is_said(tmp_path: Path) -> None:
    home = Tree(tmp_path, "/mill").group("/mill", delegated=True)
    (home / ENGINES).write_text("in the way")
    assert str(make_group(Home(home, occupied=False), "kimi", memory_max_bytes=GIB, cpus=None)).endswith("File exists")


def test_the_least_limit_on_the_way_up_holds(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "/")
    for path, limit in (("/a", "max"), ("/a/b", "4096"), ("/a/b/c", "8192")):
        (tree.group(path) / "memory.max").write_text(limit + "\n")
    (tree.proc / "7").mkdir()
    (tree.proc / "7/cgroup").write_text("0::/a/b/c\n")
    assert memory_limit_of(7, tree.proc) == 4096
    (tree.proc / "7/cgroup").write_text("0::/a\n")
    assert memory_limit_of(7, tree.proc) is None
    assert memory_limit_of(8, tree.proc) is None
