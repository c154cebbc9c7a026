"""Hosts on one machine: network namespaces with addresses of their own and an sshd in each."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

SSHD = "/usr/sbin/sshd"


def unavailable() -> str | None:
    """Install what is missing, and return why hosts cannot be made here, or None when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or not Path(SSHD).exists() or shutil.which("ssh") is None:
        install("iproute2", "openssh-server", "openssh-client")
    if shutil.which("ip") is None or not Path(SSHD).exists():
        return "iproute2 and openssh-server are not installed, and apt-get could not install them"
    name = f"srt{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces are not permitted here: {made.stderr.strip()}"
    pair = subprocess.run(["ip", "link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b"], capture_output=True, text=True)
    subprocess.run(["ip", "link", "del", f"{name}a"], capture_output=True)
    subprocess.run(["ip", "netns", "del", name], check=True)
    return f"virtual links are not permitted here: {pair.stderr.strip()}" if pair.returncode else None


def install(*packages: str) -> None:
    """Install Debian packages where apt-get can; whoever needs them looks whether it could."""
    if shutil.which("apt-get") is None:
        return
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    with Path(tempfile.gettempdir(), "stateroom-tests-apt").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests in another process may want them too, and apt-get refuses to run twice at once
        if subprocess.run(command, env=env, capture_output=True).returncode:
            subprocess.run(["apt-get", "update"], env=env, capture_output=True)
            subprocess.run(command, env=env, capture_output=True)


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


class Hosts:
    """`count` hosts on a bridge, called worker-1 and so on through an ssh configuration; the launcher's side is .254."""

    def __init__(self, folder: Path, count: int = 3) -> None:
        self.folder, self.count = folder, count
        self.id = os.getpid() % 100_000
        self.network = f"198.{18 + self.id % 2}.{self.id // 2 % 256}"
        self.bridge = f"srb{self.id}"
        self.names = [f"worker-{i}" for i in range(1, count + 1)]
        self.addresses = [f"{self.network}.{i}" for i in range(1, count + 1)]
        self._sshds: list[subprocess.Popen[bytes]] = []

    @property
    def not_on_the_last(self) -> Path:
        """A folder that is empty for the last host."""
        return self.folder / "not-on-the-last"

    def namespace(self, place: int) -> str:
        return f"srn{self.id}x{place}"

    def link(self, place: int) -> str:
        return f"srl{self.id}x{place}"

    def start(self) -> None:
        run("ip", "link", "add", self.bridge, "type", "bridge")
        run("ip", "addr", "add", f"{self.network}.254/24", "dev", self.bridge)
        run("ip", "link", "set", self.bridge, "up")
        self._write_keys()
        self.not_on_the_last.mkdir()
        for place in range(self.count):
            self._start_host(place)
        for place, address in enumerate(self.addresses):
            self._wait_for_sshd(place, address)

    def _start_host(self, place: int) -> None:
        space, link = self.namespace(place), self.link(place)
        run("ip", "netns", "add", space)
        run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
        run("ip", "link", "set", link, "master", self.bridge, "up")
        run("ip", "-n", space, "addr", "add", f"{self.addresses[place]}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            run("ip", "-n", space, "link", "set", device, "up")
        config = self.folder / f"sshd_{place}"
        config.write_text(
            f"ListenAddress {self.addresses[place]}\nPort 22\nHostKey {self.folder}/host_key\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {self.folder}/key.pub\nStrictModes no\nPermitRootLogin yes\nMaxStartups 100\n"
        )
        # `ip netns exec` makes a mount namespace too, so the last host can lack a folder that the others have.
        hide = f"mount -t tmpfs none {self.not_on_the_last} && " if place == self.count - 1 else ""
        shell = ["sh", "-c", f"{hide}exec {SSHD} -D -e -f {config}"]
        self._sshds.append(subprocess.Popen(["ip", "netns", "exec", space, *shell], stderr=subprocess.DEVNULL))

    def _write_keys(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)
        for name in ("host_key", "key"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
        blocks = [f"Host {name}\n  HostName {address}\n" for name, address in zip(self.names, self.addresses, strict=True)]
        always = f"Host *\n  IdentityFile {self.folder}/key\n  IdentitiesOnly yes\n  User root\n"
        always += "  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        self.ssh_config.write_text("".join(blocks) + always)

    @property
    def ssh_config(self) -> Path:
        return self.folder / "ssh_config"

    def _wait_for_sshd(self, place: int, address: str) -> None:
        deadline = time.monotonic() + 20
        while True:
            try:
                with socket.create_connection((address, 22), timeout=1) as connection:
                    if connection.recv(4) == b"SSH-":
                        return
            except OSError:
                pass
            assert time.monotonic() < deadline and self._sshds[place].poll() is None, f"no sshd at {address}"
            time.sleep(0.05)

    def cut(self, place: int) -> None:
        """Take the host off the network."""
        run("ip", "link", "set", self.link(place), "down")

    def mend(self, place: int) -> None:
        run("ip", "link", "set", self.link(place), "up")

    def pids(self, place: int) -> list[int]:
        """Return the processes on a host, but for its sshd."""
        found = [int(word) for word in run("ip", "netns", "pids", self.namespace(place)).split()]
        return [pid for pid in found if pid != self._sshds[place].pid]

    def commands(self, place: int) -> list[str]:
        """Return the command lines of Python processes on a host."""
        lines = []
        for pid in self.pids(place):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(b"python" in word for word in words[:1]):
                lines.append(b" ".join(words).decode())
        return lines

    def stop(self) -> None:
        for sshd in self._sshds:
            sshd.kill()
            sshd.wait()
        for place in range(self.count):
            for pid in [int(w) for w in subprocess.run(["ip", "netns", "pids", self.namespace(place)], capture_output=True).stdout.split()]:
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    continue
            subprocess.run(["ip", "netns", "del", self.namespace(place)], capture_output=True)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)
