"""Control groups: where this process may have some, and a real one where it may."""

import os
import subprocess
import sys

import pytest

from agentic_prompting.harnesses import cgroups as module
from agentic_prompting.harnesses.cgroups import ControlGroup

MOUNTS = """\
36 25 0:32 / /sys/fs/cgroup/unified rw,nosuid - tmpfs tmpfs rw
37 36 0:33 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw
"""


@pytest.mark.parametrize(
    "groups, root, folder",
    [
        ("0::/user.slice/run.scope\n", "/", "/sys/fs/cgroup/user.slice/run.scope"),
        ("0::/docker/abc\n", "/docker/abc", "/sys/fs/cgroup"),
        ("9:name=systemd:/\n0::/\n", "/", "/sys/fs/cgroup"),
        ("4:memory:/x\n", "/", None),
        ("0::/../outside\n", "/docker/abc", None),
    ],
)
def test_the_group_of_this_process(groups, root, folder):
    found = module._own_group(groups, MOUNTS.format(root=root))
    assert (str(found) if found else None) == folder


def test_no_group_without_the_controller(tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    monkeypatch.setattr(module, "_own_group", lambda *_: tmp_path / "own")
    assert module._parent_group.__wrapped__(1) is None


TAKES_MEMORY = """
import os, sys
sys.stdin.read(1)
held = os.memfd_create("x")
for _ in range(400):
    os.write(held, bytes(2**20))
print("survived")
"""


def test_a_group_counts_memory_of_no_process():
    group = ControlGroup.create(2**27, 64)
    if group is None:
        pytest.skip("this process may create no control group with a limit of memory")
    process = subprocess.Popen(
        [sys.executable, "-c", TAKES_MEMORY], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    group.add([process.pid])
    out, _ = process.communicate(b"x")
    assert process.returncode != 0 and b"survived" not in out and group.was_out_of_memory()
    group.close()
    assert not os.path.exists(group.folder)
