"""`cache ls`, `cache path`, `schema`."""

from __future__ import annotations

import json
import time
from pathlib import Path

from mokgen.cli.output import Output


def list_cache(output: Output) -> int:
    from mokgen.cache.store import cache_path, list_entries

    entries = list_entries()
    rows = []
    for entry in entries:
        size = sum(path.stat().st_size for path in entry.directory.rglob("*") if path.is_file())
        made = (entry.directory / "manifest.json").stat().st_mtime
        rows.append((entry, size, made))
    output.table(
        "",
        ("spec", "arch", "kernels", "KB", "built", "directory"),
        [
            (
                entry.manifest.stem,
                entry.manifest.arch,
                ", ".join(entry.manifest.kernels),
                size // 1024,
                time.strftime("%Y-%m-%d %H:%M", time.localtime(made)),
                entry.directory.name,
            )
            for entry, size, made in rows
        ],
    )
    output.print(f"{len(rows)} artifacts in {cache_path()}")
    output.document(
        {
            "cache": str(cache_path()),
            "entries": [
                {
                    "stem": entry.manifest.stem,
                    "arch": entry.manifest.arch,
                    "build_key": entry.manifest.build_key,
                    "layer_key": entry.manifest.layer_key,
                    "bytes": size,
                    "built": made,
                    "directory": str(entry.directory),
                }
                for entry, size, made in rows
            ],
        }
    )
    return 0


def print_cache_path(output: Output) -> int:
    from mokgen.cache.store import cache_path

    path: Path = cache_path()
    output.print(str(path))
    output.document({"cache": str(path)})
    return 0


def print_schema(markdown: bool, output: Output) -> int:
    from mokgen.spec import document

    if markdown:
        output.print(document.markdown().rstrip("\n"))
        output.document({"markdown": document.markdown()})
    else:
        print(json.dumps(document.json_schema(), indent=1))
    return 0
