"""Hostfiles and selections are read exactly, or refused with the place and the token: never half, never a traceback."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stateroom.launcher.hostfile import Host, first, parse_hostfile, read_hostfile, select
from stateroom.launcher.problem import LaunchError


def test_a_hostfile_is_read_exactly() -> None:
    text = "# the rack\n\nworker-1 slots=4   \r\n  node_2.lan\tslots=1 # spare\n"
    text += "bob@10.0.0.7 slots=2\nfe80::1 slots=3\nada@[fd00::2] slots=1\n"
    assert parse_hostfile(text, "hosts") == [
        Host("worker-1", (0, 1, 2, 3)),
        Host("node_2.lan", (0,)),
        Host("10.0.0.7", (0, 1), "bob"),
        Host("fe80::1", (0, 1, 2)),
        Host("fd00::2", (0,), "ada"),
    ]


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfa slots=1\n")
    assert read_hostfile(tmp_path / "hosts") == [Host("a", (0,))]


MALFORMED = [
    ("worker-1", "hosts:1: 'worker-1' has no slots"),
    ("worker-1 4", "hosts:1: '4' where slots=N"),
    ("worker-1 slots", "hosts:1: 'slots' where slots=N"),
    ("worker-1 slots=", "hosts:1: 'slots='"),
    ("worker-1 slots=0", "hosts:1: 'slots=0'"),
    ("worker-1 slots=-1", "hosts:1: 'slots=-1'"),
    ("worker-1 slots=two", "hosts:1: 'slots=two'"),
    ("worker-1 slots=1.5", "hosts:1: 'slots=1.5'"),
    ("worker-1 slots=99999", "hosts:1: 'slots=99999'"),
    ("worker-1 slots=9" + "9" * 5000, "hosts:1: 'slots=99"),
    ("worker-1 slots = 4", "hosts:1: 'slots' where slots=N"),
    ("worker-1 Slots=4", "hosts:1: 'Slots=4' where slots=N"),
    ("worker-1 gpus=4", "hosts:1: 'gpus=4' where slots=N"),
    ("worker-1 slots=4 max_slots=8", "hosts:1: 'max_slots=8' after the slots"),
    ("worker-1 slots=4 slots=4", "hosts:1: 'slots=4' after the slots"),
    ("slots=4", "hosts:1: 'slots=4' is neither"),
    ("a slots=1\nb slots=1\n# c\na slots=2", "hosts:4: host 'a' is already on line 1"),
    ("a slots=1\nbob@a slots=2", "hosts:2: host 'a' is already on line 1"),
    ("-oProxyCommand=x slots=1", "hosts:1: '-oProxyCommand=x' is neither"),
    ("wor ker slots=1", "hosts:1: 'ker' where slots=N"),
    ("worker;reboot slots=1", "hosts:1: 'worker;reboot' is neither"),
    ("$(id) slots=1", "hosts:1: '$(id)' is neither"),
    ("@host slots=1", "hosts:1: '@host': '' is no user name"),
    ("bob@ slots=1", "hosts:1: '' is neither"),
    ("-bob@host slots=1", "hosts:1: '-bob@host': '-bob' is no user name"),
    ("host:22 slots=1", "hosts:1: 'host:22' is neither"),
    ("[host] slots=1", "hosts:1: '[host]' is neither"),
    ("[fe80::1 slots=1", "hosts:1: '[fe80::1' is neither"),
    ("fe80:::1 slots=1", "hosts:1: 'fe80:::1' is neither"),
    ("10.0.0.256 slots=1", "hosts:1: '10.0.0.256' is neither"),
    ("10.0.0 slots=1", "hosts:1: '10.0.0' is neither"),
    ("h\u00f6st slots=1", "hosts:1: 'h\u00f6st' is neither"),
    ("host\x00 slots=1", "hosts:1: 'host\\x00' is neither"),
    ("", "hosts: no host in it"),
    ("# nothing\n\n   \n", "hosts: no host in it"),
    ("ok slots=1\n\n\nbad", "hosts:4: 'bad' has no slots"),
]
HOSTS = [Host("w-1", (0, 1, 2, 3)), Host("w-2", (0, 1)), Host("fe80::1", (0, 1))]
BAD_SELECTIONS = [
    ("w-9", "no host 'w-9'; there are w-1, w-2"),
    ("w-1@w-9", "no host 'w-9'"),
    ("W-1", "no host 'W-1'"),
    ("bob@w-1", "no host 'bob'"),
    ("w-1:4", "w-1 has no slot 4; its slots are 0, 1, 2, 3"),
    ("w-1:0,9", "w-1 has no slot 9"),
    ("w-1:-1", "'-1' is no slot number of w-1"),
    ("w-1:", "'' is no slot number of w-1"),
    ("w-1:0,", "'' is no slot number of w-1"),
    ("w-1:,", "'' is no slot number of w-1"),
    ("w-1:a", "'a' is no slot number of w-1"),
    ("w-1:0-2", "'0-2' is no slot number of w-1"),
    ("w-1:0:1", "'0:1' is no slot number of w-1"),
    ("w-1:0,0", "slot 0 of w-1 is named twice"),
    ("w-1@w-1", "host 'w-1' is named twice"),
    ("w-1:0@w-1:1", "host 'w-1' is named twice"),
    ("@w-1", "a host name is missing at an '@'"),
    ("w-1@", "a host name is missing at an '@'"),
    ("w-1@@w-2", "a host name is missing at an '@'"),
    ("@", "a host name is missing at an '@'"),
    (":0", "no host ''"),
    ("[fe80::1", "'[fe80::1' is not understood"),
    ("[fe80::1]0", "'[fe80::1]0' is not understood"),
    ("[fe80::1]:7", "fe80::1 has no slot 7"),
]


@pytest.mark.parametrize(("text", "problem"), MALFORMED)
def test_a_malformed_hostfile_is_refused_with_file_line_and_token(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as refused:
        parse_hostfile(text, "hosts")
    assert str(refused.value).startswith(problem)


@pytest.mark.parametrize("option", ["--include", "--exclude"])
@pytest.mark.parametrize(("text", "problem"), BAD_SELECTIONS)
def test_a_malformed_selection_is_refused_with_option_and_token(text: str, problem: str, option: str) -> None:
    with pytest.raises(LaunchError) as refused:
        select(HOSTS, **{option[2:]: text})
    assert str(refused.value).startswith(f"{option} {text!r}: {problem}")


def test_there_are_forty_malformed_inputs_at_least() -> None:
    assert len(MALFORMED) + len(BAD_SELECTIONS) >= 40


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("", "", {"w-1": (0, 1, 2, 3), "w-2": (0, 1), "fe80::1": (0, 1)}),
        ("w-2", "", {"w-2": (0, 1)}),
        ("w-2:1@w-1:3,0", "", {"w-1": (0, 3), "w-2": (1,)}),  # in the hostfile's order
        ("fe80::1", "", {"fe80::1": (0, 1)}),
        ("[fe80::1]:1@w-2", "", {"w-2": (0, 1), "fe80::1": (1,)}),
        ("", "w-1@[fe80::1]", {"w-2": (0, 1)}),
        ("", "w-1:0,2@w-2:0,1", {"w-1": (1, 3), "fe80::1": (0, 1)}),
    ],
)
def test_selections(include: str, exclude: str, left: dict[str, tuple[int, ...]]) -> None:
    assert {host.name: host.slots for host in select(HOSTS, include, exclude)} == left
    assert [host.name for host in select(HOSTS, include, exclude)] == list(left)


def test_include_with_exclude_and_nothing_left_are_refused() -> None:
    with pytest.raises(LaunchError, match="--include and --exclude cannot be combined"):
        select(HOSTS, "w-1", "w-2")
    with pytest.raises(LaunchError, match="leaves no slot on any host"):
        select(HOSTS, "", "w-1@w-2@fe80::1")


def test_the_first_hosts_and_slots() -> None:
    assert first(HOSTS, 2, 1) == [Host("w-1", (0,)), Host("w-2", (0,))]
    assert first(HOSTS, None, None) == HOSTS
    with pytest.raises(LaunchError, match="--num_nodes 4: there are only 3"):
        first(HOSTS, 4, None)
    with pytest.raises(LaunchError, match="--num_gpus 3: w-2 has only 2 slots"):
        first(HOSTS, None, 3)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: None, "cannot read the hostfile"),
        (lambda path: path.mkdir(), "cannot read the hostfile"),
        (lambda path: path.write_bytes(b"worker-1 slots=1\n\xff\xfe"), "byte 17 is not UTF-8 text"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(make, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    make(path)
    with pytest.raises(LaunchError, match=problem) as refused:
        read_hostfile(path)
    assert str(path) in str(refused.value)


NAMES = st.text(string.ascii_letters + string.digits + "-_.", min_size=1, max_size=20).filter(
    lambda name: name[0] not in "-." and not set(name) <= set("0123456789.")
)
ENTRIES = st.lists(st.tuples(NAMES, st.integers(1, 64)), min_size=1, max_size=8, unique_by=lambda entry: entry[0])


@settings(deadline=None)
@given(ENTRIES, st.data())
def test_what_is_written_is_read_back(entries: list[tuple[str, int]], data: st.DataObject) -> None:
    lines = []
    for name, slots in entries:
        lines += data.draw(st.lists(st.sampled_from(["", "  ", "# slots=3", "\t#"]), max_size=2))
        space = data.draw(st.sampled_from([" ", "\t", "   "]))
        lines.append(
            f"{data.draw(st.sampled_from(['', ' ']))}{name}{space}slots={slots}{data.draw(st.sampled_from(['', ' ', ' # x', chr(13)]))}"
        )
    assert parse_hostfile("\n".join(lines), "hosts") == [Host(name, tuple(range(slots))) for name, slots in entries]


@settings(deadline=None)
@given(st.text(max_size=80))
def test_no_text_brings_anything_but_hosts_or_a_named_refusal(text: str) -> None:
    try:
        hosts = parse_hostfile(text, "some/hosts")
    except LaunchError as refused:
        assert str(refused).startswith("some/hosts")
        return
    assert hosts and all(host.slots and host.name and not host.name.startswith("-") for host in hosts)


PIECES = st.lists(st.sampled_from(["w-1", "w-2", "fe80::1", "[", "]", ":", "@", ",", "0", "1", "9", " ", "x", "-"]), max_size=12)


@settings(deadline=None)
@given(PIECES, st.booleans())
def test_no_selection_brings_anything_but_known_slots_or_a_named_refusal(pieces: list[str], is_include: bool) -> None:
    text = "".join(pieces)
    option = "include" if is_include else "exclude"
    try:
        left = select(HOSTS, **{option: text})
    except LaunchError as refused:
        assert str(refused).startswith(f"--{option} {text!r}")
        return
    known = {host.name: host.slots for host in HOSTS}
    assert left and all(host.slots and set(host.slots) <= set(known[host.name]) for host in left)
