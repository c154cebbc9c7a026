"""The launcher's small parts: lines and bars, the order of failures, variables, cores, Slurm's lists, the check of hosts."""

from __future__ import annotations

import io
import json
import signal
import socket
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stateroom.launcher import exports, preflight, slurm
from stateroom.launcher.channel import Lines, decode, encode
from stateroom.launcher.cores import parse_cores, share
from stateroom.launcher.failures import Failure, echoes, first, render
from stateroom.launcher.job import Job, Order, orders_from_text, orders_to_text
from stateroom.launcher.lines import LONGEST, Transcript
from stateroom.launcher.network import interface_towards, is_loopback
from stateroom.launcher.output import Screen
from stateroom.launcher.problem import LaunchError

# --- lines and bars


@settings(deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), max_size=30), max_size=6), st.integers(1, 7))
def test_lines_are_the_same_however_the_bytes_come(lines: list[str], step: int) -> None:
    data = "".join(line + "\n" for line in lines).encode() + b"rest"
    transcript, found = Transcript(), []
    for start in range(0, len(data), step):
        found += transcript.feed(data[start : start + step])
    assert found == lines
    assert transcript.close() == ["rest"]
    assert list(transcript.tail) == [*lines, "rest"][-25:]


def test_a_line_that_is_written_over_is_its_last_state() -> None:
    transcript = Transcript()
    assert transcript.feed(b"\r 10%|#   |") == [] and transcript.bar == " 10%|#   |"
    assert transcript.feed(b"\r 50%|##  |") == [] and transcript.bar == " 50%|##  |"
    assert transcript.feed(b"\r100%|####|\nnext\r\n") == ["100%|####|", "next"]
    assert transcript.bar is None
    for i in range(10_000):
        transcript.feed(f"\rstep {i} {'x' * 50}".encode())
    assert len(transcript._rest) < 500


def test_a_line_without_end_comes_in_pieces_and_no_character_is_torn() -> None:
    text = "é" * LONGEST  # two bytes each
    pieces = Transcript().feed(text.encode() + b"\n")
    assert "".join(pieces) == text and len(pieces) >= 2
    growing, found = Transcript(), []
    for _ in range(40):
        found += growing.feed(b"x" * 1000)
    found += growing.close()
    assert "".join(found) == "x" * 40_000 and all(len(piece) <= LONGEST for piece in found)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def seen(text: str) -> list[str]:
    """Return what a terminal shows after `text`, as far as these lines use it."""
    rows = [""]
    for part in text.replace("\r\x1b[K", "\x00").replace("\n", "\n\x01"):
        if part == "\x00":
            rows[-1] = ""
        elif part == "\x01":
            rows.append("")
        elif part != "\n":
            rows[-1] += part
    return rows


def test_a_bar_stays_whole_below_the_lines_of_other_ranks() -> None:
    terminal = Terminal()
    screen = Screen(terminal, terminal)
    screen.bar("a:0", 0, "10%")
    screen.line("a:1", "hello", rank=1)
    screen.bar("b:1", 1, "99%")  # another rank's bar does not take its place
    screen.bar("a:0", 0, "20%")
    assert seen(terminal.getvalue()) == ["[a:1] hello", "[a:0] 20%"]
    screen.line("a:0", "100%", rank=0)
    screen.close()
    assert seen(terminal.getvalue()) == ["[a:1] hello", "[a:0] 100%", ""]


def test_in_a_file_a_bar_is_a_line_now_and_then() -> None:
    now = [0.0]
    out, err = io.StringIO(), io.StringIO()
    screen = Screen(out, err, lambda: now[0])
    for now[0] in range(25):
        screen.bar("a:0", 0, f"{now[0]}%")
    assert err.getvalue().splitlines() == ["[a:0] 0%", "[a:0] 10%", "[a:0] 20%"]
    assert out.getvalue() == ""


# --- the channel


def test_messages_survive_the_company_of_other_text() -> None:
    stream = b"motd\n" + encode("lines", 3, text="a\nb \x1e é") + b"half " + encode("beat", 1)
    lines = Lines()
    found = [decode(line) for start in range(0, len(stream), 5) for line in lines.feed(stream[start : start + 5])]
    assert found == [None, {"k": "lines", "h": 3, "text": "a\nb \x1e é"}, None]


@pytest.mark.parametrize("line", [b"", b"x", b"\x1eSR ", b"\x1eSR {", b'\x1eSR {"k": "x"}', b"\x1eSR []", b'\x1eSR {"k": 1, "h": 2}'])
def test_what_is_no_whole_message_is_text(line: bytes) -> None:
    assert decode(line) is None


def test_orders_survive_their_way() -> None:
    job = Job("train.py", ("a b", "%n", "'"), python="/py", cwd="/w", env={"A": "1\n2"}, bind_cores=(1, 2))
    base = Order(job, "h0", 0, None, 2, "10.0.0.1", 29500, 1, 2, "id", attempt=1, led=False)
    other = Order(job, "h1", 1, (0, 3), 2, "10.0.0.1", 29500, 1, 2, "id", attempt=1, led=False)
    text = orders_to_text([base, other])
    assert orders_from_text(text) == [base, other]
    assert Order.from_json(json.loads(json.dumps(other.to_json()))) == other
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_=")


# --- failures


def failure(rank: int, code: int = 1, time_ns: int = 0, message: str = "", **more: object) -> Failure:
    return Failure(rank, f"h{rank}", code, time_ns, message, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([failure(0, time_ns=5), failure(1, time_ns=4)], 1),
        (
            [
                failure(0, time_ns=1, message="RuntimeError: Connection closed by peer [::1]"),
                failure(1, time_ns=9, message="ValueError: x"),
            ],
            1,
        ),
        ([failure(0, time_ns=1, message="RankError: … Connection reset by peer"), failure(1, -9, time_ns=9)], 1),
        ([failure(0, -6, time_ns=1), failure(1, 3, time_ns=2)], 1),  # an abort is how NCCL's watchdog follows a lost peer
        ([failure(0, -15, time_ns=1), failure(1, 3, time_ns=2)], 1),
        ([failure(1, -11, time_ns=7), failure(0, time_ns=8)], 1),
        ([failure(2, time_ns=3), failure(1, time_ns=3)], 1),
        ([failure(0, message="Broken pipe")], 0),
    ],
)
def test_the_cause_is_told_from_its_echoes(failures: list[Failure], rank: int) -> None:
    assert first(failures).rank == rank


def test_status_and_words() -> None:
    assert (failure(0, 7).status, failure(0, -9).status, failure(0, -signal.SIGSEGV).status) == (7, 137, 139)
    assert failure(0, -11).what() == "signal 11 (SIGSEGV)" and failure(0, -64).what() == "signal 64 (SIGRTMAX)"
    assert failure(0, -99).what() == "signal 99" and failure(0, 3).what() == "status 3"


def test_the_report_ends_with_what_the_cause_left_to_read() -> None:
    cause = failure(3, time_ns=1, message="ValueError: x", traceback="".join(f"line {i}\n" for i in range(100)))
    text = render([cause, failure(1, time_ns=2)], 4).splitlines()
    assert text[0] == "rank 3 on h3 failed first, with status 1; the others were ended, its traceback:"
    assert "40 lines left out" in text[1] and text[-1] == "line 99" and len(text) == 62
    assert echoes([cause, failure(1, time_ns=2, message="a\nb")]) == ["rank 1 on h1 failed after it, with status 1: a"]
    assert len(echoes([cause, *(failure(rank, time_ns=2) for rank in range(10, 30))])) == 9
    assert render([failure(0, 3, tail=("Fatal: x",))], 1).endswith("the last lines of its standard error:\nFatal: x")
    assert Failure.from_json(json.loads(json.dumps(cause.to_json()))) == cause


# --- variables


def test_what_steers_libraries_goes_along_and_nothing_else() -> None:
    env = {"NCCL_DEBUG": "1", "PYTHONPATH": "p", "UCX_TLS": "t", "HOME": "h", "TORCHELASTIC_RUN_ID": "x", "CUDA_VISIBLE_DEVICES": "0"}
    assert exports.exported(env) == {"NCCL_DEBUG": "1", "PYTHONPATH": "p", "UCX_TLS": "t"}


def test_a_file_of_variables(tmp_path: Path) -> None:
    path = tmp_path / "vars"
    path.write_text('# c\n\nA=1\nexport B=x=y z\nC="q r"\nD=\nE=\'\n')
    assert exports.read_env_file(path) == {"A": "1", "B": "x=y z", "C": "q r", "D": "", "E": "'"}
    for text, problem in [("A=1\nB", r"vars:2: 'B'"), ("1A=1", "vars:1"), ("=x", "vars:1"), ("A B=1", "vars:1")]:
        path.write_text(text)
        with pytest.raises(LaunchError, match=problem):
            exports.read_env_file(path)
    path.write_bytes(b"A=\xff")
    with pytest.raises(LaunchError, match="byte 2 is not UTF-8"):
        exports.read_env_file(path)
    with pytest.raises(LaunchError, match="cannot read"):
        exports.read_env_file(tmp_path / "none")


def test_the_file_here_wins_over_the_one_at_home(tmp_path: Path) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
        (folder / ".deepspeed_env").write_text("A=1")
    assert exports.env_files(None, {}, home, here) == [home / ".deepspeed_env", here / ".deepspeed_env"]
    assert exports.env_files(Path("mine"), {}, home, here) == [Path("mine")]
    assert exports.env_files(None, {"DS_ENV_FILE": "other"}, home, here) == []


def test_variables_by_option() -> None:
    assert exports.from_options(["A", "B=x=y", "C="], {"A": "1"}) == {"A": "1", "B": "x=y", "C": ""}
    for word in ("Z", "=1", "A-B=1", ""):
        with pytest.raises(LaunchError, match="--export"):
            exports.from_options([word], {"A": "1"})


# --- cores


def test_cores_are_shared_out_evenly() -> None:
    assert parse_cores("0,2-4, 9") == (0, 2, 3, 4, 9)
    assert [share(range(7), rank, 3) for rank in range(3)] == [(0, 1), (2, 3), (4, 5)]
    with pytest.raises(LaunchError, match="3 ranks cannot be bound to 2 cores"):
        share((0, 1), 0, 3)
    for text in ("", "a", "3-1", "1-", "-1", "1,,2", "0-99999999"):
        with pytest.raises(LaunchError, match="--bind_core_list"):
            parse_cores(text)


# --- Slurm


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("gpu[07-08,11],login", ["gpu07", "gpu08", "gpu11", "login"]),
        ("r[1-2]n[0-1].x", ["r1n0.x", "r1n1.x", "r2n0.x", "r2n1.x"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
    ],
)
def test_slurms_lists_of_hosts(text: str, hosts: list[str]) -> None:
    assert list(slurm.expand(text)) == hosts


@pytest.mark.parametrize("text", ["", ",", "a,", "a[", "a]", "a[1", "a[[1]]", "a[1-]", "a[x]", "a[3-1]", "a[]", "a[1-99999999]"])
def test_a_malformed_list_of_slurm_is_named(text: str) -> None:
    with pytest.raises(LaunchError, match="SLURM_JOB_NODELIST"):
        slurm.expand(text, "SLURM_JOB_NODELIST")


@settings(deadline=None)
@given(st.text("ab[]0123-,", max_size=14))
def test_no_list_of_slurm_brings_anything_but_hosts_or_a_refusal(text: str) -> None:
    try:
        assert all(slurm.expand(text))
    except LaunchError as refused:
        assert repr(text) in str(refused)


def test_an_allocation() -> None:
    batch = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x2),1"}
    assert slurm.allocation(batch) == slurm.Allocation(42, ("n1", "n2", "n3"), (2, 2, 1), None)
    step = {**batch, "SLURM_STEP_ID": "0", "SLURM_NODEID": "1", "SLURM_STEP_NODELIST": "n[2-3]", "SLURM_GPUS_PER_NODE": "a100:4"}
    assert slurm.allocation(step) == slurm.Allocation(42, ("n2", "n3"), (4, 4), 1)
    assert slurm.allocation({}) is None
    with pytest.raises(LaunchError, match="SLURM_JOB_NODELIST is not"):
        slurm.allocation({"SLURM_JOB_ID": "42"})
    with pytest.raises(LaunchError, match="SLURM_TASKS_PER_NODE='x'"):
        slurm.allocation({**batch, "SLURM_TASKS_PER_NODE": "x"})


# --- the check of hosts

WHOLE = {"python": "3.11.2", "torch": "2.13.0", "stateroom": "0.1.0", "lacks": [], "port": 1}


@pytest.mark.parametrize(
    ("facts", "offset_s", "problem"),
    [
        ({}, 0.0, None),
        ({"python": "3.11.9"}, 4.0, None),
        ({"python": "3.12.1"}, 0.0, "python 3.12.1, but a has 3.11.2"),
        ({"torch": "2.12.0"}, 0.0, "torch 2.12.0, but a has 2.13.0"),
        ({"stateroom": "0.2.0"}, 0.0, "stateroom 0.2.0, but a has 0.1.0"),
        ({"torch": None}, 0.0, "torch is not installed"),
        ({"lacks": ["there is no file x"]}, 0.0, "there is no file x"),
        ({}, 6.5, "its clock is 6.5 s ahead of this one's"),
        ({}, -60.0, "its clock is 60.0 s behind this one's"),
    ],
)
def test_what_a_host_lacks(facts: dict, offset_s: float, problem: str | None) -> None:
    found = preflight.problems([("a", WHOLE), ("b", {**WHOLE, **facts}), ("c", None)], {"a": 0.0, "b": offset_s})
    assert list(found) == ([] if problem is None else ["b"])
    assert problem is None or found["b"][0].startswith(problem)


def test_facts_of_this_host(tmp_path: Path) -> None:
    (tmp_path / "x.py").touch()
    listener = preflight.Listener()
    has = preflight.facts(str(tmp_path), ("file", "x.py"), listener)
    assert has["lacks"] == [] and has["torch"] and has["port"] == listener.port > 0
    assert abs(has["time_ns"] - time.time_ns()) < 60e9
    taken = preflight.Listener(listener.port)
    lacking = preflight.facts(str(tmp_path), ("file", "y.py"), taken)["lacks"]
    assert lacking[0] == f"there is no file {tmp_path / 'y.py'}" and f"port {listener.port} is not free" in lacking[1]
    for check, word in [(("module", "no_such_module.sub"), "module no_such_module"), (("program", "no-such-program"), "program no-such")]:
        assert word in preflight.facts(None, check, preflight.Listener())["lacks"][0]
    assert preflight.facts(None, ("module", "json.tool"), listener)["lacks"] == []
    assert preflight.facts(str(tmp_path / "none"), None, listener)["lacks"] == [f"there is no folder {tmp_path / 'none'}"]
    listener.close()


def test_the_kept_port_is_kept_until_it_is_taken() -> None:
    listener = preflight.Listener(0, only_here=True)
    with pytest.raises(OSError):
        socket.create_server(("127.0.0.1", listener.port))
    with socket.socket(fileno=listener.take()) as taken:
        assert taken.getsockname()[0] == "127.0.0.1"
    with pytest.raises(OSError, match="given away"):
        listener.take()


def test_addresses_that_mean_the_host_itself() -> None:
    assert [is_loopback(a) for a in ("127.0.0.1", "::1", "localhost", "10.0.0.1", "worker-1", "fe80::1%eth0")] == [True] * 3 + [False] * 3
    assert interface_towards("127.0.0.1") is None and interface_towards("no-such-host.invalid") is None
