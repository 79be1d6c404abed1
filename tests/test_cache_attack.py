"""Another user of the machine, who can write where we look for compiled modules, or could once."""

from __future__ import annotations

import hashlib
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_jit import RUN, SOURCE, run

from sglang_pat import jit
from sglang_pat.cli import build
from sglang_pat.jit import modules, trust

pytestmark = [pytest.mark.once, pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")]

NOBODY = 65534
HASTY = "from sglang_pat.jit import locks; locks.LOCK_SECONDS = 1\n" + RUN


class Victim:
    """Root, and a folder that everybody can read.

    Attributes:
        public: The folder.
        csrc: Sources of a module that answers 42.
        home: Root's.
        own: The folder there in which that module is built already.
        name: Of its file.
        good: That file, for everybody to read.
        evil: The same under the same name, with a seal as it should be; it answers 66.
    """

    def __init__(self, public: Path) -> None:
        self.public, self.csrc, self.home = public, public / "csrc", public / "home"
        (self.csrc / "tiny").mkdir(parents=True)
        source = self.csrc / "tiny" / "module.cpp"
        source.write_text(SOURCE.replace("42", "66"))
        own = self.home / ".cache" / "sglang-pat"
        assert self.run(own).stdout == "66\n"
        (evil,) = own.glob("*.so")
        content = evil.read_bytes()[:-32]
        evil.unlink()
        source.write_text(SOURCE)
        assert self.run(own).stdout == "42\n"
        (built,) = own.glob("*.so")
        self.own, self.name = own, built.name
        for folder in ("good", "evil"):
            (public / folder).mkdir()
        self.good, self.evil = public / "good" / self.name, public / "evil" / self.name
        shutil.copy(built, self.good)
        self.evil.write_bytes(content + hashlib.sha256(self.name.encode() + content).digest())

    def run(self, cache: Path, *wrapper: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return run(self.csrc, cache, *wrapper, code=HASTY, **{"HOME": str(self.home), **environment})

    def folder(self, mode: int = 0o777) -> Path:
        folder = Path(tempfile.mkdtemp(dir=self.public))
        folder.chmod(mode)
        return folder

    def uses_its_own(self, cache: Path, reason: str) -> None:
        """Whether it loads what it built itself, and says once why."""
        result = self.run(cache, CXX="false")
        assert result.stdout == "42\n", result.stderr
        assert result.stderr.count("sglang-pat does not use") == 1 and reason in result.stderr, result.stderr
        assert f"what it builds is in {self.own} instead" in result.stderr


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    public = Path(tempfile.mkdtemp(prefix="sglang-pat-"))
    public.chmod(0o755)
    yield Victim(public)
    shutil.rmtree(public)


def as_nobody(command: str, *arguments: Path | str) -> None:
    subprocess.run(
        ["/bin/sh", "-c", command, "sh", *map(str, arguments)], user=NOBODY, group=NOBODY, extra_groups=[], check=True
    )


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_a_folder_that_others_can_write_is_not_used(victim: Victim, mode: int) -> None:
    cache = victim.folder(mode)
    os.chown(cache, 0, NOBODY)
    as_nobody("cp $1 $2", victim.evil, cache)
    victim.uses_its_own(cache, f"{cache}, because not only its owner may write it")


def test_another_user_s_folder_is_not_used(victim: Victim) -> None:
    cache = victim.folder() / "cache"
    as_nobody("umask 022; mkdir $2 && cp $1 $2", victim.evil, cache)
    victim.uses_its_own(cache, f"{cache}, because user {NOBODY} owns it")


def test_a_folder_is_not_reached_through_a_link(victim: Victim) -> None:
    """Whose owner could put it elsewhere at any time."""
    cache = victim.folder() / "cache"
    as_nobody("ln -s $1 $2", victim.good.parent, cache)
    victim.uses_its_own(cache, f"{cache}, because it is a link")


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("umask 022; cp $1 $2", f"because user {NOBODY} owns it"),
        ("umask 777; cp $1 $2", f"because user {NOBODY} owns it"),
        ("ln -s $1 $2", f"because user {NOBODY} owns it"),
    ],
)
def test_what_was_planted_while_the_folder_was_open_is_not_used(victim: Victim, command: str, reason: str) -> None:
    cache = victim.folder()
    as_nobody(command, victim.evil, cache / victim.name)
    cache.chmod(0o755)
    victim.uses_its_own(cache, f"{cache / victim.name}, {reason}")


def test_a_module_that_others_can_write_is_not_used(victim: Victim) -> None:
    cache = victim.folder(0o755)
    shutil.copy(victim.good, cache)
    (cache / victim.name).chmod(0o666)
    as_nobody("cat $1 > $2", victim.evil, cache / victim.name)
    victim.uses_its_own(cache, "because not only its owner may write it")


def test_a_module_of_any_size_is_not_read(victim: Victim) -> None:
    cache = victim.folder(0o755)
    with (cache / victim.name).open("wb") as file:
        file.truncate(200 << 30)
    victim.uses_its_own(cache, f"because it has {200 << 30} bytes")


def test_what_was_checked_is_what_is_loaded(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who can write the folder above puts another one in its place in between."""
    above = victim.folder()
    cache, evil = above / "cache", above / "evil"
    cache.mkdir(mode=0o755)
    shutil.copy(victim.good, cache)
    as_nobody("mkdir $2 && cp $1 $2", victim.evil, evil)
    is_sealed = modules.is_sealed

    def swap(*arguments: object) -> bool:
        sealed = is_sealed(*arguments)
        as_nobody("mv $1 $1.old && mv $2 $1", cache, evil)
        return sealed

    monkeypatch.setattr(modules, "is_sealed", swap)
    monkeypatch.setenv(jit.CACHE, str(cache))
    assert jit.load.__wrapped__("tiny", victim.csrc).answer() == 42
    assert (above / "cache.old").is_dir()


@pytest.mark.parametrize("mode", [0o777, 0o755])
@pytest.mark.parametrize("link", ["ln -s", "ln"])
def test_a_link_in_place_of_a_lock_is_not_followed(victim: Victim, link: str, mode: int) -> None:
    cache = victim.folder()
    secret = victim.folder(0o755) / "secret"
    secret.write_text("root's")
    secret.chmod(0o600)
    lock = (cache / victim.name).with_suffix(".lock")
    if link == "ln":
        os.link(secret, lock)  # Where fs.protected_hardlinks is 0, whoever can write the folder can do this.
    else:
        as_nobody("ln -s $1 $2", secret, lock)
    cache.chmod(mode)
    result = victim.run(cache)
    assert result.stdout == "42\n", result.stderr
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600 and secret.read_text() == "root's"
    assert result.stderr.count("sglang-pat does not use") == 1
    if mode == 0o755:
        assert f"does not use {lock}, because" in result.stderr and (cache / victim.name).exists()


def test_a_link_to_nowhere_in_place_of_a_lock_makes_no_file(victim: Victim) -> None:
    cache, elsewhere = victim.folder(), victim.folder(0o755) / "made"
    as_nobody("ln -s $1 $2", elsewhere, (cache / victim.name).with_suffix(".lock"))
    cache.chmod(0o755)
    assert victim.run(cache).stdout == "42\n" and not elsewhere.exists()


@pytest.mark.parametrize("owner", [0, NOBODY])
def test_a_lock_that_another_user_holds_is_not_waited_for_for_ever(victim: Victim, owner: int) -> None:
    """Who may read a file can lock it."""
    cache = victim.folder(0o755)
    lock = (cache / victim.name).with_suffix(".lock")
    lock.touch(0o644)
    os.chown(lock, owner, owner)
    command = ["/bin/sh", "-c", 'exec 9<"$1"; flock 9; echo held; exec sleep 100', "sh", str(lock)]
    with subprocess.Popen(command, user=NOBODY, group=NOBODY, extra_groups=[], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
            result = victim.run(cache)
        finally:
            holder.kill()
    assert result.stdout == "42\n", result.stderr
    assert ("because others may open it" if owner == 0 else f"because user {NOBODY} owns it") in result.stderr
    assert "for another process that builds" not in result.stderr
    assert stat.S_IMODE(lock.stat().st_mode) == 0o644


def test_a_user_can_be_named_whose_modules_are_loaded(victim: Victim) -> None:
    cache = victim.folder() / "cache"
    as_nobody("umask 022; mkdir $2 && cp $1 $2", victim.good, cache)
    uid = pwd.getpwnam("daemon").pw_uid
    for path in (cache, cache / victim.name):
        os.chown(path, uid, uid)
    for owner in (str(uid), "daemon"):
        result = victim.run(cache, CXX="false", **{jit.OWNER: owner})
        assert (result.stdout, result.stderr) == ("42\n", "")
    result = victim.run(cache, **{jit.OWNER: "no-such-user"})
    assert result.stderr.splitlines()[-1].endswith(
        f"{jit.OWNER}='no-such-user' must be the name or number of a user"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("command", "cache"),
    [
        ("touch $1", "x"),
        ("touch $1", "x/cache"),
        ("mkfifo $1", "x"),
        ("ln -s /nowhere $1", "x/cache"),
        ("ln -s x $1", "x/above/cache"),
    ],
)
def test_what_another_user_put_in_the_way_keeps_nobody_from_a_start(victim: Victim, command: str, cache: str) -> None:
    folder = victim.folder()
    as_nobody(command, folder / "x")
    with pytest.raises(trust.UnusedError, match=f"does not use {folder / 'x'}, because user {NOBODY} owns it"):
        trust.open_folder(folder / cache)
    if cache == "x":
        victim.uses_its_own(folder / cache, f"because user {NOBODY} owns it")


def test_what_root_made_is_for_everybody(victim: Victim) -> None:
    cache = victim.folder(0o755)
    shutil.copy(victim.good, cache)
    # The interpreter may be in root's home.
    reading = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *reading]
    result = victim.run(cache, *user, CXX="false")
    assert (result.stdout, result.stderr) == ("42\n", "")


@pytest.mark.parametrize("home", ["none", "another user's"])
def test_without_a_home_it_builds_at_every_start(victim: Victim, home: str) -> None:
    folder = victim.folder(0o755)
    os.chown(folder, NOBODY, NOBODY)
    temporary = victim.folder(0o700)
    environment = {"HOME": str(folder) if home != "none" else "/dev/null", "TMPDIR": str(temporary)}
    result = victim.run(victim.folder(), **environment)
    assert result.stdout == "42\n", result.stderr
    assert "it builds at every start instead" in result.stderr
    assert not list(folder.iterdir()) and not list(temporary.iterdir())


def test_compilers_work_where_nobody_can_replace_their_files(victim: Victim) -> None:
    """Whoever can write a temporary folder without sticky bit can put a folder with another `build.ninja` in place of ours."""
    temporary = victim.folder(0o777)
    compiler = victim.folder(0o755) / "c++"
    compiler.write_text('#!/bin/sh\necho "$PWD $TMPDIR" >> $0.log\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    result = victim.run(victim.folder(0o755), TMPDIR=str(temporary), CXX=str(compiler))
    assert (result.stdout, result.stderr) == ("42\n", "")
    for line in compiler.with_name("c++.log").read_text().splitlines():
        worked, for_more = line.split()
        assert Path(worked).parent == Path(for_more) and Path(for_more).parent == victim.own
    assert not list(temporary.iterdir()) and not list(victim.own.glob(".*"))


def test_another_user_s_temporary_folder_is_not_used(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary, link = victim.folder(0o755), victim.folder(0o755) / "link"
    link.symlink_to(temporary)
    for folder in (temporary, link):
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        monkeypatch.setenv("HOME", "/dev/null")
        os.chown(temporary, 0, 0)
        for mode in (0o755, 0o1777):
            temporary.chmod(mode)
            assert trust.temporary_folder() == str(temporary)
        os.chown(temporary, NOBODY, NOBODY)
        assert trust.temporary_folder() in ("/var/tmp", "/dev/shm")
    with monkeypatch.context() as patch:
        patch.setattr(trust, "trusted", set)
        with pytest.raises(jit.BuildError, match="because others may replace files there: set TMPDIR"):
            trust.temporary_folder()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: os.stat("/nowhere"))
    with pytest.raises(jit.BuildError, match="no folder in which compilers can work: set TMPDIR"):
        trust.temporary_folder()


def test_who_fills_a_cache_learns_that_it_will_not_be_used(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = victim.folder()
    monkeypatch.setenv(jit.CACHE, str(cache))
    with pytest.raises(SystemExit, match=f"does not use {cache}, because not only its owner may write it"):
        build.main(["--arch", "9.0"])
    assert not list(cache.iterdir())
