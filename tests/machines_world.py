"""Machines for tests: each with its own systemd, accounts, disk and network, from one image.

`make machines` runs this file, which makes the image, and then the tests in namespaces of their
own: so nothing outside reaches the machines, nor they anything outside, and all of it ends with the
tests, however they end. A machine's disk is a layer in memory over the image.
"""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILT = ROOT / "build/machines"
TOOLS = {
    "systemd-nspawn": "systemd-container",
    "debootstrap": "debootstrap",
    "buildah": "buildah",
    "ip": "iproute2",
}
"""Programs that are needed here, with the packages of Debian that have them."""

SUITE, PYTHON = "bookworm", "3.11"
PACKAGES = (
    *("systemd", "systemd-sysv", "dbus", "sudo", "procps", "iproute2", "iputils-ping", "curl"),
    *("nftables", "nginx-light", "libnginx-mod-stream", "python3", "python3-venv"),
)
LIMIT = 600.0  # seconds until a test gives up, also on a machine that is busy
SOURCE = "/usr/src/shufl"
INSTALLED = (
    "python3 -m venv /srv/shufl/.venv && . /srv/shufl/.venv/bin/activate",
    "pip install --constraint constraints.txt '.[server]'",
)
"""What docs/deployment.md has typed on every machine, in a copy of the repository."""
_NO_INDEX = f"cd {SOURCE}", "export PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels"
INSTALL = "\n".join([*_NO_INDEX, *INSTALLED])


def missing():
    """What is not here, in one line; empty: nothing."""
    if os.geteuid() != 0:
        return "make machines boots machines, so it has to be run as root"
    packages = {package for tool, package in TOOLS.items() if not shutil.which(tool)}
    return f"make machines needs: apt-get install {' '.join(sorted(packages))}" if packages else ""


def here(*command, **options):
    """Runs a command on this machine, and returns what it prints."""
    done = subprocess.run(
        list(map(str, command)), text=True, capture_output=True, stdin=subprocess.DEVNULL, **options
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def wait_until(found, what, limit=LIMIT):
    """Waits until `found` returns something true, and returns that."""
    until = time.monotonic() + limit
    while not (result := found()):
        assert time.monotonic() < until, f"{what} did not come in {limit:g} s"
        time.sleep(0.5)
    return result


def image():
    """The folder of the image, Debian with what shufl needs. It is made once, in some minutes."""
    inputs = [ROOT / name for name in ("constraints.txt", "requirements.lock")]
    key = hashlib.sha256(repr([PACKAGES, *(path.read_bytes() for path in inputs)]).encode())
    made = BUILT / f"image-{key.hexdigest()[:12]}"
    if not made.exists():
        shutil.rmtree(BUILT, ignore_errors=True)
        new = BUILT / "new"
        new.mkdir(parents=True)
        here("debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, new)
        (new / "etc/machine-id").write_text("")
        (new / "etc/hostname").unlink()
        (new / "etc/nginx/sites-enabled/default").unlink()
        for unit in ("systemd-networkd", "systemd-networkd-wait-online"):
            here("systemctl", f"--root={new}", "enable", unit)
        _download(new / "wheels")
        install(new)
        new.rename(made)
    return made


def _download(wheels):
    """Fetches what pip installs, since no machine reaches an index."""
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", wheels]
    download += ["--python-version", PYTHON, "--only-binary", ":all:"]
    here(*download, "--no-deps", "--requirement", ROOT / "requirements.lock")
    unlocked = "torch", "torchvision", "setuptools>=77", "pip"
    here(*download, "--constraint", ROOT / "constraints.txt", *unlocked)


def install(image):
    """Installs shufl, as it is here, by the commands of docs/deployment.md."""
    source = image / SOURCE[1:]
    shutil.rmtree(source, ignore_errors=True)
    listed = here("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        if (path := ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, source / name, follow_symlinks=False)
    nspawn = ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--private-network"]
    nspawn += [f"--directory={image}", "--pipe"]
    here(*nspawn, "sh", "-ec", INSTALL)


class Containers:
    """The image of deploy/Dockerfile, built on the Debian of the machines, and what it runs."""

    def __init__(self, folder, debian):
        self._buildah = ["buildah", "--root", folder / "images", "--runroot", folder / "run"]
        here("mkdir", folder)
        container = self._run("from", "scratch").strip()
        mounted = Path(self._run("mount", container).strip())
        left_out = [f"--exclude=./{name}" for name in ("srv/shufl/.venv", "wheels", SOURCE[1:])]
        archive = folder / "debian.tar"
        here("tar", "--directory", debian, *left_out, "--create", "--file", archive, ".")
        here("tar", "--directory", mounted, "--extract", "--file", archive)
        archive.unlink()
        self._run("umount", container)
        self._run("run", container, "python3", "-m", "venv", "/usr/local")
        offline = "--env", "PIP_NO_INDEX=1", "--env", "PIP_FIND_LINKS=/wheels"
        self._run("config", *offline, container)
        text = (ROOT / "deploy/Dockerfile").read_text()
        self._run("commit", container, re.search("(?m)^FROM (.*)", text)[1])
        wheels = f"--volume={debian / 'wheels'}:/wheels:ro"
        dockerfile = "--file", debian / SOURCE[1:] / "deploy/Dockerfile"
        source = debian / SOURCE[1:]
        self._run("build", "--pull=never", wheels, *dockerfile, "--tag", "shufl", source)
        self.container = self._run("from", "--pull=never", "shufl").strip()

    def _run(self, *command):
        return here(*self._buildah, *command, env=os.environ | {"BUILDAH_ISOLATION": "chroot"})

    def command(self, site, *words, user="shufl"):
        """What runs the image's entry point on a site's folder, as `docker run` would."""
        volume = f"--volume={site}:/srv/shufl"
        chroot = "--isolation=chroot", f"--user={user}", volume, self.container, "--", "site"
        return list(map(str, (*self._buildah, "run", *chroot, *words)))


class Machines:
    """Machines by their names, on one network."""

    def __init__(self, *names, ipv6_only=()):
        assert here("ip", "-brief", "link").split()[0] == "lo", "make machines runs these tests"
        base, run = image(), BUILT / "run"
        shutil.rmtree(run, ignore_errors=True)
        here("ip", "link", "add", "bridge", "type", "bridge")
        for link in ("bridge", "lo"):
            here("ip", "link", "set", link, "up")
        self.release = layer(run / "release", base)
        install(self.release)
        self._all = {name: Machine(name, number) for number, name in enumerate(names, 1)}
        for machine in self:
            disk = run / machine.name
            disk.mkdir()
            here("mount", "-t", "tmpfs", "-o", "size=2g", "tmpfs", disk)
            machine.folder = layer(disk, self.release)
            machine.is_ipv6 = machine.name in ipv6_only
            machine.set_up(self)

    def __getitem__(self, name):
        return self._all[name]

    def __iter__(self):
        return iter(self._all.values())


def layer(folder, below):
    """Mounts what is written over the folder `below`, which stays as it is."""
    upper, work, merged = (folder / name for name in ("upper", "work", "merged"))
    for each in (upper, work, merged):
        each.mkdir(parents=True)
    # Without metacopy `chown -R`, as in install.sh, would copy all of .venv.
    options = f"metacopy=on,lowerdir={below},upperdir={upper},workdir={work}"
    here("mount", "-t", "overlay", "-o", options, "overlay", merged)
    return merged


class Machine:
    """A machine that can be booted, cut off and lose its power.

    Attributes:
        folder: its disk.
        addresses: by IPv4 and IPv6.
        is_ipv6: whether it has and knows the latter alone.
    """

    folder: Path

    def __init__(self, name, number):
        self.name, self.addresses = name, (f"10.9.8.{number}", f"fd09:8::{number}")
        self.is_ipv6 = False
        self._process = None

    def set_up(self, machines):
        """Gives it its names and addresses."""
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for each in machines:
            names = f"{each.name} {each.name.rstrip('-123')}.example"
            lines += [f"{address} {names}" for address in each.addresses[self.is_ipv6 :]]
        self.write("/etc/hosts", "\n".join([*lines, ""]))
        self.write("/etc/hostname", f"{self.name}\n")
        lines = [
            "[Match]",
            "Name=host0",
            "[Network]",
            "LinkLocalAddressing=ipv6",
            "IPv6AcceptRA=no",
        ]
        own = zip(self.addresses, (24, 64), strict=True)
        lines += [f"Address={address}/{length}" for address, length in [*own][self.is_ipv6 :]]
        self.write("/etc/systemd/network/10-host0.network", "\n".join([*lines, ""]))

    def boot(self):
        """Boots it, and waits until systemd has started what is enabled."""
        groups = list(_control_groups(self.name))
        for group in groups:  # else systemd would take another machine's processes for its own
            group.mkdir(parents=True, exist_ok=True)
        enter = "".join(f"echo $$ > {group}/cgroup.procs; " for group in groups)
        nspawn = ["sh", "-ec", f'{enter}exec "$@"', "sh"]
        nspawn += ["systemd-nspawn", "--quiet", "--boot", "--register=no", "--keep-unit"]
        nspawn += ["--network-bridge=bridge", "--link-journal=no", "--console=pipe"]
        nspawn += [f"--directory={self.folder}", f"--machine={self.name}"]
        console = (self.folder.parent / "console").open("ab")
        self._process = subprocess.Popen(
            nspawn, stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True
        )
        console.close()
        self.leader = wait_until(self._find_leader, f"{self.name}'s systemd")
        states = "running", "degraded"
        wait_until(
            lambda: self.run("systemctl is-system-running", check=False).strip() in states,
            f"{self.name} booted",
        )

    def _find_leader(self):
        assert self._process.poll() is None, (self.folder.parent / "console").read_text()
        for pid in _descendants(self._process.pid):
            with suppress(OSError):
                _, _, own = Path(f"/proc/{pid}/status").read_text().partition("NSpid:")
                if own.splitlines()[0].split()[1:] == ["1"]:
                    return pid
        return None

    def power_off(self):
        """Takes its power: what runs there ends in that moment, and is told nothing."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.kill(self.leader, signal.SIGKILL)
        self._process.wait(60)
        self._process = None
        for group in _control_groups(self.name):
            for folder, *_ in os.walk(group, topdown=False):
                Path(folder).rmdir()

    def run(self, command, check=True):
        """Runs a shell command there as root, in /srv/shufl, and returns what it prints."""
        enter = ["nsenter", "--target", str(self.leader), "--all", "env", "-i", "LANG=C.UTF-8"]
        enter += ["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "COLUMNS=200"]
        done = subprocess.run(
            [*enter, "sh", "-ec", f"cd /srv/shufl 2>/dev/null || cd /\n{command}"],
            text=True,
            capture_output=True,
            stdin=subprocess.DEVNULL,
        )
        said = done.stdout + done.stderr
        assert not check or done.returncode == 0, f"{self.name}$ {command}\n{said}"
        return said

    def install(self, version):
        """Installs what the machines have as another version."""
        there = f"{SOURCE}/pyproject.toml"
        self.run(f"sed -i 's/^version = .*/version = \"{version}\"/' {there}\n{INSTALL}")

    def cut_off(self):
        """Takes the cable out."""
        here("ip", "link", "set", f"vb-{self.name}", "down")

    def connect(self):
        """Puts the cable in."""
        here("ip", "link", "set", f"vb-{self.name}", "up")

    def path(self, name):
        """Where a file of its disk is here; relative names are in its site's folder."""
        return self.folder / str(Path("/srv/shufl", name))[1:]

    def write(self, name, text):
        """Writes a file to its disk, as whoever sits before it does."""
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _control_groups(name):
    """The folders of a machine's control groups, below those of this process."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, hierarchy, path = line.split(":", 2)
        for _, place, kind, options, *_ in mounts:
            if (kind == "cgroup2" and not hierarchy) or (
                hierarchy == "name=systemd" and hierarchy in options.split(",")
            ):
                yield Path(place + path) / f"shufl-{name}"
                break


def _descendants(pid):
    """The processes that a process has started, and those that they have."""
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        yield child
        with suppress(OSError):
            yield from _descendants(child)


if __name__ == "__main__":
    sys.exit(missing() or (image() and 0))
