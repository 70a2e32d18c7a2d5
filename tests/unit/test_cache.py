"""Keys, manifest and store; nothing is compiled."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mokgen import settings
from mokgen.cache import key, store
from mokgen.cache.manifest import Manifest, ManifestError, RuntimeLibrary, damaged_files, read_manifest, write_manifest
from mokgen.cache.store import Store

BUILD = "0123456789abcdef" * 4
LAYER = "fedcba9876543210" * 4


def manifest(build_key: str = BUILD, layer_key: str = LAYER) -> Manifest:
    return Manifest(
        abi=key.ABI,
        stem="tiny",
        arch="sm_90a",
        build_key=build_key,
        layer_key=layer_key,
        layer={"hidden_size": 256},
        workspace_bytes=1024,
        regions=(),
        kernels={},
        library="kernels.so",
        files={},
        toolchain={},
        runtime_library=RuntimeLibrary(packages=("p",), versions=("1",)),
    )


@pytest.fixture
def cache(tmp_path: Path) -> Store:
    store._warned.clear()
    return Store(tmp_path / "cache")


def publish(cache: Store, content: bytes = b"code", build_key: str = BUILD, layer_key: str = LAYER) -> Path:
    with cache.work_directory() as work:
        (work / "kernels.so").write_bytes(content)
        (work / "assembly").mkdir()
        (work / "assembly" / "forward.ptx").write_text("ptx", encoding="utf-8")
        return cache.publish(work, manifest(build_key, layer_key), prefix="h256 e8/k2").directory


# --- keys -------------------------------------------------------------------------------------------------------------


def test_canonical_json_depends_on_the_data_only() -> None:
    assert key.canonical_json({"b": [1, 2.5], "a": "\u00e9"}) == '{"a":"\\u00e9","b":[1,2.5]}'
    assert key.digest({"a": 1, "b": 2}) == key.digest({"b": 2, "a": 1})
    with pytest.raises(ValueError, match="Out of range|not JSON compliant"):
        key.canonical_json({"clamp": float("inf")})


def test_keys_are_equal_in_processes_with_other_hash_seeds() -> None:
    script = "from mokgen.cache import key; print(key.build_key({'b': 'x', 'a': 'y'}, 'd', {'v': 1}, 'sm_90a', 'l'))"
    seen = {
        subprocess.run(
            [sys.executable, "-c", script],
            env=settings.child_environment(PYTHONHASHSEED=seed),
            cwd=Path(key.__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert seen == {key.build_key({"a": "y", "b": "x"}, "d", {"v": 1}, "sm_90a", "l") + "\n"}


def test_every_part_changes_the_build_key() -> None:
    base = {
        "files": {"forward.py": "A = 1\n"},
        "device_hash": "d",
        "toolchain": {"flavour": "cu12", "versions": {"p": "1"}},
        "arch": "sm_90a",
        "layer": "l",
    }
    variants = [
        {**base, "files": {"forward.py": "A = 2\n"}},
        {**base, "files": {"backward.py": "A = 1\n"}},
        {**base, "device_hash": "e"},
        {**base, "toolchain": {"flavour": "cu13", "versions": {"p": "1"}}},
        {**base, "toolchain": {"flavour": "cu12", "versions": {"p": "2"}}},
        {**base, "arch": "sm_100a"},
        {**base, "layer": "m"},
    ]
    keys = [key.build_key(**parts) for parts in [base, *variants]]
    assert len(set(keys)) == len(keys)


def test_every_part_changes_the_layer_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [
        key.layer_key({"h": 1}, {"tile": 1}, "sm_90a"),
        key.layer_key({"h": 2}, {"tile": 1}, "sm_90a"),
        key.layer_key({"h": 1}, {"tile": 2}, "sm_90a"),
        key.layer_key({"h": 1}, {"tile": 1}, "sm_100a"),
    ]
    monkeypatch.setattr(key, "ABI", key.ABI + 1)
    keys.append(key.layer_key({"h": 1}, {"tile": 1}, "sm_90a"))
    assert len(set(keys)) == len(keys)


def device_tree(root: Path) -> Path:
    files = {
        "__init__.py": "",
        "sync.py": "import cutlass\n",
        "scheduler.py": "from mokgen.device import sync\n",
        "unused.py": "",
        "sm90/__init__.py": "",
        "sm90/mma.py": "from . import copy\nfrom ..scheduler import claim\n",
        "sm90/copy.py": "import mokgen.device.sm90.tables as tables\n",
        "sm90/tables.py": "",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_device_modules_are_found_through_every_kind_of_import(tmp_path: Path) -> None:
    root = device_tree(tmp_path / "device")
    text = "import cutlass\nfrom mokgen.device.sm90 import mma\nfrom mokgen.device.sm90.mma import Tile\n"
    found = key.device_modules([text], root)
    prefix = "mokgen.device"
    assert list(found) == [prefix] + [
        f"{prefix}.{name}" for name in ("scheduler", "sm90", "sm90.copy", "sm90.mma", "sm90.tables", "sync")
    ]
    before = key.hash_modules(found)
    (root / "unused.py").write_text("X = 1\n", encoding="utf-8")
    assert key.hash_modules(key.device_modules([text], root)) == before, "unused modules do not count"
    (root / "sync.py").write_text("import cutlass  # changed\n", encoding="utf-8")
    assert key.hash_modules(key.device_modules([text], root)) != before, "indirect imports count"


def test_device_modules_of_the_real_library_and_of_a_wrong_import() -> None:
    found = key.device_modules(["from mokgen.device.stages import schedule\n"])
    assert {"mokgen.device", "mokgen.device.stages", "mokgen.device.stages.schedule"} <= set(found)
    with pytest.raises(ValueError, match="mokgen.device.nothing is imported and does not exist"):
        key.device_modules(["import mokgen.device.nothing\n"])


# --- manifest ---------------------------------------------------------------------------------------------------------


def test_manifest_round_trip_and_damage(tmp_path: Path) -> None:
    (tmp_path / "kernels.so").write_bytes(b"code")
    (tmp_path / "report.md").write_text("text", encoding="utf-8")
    written = write_manifest(tmp_path, manifest())
    assert read_manifest(tmp_path) == written
    assert set(written.files) == {"kernels.so", "report.md"}
    assert damaged_files(tmp_path, written) == []
    (tmp_path / "report.md").unlink()
    (tmp_path / "kernels.so").write_bytes(b"cod3")
    assert damaged_files(tmp_path, written) == ["kernels.so", "report.md"]
    assert damaged_files(tmp_path, written, ["kernels.so"]) == ["kernels.so"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format"),
        ({"abi": "one"}, "abi"),
        ({"surprise": 1}, "surprise"),
        ({"files": {"../evil.so": "0"}}, "outside"),
        ({"library": "/lib/evil.so"}, "outside"),
    ],
)
def test_manifest_of_another_kind_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    write_manifest(tmp_path, manifest())
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}), encoding="utf-8")
    with pytest.raises(ManifestError, match=message):
        read_manifest(tmp_path)


# --- store ------------------------------------------------------------------------------------------------------------


def test_publish_then_find_by_both_keys(cache: Store) -> None:
    assert cache.lookup_build(BUILD) is None and cache.lookup_layer(LAYER) is None and cache.list_entries() == []
    directory = publish(cache)
    assert directory.name == f"h256_e8_k2-{BUILD[:32]}"
    found = cache.lookup_build(BUILD)
    assert found is not None and found.directory == directory
    assert cache.lookup_layer(LAYER) == found
    assert cache.list_entries() == [found]
    assert cache.lookup_build("f" * 64) is None
    assert cache.lookup_build(BUILD[:32] + "f" * 32) is None, "equal first digits are not enough"
    assert list((cache.root / "tmp").iterdir()) == [], "nothing is left behind"


def test_folders_are_private(cache: Store) -> None:
    old = os.umask(0)
    try:
        directory = publish(cache)
    finally:
        os.umask(old)
    for path in (cache.root, cache.root / "entries", cache.root / "tmp", cache.root / "layers", directory):
        assert path.stat().st_mode & 0o777 == 0o700, path


def test_a_later_build_of_a_layer_is_loaded_first_and_a_build_hit_renews(cache: Store) -> None:
    other = "a" * 64
    first, second = publish(cache), publish(cache, b"newer", build_key=other)
    os.utime(cache.root / "layers" / LAYER / first.name, ns=(1, 1))
    entry = cache.lookup_layer(LAYER)
    assert entry is not None and entry.directory == second
    os.utime(cache.root / "layers" / LAYER / second.name, ns=(2, 2))
    assert cache.lookup_build(BUILD) is not None
    entry = cache.lookup_layer(LAYER)
    assert entry is not None and entry.directory == first


def test_an_entry_copied_from_elsewhere_serves_a_load(cache: Store, tmp_path: Path) -> None:
    directory = publish(cache)
    there = Store(tmp_path / "there")
    (there.root / "entries").mkdir(parents=True)
    shutil.copytree(directory, there.root / "entries" / directory.name)
    entry = there.lookup_layer(LAYER)
    assert entry is not None and entry.manifest.build_key == BUILD


def corrupt(directory: Path, how: str) -> None:
    path = directory / "manifest.json"
    if how == "no manifest":
        path.unlink()
    elif how == "not JSON":
        path.write_text("{", encoding="utf-8")
    elif how == "other format":
        path.write_text(json.dumps({**json.loads(path.read_text()), "format": 9}), encoding="utf-8")
    elif how == "changed library":
        (directory / "kernels.so").write_bytes(b"evil")
    elif how == "missing file":
        (directory / "assembly" / "forward.ptx").unlink()
    elif how == "linked library":
        (directory / "kernels.so").rename(directory / "real.so")
        (directory / "kernels.so").symlink_to("real.so")
    elif how == "writable by everyone":
        directory.chmod(0o707)
    elif how == "writable file":
        (directory / "kernels.so").chmod(0o666)


FAULTS = (
    "no manifest",
    "not JSON",
    "other format",
    "changed library",
    "missing file",
    "linked library",
    "writable by everyone",
    "writable file",
)


@pytest.mark.parametrize("how", FAULTS)
def test_a_bad_entry_is_a_miss_with_one_warning_and_is_replaced(
    cache: Store, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory = publish(cache)
    corrupt(directory, how)
    with caplog.at_level(logging.WARNING):
        assert cache.lookup_build(BUILD) is None
        assert cache.lookup_layer(LAYER) is None
        assert cache.list_entries() == []
    assert len(caplog.records) == 1 and directory.name in caplog.text
    assert publish(cache, b"again") == directory
    entry = cache.lookup_build(BUILD)
    assert entry is not None and (entry.directory / "kernels.so").read_bytes() == b"again"


def test_a_sound_entry_is_kept_when_published_again(cache: Store) -> None:
    directory = publish(cache, b"first")
    assert publish(cache, b"second") == directory
    assert (directory / "kernels.so").read_bytes() == b"first"


def test_a_world_writable_cache_is_refused_and_builds_stay_private(
    cache: Store, caplog: pytest.LogCaptureFixture
) -> None:
    publish(cache)
    cache.root.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert cache.lookup_build(BUILD) is None
    assert "writable by everyone" in caplog.text
    with cache.work_directory() as work:
        (work / "kernels.so").write_bytes(b"code")
        published = cache.publish(work, manifest())
    assert not published.cached and cache.root not in published.directory.parents
    assert read_manifest(published.directory) == published.manifest
    shutil.rmtree(published.directory.parent)


def test_entries_of_another_user_are_refused(cache: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(cache)
    owner = cache.root.stat().st_uid
    if owner == 0:
        os.chown(cache.root, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert cache.lookup_build(BUILD) is None and cache.lookup_layer(LAYER) is None


def test_a_read_only_cache_serves_hits(cache: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(cache)
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and real(path, mode))

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(Path, "touch", refuse)
    assert cache.lookup_build(BUILD) is not None
    with cache.lock(BUILD), cache.work_directory() as work:
        (work / "kernels.so").write_bytes(b"code")
        published = cache.publish(work, manifest())
    assert not published.cached and published.directory.is_dir()
    shutil.rmtree(published.directory.parent)


def test_work_directory_is_removed_after_a_failure_unless_kept(cache: Store) -> None:
    def fail() -> Path:
        with pytest.raises(RuntimeError), cache.work_directory() as work:
            raise RuntimeError
        return work

    assert not fail().exists()
    with settings.scope(MOKGEN_KEEP="1"):
        assert fail().exists()


def _hold(root: Path, ready: object, release: object) -> None:
    with Store(root).lock(BUILD):
        ready.set()  # type: ignore[attr-defined]
        release.wait()  # type: ignore[attr-defined]


def test_a_killed_process_holds_no_lock(cache: Store) -> None:
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(cache.root, ready, release))
    process.start()
    assert ready.wait(30)
    import filelock

    with pytest.raises(filelock.Timeout):
        filelock.FileLock(cache.root / "locks" / f"{BUILD[:32]}.lock").acquire(timeout=0)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with cache.lock(BUILD):
        pass


def _build(root: Path, done: Path) -> None:
    cache = Store(root)
    with cache.lock(BUILD):
        if cache.lookup_build(BUILD) is None:
            done.open("a").write("built\n")
            publish(cache)


def test_processes_that_start_together_build_once(cache: Store, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    record = tmp_path / "record"
    processes = [context.Process(target=_build, args=(cache.root, record)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert record.read_text() == "built\n"


def test_the_default_cache_follows_the_environment(tmp_path: Path) -> None:
    with settings.scope(MOKGEN_CACHE_DIR=str(tmp_path / "elsewhere")):
        assert store.cache_path() == tmp_path / "elsewhere"
        publish(Store())
        assert [entry.manifest.build_key for entry in store.list_entries()] == [BUILD]
