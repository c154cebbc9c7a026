"""The course of a job, event by event, without a process or a clock."""

from __future__ import annotations

import pytest
from stateroom.launcher.course import CONTACT_S, Course, Drop, HostState, Say, Send, Stage
from stateroom.launcher.failures import Failure
from stateroom.launcher.hostfile import Host
from stateroom.launcher.job import Job, Order
from stateroom.launcher.plan import Plan
from stateroom.launcher.runners import LocalRunner, SlurmRunner, SshRunner

FACTS = {"python": "3.11.2", "torch": "2.13.0", "stateroom": "0.1.0", "lacks": [], "port": 4000, "address": "10.0.0.1"}


def make(count: int = 3, runner=None, restarts: int = 0, low: int | None = None, high: int | None = None, **more) -> Course:
    runner = runner or SshRunner()
    names = [f"h{i}" for i in range(count)]
    low, high = low or count, high or count
    job = Job("x.py", max_restarts=restarts)
    orders = tuple(Order(job, name, i, None, 1, "", 0, low, high, "id", led=runner.leads) for i, name in enumerate(names))
    hosts = tuple(Host(name, (0,)) for name in names)
    return Course(Plan(hosts, orders, runner, low, high, more.pop("master_addr", None), more.pop("preflight", True)))


def hello(course: Course, place: int, **facts) -> list:
    return course.hello(place, {**FACTS, "address": f"10.0.0.{place + 1}", "port": 4000 + place, **facts}, 0.0, 1.0)


def running(*args, **kwargs) -> Course:
    course = make(*args, **kwargs)
    for place in range(len(course.hosts)):
        hello(course, place)
    assert course.stage is Stage.RUN
    return course


def ended(course: Course, place: int, how: str = "stopped", *failures: Failure, text: str = "") -> list:
    return course.ended(place, how, list(failures), text, 5000 + place, 2.0)


def sent(actions: list, kind: str) -> dict[int, dict]:
    return {a.place: dict(a.fields) for a in actions if isinstance(a, Send) and a.kind == kind}


def said(actions: list) -> str:
    return "\n".join(a.text for a in actions if isinstance(a, Say))


def test_nothing_starts_before_every_host_has_answered() -> None:
    course = make()
    assert hello(course, 0) == hello(course, 2) == []
    orders = {place: fields["order"] for place, fields in sent(hello(course, 1), "start").items()}
    assert [orders[p]["node"] for p in range(3)] == [0, 1, 2]
    assert {(o["address"], o["port"], o["max_nodes"], o["attempt"]) for o in orders.values()} == {("10.0.0.1", 4000, 3, 0)}


def test_a_host_that_lacks_something_or_never_answers_ends_it_with_status_2() -> None:
    course = make()
    hello(course, 0)
    hello(course, 1, lacks=["there is no file x.py"])
    assert course.tick(0.0) == [] and course.tick(CONTACT_S - 1) == []
    actions = course.tick(CONTACT_S + 1)
    assert "h1: there is no file x.py" in said(actions) and "h2: no answer" in said(actions)
    assert (course.stage, course.status) == (Stage.OVER, 2)
    assert set(sent(actions, "quit")) == {0, 1} and Drop(2) in actions and not sent(actions, "start")


def test_an_elastic_job_starts_with_the_hosts_that_can() -> None:
    course = make(low=2)
    hello(course, 0, torch=None)
    hello(course, 1)
    orders = sent(hello(course, 2), "start")
    assert {place: o["order"]["node"] for place, o in orders.items()} == {1: 0, 2: 1}
    assert orders[1]["order"]["address"] == "10.0.0.2"


def test_without_the_check_the_user_has_the_last_word() -> None:
    course = make(2, preflight=False)
    hello(course, 0)
    actions = hello(course, 1, torch="2.0")
    assert "torch 2.0" in said(actions) and set(sent(actions, "start")) == {0, 1}


def test_a_first_host_that_others_cannot_reach_is_named() -> None:
    course = make(2)
    hello(course, 0, address="127.0.0.1")
    assert "h0 has no address that other hosts can reach" in said(hello(course, 1)) and course.status == 2
    course = make(2, master_addr="10.9.9.9")
    hello(course, 0, address="127.0.0.1")
    assert sent(hello(course, 1), "start")[1]["order"]["address"] == "10.9.9.9"


def test_all_done_is_status_0() -> None:
    course = running()
    assert ended(course, 0, "done") == ended(course, 2, "done") == []
    assert set(sent(ended(course, 1, "done"), "quit")) == {0, 1, 2}
    assert (course.stage, course.status) == (Stage.OVER, 0)


def test_a_failure_stops_the_others_and_the_first_cause_is_reported_when_all_have_ended() -> None:
    course = running()
    echo = Failure(0, "h0", 1, 5, "RuntimeError: Connection closed by peer")
    actions = ended(course, 0, "failed", echo)
    assert set(sent(actions, "stop")) == {1, 2} and course.stage is Stage.STOP and not said(actions)
    assert ended(course, 1, "failed", Failure(1, "h1", 7, 9, "ValueError: x", "Traceback\nValueError: x\n")) == []
    text = said(ended(course, 2))
    assert "rank 0 on h0 failed after it" in text and text.endswith("ValueError: x")
    assert (course.stage, course.status) == (Stage.OVER, 7)


def test_clocks_of_hosts_do_not_change_who_was_first() -> None:
    course = make(2)
    course.hello(0, {**FACTS}, 3.0, 1.0)  # its clock is 3 s ahead
    course.hello(1, {**FACTS}, 0.0, 1.0)
    ended(course, 0, "failed", Failure(0, "h0", 5, 10_000_000_000))
    ended(course, 1, "failed", Failure(1, "h1", 6, 8_000_000_000))
    assert course.status == 5


def test_a_host_that_does_not_end_its_ranks_is_given_up() -> None:
    course = running(2)
    ended(course, 0, "failed", Failure(0, "h0", 3, 0))
    assert course.tick(5.0) == []
    actions = course.tick(100.0)
    assert Drop(1) in actions and "h1: its ranks did not end in time" in said(actions)
    assert (course.stage, course.status) == (Stage.OVER, 3)


def test_restarts_are_counted_and_begin_at_a_new_port() -> None:
    course = running(2, restarts=1)
    ended(course, 0, "failed", Failure(0, "h0", 3, 0))
    actions = ended(course, 1)
    orders = [fields["order"] for fields in sent(actions, "start").values()]
    assert [(o["attempt"], o["port"]) for o in orders] == [(1, 5000)] * 2 and orders[0]["run_id"] != "id.0"
    assert "restart 1 of 1" in said(actions) and "failed first, with status 3" in said(actions)
    ended(course, 1, "failed", Failure(1, "h1", 4, 0))
    ended(course, 0)
    assert (course.stage, course.status) == (Stage.OVER, 4)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_any_host_may_be_lost(lost: int) -> None:
    course = running(restarts=1, low=2)
    actions = course.gone(lost, "nothing heard of it for 30 s", 2.0)
    left = [place for place in range(3) if place != lost]
    assert Drop(lost) in actions and set(sent(actions, "stop")) == set(left)
    ended(course, left[0])
    orders = sent(ended(course, left[1]), "start")
    assert [orders[place]["order"]["node"] for place in left] == [0, 1]
    assert {(o["order"]["address"], o["order"]["max_nodes"]) for o in orders.values()} == {(f"10.0.0.{left[0] + 1}", 2)}


def test_too_few_hosts_end_the_job() -> None:
    course = running(2, restarts=5)
    course.gone(1, "ssh ended with status 255", 2.0)
    text = said(ended(course, 0))
    assert "no restart: 1 hosts are left, 2 are needed; --elastic_training would go on" in text
    assert text.endswith("h1: ssh ended with status 255") and (course.stage, course.status) == (Stage.OVER, 1)


def test_an_echo_of_a_lost_host_does_not_hide_it() -> None:
    course = running(2)
    course.gone(1, "ssh ended with status 255", 2.0)
    text = said(ended(course, 0, "failed", Failure(0, "h0", 1, 0, "RuntimeError: Connection closed by peer")))
    assert text.endswith("h1: ssh ended with status 255") and course.status == 1


def test_spares_wait_and_step_in() -> None:
    course = make(high=2, low=2, restarts=1)
    hello(course, 0)
    hello(course, 1)
    assert set(sent(hello(course, 2), "start")) == {0, 1}
    course.gone(0, "gone", 2.0)
    orders = sent(ended(course, 1), "start")
    assert {place: o["order"]["node"] for place, o in orders.items()} == {1: 0, 2: 1}
    assert "spare host h2" not in said(course.gone(2, "gone", 3.0))  # it is none any more


def test_a_spare_that_is_lost_disturbs_nobody() -> None:
    course = make(high=2, low=2)
    for place in range(3):
        hello(course, place)
    assert "spare host h2 is gone" in said(course.gone(2, "gone", 2.0)) and course.stage is Stage.RUN


def test_the_user_ends_it_gently_then_at_once() -> None:
    course = running(2, restarts=9)
    actions = course.user_signal(15, "SIGTERM", 2.0)
    assert {f["grace_s"] for f in sent(actions, "stop").values()} == {30.0}
    assert {f["grace_s"] for f in sent(course.user_signal(15, "SIGTERM", 3.0), "stop").values()} == {0.0}
    ended(course, 0)
    ended(course, 1)
    assert (course.stage, course.status) == (Stage.OVER, 143)  # and no restart


def test_the_user_may_change_their_mind_before_anything_runs() -> None:
    course = make()
    course.user_signal(2, "Ctrl-C", 0.0)
    assert (course.stage, course.status) == (Stage.OVER, 130)


def test_signals_pass_to_hosts_that_run() -> None:
    course = running(2)
    ended(course, 0, "done")
    assert sent(course.pass_signal(10), "signal") == {1: {"number": 10}}


def test_one_host_without_ssh_meets_itself() -> None:
    course = make(1, LocalRunner())
    (start,) = sent(hello(course, 0), "start").values()
    assert start["watch"] is False and start["order"]["port"] == 4000


def test_agents_that_only_speak_are_running_from_the_start() -> None:
    course = make(2, SlurmRunner())
    assert all(host.state is HostState.RUNNING for host in course.hosts) and course.stage is Stage.RUN
    ended(course, 0, "failed", Failure(0, "h0", 3, 0))
    course.gone(1, "srun ended with status 3", 3.0)
    assert (course.stage, course.status) == (Stage.OVER, 3)


def test_agents_that_only_speak_may_go_on_without_a_host() -> None:
    course = make(3, SlurmRunner(), low=2, restarts=1)
    ended(course, 0, "done")
    ended(course, 1, "done")
    course.gone(2, "srun ended with status 1", 3.0)
    assert (course.stage, course.status) == (Stage.OVER, 0)
    course = make(3, SlurmRunner(), low=2, restarts=1)
    for place in range(3):
        course.gone(place, "srun ended with status 1", 3.0)
    assert (course.stage, course.status) == (Stage.OVER, 1)
