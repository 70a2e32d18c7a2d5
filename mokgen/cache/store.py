"""Where artifacts live between builds. Atomic publication, one builder per key, damaged entries are misses.

    <root>/entries/<readable prefix>-<32 digits of build key>/   one artifact; complete once it has this name
    <root>/layers/<layer key>/<entry name>                       empty marks: which entries serve a load
    <root>/locks/<32 digits>.lock                                 held by the process that builds that key
    <root>/tmp/                                                   builds under way

Entries hold native code: everything is created 0700, and what another user owns or anyone may write is refused.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import filelock

from mokgen import settings
from mokgen.cache.manifest import Manifest, ManifestError, damaged_files, read_manifest, write_manifest

logger = logging.getLogger(__name__)

KEY_DIGITS = 32  # of the 64 in a directory's name; the manifest holds all of them and is compared
_warned: set[str] = set()


@dataclass(frozen=True)
class Entry:
    """One usable artifact of the cache."""

    directory: Path
    manifest: Manifest


@dataclass(frozen=True)
class Published:
    """Where a finished build ended up; `cached` is False if only this process will find it."""

    directory: Path
    manifest: Manifest
    cached: bool


class Store:
    """A cache rooted in one directory; usable by many processes at once."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root or settings.CACHE_DIR.get()).absolute()

    # --- looking up -------------------------------------------------------------------------------------------------

    def lookup_build(self, build_key: str) -> Entry | None:
        """Entry of exactly this build, or None. A hit becomes what `lookup_layer` prefers."""
        if not self._trusted():
            return None
        for directory in sorted(self._entries.glob(f"*-{build_key[:KEY_DIGITS]}")):
            entry = self._open(directory)
            if entry is not None and entry.manifest.build_key == build_key:
                self._mark(entry)
                return entry
        return None

    def lookup_layer(self, layer_key: str) -> Entry | None:
        """Entry that serves a load of this layer, the most recently built or hit first; None if there is none."""
        if not self._trusted():
            return None
        names = self._marks(layer_key)
        candidates = [self._entries / name for name in names]
        # An entry copied from another machine has no mark here.
        candidates += [path for path in self._directories() if path.name not in names]
        for directory in candidates:
            entry = self._open(directory, layer_key)
            if entry is not None:
                return entry
        return None

    def list_entries(self) -> list[Entry]:
        """Every usable entry, by name."""
        if not self._trusted():
            return []
        return [entry for directory in self._directories() if (entry := self._open(directory)) is not None]

    # --- building ---------------------------------------------------------------------------------------------------

    @contextmanager
    def lock(self, build_key: str) -> Iterator[None]:
        """Hold the key: other processes wait, a dead process holds nothing. No-op where the cache is not writable."""
        if not self._writable():
            yield
            return
        locks = _private_directory(self.root / "locks")
        held = filelock.FileLock(locks / f"{build_key[:KEY_DIGITS]}.lock")
        try:
            held.acquire(timeout=0)
        except filelock.Timeout:
            logger.info("waiting for another process that builds %s", build_key[:KEY_DIGITS])
            held.acquire()
        try:
            yield
        finally:
            held.release()

    @contextmanager
    def work_directory(self) -> Iterator[Path]:
        """A private directory to build in, on the cache's file system; removed unless published (or MOKGEN_KEEP)."""
        parent = _private_directory(self.root / "tmp") if self._writable() else None
        directory = Path(tempfile.mkdtemp(prefix="mokgen-build-", dir=parent))
        failed = True
        try:
            yield directory
            failed = False
        finally:
            if not (failed and settings.KEEP.get()):
                shutil.rmtree(directory, ignore_errors=True)
            else:
                logger.warning("kept the work directory %s", directory)

    def publish(self, directory: Path, manifest: Manifest, prefix: str = "artifact") -> Published:
        """Make the files of `directory` an entry: hashes and manifest.json, then one rename.

        An equal, sound entry that is already there wins. A cache that cannot be written keeps nothing: the files are
        then moved to a private temporary directory, so that the build still serves this process.
        """
        complete = write_manifest(directory, manifest)
        name = f"{_readable(prefix)}-{manifest.build_key[:KEY_DIGITS]}"
        if self._writable():
            try:
                entry = self._move_in(directory, complete, name)
                self._mark(entry)
                return Published(entry.directory, entry.manifest, cached=True)
            except OSError as error:
                _warn(self.root, f"cannot publish: {error}")
        private = Path(tempfile.mkdtemp(prefix="mokgen-")) / name
        shutil.move(directory, private)
        logger.warning("cache %s is not writable; artifact kept in %s", self.root, private)
        return Published(private, complete, cached=False)

    def _move_in(self, directory: Path, manifest: Manifest, name: str) -> Entry:
        target = _private_directory(self._entries) / name
        if target.exists() or target.is_symlink():
            existing = self._open(target)
            if existing is not None and existing.manifest.build_key == manifest.build_key:
                return existing
            aside = Path(tempfile.mkdtemp(prefix="damaged-", dir=_private_directory(self.root / "tmp")))
            os.replace(target, aside / name)
            shutil.rmtree(aside, ignore_errors=True)
        directory.chmod(0o700)
        try:
            os.rename(directory, target)
        except OSError:
            existing = self._open(target)  # another process without the lock was faster
            if existing is None:
                raise
            return existing
        return Entry(target, manifest)

    # --- trust and state --------------------------------------------------------------------------------------------

    @property
    def _entries(self) -> Path:
        return self.root / "entries"

    def _directories(self) -> list[Path]:
        try:
            return sorted(path for path in self._entries.iterdir() if path.is_dir())
        except OSError:
            return []

    def _open(self, directory: Path, layer_key: str | None = None) -> Entry | None:
        """Entry of a directory if it is ours and whole; otherwise None, with one warning a directory."""
        if not os.path.lexists(directory):
            return None
        fault = _distrust(directory)
        if fault:
            _warn(directory, fault)
            return None
        try:
            manifest = read_manifest(directory)
        except ManifestError as error:
            _warn(directory, str(error))
            return None
        if layer_key is not None and manifest.layer_key != layer_key:
            return None
        faults = [f"{name}: {fault}" for name in manifest.files if (fault := _distrust(directory / name))]
        faults += [f"{name}: damaged" for name in damaged_files(directory, manifest)]
        if manifest.library not in manifest.files:
            faults.append(f"{manifest.library}: no such file")
        if faults:
            _warn(directory, faults[0])
            return None
        return Entry(directory, manifest)

    def _trusted(self) -> bool:
        """True if the cache exists and nobody else can have put code there."""
        for directory in (self.root, self._entries):
            if not os.path.lexists(directory):
                return False
            fault = _distrust(directory, may_be_link=directory == self.root)
            if fault:
                _warn(directory, fault)
                return False
        return True

    def _writable(self) -> bool:
        """True if new entries may be put here; creates the root at first use."""
        try:
            _private_directory(self.root)
        except OSError:
            return False
        return _distrust(self.root, may_be_link=True) == "" and os.access(self.root, os.W_OK | os.X_OK)

    def _marks(self, layer_key: str) -> list[str]:
        """Names of entries marked for a layer, latest mark first."""
        try:
            marks = [(path.stat().st_mtime_ns, path.name) for path in (self.root / "layers" / layer_key).iterdir()]
        except OSError:
            return []
        return [name for _, name in sorted(marks, reverse=True)]

    def _mark(self, entry: Entry) -> None:
        try:
            folder = _private_directory(_private_directory(self.root / "layers") / entry.manifest.layer_key)
            (folder / entry.directory.name).touch(mode=0o600)
        except OSError as error:  # a read-only cache: loads fall back to reading manifests
            logger.debug("no mark for %s: %s", entry.directory, error)


def _warn(place: Path, fault: str) -> None:
    """Say once per process and place why something in the cache is not used."""
    if str(place) not in _warned:
        _warned.add(str(place))
        logger.warning("ignoring %s: %s", place, fault)


def _distrust(path: Path, may_be_link: bool = False) -> str:
    """Why a file or folder must not be used; "" if it may. Root is trusted: it can replace us anyway."""
    try:
        status = path.stat() if may_be_link else path.lstat()
    except OSError as error:
        return str(error.strerror or error)
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link"
    if status.st_uid not in {os.geteuid(), 0}:
        return f"owned by user {status.st_uid}, not by {os.geteuid()}"
    if status.st_mode & stat.S_IWOTH:
        return "writable by everyone"
    return ""


def _private_directory(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def _readable(prefix: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "_", prefix).strip("._")[:80] or "artifact"


def cache_path() -> Path:
    """Root of the default cache."""
    return Store().root


def list_entries() -> list[Entry]:
    """Every usable entry of the default cache."""
    return Store().list_entries()
