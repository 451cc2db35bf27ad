"""Replay the Containerfile without a container engine: each stage becomes a Debian root folder, entered by chroot.

What it is for: to build the images' content and to run their programs, with their capabilities, in tests and on machines without an
engine. Needs root, debootstrap, and this machine's own apt and pip set-up, which is where packages come from.

What it knows: FROM, RUN (shell form), COPY (``--from``), ENV, USER, WORKDIR, ENTRYPOINT (list form), with Docker's meaning. Anything
else is an error, never skipped. Roots lie under ``.cache/deploy/``, one per stage, named by what they were made from, so that a stage
is built again only when its steps or files changed. Mounts are made in a mount namespace of their own and are gone when the step is,
however it ends.

    python deploy/replay.py applier                      # build, and say where the root is
    python deploy/replay.py applier -- meshmark --help   # and run that in it, with CAP_NET_ADMIN only
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
CONTAINERFILE = CHECKOUT / "deploy" / "Containerfile"
CACHE = CHECKOUT / ".cache" / "deploy"
BASES = {"debian:12-slim": "bookworm"}
VERBS = {"RUN", "COPY", "ENV", "USER", "WORKDIR", "ENTRYPOINT"}
CHANGING = {"RUN", "COPY", "WORKDIR"}  # what changes files; a stage without any has its base's root
NET_ADMIN = ("net_admin",)
SCRATCH = ("/tmp", "/run", "/var/lib/meshmark")  # noqa: S108 - inside the root: what a container would lose with its end
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_FORMAT = "1"  # to be raised when this program builds differently from the same file


class ReplayError(Exception):
    """The file holds what this program does not know, or a step failed."""


@dataclass(frozen=True)
class Step:
    """One instruction, continuation lines joined."""

    verb: str
    text: str


@dataclass(frozen=True)
class Stage:
    """A FROM and what follows it. `base` is an image or an earlier stage."""

    name: str
    base: str
    steps: tuple[Step, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        """Stages that files are copied from."""
        copies = (split_copy(step.text)[0] for step in self.steps if step.verb == "COPY")
        return tuple(source for source in copies if source)


@dataclass(frozen=True)
class Image:
    """A built stage: the root folder, and how a program in it starts."""

    root: Path
    key: str
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    folder: str = "/"
    entrypoint: tuple[str, ...] = ()


# --- reading --------------------------------------------------------------------------------------------------------


def parse(text: str) -> dict[str, Stage]:
    """The stages by name, in order. ReplayError names what is not known."""
    stages: dict[str, Stage] = {}
    for verb, argument in _instructions(text):
        if verb == "FROM":
            found = re.fullmatch(r"(\S+) AS (\S+)", argument)
            if not found:
                msg = f"FROM {argument}: write FROM IMAGE AS NAME"
                raise ReplayError(msg)
            base, name = found.groups()
            if base not in stages and base not in BASES:
                msg = f"FROM {base}: neither an earlier stage nor one of {', '.join(BASES)}"
                raise ReplayError(msg)
            stages[name] = Stage(name, base, ())
        elif verb not in VERBS:
            msg = f"{verb}: not an instruction that can be replayed; there are FROM, {', '.join(sorted(VERBS))}"
            raise ReplayError(msg)
        elif not stages:
            msg = f"{verb} before the first FROM"
            raise ReplayError(msg)
        else:
            last = next(reversed(stages.values()))
            stages[last.name] = Stage(last.name, last.base, (*last.steps, _checked(Step(verb, argument))))
    return stages


def split_copy(text: str) -> tuple[str, tuple[str, ...], str]:
    """The stage (or nothing, for the context), the sources and the destination of a COPY."""
    words = shlex.split(text)
    origin = ""
    while words and words[0].startswith("--"):
        option, _, value = words.pop(0).partition("=")
        if option != "--from":
            msg = f"COPY {option}: only --from can be replayed"
            raise ReplayError(msg)
        origin = value
    if len(words) < 2:  # noqa: PLR2004 - a source and a destination
        msg = f"COPY {text}: needs a source and a destination"
        raise ReplayError(msg)
    *sources, destination = words
    if any(char in source for source in sources for char in "*?["):
        msg = f"COPY {text}: patterns cannot be replayed"
        raise ReplayError(msg)
    return origin, tuple(sources), destination


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    for line in joined.splitlines():
        verb, _, argument = line.strip().partition(" ")
        yield verb.upper(), argument.strip()


def _checked(step: Step) -> Step:
    if step.verb == "RUN" and (step.text.startswith(("--", "[")) or "<<" in step.text):
        msg = f"RUN {step.text}: only the shell form without options can be replayed"
        raise ReplayError(msg)
    if step.verb == "ENTRYPOINT":
        _entrypoint(step.text)
    if step.verb == "ENV":
        _environment(step.text)
    if step.verb == "COPY":
        split_copy(step.text)
    return step


def _entrypoint(text: str) -> tuple[str, ...]:
    try:
        return tuple(str(word) for word in json.loads(text))
    except ValueError:
        msg = f"ENTRYPOINT {text}: only the list form can be replayed"
        raise ReplayError(msg) from None


def _environment(text: str) -> dict[str, str]:
    pairs = [word.partition("=") for word in shlex.split(text)]
    if "$" in text or not all(equals for _, equals, _ in pairs):
        msg = f"ENV {text}: only NAME=value without variables can be replayed"
        raise ReplayError(msg)
    return {name: value for name, _, value in pairs}


# --- building -------------------------------------------------------------------------------------------------------


def build(target: str, cache: Path = CACHE) -> Image:
    """Build a stage and what it needs, or take it from the cache."""
    stages = parse(CONTAINERFILE.read_text(encoding="utf-8"))
    if target not in stages:
        msg = f"there is no stage {target}; there are {', '.join(stages)}"
        raise ReplayError(msg)
    if os.geteuid() != 0:
        msg = "building a root folder needs root"
        raise ReplayError(msg)
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / "lock"):
        return _build_stage(stages[target], stages, cache, {})


def _build_stage(stage: Stage, stages: Mapping[str, Stage], cache: Path, done: dict[str, Image]) -> Image:
    if stage.name in done:
        return done[stage.name]
    sources = {name: _build_stage(stages[name], stages, cache, done) for name in stage.sources}
    base = _build_stage(stages[stage.base], stages, cache, done) if stage.base in stages else _bootstrap(BASES[stage.base], cache)
    if not any(step.verb in CHANGING for step in stage.steps):
        image = base
        for step in stage.steps:
            image = _take(step, image, None, sources)
        done[stage.name] = image
        return image
    key = _stage_key(stage, base, sources)
    root = cache / f"{stage.name}-{key}"
    image = Image(root, key, base.environment, base.user, base.folder, base.entrypoint)
    fresh = not root.exists()
    with _made(root, cache, f"{stage.name}-") as work:
        if fresh:
            print(f"replay: stage {stage.name}", file=sys.stderr)
            _copy_tree(base.root, work)
        for step in stage.steps:
            image = _take(step, image, work if fresh else None, sources)
    done[stage.name] = image
    return image


def _take(step: Step, image: Image, root: Path | None, sources: Mapping[str, Image]) -> Image:
    """Carry one step out in the folder `root` (None: it was, in an earlier run) and return how the image looks then."""
    environment, user, folder, entrypoint = dict(image.environment), image.user, image.folder, image.entrypoint
    match step.verb:
        case "ENV":
            environment |= _environment(step.text)
        case "USER":
            user = step.text
        case "WORKDIR":
            folder = str(Path(folder) / step.text)
            if root:
                _inside(root, folder).mkdir(parents=True, exist_ok=True)
        case "ENTRYPOINT":
            entrypoint = _entrypoint(step.text)
        case "COPY" if root:
            _copy(step.text, root, folder, sources)
        case "RUN" if root:
            print(f"replay: RUN {step.text}", file=sys.stderr)
            _run_step(Image(root, image.key, environment, user, folder), step.text)
    return Image(image.root, image.key, environment, user, folder, entrypoint)


def _bootstrap(suite: str, cache: Path) -> Image:
    root = cache / f"debian-{suite}"
    with _made(root, cache, f"debian-{suite}") as work:
        if not root.exists():
            _need_debootstrap()
            print(f"replay: debootstrap {suite}", file=sys.stderr)
            _call(["debootstrap", "--variant=minbase", suite, str(work), mirror(suite)])
            # As in Debian's images: installing a package starts no service.
            policy = work / "usr/sbin/policy-rc.d"
            policy.write_text("#!/bin/sh\nexit 101\n")
            policy.chmod(0o755)
    return Image(root, suite)


def mirror(suite: str) -> str:
    """Where this machine's apt takes that Debian release from."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages"]
    for line in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines():
        address, _, release = line.partition(" ")
        if release == suite:
            return address
    msg = f"this machine's apt has no source for {suite}"
    raise ReplayError(msg)


def _need_debootstrap() -> None:
    if shutil.which("debootstrap"):
        return
    _call(["apt-get", "-q", "update"])
    _call(["apt-get", "-q", "install", "-y", "--no-install-recommends", "debootstrap"])


def _stage_key(stage: Stage, base: Image, sources: Mapping[str, Image]) -> str:
    """A digest of all that the stage is made from."""
    digest = hashlib.sha256(f"{_FORMAT} {base.key}".encode())
    for step in stage.steps:
        digest.update(f"\n{step.verb} {step.text}".encode())
        if step.verb == "COPY":
            origin, names, _ = split_copy(step.text)
            if origin:
                digest.update(sources[origin].key.encode())
                continue
            for path in sorted(path for name in names for path in _files(CHECKOUT / name)):
                digest.update(
                    f"\n{path.relative_to(CHECKOUT)} {path.stat().st_mode:o} ".encode() + hashlib.sha256(path.read_bytes()).digest()
                )
    return digest.hexdigest()[:12]


def _files(path: Path) -> list[Path]:
    if not path.exists():
        msg = f"COPY {path.relative_to(CHECKOUT)}: no such file"
        raise ReplayError(msg)
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts]


def _copy(text: str, root: Path, folder: str, sources: Mapping[str, Image]) -> None:
    origin, names, destination = split_copy(text)
    target = _inside(root, str(Path(folder) / destination))
    into = destination.endswith("/") or len(names) > 1
    for name in names:
        source = _inside(sources[origin].root, name) if origin else CHECKOUT / name
        if source.is_dir():  # its content, as Docker does
            shutil.copytree(
                source, target, symlinks=True, dirs_exist_ok=True, ignore=None if origin else shutil.ignore_patterns("__pycache__")
            )
        else:
            place = target / source.name if into else target
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, place)


def _inside(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _copy_tree(source: Path, target: Path) -> None:
    _call(["cp", "--archive", "--reflink=auto", "--no-target-directory", str(source), str(target)])


@contextmanager
def _made(root: Path, cache: Path, prefix: str) -> Iterator[Path]:
    """A folder that becomes `root` when all went well, in place of the stage's older roots; `root` itself when it is there."""
    if root.exists():
        yield root
        return
    work = cache / f"making.{root.name}"
    _remove(work)
    work.mkdir()
    yield work
    for old in cache.glob(f"{prefix}*"):
        if re.fullmatch(rf"{re.escape(prefix)}[0-9a-f]{{12}}", old.name):
            _remove(old)
    work.rename(root)


def _remove(folder: Path) -> None:
    if folder.exists():
        _call(["rm", "-rf", "--one-file-system", str(folder)])


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


# --- running --------------------------------------------------------------------------------------------------------


def _run_step(image: Image, script: str) -> None:
    """A RUN: all rights, and this machine's name service, certificates and pip settings, as an engine gives them to a build."""
    passed = {name: value for name, value in os.environ.items() if name in {"PIP_INDEX_URL", "PIP_DEFAULT_TIMEOUT"}}
    mounts: dict[str, Path] = {}
    if _CERTIFICATES.exists():
        mounts["/run/build-certificates.pem"] = _CERTIFICATES
        passed["PIP_CERT"] = "/run/build-certificates.pem"
    for name in ("/etc/resolv.conf", "/etc/hosts"):
        if Path(name).exists():
            mounts[name] = Path(name)
    environment = {**image.environment, **passed, "DEBIAN_FRONTEND": "noninteractive"}
    build_image = Image(image.root, image.key, environment, image.user, image.folder)
    _call(command(build_image, ["/bin/sh", "-c", script], capabilities=None, scratch=("/tmp", "/run"), mounts=mounts))  # noqa: S108


def command(
    image: Image,
    arguments: Sequence[str],
    *,
    capabilities: Sequence[str] | None = NET_ADMIN,
    network: str = "",
    environment: Mapping[str, str] | None = None,
    scratch: Sequence[str] = SCRATCH,
    mounts: Mapping[str, Path] | None = None,
    init: bool = False,
) -> list[str]:
    """The command line that runs `arguments` in the image, as root of this machine.

    The program gets the image's environment and nothing else of the caller's, a mount and a process namespace of its own (all that it
    started ends with it), a writable /proc/sys, empty folders at `scratch`, this machine's files and folders (devices too) at `mounts`,
    and just the `capabilities`, without a way to others (None: all). `network` is a network namespace under /run/netns; without it, it
    is the caller's. The program is process 1 of its namespace, or with `init` the child of one that passes SIGTERM on and waits for the
    ends of all processes, as an engine's does.
    """
    root = shlex.quote(str(image.root))
    lines = ["set -e", f"mount -t proc proc {root}/proc"]
    for path in scratch:
        target = shlex.quote(str(_inside(image.root, path)))
        lines += [f"mkdir -p {target}", f"mount -t tmpfs tmpfs {target}"]
    for path, source in (mounts or {}).items():
        target = shlex.quote(str(_inside(image.root, path)))
        lines += [f"mkdir -p {shlex.quote(str(_inside(image.root, path).parent))}"]
        lines += [f"mkdir -p {target}" if source.is_dir() else f"touch {target}"]
        lines += [f"mount --bind {shlex.quote(str(source))} {target}"]
    variables = [f"{name}={value}" for name, value in {**image.environment, **(environment or {})}.items()]
    inner = ["env", "-i", "HOME=/root", *variables, *_limited(capabilities, image.user), *arguments]
    program = f'chroot {root} /bin/sh -c \'cd "$0" && exec "$@"\' {shlex.join([image.folder, *inner])}'
    lines += [f"{program} &", *_INIT] if init else [f"exec {program}"]
    own = ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "/bin/sh", "-c", "\n".join(lines)]
    return ["nsenter", f"--net=/run/netns/{network}", *own] if network else own


# The shell's wait ends early when a signal comes; whoever else ends is waited for by the shell itself.
_INIT = (
    "program=$!",
    "trap 'kill -TERM $program' TERM",
    "set +e",
    "while :; do wait $program; code=$?; kill -0 $program 2>/dev/null || exit $code; done",
)


def _limited(capabilities: Sequence[str] | None, user: str) -> list[str]:
    words: list[str] = []
    if capabilities is not None:
        rights = ",".join(("-all", *(f"+{name}" for name in capabilities)))
        words += ["--no-new-privs", f"--bounding-set={rights}", f"--inh-caps={rights}"]
    if user:
        words += [f"--reuid={user}", f"--regid={user}", "--init-groups"]
    return ["setpriv", *words] if words else []


def _call(arguments: Sequence[str]) -> None:
    done = subprocess.run(arguments, check=False, stdout=sys.stderr, stdin=subprocess.DEVNULL)
    if done.returncode:
        msg = f"exit code {done.returncode} of {shlex.join(arguments[:3])} …"
        raise ReplayError(msg)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", help="a stage of deploy/Containerfile: planner, applier or auditor")
    parser.add_argument("--network", default="", help="run it in this network namespace of /run/netns")
    parser.add_argument("arguments", nargs="*", help="after --: what to run in the root instead of nothing")
    options = parser.parse_args()
    try:
        image = build(options.target)
    except ReplayError as error:
        print(f"replay: {error}", file=sys.stderr)
        return 1
    if not options.arguments:
        print(image.root)
        return 0
    rights = () if image.user else NET_ADMIN
    return subprocess.run(command(image, options.arguments, capabilities=rights, network=options.network), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
