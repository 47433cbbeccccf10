"""Network file systems are told from local ones by the mount table, whatever is mounted within what."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.ledger.mounts import network_file_system

MOUNTS = r"""/dev/sda1 / ext4 rw,relatime 0 0
server:/home /home nfs4 rw,vers=4.2 0 0
/dev/sdb1 /home/me/scratch xfs rw 0 0
//server/share /mnt/my\040data\134old cifs rw 0 0
/dev/sdc1 /over ext4 rw 0 0
ceph:/ /over ceph rw 0 0
server:/home2 /home2 nfs rw 0 0
/dev/sdd1 /home2 ext4 rw 0 0
broken line
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", None),
        ("/tmp/run/ledger.sqlite", None),
        ("/home", "nfs4"),
        ("/home/me/runs/a/ledger.sqlite", "nfs4"),
        ("/homestead/ledger.sqlite", None),
        ("/home/me/scratch/run/ledger.sqlite", None),
        ("/mnt/my data\\old/ledger.sqlite", "cifs"),
        ("/mnt/my data/ledger.sqlite", None),
        ("/over/ledger.sqlite", "ceph"),
        ("/home2/ledger.sqlite", None),
        ("/home/me/scratch/../ledger.sqlite", "nfs4"),
    ],
)
def test_the_innermost_and_latest_mount_decides(path: str, expected: str | None) -> None:
    assert network_file_system(Path(path), MOUNTS) == expected


def test_a_link_is_followed_to_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/nowhere/far", target_is_directory=True)
    assert (
        network_file_system(tmp_path / "link" / "ledger.sqlite", "server:/far /nowhere/far lustre rw 0 0\n") == "lustre"
    )


def test_this_machines_mount_table_is_read(tmp_path: Path) -> None:
    assert network_file_system(tmp_path) is None
