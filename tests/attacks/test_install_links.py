"""Links in a site's folder, which the account shufl may write to, when root runs install.sh."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from deployment_world import ACCOUNTS, number_accounts
from shufl.deploy.deployment import Deployment
from shufl.deploy.provision import provision

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
SECRET = "what root alone may read"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture
def site(tmp_path):
    """A node's folder that was installed, and, outside of it, what is root's."""
    example = Deployment.of_file(DEPLOY / "example" / "deployment.toml")
    provision(example, DEPLOY / "example", tmp_path, lambda name, key: True, in_place=True)
    site = tmp_path / "ward-1"
    (site / ".venv").mkdir()
    (site / "records").mkdir()
    (site / "keys" / "flower.key").write_text("a key")
    for name in (".venv", "flower.key", "flower-authority.pem", "plain"):
        place = tmp_path / "roots" / name
        place.parent.mkdir(exist_ok=True)
        place.write_text(SECRET)
        place.chmod(0o640)
    (tmp_path / "roots").chmod(0o710)
    tmp_path.chmod(0o711)
    number_accounts(site / "install.sh")
    assert install(site).returncode == 0
    return site


def install(site):
    about = {"capture_output": True, "text": True, "cwd": site}
    return subprocess.run(["sh", "install.sh", "modes"], **about)


def state_of(folder):
    """Owners and modes of all that is there."""
    places = folder, *sorted(folder.rglob("*"))
    return [(str(each), *each.lstat()[:1], *each.lstat()[4:6]) for each in places]


FILES = ["own", "records/0.npz", "keys/flower.key", "keys/flower-authority.pem", "app/own"]
FOLDERS = ["own", "records/own", "keys", "flower", "app", ".venv"]
LINKS = [(name, "plain", os.symlink) for name in FILES]
LINKS += [(name, "", os.symlink) for name in FOLDERS]
LINKS += [(name, "plain", os.link) for name in FILES]
LINKS += [("own", "nothing", os.symlink)]


@pytest.mark.parametrize(("name", "target", "make"), LINKS)
def test_what_root_owns_stays_as_it_is_whatever_links_to_it(site, name, target, make):
    """Also by a second name, as if fs.protected_hardlinks were 0."""
    roots, place = site.parent / "roots", site / name
    before = state_of(roots)
    if place.is_dir():
        shutil.move(place, place.with_name("moved"))
    place.unlink(missing_ok=True)
    make(roots / target, place)
    done = install(site)
    assert state_of(roots) == before
    assert site.stat().st_uid == ACCOUNTS["shufl"]
    if make == os.link:
        assert done.returncode == 1 and "a file here has a second name" in done.stderr
    if name == "own" and make == os.symlink:
        assert done.returncode == 0, done.stderr  # nor does it stop an installation


def test_files_of_the_account_are_not_made_root_s_programs(site):
    shutil.move(site / ".venv", site / "moved")
    (site / ".venv").mkdir()
    os.chown(site / ".venv", ACCOUNTS["shufl"], ACCOUNTS["shufl"])
    done = install(site)
    assert done.returncode == 1 and ".venv is neither root's nor yours" in done.stderr


@pytest.mark.parametrize("name", ["nftables.conf", "shufl-node.service"])
def test_what_root_copies_to_etc_is_what_the_account_can_read(site, name, tmp_path):
    script, etc = site / "install.sh", tmp_path / "etc"
    script.write_text(script.read_text().replace("/etc/", f"{etc}/"))
    for program in ("getent", "id", "nft", "systemctl"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / program).symlink_to(shutil.which("true"))
    etc.mkdir()
    path = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}

    def install_all():
        run = ["sh", "install.sh"]
        return subprocess.run(run, cwd=site, env=path, capture_output=True, text=True)

    assert install_all().returncode == 0
    copied = sorted(each.name for each in etc.rglob("*") if each.is_file())
    assert "shufl.nft" in copied and "shufl-node.service" in copied
    (site / "other.service").write_text("[Service]")  # a name that is not this site's
    (site / name).unlink()
    (site / name).symlink_to(site.parent / "roots" / "plain")
    assert install_all().returncode != 0
    assert sorted(each.name for each in etc.rglob("*") if each.is_file()) == copied
    assert not [each for each in etc.rglob("*") if each.is_file() and SECRET in each.read_text()]


def test_a_container_unpacks_nothing_to_where_a_link_leads(site, tmp_path):
    """`site install` of a volume on which `keys` leads elsewhere by now."""
    packed = tmp_path / "packed"
    (packed / "keys").mkdir(parents=True)
    (packed / "keys" / "new.pem").write_text("new")
    tar = tmp_path / "site.tar"
    subprocess.run(["tar", "-C", str(packed), "-cf", str(tar), "."], check=True)
    script = tmp_path / "site.sh"
    script.write_text((DEPLOY / "site.sh").read_text().replace("/site/site.tar", str(tar)))
    number_accounts(script)
    before = state_of(tmp_path / "roots")
    for linked in (False, True):
        if linked:
            shutil.move(site / "keys", site / "moved")
            (site / "keys").symlink_to(tmp_path / "roots")
        done = subprocess.run(["sh", str(script), "install"], cwd=site, capture_output=True)
        assert (done.returncode == 0) != linked
    assert (site / "moved/new.pem").stat().st_uid == ACCOUNTS["shufl"]
    assert state_of(tmp_path / "roots") == before
