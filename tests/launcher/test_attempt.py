"""One attempt on one host, with a rank that ends at the worst instant: after the agent's look and before torch's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

AGENT = """
import os, sys
from stateroom.launcher.channel import Sender
from stateroom.launcher.control import Control
from stateroom.launcher.elastic import run_attempt
from stateroom.launcher.job import Job, Order
from stateroom.launcher.preflight import Listener

class EndsMeanwhile(Control):
    "Asked whether to stop, it answers when the second rank has ended, once that runs."
    def check(self):
        if self._ranks:
            open("asked", "w").close()
            os.waitid(os.P_PID, self._ranks[1], os.WEXITED | os.WNOWAIT)
        super().check()

sender = Sender(os.open(os.devnull, os.O_WRONLY), 0)
control, listener = EndsMeanwhile(sender), Listener(0, True)
job = Job("job.py", python=sys.executable, cwd=os.getcwd(), raw="always", fail_grace_s=0.5)
order = Order(job, "here", 0, None, 2, "127.0.0.1", listener.port, 1, 1, "run", led=sys.argv[1] == "led")
with control.attempt():
    outcome = run_attempt(order, control, sender, listener, dict(os.environ))
print(outcome.how, [(failure.rank, failure.exitcode, failure.message) for failure in outcome.failures], outcome.text)
"""

JOB = """
import os, signal, time
if os.environ["RANK"] == "1":
    while not os.path.exists("asked"):
        time.sleep(0.01)
    raise ValueError("no")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(20)
"""


@pytest.mark.parametrize("led", ["led", "alone"])
def test_a_rank_that_ends_between_two_looks_is_reported_and_the_others_get_the_job_s_grace(led: str, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "agent.py").write_text(AGENT)
    done = subprocess.run([sys.executable, "agent.py", led], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["failed [(1, 1, 'ValueError: no')] "], done.stdout + done.stderr
